"""``spec.podTemplate``: one pod template below those of prefill, decode and router.

:func:`with_shared` merges it into them when a spec is read, so that no rule and no builder has to
know it. :func:`as_written` then finds the field that the user wrote.

A null of the shared template removes the operator's own field. If an own template has an object
there, both are merged over the operator's, and nothing is removed.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from pdcluster_operator.api.findings import FieldError, under
from pdcluster_operator.api.spec.fields import Free
from pdcluster_operator.api.spec.pod_templates import (
    ENGINE_CONTAINER,
    KEYED_LISTS,
    ROUTER_CONTAINER,
    UNREMOVABLE,
    as_list,
    as_mapping,
    is_list,
    merge,
)
from pdcluster_operator.api.spec.router_types import RouterType
from pdcluster_operator.api.spec.types import Cluster, Spec

SHARED: Final = "spec.podTemplate"
# Part of the spec -> the container of the shared template that is not for its pods.
NOT_FOR = {
    "prefill": ROUTER_CONTAINER, "decode": ROUTER_CONTAINER, "router": ENGINE_CONTAINER,
}  # fmt: skip
_IN_TEMPLATE = re.compile(rf"spec\.({'|'.join(NOT_FOR)})\.podTemplate\.(.+)")
_INDEX = re.compile(r"\[(\d+)\][.]?")
_NULL: Final = object()
_ABSENT: Final = object()


def with_shared(spec: Spec) -> Spec:
    """Return a spec whose roles and router have the shared template below their own."""
    shared = spec.pod_template
    if shared is None:
        return spec
    parts = {}
    for name, other in NOT_FOR.items():
        part = getattr(spec, name)
        if name == "router" and spec.router.type is not RouterType.VLLM_ROUTER:
            continue
        # A null of the own template removes the operator's field, too, so it has to stay. One that
        # merge() takes for no value removes nothing here either.
        own = _swapped(part.pod_template or {}, None, _NULL, but=UNREMOVABLE)
        both = _swapped(merge(_without(shared, other), own), _NULL, None)
        parts[name] = replace(part, pod_template=Free(both))
    return replace(spec, **parts)


def _without(template: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    spec = as_mapping(template.get("spec"))
    if not is_list(spec.get("containers")):
        return template
    kept = [one for one in spec["containers"] if as_mapping(one).get("name") != name]
    return {**template, "spec": {**spec, "containers": kept}}


def _swapped(part: Any, old: Any, new: Any, but: Collection[str] = ()) -> Any:
    """Return a copy of a JSON value with another value wherever ``old`` stands, but in fields."""
    if isinstance(part, Mapping):
        return {
            key: value if value is old and key in but else _swapped(value, old, new, but)
            for key, value in part.items()
        }
    if is_list(part):
        return [_swapped(value, old, new, but) for value in part]
    return new if part is old else part


def as_written(
    manifest: object, cluster: Cluster, found: Iterable[FieldError]
) -> Iterator[FieldError]:
    """Yield findings with the paths of the manifest; one about the shared template only once."""
    shared, spec = cluster.spec.pod_template, as_mapping(as_mapping(manifest).get("spec"))
    told: set[tuple[str, str, str, str]] = set()
    for finding in found:
        match = _IN_TEMPLATE.fullmatch(finding.path) if shared is not None else None
        if match is None:
            yield finding
            continue
        part, rest = match.groups()
        own = as_mapping(spec.get(part)).get("podTemplate")
        is_own, path = _place(rest, getattr(cluster.spec, part).pod_template, own, shared)
        if is_own:
            yield replace(finding, path=f"spec.{part}.podTemplate.{path}")
            continue
        message, remedy = (
            text.replace(f"spec.{part}.podTemplate", SHARED)
            for text in (finding.message, finding.remedy)
        )
        remedy = remedy.replace(f"spec.{part}.engine.", "spec.engine.")
        said = replace(finding, path=f"{SHARED}.{path}", message=message, remedy=remedy)
        key = said.path, said.value, said.rule, said.message
        if key not in told:
            told.add(key)
            yield said


def _place(path: str, merged: Any, own: Any, shared: Any) -> tuple[bool, str]:
    """Return whether a field of a merged template is the part's own, and its path in that one."""
    here, there, field = "", "", ""
    while path:
        if isinstance(merged, Mapping):
            keys = [str(key) for key in merged if under(path, str(key))]
            if not keys:
                break
            field = max(keys, key=len)
            path = path[len(field) :].removeprefix(".")
            merged = merged[field]
            steps = [f".{field}"] * 2
            inner = [as_mapping(one).get(field, _ABSENT) for one in (own, shared)]
        elif is_list(merged) and (found := _INDEX.match(path)) and int(found[1]) < len(merged):
            number, path = int(found[1]), path[found.end() :]
            merged = merged[number]
            places = [_index(as_list(one), merged, number, field) for one in (own, shared)]
            steps = [f"[{place}]" for place in places]
            inner = [
                _ABSENT if place is None else one[place]
                for one, place in zip((own, shared), places, strict=True)
            ]
        else:
            break
        if inner == [_ABSENT, _ABSENT]:
            break
        own, shared = inner
        here, there = here + steps[0], there + steps[1]
    rest = path if not path or path.startswith("[") else f".{path}"
    is_own = own is not _ABSENT and own is not None
    return is_own, f"{here if is_own else there}{rest}".removeprefix(".")


def _index(items: Sequence[Any], item: Any, number: int, field: str) -> int | None:
    """Return where an item of a merged list stands in one of the lists that it was merged from."""
    key = KEYED_LISTS.get(field, "")
    named = as_mapping(item).get(key)
    place: int
    for place in (number, *range(len(items))):
        other = items[place] if place < len(items) else _ABSENT
        if other == item or (named and as_mapping(other).get(key) == named):
            return place
    return None
