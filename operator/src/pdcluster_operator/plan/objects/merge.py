"""A user's pod template over ours, in the spirit of Kubernetes' strategic merge.

Objects merge by key, the lists below by the field that identifies an item (volumes and
variables as a whole), every other list is replaced; ``null`` removes a key.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

KEYED_LISTS = {
    "containers": "name",
    "initContainers": "name",
    "volumes": "name",
    "imagePullSecrets": "name",
    "env": "name",
    "volumeMounts": "mountPath",
    "ports": "containerPort",
}
# Such an item names one of several sources. Two items merged would name two of them.
WHOLE_ITEMS = frozenset({"volumes", "env"})
PROBES = frozenset({"startupProbe", "readinessProbe", "livenessProbe"})
HANDLERS = frozenset({"exec", "grpc", "httpGet", "tcpSocket"})


def merge(base: Any, overlay: Any, key: str = "") -> Any:
    """Return ``base`` with ``overlay`` on top; neither is changed."""
    if isinstance(base, Mapping) and isinstance(overlay, Mapping):
        merged = _beside(base, overlay, key)
        for name, value in overlay.items():
            if value is None:
                merged.pop(name, None)
            elif name in merged:
                merged[name] = merge(merged[name], value, name)
            else:  # a null inside of it would reach the API server
                merged[name] = merge({}, value) if isinstance(value, Mapping) else value
        return merged
    if _is_list(base) and _is_list(overlay) and key in KEYED_LISTS:
        return _merge_items(base, overlay, KEYED_LISTS[key], whole=key in WHOLE_ITEMS)
    return overlay


def _beside(base: Mapping[str, Any], overlay: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return a copy of ``base`` without what Kubernetes refuses beside ``overlay``."""
    refused: set[str] = set()
    if key in PROBES and any(overlay.get(name) is not None for name in HANDLERS):
        refused = {name for name in HANDLERS if name not in overlay}
    if key == "securityContext" and _escalates(overlay):
        refused = {"allowPrivilegeEscalation"}
    return {name: value for name, value in base.items() if name not in refused}


def _escalates(security: Mapping[str, Any]) -> bool:
    capabilities = security.get("capabilities")
    added = capabilities.get("add") if isinstance(capabilities, Mapping) else ()
    names: Sequence[Any] = added if isinstance(added, list | tuple) else ()
    admin = "SYS_ADMIN" in names or "CAP_SYS_ADMIN" in names
    return security.get("privileged") is True or admin


def _merge_items(
    base: Sequence[Any], overlay: Sequence[Any], field: str, *, whole: bool
) -> list[Any]:
    items = list(base)
    places = {item[field]: n for n, item in enumerate(items) if _identified(item, field)}
    for item in overlay:
        if _identified(item, field) and item[field] in places:
            place = places[item[field]]
            items[place] = item if whole else merge(items[place], item)
        else:
            items.append(item)
    return items


def _identified(item: Any, field: str) -> bool:
    return isinstance(item, Mapping) and isinstance(item.get(field), (str, int))


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))
