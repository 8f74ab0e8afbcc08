"""Rules of what the scheduler judges, and of how much the API server stores of a PDCluster.

Requests and limits are those of the spec, with those that the operator and a pod template add.
With ``spec.scheduling.gang``, the API server has to serve PodGroups, and the pods of a PodGroup
have one priority.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal

from pdcluster_connector.compat.findings import counted
from pdcluster_operator.api.findings import FieldError, Rule, shown
from pdcluster_operator.api.spec import pod_templates, resources
from pdcluster_operator.api.spec.engine_types import Switch
from pdcluster_operator.api.spec.pod_templates import as_list, as_mapping
from pdcluster_operator.api.spec.resolve import (
    Engine,
    offloaded_mebibytes,
    resolve_engine,
    workers_per_pod,
)
from pdcluster_operator.api.spec.shared_template import SHARED
from pdcluster_operator.api.spec.types import Cluster, Device, KvLayout, Role

KINDS = ("requests", "limits")


@dataclass(frozen=True, slots=True)
class Amount:
    """One resource's amount, as it is written, and where."""

    path: str
    text: str

    @property
    def number(self) -> Decimal | None:
        """The number that is meant; None if it is no quantity."""
        return resources.parse_quantity(self.text)


def resource_errors(cluster: Cluster) -> Iterator[FieldError]:
    """Yield amounts that Kubernetes would refuse, and counts of GPUs that do not fit the engine."""
    for role in Role:
        engine = resolve_engine(cluster, role)
        requests, limits = (_amounts(cluster, engine, kind) for kind in KINDS)
        yield from _each(requests, limits)
        if cluster.spec.transfer.device is Device.CUDA and not resources.takes_no_gpus(
            cluster, role
        ):
            yield from _gpus(engine, limits)
    router = cluster.spec.router.resources
    given = {"requests": router.requests, "limits": router.limits}
    yield from _container("spec.router", {"resources": given})
    for path, template, ours in pod_templates.pod_templates(cluster):
        for place, entry in pod_templates.containers(template):
            if not entry.get("name") == ours == "engine":
                yield from _container(f"{path}.{place}", entry)


def resource_warnings(cluster: Cluster) -> Iterator[FieldError]:
    """Yield engines whose pods request no memory, or perhaps twice as many GPUs as are meant."""
    for role in Role:
        engine = resolve_engine(cluster, role)
        yield from _beside_claims(cluster, engine)
        pod = pod_templates.pod_spec(cluster.spec.role(role).pod_template)
        yield from _nowhere(role, pod)
        given = [{*_amounts(cluster, engine, kind), *_written(pod, "", kind)} for kind in KINDS]
        if not any("memory" in names for names in given):
            yield FieldError(
                f"spec.{role}.resources.requests.memory",
                "",
                Rule.NO_MEMORY_REQUEST,
                "without it the scheduler reserves no memory for the pod, and the node may run out "
                "of memory",
                "Request what the weights and the KV cache on the host need.",
                (f"spec.{role}.resources", f"spec.{role}.podTemplate"),
            )


def _beside_claims(cluster: Cluster, engine: Engine) -> Iterator[FieldError]:
    path = resources.claims(cluster, engine.role)
    added = resources.added_limits(cluster, engine).get(resources.GPU_RESOURCE)
    if path and added is not None:
        gpu, limits = resources.GPU_RESOURCE, f"spec.{engine.role}.resources.limits"
        yield FieldError(
            path,
            "",
            Rule.GPU_BESIDE_CLAIM,
            f"the operator adds {gpu}: {added} to the pod, and if the claim is for GPUs, too, the "
            "pod takes twice as many",
            f"If it is, write {gpu}: 0 in the limits of the pod template's container engine. If "
            f"it is for something else, write {gpu}: {added} in {limits}.",
            (limits, f"spec.{engine.role}.parallelism", "spec.transfer.device"),
        )


def _nowhere(role: Role, pod: Mapping[str, object]) -> Iterator[FieldError]:
    """Yield a nodeSelector that no term of the required node affinity allows."""
    affinity = as_mapping(as_mapping(pod.get("affinity")).get("nodeAffinity"))
    needed = as_mapping(affinity.get("requiredDuringSchedulingIgnoredDuringExecution"))
    terms = map(as_mapping, as_list(needed.get("nodeSelectorTerms")))
    wanted = [as_list(term.get("matchExpressions")) for term in terms]
    for key, value in as_mapping(pod.get("nodeSelector")).items():
        meant = [[one for one in map(as_mapping, term) if one.get("key") == key
                  and one.get("operator") == "In" and value not in as_list(one.get("values"))]
                 for term in wanted]  # fmt: skip
        if value is not None and meant and all(meant):
            why = "contradicts the required nodeAffinity: no node fits both", "Keep one of them."
            selector = f"spec.{role}.podTemplate.spec.nodeSelector"
            yield FieldError(f"{selector}.{key}", shown(value), Rule.CONFLICTING_SETTINGS, *why)


