"""Resources of pods: quantities, kinds of resources, and the limits that the operator adds."""

import re
from decimal import Decimal

from pdcluster_operator.api.spec import engine_types, resolve, router_types, types
from pdcluster_operator.api.spec.pod_templates import amounts, engine_container
from pdcluster_operator.api.spec.types import Device, Role

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
    number = parse_quantity(str(value)) if isinstance(value, int | str) else None
    if number is None:
        return "is not a Kubernetes quantity"
    return "is negative" if number < 0 else None


GPU_RESOURCE = "nvidia.com/gpu"
STANDARD = frozenset({"cpu", "memory", "ephemeral-storage"})


def is_accelerator(name: str) -> bool:
    """Whether a resource stands for GPUs, or for parts of one (``nvidia.com/mig-1g.10gb``)."""
    domain, slash, kind = name.partition("/")
    parts = kind == "gpu" or kind.startswith(("gpu.", "gpu-", "mig-"))
    return bool(slash) and (parts or domain.startswith("gpu."))


def is_countable(name: str) -> bool:
    """Whether a resource is given out in whole pieces: its request and limit must be equal."""
    return "/" in name or name.startswith("hugepages-")


def takes_no_gpus(cluster: types.Cluster, role: Role) -> bool:
    """Whether a role's pod template sets 0 GPUs, because pods get them by a claim.

    ``null`` would mean the same, but ``kubectl apply`` drops every null of an object.
    """
    _, overlay = engine_container(cluster, role)
    named = [amount for name, amount in amounts(overlay, "limits").items() if is_accelerator(name)]
    return bool(named) and all(parse_quantity(str(amount)) == 0 for amount in named)


def added_limits(cluster: types.Cluster, engine: resolve.Engine) -> dict[str, str]:
    """Return the limits that the operator adds to the user's: GPUs and RDMA devices."""
    _, overlay = engine_container(cluster, engine.role)
    given = {*cluster.spec.role(engine.role).resources.limits, *amounts(overlay, "limits")}
    added = {}
    on_gpus = cluster.spec.transfer.device is Device.CUDA
    gpus = resolve.workers_per_pod(engine) if on_gpus else 0
    if gpus and not any(map(is_accelerator, given)):
        added[GPU_RESOURCE] = str(gpus)
    rdma = cluster.spec.transfer.rdma
    if rdma is not None and rdma.resource not in given:
        added[rdma.resource] = str(rdma.per_gpu * max(1, gpus))
    return added


def of_container(
    given: engine_types.Resources | router_types.RouterResources, added: dict[str, str]
) -> dict[str, dict[str, str]]:
    """Return a container's resources: those of the spec, and limits that the operator adds."""
    parts = {"requests": dict(given.requests), "limits": given.limits | added}
    return {name: part for name, part in parts.items() if part}
