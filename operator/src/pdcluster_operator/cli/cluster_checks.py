"""What ``pdcluster doctor`` makes of the facts about a cluster. Pure.

Each check of ``CHECKS`` yields rows. A row is MISSING only if the manifest needs it, or if every
PDCluster does.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import msgspec

from pdcluster_connector.compat.findings import counted
from pdcluster_operator.api.schema.crd import crd
from pdcluster_operator.api.spec import resolve, resources
from pdcluster_operator.api.spec.engine_types import Switch
from pdcluster_operator.api.spec.pod_templates import amounts, engine_container, pod_spec
from pdcluster_operator.api.spec.types import Cluster, Role

LEAST_KUBERNETES = (1, 30)
"""As the chart's ``kubeVersion`` says."""
RDMA = re.compile(r"rdma|roce|infiniband|/ib|hca|efa|mlnx|mlx|sriov|_vf")
ENFORCING = ("calico", "canal", "cilium", "antrea", "weave", "kube-router", "ovn", "anetd",
             "romana", "azure-npm", "kube-network-policies")  # fmt: skip
"""Parts of the names of DaemonSets whose networks enforce NetworkPolicies."""
NOT_ENFORCING = ("flannel", "aws-node", "kindnet")
"""Those that do not, or only if somebody turned it on."""
LEVEL = "pod-security.kubernetes.io/enforce"
INSTALL = "helm install pdcluster charts/pdcluster -n pdcluster-system --create-namespace"


class Verdict(StrEnum):
    """What a row says."""

    OK = "ok"
    WARNING = "warning"
    MISSING = "missing"
    UNKNOWN = "unknown"


class Row(msgspec.Struct, frozen=True, rename="camel"):
    """One finding.

    Attributes:
        found: what is there.
        why: why it matters.
        remedy: what to do; empty if nothing has to be done.
    """

    check: str
    verdict: Verdict
    found: str
    why: str
    remedy: str = ""


def row(
    check: str, good: bool, found: str, why: str, remedy: str = "", bad: Verdict = Verdict.WARNING
) -> Row:
    """Return a row that is OK, or ``bad`` with a remedy."""
    return Row(check, Verdict.OK, found, why) if good else Row(check, bad, found, why, remedy)


@dataclass(frozen=True, slots=True)
class Node:
    """One node: what it can give to pods, and whether pods may come."""

    name: str
    allocatable: Mapping[str, int]
    usable: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterFacts:
    """What the API server told.

    Attributes:
        answers: a document by question (``cli/cluster_facts.py``); a text says why there is none,
            and None that there is no such object.
        own, operator: rights, as ``create pods``, and whether they are held. None: not known.
        review: the API server's answer to a dry run that the webhook has to refuse.
    """

    namespace: str
    nodes: tuple[Node, ...] | str
    answers: Mapping[str, Mapping[str, Any] | str | None]
    own: Mapping[str, bool | None] = field(default_factory=dict)
    operator: Mapping[str, bool | None] = field(default_factory=dict)
    review: str = ""
    version: str = ""

    @property
    def usable_nodes(self) -> tuple[Node, ...]:
        """The nodes that take pods; none if nobody told."""
        nodes = () if isinstance(self.nodes, str) else self.nodes
        return tuple(node for node in nodes if node.usable)


def check_cluster(facts: ClusterFacts, cluster: Cluster | None) -> list[Row]:
    """Return all rows; ``cluster`` is what a manifest wants, if there is one."""
    return [row for check in CHECKS for row in check(facts, cluster)]


def _kubernetes(facts: ClusterFacts, _: Cluster | None) -> Iterator[Row]:
    why = "the CRD and the webhook use what older API servers do not have"
    answer = facts.answers["version"]
    if not isinstance(answer, Mapping):
        yield Row("Kubernetes", Verdict.UNKNOWN, str(answer), why)
        return
    numbers = [re.match(r"\d+", str(answer.get(part, ""))) for part in ("major", "minor")]
    release = tuple(int(one[0]) for one in numbers if one)
    least = ".".join(map(str, LEAST_KUBERNETES))
    found, remedy = ".".join(map(str, release)), f"Upgrade to {least} or newer."
    yield row("Kubernetes", release >= LEAST_KUBERNETES, found, why, remedy, Verdict.MISSING)


def _crd(facts: ClusterFacts, _: Cluster | None) -> Iterator[Row]:
    why, answer = "the API server keeps PDClusters only with it", facts.answers["crd"]
    if isinstance(answer, str):
        yield Row("CRD", Verdict.UNKNOWN, answer, why)
    elif answer is None:
        yield Row("CRD", Verdict.MISSING, "none", why, f"Install the chart: {INSTALL}")
    else:
        lacks = sorted(_fields(_schema(crd())) - _fields(_schema(answer)))
        found = f"lacks {', '.join(lacks[:3])}" if lacks else "has all fields of this command"
        remedy = "Upgrade the chart to the version of this command."
        yield row("CRD", not lacks, found, why, remedy)


