"""vLLM's own ``vllm-router``, which sends requests to the engines of one pairing key.

At the end: what llm-d's router expects of engine pods instead, labels and a sidecar beside each
decode engine. Its endpoint picker names a prefill pod in a header of a request, which goes to a
decode pod. There the sidecar takes the engine's port. It sends the prompt to prefill for one token,
and then to its engine with the ``kv_transfer_params`` of that answer. Without the header it passes
the request on as it is. The labels are those of llm-d-router's filters, the flags those of its
pd-sidecar 0.10.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from pdcluster_operator.api import object_names
from pdcluster_operator.api.spec import fields, pod_templates, resolve, resources
from pdcluster_operator.api.spec.flags import TYPED_ROUTER_FLAGS
from pdcluster_operator.api.spec.router_types import Router, RouterPolicy, RouterType
from pdcluster_operator.api.spec.types import Cluster, Role
from pdcluster_operator.plan import connectors
from pdcluster_operator.plan.builders.secrets import api_key_env
from pdcluster_operator.plan.objects.ownership import child_object, common_metadata

ROUTER_COMPONENT = "router"
PLACEHOLDERS = {role: f"{{{role} engines}}" for role in Role}
"""Where the engines of a role will stand on the router's command line."""
NOBODY = 65_532
GATE_MODULE = "pdcluster_connector.launcher.router_gate"
# The router listens only once every engine answers, and gives up after this long.
WORKER_STARTUP_SECONDS = 86_400
# The router leaves an engine out after three failed checks and takes it back after one good check.
# Its pod is then unready within 7 s of the last engine's end. The status never says Ready while the
# router still leaves an engine out: a start takes longer, and a launcher's canary waits that long.
HEALTH_CHECK_SECONDS = 1
HEALTH_CHECK_FAILURES = 3
PROBE_SECONDS = 1
PROBE_FAILURES = 3


def build_router_template(
    cluster: Cluster,
    pairing_key: str,
    connector: str,
    host: str = "0.0.0.0",  # noqa: S104 (a pod's own network)
) -> dict[str, Any]:
    """Return the pod template, with a placeholder for the engines of each role; see :func:`bound`.

    Args:
        connector: name of the ConfigMap with the connector. It holds the gate that asks for the
            API key.
        host: the address that the router binds to.
    """
    router = cluster.spec.router
    labels = router_labels(cluster, pairing_key)
    template: dict[str, Any] = {
        "metadata": common_metadata(cluster, labels),
        "spec": {
            "serviceAccountName": object_names.service_account_name(cluster.name),
            "automountServiceAccountToken": False,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": NOBODY,
                "runAsGroup": NOBODY,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "enableServiceLinks": False,
            # vllm-router sets up no signal handler while it waits for engines, and the kernel
            # drops a SIGTERM that process 1 does not handle: here the pause process is process 1.
            "shareProcessNamespace": True,
            "terminationGracePeriodSeconds": resolve.router_grace_period(cluster),
            "containers": [_container(cluster, host)],
        },
    }
    if router.api_key_secret_ref is not None:
        template["spec"]["volumes"] = [connectors.connector_volume(connector)]
    merged: dict[str, Any] = pod_templates.merge(
        pod_templates.merge(template, router.pod_template or {}), {"metadata": {"labels": labels}}
    )
    return merged


def bound(
    template: Mapping[str, Any], engines: Iterable[object_names.EngineName]
) -> dict[str, Any]:
    """Return a template whose router sends requests to these engines."""
    words = {
        word: [
            flag for name in engines if name.role is role for flag in (f"--{role}", name.api_url)
        ]
        for role, word in PLACEHOLDERS.items()
    }
    containers = [
        {**one, "args": [said for word in one["args"] for said in words.get(word, (word,))]}
        if one.get("name") == pod_templates.ROUTER_CONTAINER and one.get("args")
        else one
        for one in template["spec"]["containers"]
    ]
    return {**template, "spec": {**template["spec"], "containers": containers}}


