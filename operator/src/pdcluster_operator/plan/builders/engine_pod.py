"""The pod template of an engine: the launcher as PID 1, the connector mounted beside vLLM."""

from __future__ import annotations

from typing import Any

from pdcluster_operator.api.labels import POD_INDEX_LABEL, TLS_LABEL, engine_labels
from pdcluster_operator.api.object_names import (
    ENGINE_METRICS_PORT,
    HTTP_PORT,
    LAUNCHER_PORT,
    SIDE_CHANNEL_PORT,
    EngineName,
    connector_name,
    service_account_name,
)
from pdcluster_operator.api.spec.enums import Certificates, ConnectorSource, Device
from pdcluster_operator.api.spec.pod_templates import ENGINE_CONTAINER
from pdcluster_operator.api.spec.resolve import (
    CACHE_FOLDER,
    MODEL_FOLDER,
    STOP_SECONDS,
    Engine,
    drain_seconds,
    grace_period,
)
from pdcluster_operator.api.spec.resources import added_limits
from pdcluster_operator.api.spec.types import Cluster
from pdcluster_operator.plan.builders.connector_configmap import (
    CONNECTOR_FILE,
    CONNECTOR_FOLDER,
    connector_mount,
    connector_volume,
)
from pdcluster_operator.plan.builders.secrets import (
    api_key_env,
    certificate_mount,
    certificate_volume,
    certificates_of,
    has_certificates,
    ticket_key_mount,
    ticket_key_volume,
    tls_labels,
)
from pdcluster_operator.plan.builders.vllm_args import NODE_RANK_VARIABLE, vllm_args
from pdcluster_operator.plan.objects.merge import merge

SHARED_MEMORY = {Device.CUDA: "8Gi", Device.CPU: "2Gi"}
TERMINATION_LOG = "/dev/termination-log"
SHM_FOLDER = "/dev/shm"  # noqa: S108 (a mount of the pod's own)
PROBE_PERIOD_SECONDS = 2
# Channels before positions: so a Mamba model's convolution states can be cut by tensor rank, and
# the two roles may differ in tensor size. Other models do not look at it.
CONV_STATE_LAYOUT = "VLLM_SSM_CONV_STATE_LAYOUT"


def build_engine_pod(
    cluster: Cluster, engine: Engine, name: EngineName, pairing_key: str, digest: str
) -> dict[str, Any]:
    """Return the pod template, with the user's own merged over it by container name."""
    labels = engine_labels(name, pairing_key) | tls_labels(cluster)
    signed = certificates_of(cluster) is Certificates.OPERATOR
    template: dict[str, Any] = {
        "metadata": {"labels": labels},
        "spec": {
            "serviceAccountName": service_account_name(cluster.name),
            "automountServiceAccountToken": False,
            # vLLM's images run as root, so that no more can be asked of the user here.
            "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}},
            # Service links would set VLLM_PORT and the like for Services of such names.
            "enableServiceLinks": False,
            "terminationGracePeriodSeconds": grace_period(cluster),
            "containers": [_container(cluster, engine, name, pairing_key)],
            "volumes": [
                *_volumes(engine, digest),
                *model_volumes(cluster),
                ticket_key_volume(cluster),
                *([certificate_volume(cluster, name)] if signed else []),
                {
                    "name": "shm",
                    "emptyDir": {
                        "medium": "Memory",
                        "sizeLimit": SHARED_MEMORY[cluster.spec.transfer.device],
                    },
                },
            ],
        },
    }
    rdma = cluster.spec.transfer.rdma
    if rdma is not None and rdma.networks:
        networks = {"k8s.v1.cni.cncf.io/networks": ",".join(rdma.networks)}
        template["metadata"]["annotations"] = networks
    overlay = cluster.spec.role(engine.role).pod_template
    merged: dict[str, Any] = merge(template, overlay or {})
    # Selectors, links and revisions go by these: no template may change them.
    return merge(merged, {"metadata": {"labels": {TLS_LABEL: None, **labels}}})  # type: ignore[no-any-return]


