"""The input and the output of the planner: plain, immutable data.

``make_plan(observed, now) -> Plan`` is a pure function over these types. An executor performs
the plan and decides nothing.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pdcluster_connector.protocol.launcher_documents import EngineReport, LinksReport, PeersDocument
from pdcluster_connector.protocol.load_report import LoadReport
from pdcluster_operator.api.object_names import engine_of
from pdcluster_operator.api.spec.model_config import FoundConfig
from pdcluster_operator.plan.moments import Moment

Manifest = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ConnectorBundle:
    """The connector that the operator ships: SHA-256 hex digest and bytes of the zipapp."""

    digest: str
    data: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class HeldCertificates:
    """The Secret with the engines' certificates, without the keys.

    Attributes:
        authority: fingerprint of the CA that the operator signs with.
        issue: which authority made the certificates, and for which time; None without a Secret.
        engines: names under which the Secret holds a certificate.
        uid: of the Secret; empty without one.
    """

    authority: str = ""
    issue: str | None = None
    engines: frozenset[str] = frozenset()
    uid: str = ""


@dataclass(frozen=True, slots=True)
class Rewrite:
    """How the API server's answer to an apply differs from what was applied.

    Attributes:
        applied: hash of the manifest that was applied.
        fields: (path, value as JSON) of each field that the live object holds otherwise.
    """

    applied: str
    fields: tuple[tuple[str, str], ...]


Rewrites = Mapping[tuple[str, str], Rewrite]
"""By kind and name of a child."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where the operator runs, and what it was allowed there.

    Attributes:
        namespace: of the operator's pod; None where that is not known.
        host_path_models: whether a PDCluster may mount folders of the nodes, or the folders whose
            contents it may read. Whoever installs the operator decides.
        one_node: whether all pods run on one machine, as in local mode.
        mounted_certificates: whether the operator has a certificate for engines whose
            certificates are mounted.
        operator_class: the class of PDClusters to work on; empty for those without, None for all.
        every_address: what routers bind to: ``::`` in a cluster whose Services have IPv6 addresses,
            so that its nodes have IPv6.
    """

    namespace: str | None = None
    host_path_models: bool | tuple[str, ...] = True
    one_node: bool = False
    mounted_certificates: bool = True
    operator_class: str | None = None
    every_address: str = "0.0.0.0"  # noqa: S104 - of a pod's own network


@dataclass(frozen=True, slots=True)
class Observed:
    """One cluster as it was seen.

    Attributes:
        cluster: the live PDCluster, with status.
        children: live objects that it owns (by owner UID): StatefulSets, Services, …
        pods: live pods of its StatefulSets and Deployments.
        engines: logical engine id -> the last report of its leader's launcher; missing =
            unreachable.
        links: decode engine's logical id -> the links that its launcher reports; missing =
            unreachable.
        connector: the connector to mount in engine pods.
        connectors: live ConfigMaps with a connector that the PDClusters of the namespace share.
        ticket_key: value of the annotation for which the last ticket key was made; None if there
            is no Secret that holds the ticket keys as they were written.
        certificates: the Secret with the engines' certificates.
        place: where the operator runs.
        pod_groups: whether the API server serves PodGroups.
        rewrites: what something else made of children as they were applied, by kind and name.
        scaler: the PrefillScaler of the cluster's name; None if there is none.
        model_config: the ConfigMap of ``spec.model.configMapRef``; None if the spec names none.
        unread: whether the Secrets could not be read. Then ``ticket_key`` and ``certificates`` say
            nothing. The status says why, as of a step that failed.
        loads: logical engine id -> what its launcher measured; missing = nothing.
        moments: what was seen at the looks before, for ``spec.autoscaling``.
    """

    cluster: Manifest
    children: tuple[Manifest, ...]
    pods: tuple[Manifest, ...]
    engines: Mapping[str, EngineReport]
    links: Mapping[str, LinksReport]
    connector: ConnectorBundle
    ticket_key: str | None = None
    certificates: HeldCertificates = HeldCertificates()
    place: Place = Place()
    pod_groups: bool = True
    rewrites: Rewrites = field(default_factory=dict)
    scaler: Manifest | None = None
    connectors: tuple[Manifest, ...] = ()
    model_config: FoundConfig | None = None
    unread: bool = False
    loads: Mapping[str, LoadReport] = field(default_factory=dict, compare=False)
    moments: tuple[Moment, ...] = field(default=(), compare=False)


@dataclass(frozen=True, slots=True)
class Apply:
    """Server-side apply of one object.

    Attributes:
        uid: of the live child that is changed; empty if the store knows none, or one that is
            being deleted.
        makes_room: wanted engines wait until old ones, and their routers, are gone by this step.
    """

    manifest: Manifest
    why: str
    uid: str = ""
    makes_room: bool = False


@dataclass(frozen=True, slots=True)
class WriteTicketKey:
    """A new ticket key, minted by whoever carries the plan out.

    Attributes:
        manifest: the Secret without its data.
        rotate: the Secret exists, and its first key stays valid as the second.
    """

    manifest: Manifest
    rotate: bool
    why: str


@dataclass(frozen=True, slots=True)
class WriteCertificates:
    """The certificates of all engines, signed by whoever carries the plan out.

    Attributes:
        manifest: the Secret without its data.
        engines: logical id of each engine, by the name that its certificate has in the Secret.
        start: when the certificates begin to be valid, in seconds since the epoch.
        end: when they expire.
        uid: of the Secret that is changed; empty if there is none.
    """

    manifest: Manifest
    engines: Mapping[str, str]
    start: float
    end: float
    why: str
    uid: str = ""


@dataclass(frozen=True, slots=True)
class TryOut:
    """Dry runs of what a new revision needs. If they pass, the revision is stored.

    Attributes:
        tried: an engine's StatefulSet, and a pod of it: quotas and Pod Security refuse pods and
            never StatefulSets. With engines that may end for it, its Service, too.
        manifest: the ControllerRevision to apply.
        beside: the pod is to run beside the old ones. Otherwise it gets the place of an old
            pod, and a quota that is used up refuses nothing.
        first: no engine of the role exists. Then none of either role is created before the trial
            of both has passed: one role alone would hold GPUs and serve nothing.
        uid: of the revision if it is stored as it is, and nothing is to be applied; else empty.
    """

    tried: tuple[Manifest, ...]
    manifest: Manifest
    beside: bool
    why: str
    first: bool = False
    uid: str = ""


@dataclass(frozen=True, slots=True)
class Delete:
    """Deletion of one object, only if it is still the one seen; ``makes_room`` as in ``Apply``."""

    kind: str
    namespace: str
    name: str
    uid: str
    resource_version: str
    why: str
    makes_room: bool = False


def deletion(live: Manifest, why: str) -> Delete:
    """Return the deletion of an object as it was seen."""
    metadata = live["metadata"]
    return Delete(
        str(live["kind"]),
        str(metadata.get("namespace") or "default"),
        str(metadata["name"]),
        str(metadata.get("uid", "")),
        str(metadata.get("resourceVersion", "")),
        why,
    )


Step = Apply | WriteTicketKey | WriteCertificates | TryOut | Delete


@dataclass(frozen=True, slots=True)
class ScalerStatus:
    """The ``status`` to write to a PrefillScaler, if it is still the object with this UID."""

    uid: str
    status: Manifest


@dataclass(frozen=True, slots=True)
class Scale:
    """The number of engines to set by the subresource scale, as an autoscaler does.

    Attributes:
        kind: PDCluster for decode, PrefillScaler for prefill.
        version: resourceVersion of the object as it was seen. One that changed since is left alone.
    """

    kind: str
    version: str
    replicas: int


@dataclass(frozen=True, slots=True)
class Event:
    """A Kubernetes event about the cluster. There is at most one for each change of a condition."""

    type: str  # Normal or Warning
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do now.

    Attributes:
        steps: in order; those of one stage (:func:`stages`) may be carried out side by side. One
            that failed stops those that need it (:func:`needs`).
        status: the whole ``status`` to write, also when a step failed.
        peers: decode engine's logical id -> the prefill engines that it reads from, for
            ``PUT /v1/peers``.
        routed: logical ids of the engines that routers may send requests to.
        requeue_after: seconds until this cluster should be looked at again; None if an
            event will come.
        events: to be published once the status is written.
        scaler: the status of the PrefillScaler; None if there is nothing to write.
        scales: numbers of engines to set.
        moments: see ``Observed``.
        fault: of a part that is left out because of a bug of the operator.
    """

    steps: tuple[Step, ...]
    status: Mapping[str, Any]
    peers: Mapping[str, PeersDocument] = field(default_factory=dict)
    routed: frozenset[str] = frozenset()
    requeue_after: float | None = None
    events: tuple[Event, ...] = ()
    scaler: ScalerStatus | None = None
    scales: tuple[Scale, ...] = ()
    moments: tuple[Moment, ...] = ()
    fault: Exception | None = None