def _amounts(cluster: Cluster, engine: Engine, kind: str) -> dict[str, Amount]:
    """Return resource -> amount of an engine's container. The pod template wins."""
    given = cluster.spec.role(engine.role).resources
    limits = given.limits | resources.added_limits(cluster, engine)
    texts = given.requests if kind == "requests" else limits
    path = f"spec.{engine.role}.resources.{kind}"
    found = {name: Amount(f"{path}.{name}", text) for name, text in texts.items()}
    place, overlay = pod_templates.engine_container(cluster, engine.role)
    return found | _written(overlay, place, kind)


def _written(container: Mapping[str, object], path: str, kind: str) -> dict[str, Amount]:
    return {
        str(name): Amount(f"{path}.resources.{kind}.{name}", str(amount))
        for name, amount in pod_templates.amounts(container, kind).items()
        if amount is not None
    }


def _each(requests: dict[str, Amount], limits: dict[str, Amount]) -> Iterator[FieldError]:
    """Yield what the API server refuses in a container's amounts."""
    for name, amount in (*requests.items(), *limits.items()):
        number = amount.number
        message = remedy = ""
        if name and name not in resources.STANDARD and not resources.is_countable(name):
            message = f"{name} is not a resource of Kubernetes; others are written as domain/name"
            remedy = "Write for example cpu, memory or nvidia.com/gpu."
        elif resources.is_countable(name) and number and number != number.to_integral_value():
            message = f"Kubernetes gives a container a whole number of {name}, never a part of one"
            remedy = "Write a whole number."
        if message:
            yield FieldError(amount.path, shown(amount.text), Rule.BAD_FORMAT, message, remedy)
    yield from _pairs(requests, limits)


def _container(path: str, container: Mapping[str, object]) -> Iterator[FieldError]:
    yield from _each(*(_written(container, path, kind) for kind in KINDS))


def _pairs(requests: dict[str, Amount], limits: dict[str, Amount]) -> Iterator[FieldError]:
    """Compare each request with its limit, as the API server does."""
    yield from _bytes("requests", requests)
    yield from _bytes("limits", limits)
    for name, request in requests.items():
        limit, number = limits.get(name), request.number
        if number is None:
            continue
        if limit is None:
            if resources.is_countable(name):
                missing = request.path.replace(".requests.", ".limits.", 1)
                message = f"{name} is requested without a limit"
                yield _mismatch(request, message, (missing,), request.text)
            continue
        most = limit.number
        if most is None:
            continue
        if resources.is_countable(name) and number != most:
            message = f"the limit is {limit.text}; for {name}, request and limit must be equal"
            yield _mismatch(request, message, (limit.path,), limit.text)
        elif number > most:
            yield _mismatch(request, f"is above the limit {limit.text}", (limit.path,), limit.text)


LEAST_BYTES = {
    ("requests", "memory"): 64 << 10,
    ("limits", "memory"): 4 << 20,
    ("requests", "ephemeral-storage"): 64 << 10,
    ("limits", "ephemeral-storage"): 64 << 10,
}
"""Bytes below which the unit is wrong: small sidecars request little, but none runs in 4Mi."""


def _bytes(kind: str, given: dict[str, Amount]) -> Iterator[FieldError]:
    """Yield amounts without a unit, or with one that means less than was meant."""
    for name, amount in given.items():
        number = amount.number
        if number and 0 < number < LEAST_BYTES.get((kind, name), 0):
            yield FieldError(
                amount.path,
                shown(amount.text),
                Rule.OUT_OF_RANGE,
                f"means {number.normalize():f} bytes of {name}",
                f"Write {'more' if amount.text[-1:] in 'ikM' else 'a unit'}, as in 512Mi or 16Gi.",
            )


def _mismatch(request: Amount, message: str, related: tuple[str, ...], limit: str) -> FieldError:
    return FieldError(
        request.path,
        shown(request.text),
        Rule.REQUEST_LIMIT_MISMATCH,
        message,
        f"Write {limit} in both, or change the limit.",
        related,
    )