def _container(
    cluster: Cluster, engine: Engine, name: EngineName, pairing_key: str
) -> dict[str, Any]:
    command = ["python3", f"{CONNECTOR_FOLDER}/{CONNECTOR_FILE}"]
    if engine.connector is ConnectorSource.IMAGE:
        command = ["python3", "-m", "pdcluster_connector.launcher"]
    signed = certificates_of(cluster) is Certificates.OPERATOR
    return {
        "name": ENGINE_CONTAINER,
        "image": engine.image,
        "command": command,
        "args": [
            "--engine", name.logical,
            "--role", engine.role.value,
            "--host", "0.0.0.0",  # noqa: S104 (a pod's own network)
            "--port", str(LAUNCHER_PORT),
            "--metrics-port", str(ENGINE_METRICS_PORT),
            "--drain-seconds", str(drain_seconds(cluster)),
            "--stop-seconds", str(STOP_SECONDS),
            "--termination-log", TERMINATION_LOG,
            "--",
            *vllm_args(cluster, engine, name, pairing_key),
        ],
        "env": _env(cluster, engine),
        "ports": _ports(engine),
        "resources": _resources(cluster, engine),
        "volumeMounts": [*_mounts(engine), *model_mounts(cluster), ticket_key_mount(),
                         *([certificate_mount()] if signed else []),
                         {"name": "shm", "mountPath": SHM_FOLDER}],
        "startupProbe": _probe(cluster, engine.startup_timeout_seconds // PROBE_PERIOD_SECONDS),
        "readinessProbe": _probe(cluster, failures=3),
        "securityContext": _security(cluster),
        "terminationMessagePath": TERMINATION_LOG,
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }  # fmt: skip


def _probe(cluster: Cluster, failures: int) -> dict[str, Any]:
    # The kubelet checks no certificate and shows none: the launcher answers this path to anybody.
    scheme = {"scheme": "HTTPS"} if has_certificates(cluster) else {}
    return {
        "httpGet": {"path": "/readyz", "port": "launcher", **scheme},
        "periodSeconds": PROBE_PERIOD_SECONDS,
        "timeoutSeconds": 2,
        "failureThreshold": failures,
    }


def _env(cluster: Cluster, engine: Engine) -> list[dict[str, Any]]:
    env: list[dict[str, Any]] = [
        {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        {"name": "VLLM_HOST_IP", "value": "$(POD_IP)"},
    ]
    if all(var.name != CONV_STATE_LAYOUT for var in engine.env):
        env.append({"name": CONV_STATE_LAYOUT, "value": "DS"})
    if engine.parallelism.nodes > 1:
        label = {"fieldRef": {"fieldPath": f"metadata.labels['{POD_INDEX_LABEL}']"}}
        env.append({"name": NODE_RANK_VARIABLE, "valueFrom": label})
    env += model_env(cluster)
    env += api_key_env(cluster)
    for var in engine.env:
        if var.value_from is not None:
            env.append({"name": var.name, "valueFrom": dict(var.value_from)})
        else:
            env.append({"name": var.name, "value": var.value or ""})
    return env


def _ports(engine: Engine) -> list[dict[str, Any]]:
    # A data-parallel rank listens on the side channel's port plus its rank. Kubernetes takes
    # names of 15 characters.
    side_channels = {
        "side-channel" if rank == 0 else f"side-ch-{rank}": SIDE_CHANNEL_PORT + rank
        for rank in range(engine.parallelism.data)
    }
    own = {"http": HTTP_PORT, "launcher": LAUNCHER_PORT, "metrics": ENGINE_METRICS_PORT}
    ports = own | side_channels
    return [
        {"name": name, "containerPort": number, "protocol": "TCP"} for name, number in ports.items()
    ]


def _resources(cluster: Cluster, engine: Engine) -> dict[str, Any]:
    given = cluster.spec.role(engine.role).resources
    limits = {**given.limits, **added_limits(cluster, engine)}
    parts = {"requests": dict(given.requests), "limits": limits}
    return {name: part for name, part in parts.items() if part}


def _security(cluster: Cluster) -> dict[str, Any]:
    capabilities: dict[str, Any] = {"drop": ["ALL"]}
    if cluster.spec.transfer.rdma is not None:
        # RDMA memory registration locks pages.
        capabilities["add"] = ["IPC_LOCK"]
    return {"allowPrivilegeEscalation": False, "capabilities": capabilities}


def _volumes(engine: Engine, digest: str) -> list[dict[str, Any]]:
    if engine.connector is ConnectorSource.IMAGE:
        return []
    return [connector_volume(connector_name(digest))]


def _mounts(engine: Engine) -> list[dict[str, Any]]:
    return [] if engine.connector is ConnectorSource.IMAGE else [connector_mount()]


def model_volumes(cluster: Cluster) -> list[dict[str, Any]]:
    """Return the volumes of weights: the source's, or the cache for a download."""
    source = cluster.spec.model.source
    if source.persistent_volume_claim is not None:
        claim = source.persistent_volume_claim.claim_name
        return [{"name": "model", "persistentVolumeClaim": {"claimName": claim, "readOnly": True}}]
    if source.host_path is not None:
        # With Directory a missing folder is an error of the pod. The kubelet creates no empty one.
        return [{"name": "model", "hostPath": {"path": source.host_path.path, "type": "Directory"}}]
    cache = cluster.spec.model.cache.persistent_volume_claim
    if cache is not None:
        return [{"name": "cache", "persistentVolumeClaim": {"claimName": cache.claim_name}}]
    return [{"name": "cache", "emptyDir": {}}]


def model_mounts(cluster: Cluster) -> list[dict[str, Any]]:
    """Return the mounts of those volumes."""
    if cluster.spec.model.source.hugging_face is None:
        return [{"name": "model", "mountPath": MODEL_FOLDER, "readOnly": True}]
    mount: dict[str, Any] = {"name": "cache", "mountPath": CACHE_FOLDER}
    cache = cluster.spec.model.cache.persistent_volume_claim
    if cache is not None and cache.path:
        mount["subPath"] = cache.path.strip("/")
    return [mount]


def model_env(cluster: Cluster) -> list[dict[str, Any]]:
    """Return the environment of a download: where it goes and with which token."""
    source = cluster.spec.model.source.hugging_face
    if source is None:
        return []
    env: list[dict[str, Any]] = [{"name": "HF_HOME", "value": CACHE_FOLDER}]
    if source.token_secret_ref is not None:
        ref = {"name": source.token_secret_ref.name, "key": source.token_secret_ref.key}
        env.append({"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": ref}})
    return env
