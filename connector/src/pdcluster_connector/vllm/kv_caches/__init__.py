"""From vLLM's KV caches and their groups to the shape that engines exchange."""