def _gpus(engine: Engine, limits: dict[str, Amount]) -> Iterator[FieldError]:
    if engine.parallelism.workers % engine.parallelism.nodes:
        return  # NodesDivideWorkers reports it
    wanted = workers_per_pod(engine)
    named = {name: one for name, one in limits.items() if resources.counts_accelerators(name)}
    numbers = [amount.number or Decimal(0) for amount in named.values()]
    if not named or sum(numbers) == wanted:
        return
    first = next(iter(named.values()))
    yield FieldError(
        first.path,
        shown(" + ".join(amount.text for amount in named.values())),
        Rule.GPU_COUNT_MISMATCH,
        f"spec.{engine.role}.parallelism needs {counted(wanted, 'GPU')} in each pod",
        f"Write {wanted}, or leave it out."
        if len(named) == 1
        else f"Write amounts whose sum is {wanted}, or leave all of them out.",
        (f"spec.{engine.role}.parallelism", "spec.transfer.device"),
    )


MIB = 1 << 20
LEAST_MIB, MOST_MIB = 1 << 10, 64 << 20
LEAST_POD_GIB, LEAST_GPU_GIB = 4, 2
"""Host memory of an engine that is surely needed: of its pod, and for each GPU.

Engines that serve need more. ``pdcluster init`` writes what they should have.
"""


def offload_errors(cluster: Cluster) -> Iterator[FieldError]:
    """Yield engines that cannot offload KV, and pods without room for it."""
    for role in Role:
        engine = resolve_engine(cluster, role)
        if engine.kv_offload is None:
            continue
        own = cluster.spec.role(role).engine.kv_offload is not None
        path = f"spec.{role}.engine.kvOffload" if own else "spec.engine.kvOffload"
        wrong = list(_cannot_offload(cluster, engine, path))
        yield from wrong or _room_to_offload(cluster, engine, f"{path}.cpuMemory")


def _cannot_offload(cluster: Cluster, engine: Engine, path: str) -> Iterator[FieldError]:
    parallel = engine.parallelism
    message, remedy = "", "Remove it."
    if engine.role is Role.DECODE:
        message = (
            "decode engines cannot have it: vLLM's offloading connector does not see the blocks "
            "that KV from prefill is written to. It would keep that KV as the KV of other prompts "
            "(vLLM's issue 46951)"
        )
        remedy = "Set spec.prefill.engine.kvOffload instead: prefill engines reuse the KV."
    elif cluster.spec.transfer.device is Device.CPU:
        message = "with spec.transfer.device CPU, KV is in host memory anyway, and vLLM refuses it"
    elif (layout := cluster.spec.transfer.kv_layout) in (KvLayout.BLHNC, KvLayout.BHLNC):
        message = (
            f"spec.transfer.kvLayout is {layout}, and vLLM's offloading connector asks for LBHNC; "
            "vLLM does not start if two connectors ask for different layouts"
        )
        remedy = "Remove it, or set spec.transfer.kvLayout to LBHNC."
    elif parallel.nodes > parallel.data:
        message = (
            f"the engine spans {parallel.nodes} pods, and vLLM would need the memory of all of "
            "them in each pod's /dev/shm"
        )
        remedy = f"Remove it, or set spec.{engine.role}.parallelism.nodes to 1."
    if message:
        related = (f"spec.{engine.role}.parallelism", "spec.transfer.device")
        rule = Rule.KV_OFFLOAD_UNSUPPORTED
        yield FieldError(path, "", rule, message, remedy, related)


def _room_to_offload(cluster: Cluster, engine: Engine, path: str) -> Iterator[FieldError]:
    """Compare the sum with the limit, or with the request where there is no limit."""
    text = engine.kv_offload.cpu_memory if engine.kv_offload else ""
    offloaded, gpus = offloaded_mebibytes(engine), workers_per_pod(engine)
    if not LEAST_MIB <= offloaded <= MOST_MIB:
        remedy = "Write for example 64Gi."
        yield FieldError(path, shown(text), Rule.OUT_OF_RANGE, "is not 1Gi to 64Ti", remedy)
        return
    least = offloaded + ((LEAST_POD_GIB + LEAST_GPU_GIB * gpus) << 10)
    for kind in ("limits", "requests"):
        amount = _amounts(cluster, engine, kind).get("memory")
        if amount is None or amount.number is None:
            continue
        if amount.number < least * MIB:
            yield FieldError(
                path,
                shown(text),
                Rule.KV_OFFLOAD_TOO_LARGE,
                f"{text} for KV + {LEAST_POD_GIB}Gi for the pod + {LEAST_GPU_GIB}Gi for each of "
                f"{counted(gpus, 'GPU')} is more memory than {amount.path} = {amount.text}",
                f"Write at least {least}Mi there, or a smaller cpuMemory.",
                (amount.path, f"spec.{engine.role}.parallelism"),
            )
        break
    template = cluster.spec.role(engine.role).pod_template
    for place, volume in pod_templates.mappings(template, "volumes"):
        given = pod_templates.as_mapping(volume.get("emptyDir")).get("sizeLimit")
        size = resources.parse_quantity(str(given)) if volume.get("name") == "shm" else None
        if size is not None and size < (offloaded + 1024) * Decimal(MIB):
            where = f"spec.{engine.role}.podTemplate.{place}.emptyDir.sizeLimit"
            yield FieldError(
                path,
                shown(text),
                Rule.KV_OFFLOAD_TOO_LARGE,
                f"vLLM keeps it in /dev/shm, and {where} = {given} is less than it and 1Gi more",
                f"Write at least {offloaded + 1024}Mi there, or remove that volume: the operator's "
                "own has room.",
                (where,),
            )