def build_router_deployment(
    cluster: Cluster, pairing_key: str, template: Mapping[str, Any], *, stop: bool = False
) -> dict[str, Any]:
    """Return the Deployment.

    An old router goes when a new one is ready, not before. With ``stop`` it goes at once: its
    engines are being ended, and each of them ends only when it gets no more requests.
    """
    name = object_names.router_deployment_name(cluster.name, pairing_key)
    spec = {
        "replicas": cluster.spec.router.pods,
        "strategy": {
            "type": "RollingUpdate",
            "rollingUpdate": {"maxSurge": 1, "maxUnavailable": "100%" if stop else 0},
        },
        "selector": {"matchLabels": router_selector(cluster, pairing_key)},
        "template": dict(template),
    }
    labels = router_labels(cluster, pairing_key)
    return child_object(cluster, "apps/v1", "Deployment", name, labels, spec=spec)


def router_pods(cluster: Cluster) -> dict[str, str]:
    """Return the labels that find the pods of all routers of a cluster."""
    labels = {object_names.CLUSTER_LABEL: cluster.name}
    return labels | {"app.kubernetes.io/component": ROUTER_COMPONENT}


def router_selector(cluster: Cluster, pairing_key: str) -> dict[str, str]:
    """Return the immutable labels that find the pods of one router."""
    return router_pods(cluster) | {object_names.PAIRING_LABEL: pairing_key}


def router_labels(cluster: Cluster, pairing_key: str) -> dict[str, str]:
    """Return all labels of a router and its pods."""
    return object_names.cluster_labels(cluster.name, ROUTER_COMPONENT) | {
        object_names.PAIRING_LABEL: pairing_key
    }


def _typed(router: Router) -> list[str]:
    """Return the flags that fields of the spec set.

    In turn, both roles step together: of the four links between two and two engines, two carry
    everything. So decode engines are picked at random, unless the user says otherwise.
    """
    given = {flag: getattr(router, field) for flag, field in TYPED_ROUTER_FLAGS.items()}
    if router.policy is RouterPolicy.ROUND_ROBIN:
        given["--decode-policy"] = router.decode_policy or RouterPolicy.RANDOM
    return [word for flag, value in given.items() if value for word in (flag, value.name.lower())]


def _container(cluster: Cluster, host: str) -> dict[str, Any]:
    gated = cluster.spec.router.api_key_secret_ref is not None
    args = [
        "--vllm-pd-disaggregation",
        *PLACEHOLDERS.values(),
        "--host", host,
        "--port", str(object_names.ROUTER_PORT),
        *_typed(cluster.spec.router),
        "--worker-startup-timeout-secs", str(WORKER_STARTUP_SECONDS),
        "--worker-startup-check-interval", "1",
        "--health-check-interval-secs", str(HEALTH_CHECK_SECONDS),
        "--health-failure-threshold", str(HEALTH_CHECK_FAILURES),
        "--health-success-threshold", "1",
        "--request-timeout-secs", str(cluster.spec.request_timeout_seconds),
        "--prometheus-host", host,
        "--prometheus-port", str(object_names.ROUTER_METRICS_PORT),
        *cluster.spec.router.extra_args,
    ]  # fmt: skip
    container = {
        "name": pod_templates.ROUTER_CONTAINER,
        "image": cluster.spec.router.image,
        "command": ["vllm-router"],
        "args": args,
        "ports": [
            {"name": name, "containerPort": number, "protocol": "TCP"}
            for name, number in object_names.router_ports(gated=gated).items()
        ],
        "resources": resources.of_container(cluster.spec.router.resources, {}),
        "readinessProbe": {
            "httpGet": {"path": "/readiness", "port": "http"},
            "periodSeconds": PROBE_SECONDS,
            "timeoutSeconds": 2,
            "failureThreshold": PROBE_FAILURES,
        },
        # Every image can do this: the kubelet waits, and no program of the image runs.
        "lifecycle": {"preStop": {"sleep": {"seconds": resolve.ROUTER_LINGER_SECONDS}}},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        },
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    return _gated(cluster, container) if gated else container


