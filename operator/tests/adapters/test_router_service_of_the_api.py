"""On a real API server: spec.router.service changes the Service for clients in place."""

from __future__ import annotations

from typing import Any

import pytest
from operator_runs import CHILDREN, Operator, at_rest, cluster, create, edit, get, until
from real_api import RealApi

pytestmark = pytest.mark.cluster

CLASS, OTHER_CLASS = "service.k8s.aws/nlb", "example.com/other"
OURS, THEIRS = "example.com/scheme", "cloud.example.com/balancer"
BALANCER = {
    "type": "LoadBalancer",
    "loadBalancerClass": CLASS,
    "loadBalancerSourceRanges": ["10.0.0.0/8"],
    "externalTrafficPolicy": "Local",
    "annotations": {OURS: "internal"},
}


def test_the_service_for_clients_is_opened_changed_and_closed_again(
    real: RealApi, operator: Operator, namespace: str
) -> None:
    path = f"/api/v1/namespaces/{namespace}/services/tiny-router"

    def service() -> dict[str, Any]:
        found: dict[str, Any] = real.call("GET", path)[1]
        return found

    def annotations() -> dict[str, str]:
        found: dict[str, str] = service()["metadata"].get("annotations") or {}
        return found

    def becomes(**fields: Any) -> None:
        until(
            lambda: fields.items() <= service().get("spec", {}).items(),
            60,
            lambda: (service(), operator.said()),
        )

    operator.start()
    create(real, namespace, cluster())
    becomes(type="ClusterIP")
    address = service()["spec"]["clusterIP"]
    routers = CHILDREN["Deployment"].format(namespace)
    until(lambda: real.call("GET", routers)[1]["items"], 60, operator.said)
    [router] = real.call("GET", routers)[1]["items"]
    assert edit(real, namespace, {"router": {"service": BALANCER}})[0] == 200
    becomes(**{name: value for name, value in BALANCER.items() if name != "annotations"})
    assert annotations()[OURS] == "internal"
    assert service()["spec"]["ports"][0]["nodePort"]

    # A cloud's controller writes an annotation of its own, and nobody takes it away.
    cloud = {"metadata": {"annotations": {THEIRS: "lb-1"}}}
    assert real.call("PATCH", path, cloud, "application/merge-patch+json")[0] == 200
    at_rest(real, operator)
    changed = {"annotations": {OURS: "internet-facing"}, "externalTrafficPolicy": "Cluster"}
    assert edit(real, namespace, {"router": {"service": changed}})[0] == 200
    becomes(externalTrafficPolicy="Cluster")
    assert annotations().items() >= {OURS: "internet-facing", THEIRS: "lb-1"}.items()

    # Kubernetes would refuse this change of the Service. The CRD says so first.
    for other in (OTHER_CLASS, None):
        status, answer = edit(
            real, namespace, {"router": {"service": {"loadBalancerClass": other}}}
        )
        assert status == 422
        assert "set type to ClusterIP first" in answer["message"]
    closed = {
        "type": "ClusterIP",
        "loadBalancerClass": None,
        "loadBalancerSourceRanges": None,
        "externalTrafficPolicy": None,
    }
    assert edit(real, namespace, {"router": {"service": closed}})[0] == 200
    becomes(type="ClusterIP")
    again = {"type": "LoadBalancer", "loadBalancerClass": OTHER_CLASS}
    assert edit(real, namespace, {"router": {"service": again}})[0] == 200
    becomes(**again)

    assert edit(real, namespace, {"router": {"service": None}})[0] == 200
    becomes(type="ClusterIP")
    left = service()["spec"]
    assert not {"loadBalancerClass", "externalTrafficPolicy"} & left.keys()
    assert "nodePort" not in left["ports"][0]
    assert OURS not in annotations()
    assert annotations()[THEIRS] == "lb-1"
    # status.endpoint was right all the time.
    assert left["clusterIP"] == address
    [still] = real.call("GET", routers)[1]["items"]
    assert still["metadata"]["uid"] == router["metadata"]["uid"]
    assert still["spec"] == router["spec"], "no router was replaced"
    assert get(real, namespace)["status"]["endpoint"] == (
        f"http://tiny-router.{namespace}.svc:8000"
    )


def test_a_type_that_somebody_else_set_stays_without_the_field(
    real: RealApi, operator: Operator, namespace: str
) -> None:
    path = f"/api/v1/namespaces/{namespace}/services/tiny-router"
    operator.start()
    create(real, namespace, cluster())
    until(lambda: real.call("GET", path)[0] == 200, 60, operator.said)
    patch = {"spec": {"type": "NodePort"}}
    assert real.call("PATCH", path, patch, "application/merge-patch+json")[0] == 200
    at_rest(real, operator)
    assert real.call("GET", path)[1]["spec"]["type"] == "NodePort"


@pytest.mark.parametrize(
    ("service", "words"),
    [
        ({"loadBalancerClass": CLASS}, "unless type is LoadBalancer"),
        ({"type": "NodePort", "loadBalancerSourceRanges": ["10.0.0.0/8"]}, "unless type is"),
        ({"externalTrafficPolicy": "Local"}, "does nothing with type ClusterIP"),
    ],
)
def test_the_server_itself_refuses_fields_of_another_type(
    real: RealApi, namespace: str, service: dict[str, Any], words: str
) -> None:
    path = f"/apis/pdcluster.dev/v1alpha1/namespaces/{namespace}/pdclusters?dryRun=All"
    status, answer = real.call("POST", path, cluster(router={"service": service}))
    assert status == 422
    assert words in answer["message"]
    right = cluster(router={"service": {**service, "type": "LoadBalancer"}})
    assert real.call("POST", path, right)[0] == 201
