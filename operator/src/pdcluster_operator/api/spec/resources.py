"""What an engine's pod asks of its node: the user's resources, and what the operator adds."""

from __future__ import annotations

from pdcluster_operator.api.spec.enums import Role
from pdcluster_operator.api.spec.pod_templates import amounts, engine_container
from pdcluster_operator.api.spec.quantity import parse_quantity
from pdcluster_operator.api.spec.resolve import Engine, gpus_per_pod
from pdcluster_operator.api.spec.types import Cluster

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


def takes_no_gpus(cluster: Cluster, role: Role) -> bool:
    """Whether a role's pod template asks for 0 GPUs, because they come in another way.

    ``null`` would mean the same, but ``kubectl apply`` drops every null of an object.
    """
    _, overlay = engine_container(cluster, role)
    named = [amount for name, amount in amounts(overlay, "limits").items() if is_accelerator(name)]
    return bool(named) and all(parse_quantity(str(amount)) == 0 for amount in named)


def added_limits(cluster: Cluster, engine: Engine) -> dict[str, str]:
    """Return the limits that the operator adds to the user's: GPUs and RDMA devices."""
    _, overlay = engine_container(cluster, engine.role)
    given = {*cluster.spec.role(engine.role).resources.limits, *amounts(overlay, "limits")}
    added = {}
    gpus = gpus_per_pod(cluster, engine)
    if gpus and not any(map(is_accelerator, given)):
        added[GPU_RESOURCE] = str(gpus)
    rdma = cluster.spec.transfer.rdma
    if rdma is not None and rdma.resource not in given:
        added[rdma.resource] = str(rdma.per_gpu * max(1, gpus))
    return added
