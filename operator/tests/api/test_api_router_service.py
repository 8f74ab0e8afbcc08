"""spec.router.service: which fields go with which type, and a router that everybody reaches."""

from __future__ import annotations

from typing import Any

import pytest
from said_findings import check_manifest

from pdcluster_operator.api.findings import Findings


def findings(service: Any, **router: Any) -> Findings:
    spec = {
        "model": {"source": {"persistentVolumeClaim": {"claimName": "w"}}},
        "router": {"service": service, **router},
    }
    document = {"apiVersion": "pdcluster.dev/v1alpha1", "kind": "PDCluster"}
    return check_manifest({**document, "metadata": {"name": "c"}, "spec": spec})[1]


def warned(service: Any, **router: Any) -> list[tuple[str, str]]:
    found = findings(service, **router).warnings
    return [(one.path, one.rule) for one in found if "router" in one.path]


FIELDS: dict[str, Any] = {
    "loadBalancerClass": "service.k8s.aws/nlb",
    "loadBalancerSourceRanges": ["10.0.0.0/8"],
    "externalTrafficPolicy": "Local",
}


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("kind", ["ClusterIP", "NodePort", "LoadBalancer"])
def test_fields_go_with_types(kind: str, field: str) -> None:
    fits = kind == "LoadBalancer" or (kind == "NodePort" and field == "externalTrafficPolicy")
    refused = [
        (one.path, one.rule) for one in findings({"type": kind, field: FIELDS[field]}).errors
    ]
    assert refused == ([] if fits else [(f"spec.router.service.{field}", "RouterFieldUnused")])


def test_the_remedy_names_the_types_that_have_the_field() -> None:
    [error] = findings({"externalTrafficPolicy": "Local"}).errors
    assert error.remedy == (
        "Remove it, or set spec.router.service.type to LoadBalancer or NodePort."
    )


@pytest.mark.parametrize("cidr", ["10.0.0.1/8", "10.0.0.0/33", "10.0.0.0"])
def test_a_range_that_is_none_is_refused(cidr: str) -> None:
    [error] = findings({"type": "LoadBalancer", "loadBalancerSourceRanges": [cidr]}).errors
    assert (error.path, error.rule) == (
        "spec.router.service.loadBalancerSourceRanges[0]", "BadFormat",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("annotations", "rule"),
    [
        ({"pdcluster.dev/applied": "x"}, "NotAllowed"),
        ({"kubectl.kubernetes.io/last-applied-configuration": "{}"}, "NotAllowed"),
        ({"a/b/c": "x"}, "BadFormat"),
        ({"a..b/c": "x"}, "BadFormat"),
        ({"a.-b/c": "x"}, "BadFormat"),
        ({"a": True}, "WrongType"),
        ({"a": "x" * (16 << 10), "b": "x"}, "TooLarge"),
    ],
)
def test_annotations_that_no_service_may_have(annotations: dict[str, Any], rule: str) -> None:
    [error] = findings({"annotations": annotations}).errors
    assert error.rule == rule
    assert error.path.startswith("spec.router.service.annotations")


def test_a_class_has_a_name_with_or_without_a_domain() -> None:
    def refused(name: str) -> list[str]:
        found = findings({"type": "LoadBalancer", "loadBalancerClass": name})
        return [one.rule for one in found.errors]

    assert refused("internal-vip") == refused("example.com/Internal_vip.1") == []
    for name in ("", "-a", "a/b/c", "a..b/c", "Example.com/a", "a" * 64, "a/"):
        assert refused(name), name


@pytest.mark.parametrize("kind", ["NodePort", "LoadBalancer"])
def test_a_router_that_everybody_outside_may_use_is_named(kind: str) -> None:
    [(path, rule)] = warned({"type": kind})
    assert path == "spec.router.service.type"
    assert rule == "RouterExposed"
    assert warned({"type": kind}, apiKeySecretRef={"name": "api"}) == []
    assert warned({"type": kind}, allowFrom=[{"ipBlock": {"cidr": "10.0.0.0/8"}}]) == []
    assert warned({"type": "ClusterIP"}) == []
    assert warned({"type": kind}, type="None") == [], "there is no such Service"


def test_a_load_balancer_that_lets_in_certain_addresses_is_not_open_to_everybody() -> None:
    assert warned({"type": "LoadBalancer", "loadBalancerSourceRanges": ["10.0.0.0/8"]}) == []


@pytest.mark.parametrize("cidr", ["0.0.0.0/0", "::/0"])
def test_a_range_of_all_addresses_keeps_nobody_out(cidr: str) -> None:
    exposed = [("spec.router.service.type", "RouterExposed")]
    ranges, peers = ["10.0.0.0/8", cidr], [{"podSelector": {}}, {"ipBlock": {"cidr": cidr}}]
    service = {"type": "LoadBalancer", "loadBalancerSourceRanges": ranges}
    assert warned(service) == exposed
    assert warned({"type": "LoadBalancer"}, allowFrom=peers) == exposed
    assert warned(service, allowFrom=peers) == exposed
    assert warned(service, allowFrom=[{"ipBlock": {"cidr": "10.0.0.0/8"}}]) == []
    assert warned({**service, "loadBalancerSourceRanges": ranges[:1]}, allowFrom=peers) == []
    assert warned(service, apiKeySecretRef={"name": "api"}) == []


def test_a_service_for_outside_that_lets_in_only_pods_is_named() -> None:
    pods = {"podSelector": {"matchLabels": {"app": "chat"}}}
    outside = {"ipBlock": {"cidr": "10.0.0.0/8"}}
    found = warned({"type": "LoadBalancer"}, allowFrom=[pods])
    assert found == [("spec.router.service.type", "RouterFieldUnused")]
    assert warned({"type": "LoadBalancer"}, allowFrom=[pods, outside]) == []
    assert warned({"type": "ClusterIP"}, allowFrom=[pods]) == []


@pytest.mark.parametrize("kind", ["LLMD", "None"])
def test_without_a_router_of_ours_there_is_no_such_service(kind: str) -> None:
    found = findings({"type": "NodePort"}, type=kind, apiKeySecretRef={"name": "api"}).errors
    assert [(one.path, one.rule) for one in found] == [("spec.router.service", "RouterFieldUnused")]
