"""From vLLM's KV caches and their groups to the shape that engines exchange.

Kinds, types, heads and states of layers: ``layers.py``. Which memory is registered:
``registration.py``. Which blocks hold which tokens: ``groups.py``.
"""
