"""Drift: whether a live object is still as wanted, and how it is repaired.

A live object holds more than was applied: defaults, the status and fields of other owners.
The API server also rewrites values: it normalizes quantities and drops empty values.

Something else may change a child as soon as it is applied. A mutating webhook adds a sidecar to a
pod template, or writes another registry's name into an image. The live object is then never as
wanted, and to apply it again changes nothing. Such a rewrite is noted from the answer to an apply,
reported once in an event, and left as it is.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from pdcluster_operator.api.conditions import StatusReason
from pdcluster_operator.api.object_names import APPLIED_ANNOTATION
from pdcluster_operator.api.spec.pod_templates import KEYED_LISTS, is_list
from pdcluster_operator.api.spec.resources import parse_quantity
from pdcluster_operator.plan.objects.kept_fields import without_contents
from pdcluster_operator.plan.types import Event, Manifest, Rewrite

QUANTITY_FIELDS = frozenset({"requests", "limits", "sizeLimit"})
SELECTORS = frozenset({"selector", "podSelector", "matchLabels"})
"""Fields that select other objects with one label more than was applied."""


def stamped(desired: Manifest) -> dict[str, Any]:
    """Return the manifest with a hash of itself in an annotation.

    When a field is removed from what is wanted, the live object still covers the rest. The hash
    shows that such an object has to be applied again.
    """
    text = json.dumps(desired, sort_keys=True, separators=(",", ":"))
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    metadata = dict(desired["metadata"])
    metadata["annotations"] = {**metadata.get("annotations", {}), APPLIED_ANNOTATION: digest}
    return {**desired, "metadata": metadata}


def applied_hash(manifest: Manifest) -> str:
    """Return the hash in a stamped manifest; empty if it is not stamped."""
    annotations = manifest["metadata"].get("annotations") or {}
    return str(annotations.get(APPLIED_ANNOTATION, ""))


def repair(live: Manifest, desired: Manifest) -> dict[str, Any] | None:
    """Return a merge patch that takes an object back to what is wanted; None if there is none.

    It is for an object whose apply the API server calls invalid. An apply keeps the list items
    of other managers beside ours. If somebody changed the number of our port by hand, the list
    then holds two ports with one name. A merge patch replaces whole lists.
    """
    if "spec" not in desired:
        return None
    version = live["metadata"]["resourceVersion"]
    return {"metadata": {"resourceVersion": version}, "spec": desired["spec"]}


def without_manager(live: Manifest, manager: str) -> dict[str, Any] | None:
    """Return a merge patch that takes all fields from a field manager; None if it has none.

    A repair leaves every field to two managers: to the patch's and to the apply's. A field that
    the next apply omits would stay, because the patch's manager still owns it.
    """
    metadata = live["metadata"]
    entries = metadata.get("managedFields") or []
    kept = [entry for entry in entries if entry.get("manager") != manager]
    if len(kept) == len(entries):
        return None
    return {"metadata": {"resourceVersion": metadata["resourceVersion"], "managedFields": kept}}


def covers(live: Any, desired: Any) -> bool:
    """Whether ``live`` holds everything that ``desired`` says."""
    return next(differences(live, desired), None) is None


def differences(
    live: Any, desired: Any, key: str = "", path: str = "", *, quantities: bool = False
) -> Iterator[tuple[str, Any]]:
    """Yield the path and the live value of each field that is not as ``desired`` says.

    They are as few and as deep as possible.
    """
    if _is_empty(desired) and _is_empty(live):
        return
    quantities = quantities or key in QUANTITY_FIELDS
    other = key in SELECTORS and isinstance(live, Mapping) and not live.keys() <= desired.keys()
    if isinstance(live, Mapping) and isinstance(desired, Mapping) and desired and not other:
        for name, value in desired.items():
            if (found := live.get(name)) != value:  # most are equal: look no deeper
                below = f"{path}.{name}" if path else name
                yield from differences(found, value, name, below, quantities=quantities)
        return
    field = KEYED_LISTS.get(key)
    ours, theirs = _by_key(desired, field), _by_key(live, field)
    if ours and theirs:
        for name, item in ours.items():
            if theirs.get(name) != item:
                yield from differences(theirs.get(name), item, "", f"{path}[{name}]")
        for name in theirs.keys() - ours.keys():
            yield f"{path}[{name}]", theirs[name]
    elif live != desired and not (
        _covers_items(live, desired) or (quantities and _same_quantity(live, desired))
    ):
        yield path, live


def _by_key(items: Any, field: str | None) -> Mapping[Any, Any]:
    """Return a list's items by what identifies them; empty if that is not unique."""
    if field is None or not is_list(items):
        return {}
    named = [item for item in items if isinstance(item, Mapping) and item.get(field) is not None]
    found = {str(item[field]): item for item in named}
    return found if len(found) == len(items) else {}


def _covers_items(live: Any, desired: Any) -> bool:
    if not (is_list(live) and is_list(desired)) or len(live) != len(desired):
        return False
    return all(covers(ours, item) for ours, item in zip(live, desired, strict=True))


def _same_quantity(live: Any, desired: Any) -> bool:
    wanted = parse_quantity(str(desired))
    return live is not None and parse_quantity(str(live)) == wanted is not None


def _is_empty(value: Any) -> bool:
    return value is None or value in ("", [], {}, ())


MAX_SHOWN_FIELDS = 5


def rewrite_of(live: Manifest, desired: Manifest) -> Rewrite | None:
    """Return how ``live`` differs from ``desired`` (stamped); None if it does not."""
    found = tuple(
        (path, json.dumps(value, sort_keys=True, default=str))
        for path, value in differences(without_contents(live), without_contents(desired))
    )
    return Rewrite(applied_hash(desired), found) if found else None


def is_settled(live: Manifest | None, desired: Manifest, noted: Rewrite | None) -> bool:
    """Whether applying ``desired`` (stamped) would change nothing.

    Args:
        noted: what became of the last apply of this object; None if it went as wanted.
    """
    return live is not None and rewrite_of(live, desired) in (None, noted)


def rewritten_event(desired: Manifest, rewrite: Rewrite) -> Event:
    """Return the event about a rewrite."""
    paths = [path for path, _ in rewrite.fields]
    shown = ", ".join(paths[:MAX_SHOWN_FIELDS])
    if len(paths) > MAX_SHOWN_FIELDS:
        shown += f" and {len(paths) - MAX_SHOWN_FIELDS} more"
    return Event(
        "Warning",
        StatusReason.REWRITTEN,
        f"{desired['kind']} {desired['metadata']['name']}: something else, such as a mutating "
        f"webhook, changes what the operator applies: {shown}. The operator leaves that change",
    )
