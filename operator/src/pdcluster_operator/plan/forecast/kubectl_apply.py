"""What ``kubectl apply`` would send for a manifest, so that a dry run of it can be asked for.

An object that was applied on the server side is applied so again, by the same field manager. Any
other object gets kubectl's merge patch: fields that were in the last applied manifest and are not
in this one are removed, and fields of others, such as an autoscaler's replicas, stay.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pdcluster_operator.plan.model import Manifest

LAST_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"


def server_side_manager(live: Manifest) -> str | None:
    """Return who applied the object's spec on the server side; None if nobody did."""
    for entry in live["metadata"].get("managedFields") or ():
        if entry.get("operation") == "Apply" and "f:spec" in (entry.get("fieldsV1") or {}):
            return str(entry.get("manager"))
    return None


def merge_patch(live: Manifest, document: Manifest) -> dict[str, Any]:
    """Return the JSON merge patch of ``kubectl apply`` on the client side."""
    annotations = live["metadata"].get("annotations") or {}
    try:
        last = json.loads(annotations.get(LAST_APPLIED, "{}"))
    except ValueError:
        last = {}
    last = last if isinstance(last, Mapping) else {}
    labelled = {"labels", "annotations"}
    metadata = {k: v for k, v in (document.get("metadata") or {}).items() if k in labelled}
    old = {k: v for k, v in (last.get("metadata") or {}).items() if k in labelled}
    wanted = {"metadata": metadata, "spec": document.get("spec")}
    return _with_removals({"metadata": old, "spec": last.get("spec")}, wanted)


def _with_removals(last: Any, wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``wanted`` with a null for each field that only ``last`` has."""
    last = last if isinstance(last, Mapping) else {}
    patch: dict[str, Any] = dict.fromkeys(last)
    for name, value in wanted.items():
        whole = not isinstance(value, Mapping)
        patch[name] = value if whole else _with_removals(last.get(name), value)
    return patch