MAKE_PODS = ("StatefulSet", "Deployment", "Job")
FENCES = ("NetworkPolicy", "ServiceAccount")


def stages(steps: Iterable[Step]) -> list[tuple[Step, ...]]:
    """Return the steps in stages; within a stage they keep their order.

    First come the objects that pods mount or go by. Then new revisions are tried out, and then come
    the workloads that make pods. The Service follows Recreate's routers. Deletions come last.
    """
    staged: dict[int, list[Step]] = {}
    for step in steps:
        staged.setdefault(_stage(step), []).append(step)
    return [tuple(staged[number]) for number in sorted(staged)]


def creates(steps: Iterable[Step]) -> bool:
    """Whether any step creates an object. A key that is rotated has its Secret."""
    return any(
        not (step.rotate if isinstance(step, WriteTicketKey) else step.uid)
        for step in steps
        if not isinstance(step, Delete)
    )


def needs(step: Step, other: Step) -> bool:
    """Whether a step is left out when another one of an earlier stage failed or was left out.

    A refusal stops its engine, its router or itself, what makes room for new engines, and nothing
    else. So clients are sent to the engines that serve, whatever child the API server refuses.
    """
    if isinstance(step, Apply | Delete) and step.makes_room and _is_for_engines(other):
        return True
    if isinstance(step, Delete):
        # An engine goes when no router lists it, and a router when clients are sent to another one.
        first = ("Deployment", "Service") if step.kind == "Deployment" else ("Deployment",)
        return (
            isinstance(other, Apply)
            and other.manifest["kind"] in first
            and engine_of(other.manifest) is None
        )
    if not isinstance(step, Apply) or step.manifest["kind"] not in MAKE_PODS:
        return False
    if isinstance(other, Apply):
        return _is_used(other.manifest, step)
    if isinstance(other, TryOut):  # while engines of its role exist, they serve on
        return other.first and not step.uid
    return step.manifest["kind"] == "StatefulSet" and _is_for_engines(other)