def _schema(definition: Mapping[str, Any]) -> Mapping[str, Any]:
    versions = definition["spec"]["versions"]
    found: Mapping[str, Any] = versions[0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    return found


def _fields(schema: Mapping[str, Any], path: str = "spec") -> set[str]:
    """Return the paths of all fields of a schema."""
    parts = {f"{path}.{name}": one for name, one in (schema.get("properties") or {}).items()}
    return set(parts).union(*(_fields(one, name) for name, one in parts.items()))


def _operator(facts: ClusterFacts, _: Cluster | None) -> Iterator[Row]:
    why, answer = "it makes the engines and says whether KV moves", facts.answers["deployments"]
    if not isinstance(answer, Mapping):
        yield Row("operator", Verdict.UNKNOWN, str(answer), why)
        return
    if not (operators := _operators(facts)):
        yield Row("operator", Verdict.MISSING, "none", why, f"Install the chart: {INSTALL}")
    for one in operators:
        place = f"{one['metadata']['namespace']}/{one['metadata']['name']}"
        version, ready = _label(one, "version"), (one.get("status") or {}).get("readyReplicas", 0)
        found = f"{place}, version {version}, {counted(ready, 'pod')} ready"
        if not ready:
            look = f"kubectl describe deployment {one['metadata']['name']}"
            remedy = f"See why: {look} -n {one['metadata']['namespace']}"
            yield Row("operator", Verdict.MISSING, found, why, remedy)
        elif version != facts.version:
            remedy = f"This command is {facts.version}: use one version of both."
            yield Row("operator", Verdict.WARNING, found, why, remedy)
        else:
            yield Row("operator", Verdict.OK, found, why)


def _operators(facts: ClusterFacts) -> list[Mapping[str, Any]]:
    answer = facts.answers["deployments"]
    items = answer["items"] if isinstance(answer, Mapping) else ()
    return [one for one in items if _label(one, "component") == "operator"]


def _label(manifest: Mapping[str, Any], name: str) -> str:
    return str((manifest["metadata"].get("labels") or {}).get(f"app.kubernetes.io/{name}", ""))


def _webhook(facts: ClusterFacts, _: Cluster | None) -> Iterator[Row]:
    why, said = "it refuses a PDCluster that can never work, and says why", facts.review
    if "validate.pdcluster.dev" in said and "denied the request" in said:
        yield Row("webhook", Verdict.OK, "refuses what it must, in a dry run", why)
    elif "failed calling webhook" in said or "failed to call webhook" in said:
        remedy = (
            "The API server must reach port 9443 of the webhook's pods: see them, and policies."
        )
        yield Row("webhook", Verdict.MISSING, said[:200], why, remedy)
    elif said == "":
        remedy = "Set webhook.enabled in the chart; without it read the condition Accepted."
        yield Row("webhook", Verdict.WARNING, "no webhook reviews this namespace", why, remedy)
    else:
        yield Row("webhook", Verdict.UNKNOWN, said[:200], why)


def _devices(facts: ClusterFacts, cluster: Cluster | None) -> Iterator[Row]:
    """Yield what device plugins offer: GPUs and RDMA, and what the manifest asks for."""
    if isinstance(facts.nodes, str):
        yield Row("devices", Verdict.UNKNOWN, facts.nodes, "engines get GPUs and NICs from nodes",
                  "Ask somebody who may list nodes to run this.")  # fmt: skip
        return
    offers: dict[str, list[int]] = defaultdict(list)
    for node in facts.usable_nodes:
        for name, count in node.allocatable.items():
            if count and "/" in name:
                offers[name].append(count)
    wanted = device_needs(cluster) if cluster else {}
    kinds = (
        ("GPUs", resources.is_accelerator, "engines keep weights and KV in their memory",
         "Install the device plugin of your GPUs, such as NVIDIA's GPU operator."),
        ("RDMA devices", RDMA.search, "without them KV goes over TCP, which is slow",
         "Install an RDMA device plugin, and name its resource in transfer.rdma."),
    )  # fmt: skip
    for check, belongs, why, remedy in kinds:
        there = {name: counts for name, counts in offers.items() if belongs(name)}
        for name, counts in sorted(there.items()):
            yield Row(check, Verdict.OK, _offer(name, counts), why)
        if not there and not any(map(belongs, wanted)):
            yield Row(check, Verdict.WARNING, "no node offers one", why, remedy)
    for name, pods in wanted.items():
        yield from _enough(name, pods, offers.get(name, []))


def _offer(name: str, counts: list[int]) -> str:
    return f"{name}: {sum(counts)} on {counted(len(counts), 'node')}" if counts else f"no {name}"


def _enough(name: str, pods: list[tuple[int, int]], counts: list[int]) -> Iterator[Row]:
    """Yield whether nodes that are empty have room for pods with (number of devices, copies)."""
    total, largest = sum(each * copies for each, copies in pods), max(each for each, _ in pods)
    why = f"the manifest asks for {total}, up to {largest} in a pod"
    left, fits = sorted(counts), True
    for each, copies in sorted(pods, reverse=True):
        for _ in range(copies):
            place = next((n for n, count in enumerate(left) if count >= each), None)
            if fits := fits and place is not None:
                left[place or 0] -= each
    if fits:
        yield Row(name, Verdict.OK, f"{_offer(name, counts)}, if they are free", why)
    else:
        remedy = "Add nodes, ask for fewer (replicas, parallelism), or correct the resource's name."
        yield Row(name, Verdict.MISSING, _offer(name, counts), why, remedy)


def device_needs(cluster: Cluster) -> dict[str, list[tuple[int, int]]]:
    """Return, by resource, (devices of a pod, pods) for each role."""
    found: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for role in Role:
        engine, spec = resolve.resolve_engine(cluster, role), cluster.spec.role(role)
        limits = {**spec.resources.limits, **resources.added_limits(cluster, engine)}
        limits |= amounts(engine_container(cluster, role)[1], "limits")
        for name, amount in limits.items():
            number = int(resources.parse_quantity(str(amount)) or 0)
            if "/" in name and number and spec.replicas:
                found[name].append((number, spec.replicas * engine.parallelism.nodes))
    return dict(found)


def _policies(facts: ClusterFacts, _: Cluster | None) -> Iterator[Row]:
    why = "the operator's NetworkPolicies keep strangers away from the engines' ports"
    answer = facts.answers["daemonsets"]
    if not isinstance(answer, Mapping):
        yield Row("network policies", Verdict.UNKNOWN, str(answer), why)
        return
    names = [str(one["metadata"]["name"]) for one in answer["items"]]
    enforcing = [name for name in names if any(part in name for part in ENFORCING)]
    others = [name for name in names if any(part in name for part in NOT_ENFORCING)]
    if enforcing:
        yield Row("network policies", Verdict.OK, f"{enforcing[0]} enforces them", why)
    elif others:
        remedy = "Turn policies on in that network, or install one that enforces them."
        found = f"{others[0]} does not enforce them by default"
        yield Row("network policies", Verdict.WARNING, found, why, remedy)
    else:
        remedy = "Ask whoever runs the network whether it enforces NetworkPolicies."
        yield Row("network policies", Verdict.UNKNOWN, "no network that is known here", why, remedy)


def _pod_security(facts: ClusterFacts, cluster: Cluster | None) -> Iterator[Row]:
    why, answer = "a level refuses pods: vLLM's images run as root", facts.answers["namespace"]
    if not isinstance(answer, Mapping):
        found = f"there is no namespace {facts.namespace}" if answer is None else answer
        remedy = f"kubectl create namespace {facts.namespace}" if answer is None else ""
        missing = Verdict.MISSING if answer is None and cluster else Verdict.UNKNOWN
        yield Row("Pod Security", missing, found, why, remedy)
        return
    level = (answer["metadata"].get("labels") or {}).get(LEVEL)
    refused = []
    if level == "restricted" and not (cluster and _has_user(cluster)):
        refused.append("pods of root")
    if level in ("baseline", "restricted"):
        spec = cluster.spec if cluster else None
        if spec is None or spec.transfer.rdma is not None:
            refused.append("the capability IPC_LOCK, which RDMA needs")
        if spec is None or spec.model.source.host_path is not None:
            refused.append("models in a hostPath")
    found = f"{facts.namespace} enforces {level}" if level else "no level is enforced by a label"
    if not refused:
        yield Row("Pod Security", Verdict.OK, found, why)
        return
    verdict = Verdict.MISSING if cluster else Verdict.WARNING
    remedy = f"kubectl label namespace {facts.namespace} {LEVEL}=privileged --overwrite"
    yield Row(
        "Pod Security", verdict, f"{found}, which refuses {' and '.join(refused)}", why, remedy
    )


def _has_user(cluster: Cluster) -> bool:
    """Whether the pod templates of both roles set a user, as the level restricted asks."""
    specs = (pod_spec(cluster.spec.role(role).pod_template) for role in Role)
    return all((spec.get("securityContext") or {}).get("runAsNonRoot") is True for spec in specs)


def _memory(_: ClusterFacts, cluster: Cluster | None) -> Iterator[Row]:
    why = "vLLM's processes and UCX exchange data in /dev/shm"
    yield Row("shared memory", Verdict.OK, "each engine's pod gets its own, of 8Gi (CPU: 2Gi)", why)
    if cluster is None or cluster.spec.transfer.rdma is not None:
        yield Row("locked memory", Verdict.UNKNOWN, "the nodes' container runtime sets the limit",
                  "RDMA locks the memory that it registers",
                  "IPC_LOCK, which RDMA pods get, lifts it for root.")  # fmt: skip


def _apis(facts: ClusterFacts, cluster: Cluster | None) -> Iterator[Row]:
    """Yield what is needed by some manifests only: DRA, gangs, queues, networks of Multus."""
    answer = facts.answers["groups"]
    served = {one["name"] for one in answer["groups"]} if isinstance(answer, Mapping) else None
    classes = facts.answers["deviceclasses"]
    if isinstance(classes, Mapping):
        names = ", ".join(sorted(one["metadata"]["name"] for one in classes["items"])[:5])
        yield Row("DRA", Verdict.OK, f"device classes: {names or 'none'}",
                  "pods may claim devices by class instead of by count")  # fmt: skip
    spec = cluster.spec if cluster else None
    rdma = spec.transfer.rdma if spec else None
    for wanted, check, group, who in (
        (spec and spec.scheduling.gang is Switch.ENABLED, "PodGroups", "scheduling.k8s.io",
         "spec.scheduling.gang"),
        (spec and spec.scheduling.queue_name, "Kueue", "kueue.x-k8s.io",
         "spec.scheduling.queueName"),
        (rdma and rdma.networks, "Multus", "k8s.cni.cncf.io", "spec.transfer.rdma.networks"),
    ):  # fmt: skip
        if not wanted:
            continue
        why = f"{who} needs it"
        there = None if served is None else group in served
        if check == "PodGroups" and there:
            there = isinstance(facts.answers["podgroups"], Mapping)
        if there is None:
            yield Row(check, Verdict.UNKNOWN, str(answer), why)
        elif there:
            yield Row(check, Verdict.OK, f"{group} is served", why)
        else:
            yield Row(check, Verdict.MISSING, f"{group} is not served", why,
                      f"Install {check}, or leave {who} out.")  # fmt: skip


def _claims(facts: ClusterFacts, cluster: Cluster | None) -> Iterator[Row]:
    for name in claims_of(cluster):
        answer, why = facts.answers.get(f"claim {name}"), "the manifest mounts it"
        if isinstance(answer, Mapping):
            phase = (answer.get("status") or {}).get("phase")
            yield Row(f"claim {name}", Verdict.OK, f"phase {phase}", why)
        elif answer is None:
            yield Row(f"claim {name}", Verdict.MISSING, f"not in namespace {facts.namespace}", why,
                      "Create the PersistentVolumeClaim, or correct its name.")  # fmt: skip
        else:
            yield Row(f"claim {name}", Verdict.UNKNOWN, answer, why)


def claims_of(cluster: Cluster | None) -> list[str]:
    """Return the names of the claims that a model needs."""
    if cluster is None:
        return []
    model = cluster.spec.model
    claims = (model.source.persistent_volume_claim, model.cache.persistent_volume_claim)
    return [one.claim_name for one in claims if one is not None]


def _rights(facts: ClusterFacts, _: Cluster | None) -> Iterator[Row]:
    place = next((one["metadata"]["namespace"] for one in _operators(facts)), "pdcluster-system")
    for check, rights, verdict, why, remedy, where in (
        ("your rights", facts.own, Verdict.WARNING, "you apply PDClusters and read their pods",
         "Ask for the role edit in this namespace.", facts.namespace),
        ("the operator's rights", facts.operator, Verdict.MISSING, "it makes these objects",
         "Add the namespace to the chart's watchNamespaces, or leave that empty.", place),
    ):  # fmt: skip
        lacks = [right for right, held in rights.items() if held is False]
        unknown = [right for right, held in rights.items() if held is None]
        if lacks:
            yield Row(
                check, verdict, f"none to {', '.join(lacks).replace('core/', '')}", why, remedy
            )
        elif unknown or not rights:
            found = "this account may not ask" if unknown else "there is nobody to ask about"
            ask = f"See what you may ask: kubectl auth can-i --list -n {where}"
            yield Row(check, Verdict.UNKNOWN, found, why, ask)
        else:
            yield Row(check, Verdict.OK, f"all {len(rights)} that were asked for", why)


CHECKS: Iterable[Callable[[ClusterFacts, Cluster | None], Iterator[Row]]] = (
    _kubernetes, _crd, _operator, _webhook, _devices, _apis, _claims, _policies, _pod_security,
    _memory, _rights,
)  # fmt: skip
