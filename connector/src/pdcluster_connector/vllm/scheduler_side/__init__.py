"""The role of the connector in vLLM's scheduler."""