MOST_BYTES = {
    "spec.router.": (112 << 10, "an annotation holds it twice, and the most is 256 KiB"),
    "spec.": (240 << 10, "an object holds it twice, and the most is 1.5 MiB"),
}
"""Bytes of JSON of a part of the spec, and why there may not be more.

A ControllerRevision holds the spec and a pod template that comes from it. API servers add the names
of all its fields, which take up to 1.5 times as much; 3.5 times in a StatefulSet, which holds the
template alone. A Deployment of routers has ``spec.router`` and a template in one annotation.
"""


def stored_errors(manifest: object) -> Iterator[FieldError]:
    """Yield the largest field of a spec that makes objects which API servers do not store."""
    sizes = {
        f"spec.{part}.{name}": len(json.dumps(value, default=str))
        for part, fields in as_mapping(as_mapping(manifest).get("spec")).items()
        for name, value in as_mapping(fields).items()
    }
    for prefix, (most, why) in MOST_BYTES.items():
        parts = (prefix, f"{SHARED}.")  # routers have the shared template, too
        found = {path: size for path, size in sizes.items() if path.startswith(parts)}
        if (size := sum(found.values())) > most:
            yield FieldError(
                max(found, key=lambda path: found[path]),
                "",
                Rule.TOO_LARGE,
                f"{prefix[:-1]} has {size:,} bytes of JSON; {most:,} are allowed, because {why}",
                "Keep long texts in a ConfigMap or a Secret, and mount it.",
            )


GANG = "spec.scheduling.gang"
GROUP_FIELDS = ("priorityClassName", "preemptionPolicy", "schedulerName")
"""Fields that must be equal in all pods of a PodGroup."""


def gang_errors(cluster: Cluster) -> Iterator[FieldError]:
    """Yield fields with which the scheduler refuses the pods of a PodGroup."""
    if cluster.spec.scheduling.gang is not Switch.ENABLED:
        return
    specs = {role: pod_templates.pod_spec(cluster.spec.role(role).pod_template) for role in Role}
    for role, spec in specs.items():
        if spec.get("schedulingGroup") is not None:
            yield FieldError(
                f"spec.{role}.podTemplate.spec.schedulingGroup",
                shown(spec["schedulingGroup"]),
                Rule.CONFLICTING_SETTINGS,
                f"contradicts {GANG}, with which the operator writes this field",
                f"Remove it, or set {GANG} to Disabled.",
            )
    for field in GROUP_FIELDS:
        prefill, decode = (specs[role].get(field) or "" for role in Role)
        if prefill != decode:
            yield FieldError(
                f"spec.decode.podTemplate.spec.{field}",
                shown(decode),
                Rule.GANG_MIXED,
                f"differs from prefill's, which is {shown(prefill)}. The scheduler refuses a "
                "PodGroup of such pods",
                f"Write the same {field} in both roles, or set {GANG} to Disabled.",
            )


def pod_group_errors(cluster: Cluster) -> Iterator[FieldError]:
    """Yield an error if engines are to start together, for an API server without PodGroups."""
    if cluster.spec.scheduling.gang is Switch.ENABLED:
        yield FieldError(
            GANG,
            Switch.ENABLED.value,
            Rule.POD_GROUPS_NOT_SERVED,
            "this API server serves no podgroups of scheduling.k8s.io/v1beta1",
            "Set it to Disabled. Or use Kubernetes 1.37 or newer with the feature gate "
            "GenericWorkload in the API server, the scheduler and the controller manager, and with "
            "--runtime-config=scheduling.k8s.io/v1beta1=true in the API server.",
        )
