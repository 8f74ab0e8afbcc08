"""What llm-d's router expects of engine pods: labels, and a sidecar beside each decode engine.

llm-d's endpoint picker names a prefill pod in a header of a request, which goes to a decode pod.
There the sidecar takes the engine's port. It sends the prompt to prefill for one token, and then to
its engine with the ``kv_transfer_params`` of that answer. Without the header it passes the request
on as it is. The labels are those of llm-d-router's filters, the flags those of its pd-sidecar 0.10.
"""

from typing import Any, Final

from pdcluster_operator.api.object_names import HTTP_PORT
from pdcluster_operator.api.spec.router_types import RouterType
from pdcluster_operator.api.spec.types import Cluster, Role

SIDECAR_CONTAINER: Final = "routing-proxy"
ENGINE_PORT: Final = 8200
"""Where a decode engine listens behind the sidecar: its default for ``--model-server-port``."""


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
        "name": SIDECAR_CONTAINER,
        "image": cluster.spec.router.sidecar_image,
        "args": [f"--port={HTTP_PORT}", "--kv-connector=nixlv2", "--secure-proxy=false"],
        "restartPolicy": "Always",
        "securityContext": {
            "runAsNonRoot": True,
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        },
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    return {"initContainers": [sidecar]}
