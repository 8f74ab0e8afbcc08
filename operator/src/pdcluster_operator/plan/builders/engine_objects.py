"""The objects of one engine: its StatefulSet, its Service, its PodGroup, and its pod template.

The launcher is PID 1, and the connector is mounted beside vLLM.
"""

import json
from collections.abc import Mapping
from typing import Any

from pdcluster_operator.api import object_names
from pdcluster_operator.api.object_names import EngineName
from pdcluster_operator.api.spec import engine_types, resolve, resources, types
from pdcluster_operator.api.spec.pod_templates import ENGINE_CONTAINER, merge
from pdcluster_operator.plan import connectors
from pdcluster_operator.plan.builders import router, secrets, weights
from pdcluster_operator.plan.objects.ownership import child_object, common_metadata


def build_engine_statefulset(
    cluster: types.Cluster,
    name: EngineName,
    template: Mapping[str, Any],
    *,
    pairing_key: str,
    nodes: int,
    queue: str = "",
) -> dict[str, Any]:
    """Return the StatefulSet; ``OnDelete`` because a change of the template restarts no engine.

    Args:
        template: the pod template of this engine; see :func:`..rollout.revisions.engine_template`.
        nodes: pods of the engine.
        queue: Kueue's queue; empty for none.
    """
    labels = object_names.engine_labels(name, pairing_key)
    if queue:
        labels[object_names.QUEUE_LABEL] = queue
    spec = {
        "serviceName": name.stateful_set,
        "replicas": nodes,
        "podManagementPolicy": "Parallel",
        "updateStrategy": {"type": "OnDelete"},
        "selector": {"matchLabels": _selector(name)},
        "template": template,
    }
    return child_object(cluster, "apps/v1", "StatefulSet", name.stateful_set, labels, spec=spec)


def _selector(name: EngineName) -> dict[str, str]:
    """Return the labels that find an engine's pods. They can never be changed."""
    return {
        object_names.CLUSTER_LABEL: name.cluster,
        object_names.ENGINE_LABEL: name.stateful_set,
    }


def build_engine_service(
    cluster: types.Cluster, name: EngineName, pairing_key: str
) -> dict[str, Any]:
    """Return the Service. Pods have names before they are ready: others connect to the first."""
    labels = object_names.engine_labels(name, pairing_key)
    spec = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": _selector(name),
        "ports": [
            {"name": port, "port": number, "targetPort": port, "protocol": "TCP"}
            for port, number in object_names.ENGINE_PORTS.items()
        ],
    }
    return child_object(cluster, "v1", "Service", name.stateful_set, labels, spec=spec)


POD_GROUP_KIND = "PodGroup"


def build_pod_group(cluster: types.Cluster, name: str, pods: int, priority: str) -> dict[str, Any]:
    """Return the PodGroup.

    Args:
        pods: how many pods have to fit at once.
        priority: ``priorityClassName`` of the pods; empty if they have none. The scheduler refuses
            pods whose priority is not that of their group.
    """
    spec: dict[str, Any] = {"schedulingPolicy": {"gang": {"minCount": pods}}}
    if priority:
        spec["priorityClassName"] = priority
    labels = object_names.cluster_labels(cluster.name, "gang")
    return child_object(
        cluster, "scheduling.k8s.io/v1beta1", POD_GROUP_KIND, name, labels, spec=spec
    )


SHARED_MEMORY = {types.Device.CUDA: "8Gi", types.Device.CPU: "2Gi"}
TERMINATION_LOG = "/dev/termination-log"
SHM_FOLDER = "/dev/shm"  # noqa: S108 (a mount of the pod's own)
PROBE_PERIOD_SECONDS = 2
# Channels before positions: so a Mamba model's convolution states can be cut by tensor rank, and
# the two roles may differ in tensor size. Other models do not look at it.
CONV_STATE_LAYOUT = "VLLM_SSM_CONV_STATE_LAYOUT"


