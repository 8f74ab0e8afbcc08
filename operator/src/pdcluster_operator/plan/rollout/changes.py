"""The part of a spec that engines are made from, and the fields of it that differ in two specs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from pdcluster_operator.api.spec.enums import Role
from pdcluster_operator.plan.rollout.revisions import Revision
from pdcluster_operator.plan.types import Manifest

# None of these is a part of an engine.
ELSEWHERE = ("rollout", "monitoring", "verification", "operatorClass", "scheduling")
ONLY_FIELD_OF_THE_ROUTER = "apiKeySecretRef"
PARTLY = (*(role.value for role in Role), "router")
"""Parts of the spec of which engines have some fields."""
MOST_SHOWN = 3


def spec_of_engines(cluster: Manifest) -> dict[str, Any]:
    """Return the spec as the user wrote it, without the fields that change no engine."""
    given = cluster.get("spec")
    spec = {
        name: value
        for name, value in (given.items() if isinstance(given, Mapping) else ())
        if name not in ELSEWHERE
    }
    for part in PARTLY:
        _keep(spec, part)
    return spec


def with_spec_of_engines(given: Manifest, engines: Manifest) -> dict[str, Any]:
    """Return a spec with its engines' part replaced; see :func:`spec_of_engines`.

    ``rollout.renew`` is left out, because it asks for a newer revision than the one of ``engines``.
    """
    spec = {**engines, **{name: given[name] for name in ELSEWHERE if name in given}}
    for part in PARTLY:
        old = given.get(part)
        stays = {n: v for n, v in old.items() if not _is_of_engines(part, n)} if old else {}
        if stays:
            spec[part] = {**(spec.get(part) or {}), **stays}
    if isinstance(rollout := spec.get("rollout"), Mapping):
        spec["rollout"] = {name: value for name, value in rollout.items() if name != "renew"}
    return spec


def changed_fields(before: Any, after: Any, path: str = "") -> Iterator[str]:
    """Yield the path of each field that is not the same in both: ``decode.engine.env[0].value``."""
    before = {} if before is None and isinstance(after, Mapping) else before
    after = {} if after is None and isinstance(before, Mapping) else after
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        for name in sorted(before.keys() | after.keys()):
            inner = f"{path}.{name}" if path else str(name)
            yield from changed_fields(before.get(name), after.get(name), inner)
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for number, (old, new) in enumerate(zip(before, after, strict=True)):
            yield from changed_fields(old, new, f"{path}[{number}]")
    elif before != after:
        yield path


def what_changed(before: Manifest, after: Manifest, role: Role, *, rekeyed: bool) -> list[str]:
    """Return the fields that can have made another revision of ``role`` necessary.

    Args:
        rekeyed: the pairing key is another one, so the other role's fields count as well.
    """
    other = Role.DECODE if role is Role.PREFILL else Role.PREFILL
    return [
        path
        for path in changed_fields(before, after)
        if rekeyed or not path.startswith(f"{other.value}.")
    ]


def why_replaced(older: Iterable[Revision | None], wanted: Revision, spec: Manifest) -> set[str]:
    """Return the fields because of which engines of older revisions get the wanted one.

    Args:
        older: the revisions of one role that engines have; None for one that is not known.
        spec: see :func:`spec_of_engines`.
    """
    fields: set[str] = set()
    for old in older:
        if old is None or old.name == wanted.name:
            continue
        rekeyed = old.pairing_key != wanted.pairing_key
        fields.update(what_changed(old.spec, spec, wanted.role, rekeyed=rekeyed))
        if old.renew != wanted.renew:
            fields.add("rollout.renew")
    return fields


def in_words(paths: Iterable[str]) -> str:
    """Return a few of the paths and how many there are beside them; empty if there are none."""
    unique = sorted(set(paths))
    if not unique:
        return ""
    more = len(unique) - MOST_SHOWN
    tail = f" and {more} more" if more > 0 else ""
    return f"{', '.join(unique[:MOST_SHOWN])}{tail} changed"


def _keep(spec: dict[str, Any], part: str) -> None:
    """Keep only what engines have of one part of the spec; leave out a part that has none."""
    given = spec.pop(part, None)
    items = given.items() if isinstance(given, Mapping) else ()
    kept = {name: value for name, value in items if _is_of_engines(part, name)}
    if kept:
        spec[part] = kept


def _is_of_engines(part: str, name: str) -> bool:
    return name == ONLY_FIELD_OF_THE_ROUTER if part == "router" else name != "replicas"
