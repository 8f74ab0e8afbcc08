"""From vLLM's KV caches to the shape that engines exchange."""
