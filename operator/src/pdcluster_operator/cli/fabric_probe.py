"""``doctor --probe``: two pods that move bytes over NIXL, as engines do, and go away again.

The Job that serves owns everything else, and has a deadline and a time to live. So Kubernetes
removes all of it, even if this command is killed.
"""

import asyncio
import base64
import json
import secrets
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec

from pdcluster_operator.adapters.api_server.client import KubeClient
from pdcluster_operator.api.object_names import SIDE_CHANNEL_PORT, url_host
from pdcluster_operator.api.spec import engine_types, resolve, resources
from pdcluster_operator.api.spec.pod_templates import ENGINE_CONTAINER, engine_container, merge
from pdcluster_operator.api.spec.types import Backend, Cluster, Device, Role
from pdcluster_operator.cli.cluster_checks import Row, Verdict
from pdcluster_operator.plan import connectors
from pdcluster_operator.plan.observed.pods import describe_end, pod_trouble
from pdcluster_operator.plan.types import ConnectorBundle
from pdcluster_operator.runtime.interfaces import ApiError

PROGRAM = "pdcluster_connector.vllm.fabric_probe"
LAST_WORDS = "/dev/termination-log"
LOOK_SECONDS, REMOVE_SECONDS, SPARE_SECONDS = 1.0, 10.0, 60
MOST_WORDS = 1000
MEMORY = "4Gi"
POD_IP = {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
NETWORKS = "k8s.v1.cni.cncf.io/networks"
WHY = "every request's KV takes this way"


class ProbeError(Exception):
    """The pods did not move bytes; the message says why."""


class Probe(msgspec.Struct, frozen=True, rename="camel"):
    """What two pods measured.

    Attributes:
        gigabytes_per_second: the median of several rounds, in 10^9 bytes.
        transports: UCX's names of what carried the bytes, such as ``rc_mlx5/mlx5_0:1``.
        device: where the bytes lay: ``cuda`` or ``cpu``.
        nodes: those of the two pods. One, if both were on the same.
    """

    gigabytes_per_second: float
    bytes: int
    transports: tuple[str, ...]
    device: str
    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What to run.

    Attributes:
        cluster: a manifest whose RDMA devices, variables and places the pods get, if there is one.
        device: where the bytes lie: ``cuda`` or ``cpu``.
        seconds: for everything together, the pull of the image included.
    """

    name: str
    namespace: str
    image: str
    device: str
    cluster: Cluster | None
    seconds: float


def order(
    namespace: str, cluster: Cluster | None, image: str | None, gpus: bool, seconds: float
) -> Order:
    """Return what to run for a manifest, or for a cluster that has GPUs or not."""
    device = Device.CUDA if gpus else Device.CPU
    if cluster is not None:
        device = cluster.spec.transfer.device
    named = cluster.spec.engine.image if cluster else engine_types.SharedEngine().image
    return Order(
        name=f"pdcluster-probe-{secrets.token_hex(3)}", namespace=namespace,
        image=image or str(named), device=device.value.lower(), cluster=cluster, seconds=seconds,
    )  # fmt: skip


def job(wanted: Order, role: Role, arguments: list[str], owner: str | None) -> dict[str, Any]:
    """Return the Job of one side: prefill serves, decode reads. The other one's node is avoided."""
    labels = {"app.kubernetes.io/name": "pdcluster-probe", "pdcluster-probe": wanted.name}
    selector = {"labelSelector": {"matchLabels": labels}, "topologyKey": "kubernetes.io/hostname"}
    apart = [{"weight": 100, "podAffinityTerm": selector}]
    spec: dict[str, Any] = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}},
        "terminationGracePeriodSeconds": 1,
        "affinity": {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": apart}},
        "tolerations": [{"key": resources.GPU_RESOURCE, "operator": "Exists"}],
        "containers": [_container(wanted, role, arguments)],
        "volumes": [
            connectors.connector_volume(wanted.name),
            {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"}},
        ],
    }
    template: dict[str, Any] = {"metadata": {"labels": labels}, "spec": spec}
    if wanted.cluster is not None:
        template = _as_the_engines(template, wanted.cluster, role)
    life = {
        "backoffLimit": 0,
        "activeDeadlineSeconds": int(wanted.seconds) + SPARE_SECONDS,
        "ttlSecondsAfterFinished": SPARE_SECONDS,
    }
    named = {**_named(f"{wanted.name}-{role}", wanted, owner), "labels": labels}
    return {
        "apiVersion": "batch/v1", "kind": "Job", "metadata": named,
        "spec": {**life, "template": template},
    }  # fmt: skip


def _as_the_engines(template: dict[str, Any], cluster: Cluster, role: Role) -> dict[str, Any]:
    """Return the pod template with what the manifest's adds: places, volumes, variables, networks.

    The program and its resources stay: a probe needs one GPU, whatever an engine needs.
    """
    (ours,) = template["spec"]["containers"]
    merged: dict[str, Any] = merge(template, cluster.spec.role(role).pod_template or {})
    found = merge(ours, engine_container(cluster, role)[1])
    kept = {key: ours[key] for key in ("image", "command", "args", "resources")}
    container = {key: value for key, value in found.items() if key in ours} | kept
    spec = {**merged["spec"], "containers": [container], "restartPolicy": "Never"}
    spec.pop("initContainers", None)
    rdma = cluster.spec.transfer.rdma
    if rdma is not None and rdma.networks:
        networks = ",".join(rdma.networks[: rdma.per_gpu])
        merged = merge({"metadata": {"annotations": {NETWORKS: networks}}}, merged)
    return {**merged, "spec": spec}


def _named(name: str, wanted: Order, owner: str | None) -> dict[str, Any]:
    reference = {
        "apiVersion": "batch/v1", "kind": "Job", "name": f"{wanted.name}-{Role.PREFILL}",
        "uid": owner,
    }  # fmt: skip
    return {"name": name, **({"ownerReferences": [reference]} if owner else {})}


def _container(wanted: Order, role: Role, arguments: list[str]) -> dict[str, Any]:
    limits, capabilities = {"memory": MEMORY}, {"drop": ["ALL"]}
    env, backend = {"PYTHONPATH": connectors.CONNECTOR_PATH}, list[str]()
    if wanted.device == Device.CUDA.value.lower():
        limits[resources.GPU_RESOURCE] = "1"
    if wanted.cluster is not None:
        engine = resolve.resolve_engine(wanted.cluster, role)
        env |= dict(resolve.provider(wanted.cluster, engine))
        env |= {one.name: one.value for one in engine.env if one.value is not None}
        if (rdma := wanted.cluster.spec.transfer.rdma) is not None:
            limits[rdma.resource] = str(rdma.per_gpu)
            capabilities["add"] = ["IPC_LOCK"]
        backend = ["--backend", wanted.cluster.spec.transfer.backends[0]]
    return {
        "name": ENGINE_CONTAINER,
        "image": wanted.image,
        "command": ["python3", "-m", PROGRAM],
        "args": [*arguments, "--device", wanted.device, "--last-words", LAST_WORDS, *backend],
        "env": [POD_IP, *({"name": name, "value": value} for name, value in env.items())],
        "resources": {"requests": {"memory": "1Gi"}, "limits": limits},
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": capabilities},
        "terminationMessagePath": LAST_WORDS,
        "volumeMounts": [
            connectors.connector_mount(),
            {"name": "shm", "mountPath": "/dev/shm"},  # noqa: S108 (a mount of the pod's own)
        ],
    }


async def run(
    client: KubeClient, wanted: Order, connector: ConnectorBundle, say: Callable[[str], None]
) -> Probe:
    """Run both sides, and remove everything in any case.

    Raises:
        ProbeError: they did not move bytes in time, or the API server refuses the pods.
    """
    jobs = f"/apis/batch/v1/namespaces/{wanted.namespace}/jobs"
    maps = f"/api/v1/namespaces/{wanted.namespace}/configmaps"
    served = ["serve", "--host", "$(POD_IP)", "--patience", str(int(wanted.seconds))]
    told = ["starts"]

    def tell(line: str) -> None:
        told.append(line)
        say(line)

    try:
        async with asyncio.timeout(wanted.seconds):
            serving = job(wanted, Role.PREFILL, served, None)
            made = await client.call("POST", jobs, body=serving)
            uid = str(made["metadata"]["uid"])
            data = {connectors.CONNECTOR_FILE: base64.b64encode(connector.data).decode()}
            named = {"apiVersion": "v1", "kind": "ConfigMap", "binaryData": data}
            metadata = _named(wanted.name, wanted, uid)
            await client.call("POST", maps, body={**named, "metadata": metadata})
            first = await _pod(client, wanted, Role.PREFILL, _address, tell)
            peer = f"{url_host(_address(first) or '')}:{SIDE_CHANNEL_PORT}"
            words = ["read", "--peer", peer, "--patience", str(SPARE_SECONDS)]
            await client.call("POST", jobs, body=job(wanted, Role.DECODE, words, uid))
            second = await _pod(client, wanted, Role.DECODE, _ended, tell)
    except TimeoutError as error:
        raise ProbeError(f"not done in {wanted.seconds:.0f} s: {told[-1]}") from error
    except ApiError as error:
        raise ProbeError(f"the API server: {error}") from error
    finally:
        await _remove(client, wanted, jobs, maps)
    nodes = dict.fromkeys(str(one["spec"].get("nodeName")) for one in (first, second))
    return _result(_ended(second) or {}, wanted.device, tuple(nodes))


async def _remove(client: KubeClient, wanted: Order, jobs: str, maps: str) -> None:
    """Delete what :func:`run` made; what is gone, or cannot be reached, is left to its owner."""
    names = [f"{jobs}/{wanted.name}-{role}" for role in reversed(Role)]
    for path in (*names, f"{maps}/{wanted.name}"):
        with suppress(ApiError, TimeoutError):
            async with asyncio.timeout(REMOVE_SECONDS):
                await client.call("DELETE", path, body={"propagationPolicy": "Background"})


async def _pod(
    client: KubeClient,
    wanted: Order,
    role: Role,
    holds: Callable[[Mapping[str, Any]], object],
    say: Callable[[str], None],
) -> Mapping[str, Any]:
    """Return the pod of a side when something holds of it; say meanwhile what it waits for."""
    path = f"/api/v1/namespaces/{wanted.namespace}/pods"
    query = {"labelSelector": f"job-name={wanted.name}-{role}"}
    side, said = "serving" if role is Role.PREFILL else "reading", ""
    while True:
        pods = (await client.call("GET", path, query=query))["items"]
        if pods and holds(pods[0]) is not None:
            return pods[0]  # type: ignore[no-any-return]
        if pods and (ended := _ended(pods[0])) is not None:
            raise ProbeError(f"the {side} pod ended: {ended.get('error', 'it said nothing')}")
        trouble = pod_trouble(pods[0]) if pods else None
        waits = trouble.message if trouble else "starts"
        if waits != said:
            said = waits
            say(f"{side} pod: {waits}")
        await asyncio.sleep(LOOK_SECONDS)


def _address(pod: Mapping[str, Any]) -> str | None:
    """Return the address of a pod that runs."""
    status = pod.get("status") or {}
    return status.get("podIP") if status.get("phase") == "Running" else None


def _ended(pod: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the document that a pod ended with; None while it runs."""
    status = pod.get("status") or {}
    for one in status.get("containerStatuses") or ():
        if ended := (one.get("state") or {}).get("terminated"):
            words = str(ended.get("message") or "")
            try:
                document = json.loads(words)
            except (ValueError, RecursionError):
                why = words[-MOST_WORDS:].strip() or describe_end(ended)
                return {"error": " ".join(why.split())}
            return document if isinstance(document, dict) else {"error": words[:MOST_WORDS]}
    return {"error": str(status.get("message"))} if status.get("phase") == "Failed" else None


def _result(document: Mapping[str, Any], device: str, nodes: tuple[str, ...]) -> Probe:
    if "error" in document:
        raise ProbeError(str(document["error"])[:MOST_WORDS])
    try:
        return msgspec.convert({**document, "device": device, "nodes": nodes}, Probe)
    except msgspec.ValidationError as error:
        raise ProbeError(f"the pod said something else: {error}") from error


def row_of(probe: Probe, cluster: Cluster | None) -> Row:
    """Return the row of a probe that moved bytes."""
    rdma = cluster is not None and cluster.spec.transfer.rdma is not None
    least = (cluster.spec.transfer.min_bandwidth_mbps or 0) / 1000 if cluster else 0
    over = ", ".join(probe.transports) or "transports that UCX did not name"
    of_ucx = cluster is None or Backend.UCX in cluster.spec.transfer.backends
    setting = "UCX_NET_DEVICES" if of_ucx else resolve.PROVIDER
    memory = "GPU memory" if probe.device == "cuda" else "host memory"
    apart = " and ".join(probe.nodes)
    where = f"between {apart}" if len(probe.nodes) > 1 else f"on one node, {apart}"
    found = f"{probe.gigabytes_per_second:g} GB/s over {over}, {memory}, {where}"
    tcp = all(one.startswith("tcp") for one in probe.transports)
    if rdma and tcp:
        remedy = f"RDMA was asked for: see the devices' names, {setting} and locked memory."
        return Row("probe", Verdict.MISSING, found, WHY, remedy)
    if probe.gigabytes_per_second < least:
        remedy = f"transfer.minBandwidthMBps asks for {least:g} GB/s: correct it or the fabric."
        return Row("probe", Verdict.MISSING, found, WHY, remedy)
    return Row("probe", Verdict.OK, found, WHY)


def failed_row(error: ProbeError) -> Row:
    """Return the row of a probe that moved nothing."""
    remedy = "Correct that, and run it again; --image and --namespace change what it runs where."
    return Row("probe", Verdict.MISSING, str(error), WHY, remedy)
