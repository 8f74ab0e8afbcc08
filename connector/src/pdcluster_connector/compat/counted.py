"""Counts in messages, with the noun in the singular or in the plural."""


def counted(number: int, thing: str) -> str:
    """Return ``1 link`` or ``2 links``; ``thing`` is the singular of a regular noun."""
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"
