"""What the launcher puts into vLLM's own processes."""
