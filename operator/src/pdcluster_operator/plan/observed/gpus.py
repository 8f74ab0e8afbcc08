"""The GPUs of a pod."""

from __future__ import annotations

from pdcluster_operator.api.spec.resources import is_accelerator, parse_quantity
from pdcluster_operator.plan.model import Manifest


def gpus(template: Manifest) -> int:
    """Return the GPUs of a pod or of a pod template; 1 for one without GPUs."""
    return max(1, accelerators(template))


def accelerators(template: Manifest) -> int:
    """Return the GPUs of a pod or of a pod template."""
    asked = 0
    for container in (template.get("spec") or {}).get("containers") or ():
        limits = (container.get("resources") or {}).get("limits") or {}
        found = (parse_quantity(str(n)) for name, n in limits.items() if is_accelerator(name))
        asked += sum(int(n) for n in found if n is not None)
    return asked
