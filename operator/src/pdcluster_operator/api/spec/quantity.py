"""Kubernetes quantities: the numbers behind ``500m`` and ``16Gi``."""

from __future__ import annotations

import re
from decimal import Decimal

_SUFFIXES = {
    "": Decimal(1), "n": Decimal("1e-9"), "u": Decimal("1e-6"), "m": Decimal("1e-3"),
    "k": Decimal(10) ** 3, "M": Decimal(10) ** 6, "G": Decimal(10) ** 9, "T": Decimal(10) ** 12,
    "P": Decimal(10) ** 15, "E": Decimal(10) ** 18,
    "Ki": Decimal(2) ** 10, "Mi": Decimal(2) ** 20, "Gi": Decimal(2) ** 30,
    "Ti": Decimal(2) ** 40, "Pi": Decimal(2) ** 50, "Ei": Decimal(2) ** 60,
}  # fmt: skip
_QUANTITY = re.compile(
    r"([+-]?(?:\d{1,30}\.?\d{0,30}|\.\d{1,30}))(?:([eE][+-]?\d{1,2})|([numkMGTPE]|[KMGTPE]i)?)"
)


def parse_quantity(text: str) -> Decimal | None:
    """Return the number that a quantity stands for, or None if it is not one."""
    match = _QUANTITY.fullmatch(text)
    if match is None:
        return None
    number, exponent, suffix = match.groups()
    if exponent:
        return Decimal(number + exponent)
    return Decimal(number) * _SUFFIXES[suffix or ""]


def why_no_amount(value: object) -> str | None:
    """Return why a value is no amount of a resource, as the end of a sentence; None for an amount.

    As in Kubernetes, an amount is a quantity as a string, or a whole number, and never negative.
    """
    if not isinstance(value, int | str):
        return "is not a Kubernetes quantity"
    number = parse_quantity(str(value))
    if number is None:
        return "is not a Kubernetes quantity"
    return "is negative" if number < 0 else None