def _is_for_engines(step: Step) -> bool:
    """Whether new engines, or clients of theirs, need what a step makes or tries out."""
    if isinstance(step, Apply):
        kinds = (*FENCES, "ConfigMap", "ControllerRevision")
        return step.makes_room or step.manifest["kind"] in kinds
    if isinstance(step, WriteTicketKey):  # while the present key stays, pods start with it
        return not step.rotate
    return isinstance(step, WriteCertificates | TryOut)


def _is_used(child: Manifest, step: Apply) -> bool:
    """Whether the pods of a workload need a child: a fence, or an object that the workload names.

    Pods of a workload that exists have started without the fence.
    """
    kind, workload = child["kind"], step.manifest
    if kind in FENCES:
        return not step.uid
    pod = workload["spec"]["template"]["spec"]
    named = {
        ("ControllerRevision", workload["metadata"]["name"].rpartition("-")[0]),
        ("Service", workload["spec"].get("serviceName")),
        ("PodGroup", (pod.get("schedulingGroup") or {}).get("podGroupName")),
    }
    mounted = ((volume.get("configMap") or {}).get("name") for volume in pod.get("volumes") or ())
    return (kind, child["metadata"]["name"]) in named.union(("ConfigMap", one) for one in mounted)


def _stage(step: Step) -> int:
    if isinstance(step, Apply):
        return 2 if step.manifest["kind"] in MAKE_PODS else 3 if step.makes_room else 0
    return 1 if isinstance(step, TryOut) else 4 if isinstance(step, Delete) else 0
