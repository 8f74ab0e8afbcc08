"""Whether a live object already says everything that is wanted of it.

A live object holds more than was applied: defaults, status, other owners' fields. It holds
it in canonical form, too: quantities are rewritten and empty values dropped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pdcluster_operator.api.spec.quantity import parse_quantity
from pdcluster_operator.plan.merge import KEYED_LISTS

QUANTITY_FIELDS = frozenset({"requests", "limits", "sizeLimit"})


def covers(live: Any, desired: Any, key: str = "", *, quantities: bool = False) -> bool:
    """Whether ``live`` holds everything that ``desired`` says."""
    if _is_empty(desired):
        return live is None or live == desired or _is_empty(live)
    quantities = quantities or key in QUANTITY_FIELDS
    if isinstance(desired, Mapping):
        return isinstance(live, Mapping) and all(
            covers(live.get(name), value, name, quantities=quantities)
            for name, value in desired.items()
        )
    if _is_list(desired):
        return _is_list(live) and _covers_items(live, desired, KEYED_LISTS.get(key))
    if quantities:
        return _same_quantity(live, desired)
    return bool(live == desired)


def _covers_items(live: Sequence[Any], desired: Sequence[Any], field: str | None) -> bool:
    if len(live) != len(desired):
        return False
    if field and all(isinstance(item, Mapping) and field in item for item in (*live, *desired)):
        places = {item[field]: item for item in live}
        return all(covers(places.get(item[field]), item) for item in desired)
    return all(covers(ours, item) for ours, item in zip(live, desired, strict=True))


def _same_quantity(live: Any, desired: Any) -> bool:
    return live is not None and (
        live == desired or parse_quantity(str(live)) == parse_quantity(str(desired)) is not None
    )


def _is_empty(value: Any) -> bool:
    return value is None or value in ("", [], {}, ())


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))
