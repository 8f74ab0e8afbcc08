"""Resources of pods: quantities, kinds of resources, and the limits that the operator adds."""

import re
from dataclasses import dataclass
from decimal import Decimal
from functools import lru_cache

from pdcluster_operator.api.spec import engine_types, pod_templates, resolve, router_types, types
from pdcluster_operator.api.spec.pod_templates import amounts, as_list, as_mapping, engine_container
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


@dataclass(frozen=True, slots=True)
class Accelerator:
    """A kind of accelerator.

    Attributes:
        transports: UCX's name of the transports that reach its memory: ``cuda``, ``rocm`` or
            ``ze``; empty where UCX has none, or the resource does not say whose device it is.
        counted: whether one piece of it serves one worker. Memory, cores and tiles do not.
    """

    transports: str = ""
    counted: bool = True


# Names of resources, as device plugins, schedulers and operators give them; the first match counts.
# A share of a device is written beside a number of devices, or instead of it.
ACCELERATORS: tuple[tuple[str, Accelerator], ...] = (
    (r"gpu\.intel\.com/(i915|xe)", Accelerator("ze")),
    (r"gpu\.intel\.com/.+", Accelerator("ze", counted=False)),
    (r"volcano\.sh/vgpu-number", Accelerator("cuda")),
    (r"volcano\.sh/vgpu-.+", Accelerator("cuda", counted=False)),
    # KubeVirt and Kata name a GPU by its model, as in GB200 or TU104GL_TESLA_T4. ConnectX and
    # BlueField are NICs in the same domain.
    (r"nvidia\.com/([pv]?gpu([.-].+)?|mig-.+|GRID.+|(?!MT|CX|BF)[A-Z]{1,2}\d.*)",
     Accelerator("cuda")),
    # cpx, dpx, qpx and spx are the partitions of an Instinct.
    (r"amd\.com/(gpu|[cdqs]px)([._-].+)?", Accelerator("rocm")),
    # A Neuron device has several cores, and each of them may be a worker.
    (r"aws\.amazon\.com/neuron(core|device)?", Accelerator(counted=False)),
    (r"[^/]+/gpu[.-](core|mem|shared?-mem).*|koordinator\.sh/gpu", Accelerator(counted=False)),
    ((r"habana\.ai/gaudi|google\.com/tpu|huawei\.com/(Ascend|npu).*|cambricon\.com/v?mlu.*"
      r"|hygon\.com/v?dcu.*|enflame\.com/(shared-)?gcu.*|(baidu|kunlunxin)\.com/v?xpu.*"
      r"|(mthreads|metax-tech|iluvatar)\.(com|ai)/[sv]?gpu.*|qualcomm\.com/qaic.*"
      r"|(furiosa|rebellions)\.ai/.+|tenstorrent\.com/.+"
      # Dynamic resource allocation gives such a resource to each device class.
      r"|deviceclass\.resource\.kubernetes\.io/.*(gpu|mig|tpu|gaudi|neuron).*"
      r"|[^/]+/gpu([.-].+)?|[^/]+/mig-.+|gpu\.[^/]+/.+"), Accelerator()),
)  # fmt: skip


@lru_cache(maxsize=256)
def accelerator(name: str) -> Accelerator | None:
    """Return which kind of accelerator a resource stands for, or for a part of which; else None."""
    return next((kind for names, kind in ACCELERATORS if re.fullmatch(names, name)), None)


def is_accelerator(name: str) -> bool:
    """Whether a resource stands for accelerators, or for parts of one."""
    return accelerator(name) is not None


def counts_accelerators(name: str) -> bool:
    """Whether each piece of a resource is an accelerator, or a part that serves one worker."""
    kind = accelerator(name)
    return kind is not None and kind.counted


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


def claims(cluster: types.Cluster, role: Role) -> str:
    """Return the path of the claims that may give devices to a role's engines; empty without."""
    template = cluster.spec.role(role).pod_template
    path, _ = engine_container(cluster, role)
    claiming = {
        str(entry.get("name")): where
        for where, entry in pod_templates.containers(template)
        if as_list(as_mapping(entry.get("resources")).get("claims"))
    }
    if pod_templates.ENGINE_CONTAINER in claiming:
        return f"{path}.resources.claims"
    unused = as_list(pod_templates.pod_spec(template).get("resourceClaims")) and not claiming
    return f"spec.{role}.podTemplate.spec.resourceClaims" if unused else ""


def device_limits(cluster: types.Cluster, role: Role) -> dict[str, object]:
    """Return resource -> amount of a role's engines, as written, without what is added to them."""
    _, overlay = engine_container(cluster, role)
    return {**cluster.spec.role(role).resources.limits, **amounts(overlay, "limits")}


def gpu_transports(cluster: types.Cluster, role: Role) -> frozenset[str]:
    """Return UCX's names of the transports that may reach the memory of a role's GPUs.

    Several if the spec does not say whose GPUs they are; none if UCX has no transport for them.
    """
    if cluster.spec.transfer.device is not Device.CUDA:
        return frozenset()
    if takes_no_gpus(cluster, role):
        return frozenset({"cuda", "rocm", "ze"})
    found = [kind for name in device_limits(cluster, role) if (kind := accelerator(name))]
    return frozenset({kind.transports for kind in found} - {""} if found else {"cuda"})


def added_limits(cluster: types.Cluster, engine: resolve.Engine) -> dict[str, str]:
    """Return the limits that the operator adds to the user's: GPUs and RDMA devices."""
    given = device_limits(cluster, engine.role)
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
