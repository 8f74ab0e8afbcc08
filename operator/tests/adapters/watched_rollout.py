"""What tests look at while engines are replaced: whether clients are served, whether it ended."""

from __future__ import annotations

from typing import Any

from operator_runs import CHILDREN, condition, get
from real_api import RealApi

from pdcluster_operator.api.object_names import PAIRING_LABEL, router_name


def done(real: RealApi, namespace: str) -> bool:
    live = get(real, namespace)
    seen = live["status"]["observedGeneration"] == live["metadata"]["generation"]
    ready = condition(real, namespace, "Ready")["status"] == "True"
    return seen and ready and condition(real, namespace, "Progressing")["reason"] == "Complete"


def serves(real: RealApi, namespace: str) -> bool:
    """Whether the routers behind the Service know an engine of each role that does not end.

    False if these routers changed while the pods were read.
    """
    words = routed(real, namespace)
    pods = [one["metadata"] for one in found(real, namespace, "Pod")]
    if words != routed(real, namespace):
        return False
    known = [pod for pod in pods if any(f"//{pod['name']}." in word for word in words)]
    roles = {pod["labels"]["pdcluster.dev/role"] for pod in known if "deletionTimestamp" not in pod}
    assert roles == {"prefill", "decode"}, (words, pods)
    return True


def routed(real: RealApi, namespace: str) -> set[str]:
    """Return the words on the command line of the routers that the Service selects."""
    keys = {
        one["spec"]["selector"].get(PAIRING_LABEL)
        for one in found(real, namespace, "Service")
        if one["metadata"]["name"] == router_name("tiny")
    }
    return {
        word
        for one in found(real, namespace, "Deployment")
        if one["metadata"]["labels"][PAIRING_LABEL] in keys
        for word in one["spec"]["template"]["spec"]["containers"][0]["args"]
    }


def found(real: RealApi, namespace: str, kind: str) -> list[dict[str, Any]]:
    query = "?labelSelector=pdcluster.dev/cluster"
    return list(real.call("GET", CHILDREN[kind].format(namespace) + query)[1]["items"])