def _gated(cluster: Cluster, container: Mapping[str, Any]) -> dict[str, Any]:
    """Return the container with the gate as its process. The gate starts the router.

    With a key the router answers only who sends it, which the kubelet's probe does not. So the
    probe asks the gate, and the gate asks the router with the key.
    """
    return {
        **container,
        "command": ["python3", "-m", GATE_MODULE],
        "args": [
            "--host", "0.0.0.0",  # noqa: S104 (a pod's own network)
            "--port", str(object_names.LAUNCHER_PORT),
            "--",
            *container["args"],
        ],
        "env": [
            {"name": "PYTHONPATH", "value": connectors.CONNECTOR_PATH},
            *api_key_env(cluster),
        ],
        "volumeMounts": [connectors.connector_mount()],
        "readinessProbe": {
            **container["readinessProbe"],
            "httpGet": {"path": "/readyz", "port": object_names.GATE},
        },
    }  # fmt: skip


def build_router_service(cluster: Cluster, pairing_key: str) -> dict[str, Any] | None:
    """Return the Service of the routers of one pairing key; None without routers."""
    if cluster.spec.router.pods == 0:
        return None
    labels = object_names.cluster_labels(cluster.name, ROUTER_COMPONENT)
    port = {
        "name": "http",
        "port": object_names.ROUTER_PORT,
        "targetPort": "http",
        "protocol": "TCP",
        "appProtocol": "http",
    }
    spec = fields.as_manifest(cluster.spec.router.service or {})
    annotations = spec.pop("annotations", {})
    spec |= {"selector": router_selector(cluster, pairing_key), "ports": [port]}
    name = object_names.router_name(cluster.name)
    service = child_object(cluster, "v1", "Service", name, labels, spec=spec)
    if annotations:
        common = service["metadata"].get("annotations", {})
        service["metadata"]["annotations"] = {**common, **annotations}
    return service


def endpoint(cluster: Cluster) -> str:
    """Return the base URL for clients inside the Kubernetes cluster; empty without routers.

    It holds for every type of Service: each has a ClusterIP.
    """
    if cluster.spec.router.pods == 0:
        return ""
    return f"http://{object_names.router_name(cluster.name)}.{cluster.namespace}.svc:{object_names.ROUTER_PORT}"


def is_llmd(cluster: Cluster) -> bool:
    """Whether llm-d's router sends requests to the engines."""
    return cluster.spec.router.type is RouterType.LLMD


def has_sidecar(cluster: Cluster, role: Role) -> bool:
    """Whether a sidecar takes the port of this role's engines."""
    return is_llmd(cluster) and role is Role.DECODE


def pod_labels(cluster: Cluster, role: Role) -> dict[str, str]:
    """Return the labels by which llm-d finds the pods of a role; empty without llm-d."""
    if not is_llmd(cluster):
        return {}
    return {"llm-d.ai/inference-serving": "true", "llm-d.ai/role": role.value}


def init_containers(cluster: Cluster, role: Role) -> dict[str, Any]:
    """Return ``initContainers`` with the sidecar, which Kubernetes ends after the engine.

    It speaks plain HTTP on both sides, as engines do, and passes ``Authorization`` on to both.
    """
    if not has_sidecar(cluster, role):
        return {}
    sidecar = {
        "name": pod_templates.SIDECAR_CONTAINER,
        "image": cluster.spec.router.sidecar_image,
        "args": [
            f"--port={object_names.HTTP_PORT}",
            "--kv-connector=nixlv2",
            "--secure-proxy=false",
        ],
        "restartPolicy": "Always",
        "securityContext": {
            "runAsNonRoot": True,
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        },
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    return {"initContainers": [sidecar]}