def build_engine_pod(
    cluster: types.Cluster, engine: resolve.Engine, name: EngineName, pairing_key: str, digest: str
) -> dict[str, Any]:
    """Return the pod template, with the user's own merged over it by container name."""
    labels = object_names.engine_labels(name, pairing_key)
    labels |= router.pod_labels(cluster, engine.role)
    if (tls := cluster.spec.transfer.tls) is types.TlsMode.MOUNTED:
        labels[object_names.TLS_LABEL] = tls.value
    signed = secrets.certificates_of(cluster) is types.Certificates.OPERATOR
    bundled = engine.connector is engine_types.ConnectorSource.BUNDLED
    config_map = object_names.connector_name(digest)
    ticket_key = {"secretName": object_names.ticket_key_name(cluster.name)}
    template: dict[str, Any] = {
        "metadata": common_metadata(cluster, labels),
        "spec": {
            "serviceAccountName": object_names.service_account_name(cluster.name),
            "automountServiceAccountToken": False,
            # vLLM's images run as root, so that no more can be asked of the user here.
            "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}},
            # Service links would set VLLM_PORT and the like for Services of such names.
            "enableServiceLinks": False,
            "terminationGracePeriodSeconds": resolve.grace_period(cluster),
            **router.init_containers(cluster, engine.role),
            **weights.pull_secrets(cluster),
            "containers": [_container(cluster, engine, name, pairing_key)],
            "volumes": [
                *([connectors.connector_volume(config_map)] if bundled else []),
                *weights.model_volumes(cluster),
                {"name": secrets.TICKET_KEY_VOLUME, "secret": ticket_key},
                *([secrets.certificate_volume(cluster, name)] if signed else []),
                {
                    "name": "shm",
                    "emptyDir": {"medium": "Memory", "sizeLimit": _shared_memory(cluster, engine)},
                },
            ],
        },
    }
    rdma = cluster.spec.transfer.rdma
    if rdma is not None and rdma.networks:
        annotations = template["metadata"].setdefault("annotations", {})
        annotations["k8s.v1.cni.cncf.io/networks"] = ",".join(rdma.networks)
    overlay = cluster.spec.role(engine.role).pod_template
    merged: dict[str, Any] = merge(template, overlay or {})
    # Selectors, links and revisions go by these: no template may change them.
    return merge(merged, {"metadata": {"labels": {object_names.TLS_LABEL: None, **labels}}})  # type: ignore[no-any-return]


def _shared_memory(cluster: types.Cluster, engine: resolve.Engine) -> str:
    """Return the size of /dev/shm, where vLLM also keeps the KV of ``engine.kvOffload``."""
    own, offloaded = (
        SHARED_MEMORY[cluster.spec.transfer.device],
        resolve.offloaded_mebibytes(engine),
    )
    return f"{(int(own.removesuffix('Gi')) << 10) + offloaded}Mi" if offloaded else own


