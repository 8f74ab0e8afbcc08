"""The side of the connector that runs in vLLM's scheduler."""
