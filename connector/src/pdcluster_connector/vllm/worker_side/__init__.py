"""The role of the connector in each of vLLM's workers."""
