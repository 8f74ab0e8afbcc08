"""The connector as vLLM loads it."""
