"""The element types of KV caches that can be transferred, each under one name."""

from __future__ import annotations

from typing import Final

PLAIN: Final = frozenset({"float32", "float16", "bfloat16"})
# One byte for each element, and in each layer one constant scale for K and one for V.
# fnuz (AMD's MI300) is not e4m3: the same byte is another number.
SCALED: Final = frozenset({"fp8_e4m3", "fp8_e4m3fnuz", "fp8_e5m2"})
CARRIED_DTYPES: Final = PLAIN | SCALED

_SYNONYMS: Final = {"fp8": "fp8_e4m3", "float": "float32", "half": "float16"}


def dtype_name(name: str) -> str:
    """Return the one name of an element type that vLLM has several for."""
    return _SYNONYMS.get(name, name)
