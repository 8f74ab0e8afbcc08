"""The side of the connector that runs in each of vLLM's workers."""
