"""The element types of KV caches that are carried, under one name each."""

from __future__ import annotations

from typing import Final

PLAIN: Final = frozenset({"float32", "float16", "bfloat16"})
# One byte an element, and one constant scale for K and one for V in each layer. AMD's MI300
# reads the bytes of fnuz as other numbers than everybody else's e4m3.
SCALED: Final = frozenset({"fp8_e4m3", "fp8_e4m3fnuz", "fp8_e5m2"})
CARRIED_DTYPES: Final = PLAIN | SCALED

_SYNONYMS: Final = {"fp8": "fp8_e4m3", "float": "float32", "half": "float16"}


def dtype_name(name: str) -> str:
    """Return the one name of an element type that vLLM has several for."""
    return _SYNONYMS.get(name, name)