def _container(
    cluster: types.Cluster, engine: resolve.Engine, name: EngineName, pairing_key: str
) -> dict[str, Any]:
    bundled = engine.connector is engine_types.ConnectorSource.BUNDLED
    command = ["python3", connectors.CONNECTOR_PATH]
    if not bundled:
        command = ["python3", "-m", "pdcluster_connector.launcher"]
    signed = secrets.certificates_of(cluster) is types.Certificates.OPERATOR
    return {
        "name": ENGINE_CONTAINER,
        "image": engine.image,
        "command": command,
        "args": [
            "--engine", name.logical,
            "--role", engine.role.value,
            "--host", "0.0.0.0",  # noqa: S104 (a pod's own network)
            "--port", str(object_names.LAUNCHER_PORT),
            "--metrics-port", str(object_names.ENGINE_METRICS_PORT),
            "--drain-seconds", str(resolve.drain_seconds(cluster)),
            "--stop-seconds", str(resolve.STOP_SECONDS),
            "--termination-log", TERMINATION_LOG,
            "--",
            *vllm_args(cluster, engine, name, pairing_key),
        ],
        "env": _env(cluster, engine),
        "ports": _ports(engine),
        "resources": resources.of_container(
            cluster.spec.role(engine.role).resources, resources.added_limits(cluster, engine)
        ),
        "volumeMounts": [*([connectors.connector_mount()] if bundled else []),
                         *weights.model_mounts(cluster), *secrets.mounts(signed=signed),
                         {"name": "shm", "mountPath": SHM_FOLDER}],
        "startupProbe": _probe(cluster, engine.startup_timeout_seconds // PROBE_PERIOD_SECONDS),
        "readinessProbe": _probe(cluster, failures=3),
        "securityContext": _security(cluster),
        "terminationMessagePath": TERMINATION_LOG,
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }  # fmt: skip


def _probe(cluster: types.Cluster, failures: int) -> dict[str, Any]:
    # The kubelet checks no certificate and shows none: the launcher answers this path to anybody.
    scheme = {"scheme": "HTTPS"} if secrets.has_certificates(cluster) else {}
    return {
        "httpGet": {"path": "/readyz", "port": "launcher", **scheme},
        "periodSeconds": PROBE_PERIOD_SECONDS,
        "timeoutSeconds": 2,
        "failureThreshold": failures,
    }


def _env(cluster: types.Cluster, engine: resolve.Engine) -> list[dict[str, Any]]:
    env: list[dict[str, Any]] = [
        {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        {"name": "VLLM_HOST_IP", "value": "$(POD_IP)"},
    ]
    if all(var.name != CONV_STATE_LAYOUT for var in engine.env):
        env.append({"name": CONV_STATE_LAYOUT, "value": "DS"})
    env += [{"name": name, "value": value} for name, value in resolve.provider(cluster, engine)]
    if engine.parallelism.nodes > 1:
        label = {"fieldRef": {"fieldPath": f"metadata.labels['{object_names.POD_INDEX_LABEL}']"}}
        env.append({"name": NODE_RANK_VARIABLE, "valueFrom": label})
    env += weights.model_env(cluster)
    env += secrets.api_key_env(cluster)
    for var in engine.env:
        if var.value_from is not None:
            env.append({"name": var.name, "valueFrom": dict(var.value_from)})
        else:
            env.append({"name": var.name, "value": var.value or ""})
    return env


def _ports(engine: resolve.Engine) -> list[dict[str, Any]]:
    ports = object_names.engine_ports(engine.parallelism.data).items()
    return [{"name": name, "containerPort": number, "protocol": "TCP"} for name, number in ports]


def _security(cluster: types.Cluster) -> dict[str, Any]:
    capabilities: dict[str, Any] = {"drop": ["ALL"]}
    if cluster.spec.transfer.rdma is not None:
        # RDMA memory registration locks pages.
        capabilities["add"] = ["IPC_LOCK"]
    return {"allowPrivilegeEscalation": False, "capabilities": capabilities}


KV_ROLES = {types.Role.PREFILL: "kv_producer", types.Role.DECODE: "kv_consumer"}
NODE_RANK_VARIABLE = "PDCLUSTER_NODE_RANK"


def vllm_args(
    cluster: types.Cluster, engine: resolve.Engine, name: object_names.EngineName, pairing_key: str
) -> list[str]:
    """Return the words after ``vllm serve``; the model comes first."""
    host, port = "0.0.0.0", object_names.HTTP_PORT  # noqa: S104 (a pod's own network)
    if router.has_sidecar(cluster, engine.role):
        host, port = "127.0.0.1", object_names.BEHIND_SIDECAR_PORT
    words = [
        engine.model,
        "--served-model-name", cluster.served_name,
        "--host", host,
        "--port", str(port),
        *_parallel(engine, name),
        *_cache(engine),
    ]  # fmt: skip
    if engine.model_revision:
        words += ["--revision", engine.model_revision]
    if engine.max_model_len is not None:
        words += ["--max-model-len", str(engine.max_model_len)]
    if engine.attention_backend is not None:
        words += ["--attention-backend", engine.attention_backend]
    if cluster.spec.router.api_key_secret_ref is not None:
        words += ["--middleware", secrets.ENGINE_MIDDLEWARE]
    words += ["--kv-transfer-config", kv_transfer_config(cluster, engine, pairing_key)]
    return [*words, *engine.extra_args]


def _parallel(engine: resolve.Engine, name: object_names.EngineName) -> list[str]:
    parallel = engine.parallelism
    words = ["--tensor-parallel-size", str(parallel.tensor)]
    if parallel.pipeline > 1:
        words += ["--pipeline-parallel-size", str(parallel.pipeline)]
    if parallel.data > 1:
        # One API server for all ranks: the gauges of several servers cannot be added up.
        words += ["--data-parallel-size", str(parallel.data), "--api-server-count", "1"]
    if parallel.nodes > 1:
        # The launcher adds --headless where the node's rank is not 0.
        words += [
            "--distributed-executor-backend", "mp",
            "--nnodes", str(parallel.nodes),
            "--node-rank", f"$({NODE_RANK_VARIABLE})",
            "--master-addr", name.host(),
            "--master-port", str(object_names.MASTER_PORT),
        ]  # fmt: skip
    return words


def _cache(engine: resolve.Engine) -> list[str]:
    words = []
    if engine.block_size is not None:
        words += ["--block-size", str(engine.block_size)]
    on = engine.prefix_caching is engine_types.Switch.ENABLED
    words.append("--enable-prefix-caching" if on else "--no-enable-prefix-caching")
    if engine.kv_cache_dtype is not None:
        words += ["--kv-cache-dtype", engine.kv_cache_dtype]
    return words


def kv_transfer_config(cluster: types.Cluster, engine: resolve.Engine, pairing_key: str) -> str:
    """Return the JSON of ``--kv-transfer-config``; the launcher adds ``engine_id``."""
    transfer, role = cluster.spec.transfer, engine.role
    policy = "fail" if transfer.load_failure_policy is types.LoadFailurePolicy.FAIL else "recompute"
    auto = transfer.kv_layout is types.KvLayout.AUTO
    layout = {} if auto else {"kv_layout": transfer.kv_layout.value}
    threads = {} if transfer.nixl_threads is None else {"num_threads": transfer.nixl_threads}
    tokens = transfer.local_tokens_per_step if role is types.Role.DECODE else None
    pace = {} if tokens is None else {"local_tokens_per_step": tokens}
    skips = {"router_may_skip_prefill": True} if router.has_sidecar(cluster, role) else {}
    document = {
        "kv_connector": "PDClusterConnector",
        "kv_connector_module_path": "pdcluster_connector.vllm.connector",
        "kv_role": KV_ROLES[role],
        "kv_buffer_device": transfer.device.value.lower(),
        "kv_load_failure_policy": policy,
        "kv_connector_extra_config": {
            "side_channel_host": "$(POD_IP)",
            "side_channel_port": object_names.SIDE_CHANNEL_PORT,
            "lease_seconds": transfer.lease_seconds,
            "drain_deadline_seconds": resolve.DRAIN_DEADLINE_SECONDS,
            "backends": list(transfer.backends),
            "show_internal_names": transfer.internal_names is types.Visibility.SHOWN,
            "ticket_key_file": f"{secrets.TICKET_KEY_FOLDER}/{secrets.TICKET_KEY_FILE}",
            "ticket_audience": secrets.ticket_audience(cluster, pairing_key),
            **layout,
            **threads,
            **pace,
            **skips,
            # A pod's address is not loopback, so the connector starts only with one of these two.
            **(
                {"tls": secrets.tls_option(cluster)}
                if secrets.has_certificates(cluster)
                else {"allow_insecure": True}
            ),
        },
    }
    if offloaded := resolve.offloaded_mebibytes(engine):
        document = _beside_offloading(document, offloaded, engine.parallelism)
    return json.dumps(document, separators=(",", ":"))


def _beside_offloading(
    ours: dict[str, Any], mebibytes: int, parallel: engine_types.Parallelism
) -> dict[str, Any]:
    """Return our connector's document with vLLM's offloading connector beside it.

    Ours comes first. As ``kv_both``, vLLM frees no block while a step may still write into it:
    host memory is loaded into blocks without waiting for steps. Each data-parallel rank has its
    own part of the pod's memory.
    """
    nbytes = (mebibytes << 20) // max(1, parallel.data // parallel.nodes)
    offloading = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"cpu_bytes_to_use": nbytes},
    }
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_buffer_device": ours["kv_buffer_device"],
        "kv_load_failure_policy": ours["kv_load_failure_policy"],
        "kv_connector_extra_config": {"connectors": [ours, offloading]},
    }
