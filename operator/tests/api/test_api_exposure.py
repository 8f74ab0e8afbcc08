"""Who may reach a cluster, with which key, and what its pods share with their nodes."""

from __future__ import annotations

from typing import Any

import pytest
from said_findings import check_manifest

from pdcluster_operator.api.findings import Findings


def findings(**spec: Any) -> Findings:
    document = {
        "apiVersion": "pdcluster.dev/v1alpha1",
        "kind": "PDCluster",
        "metadata": {"name": "llama"},
        "spec": {"model": {"source": {"persistentVolumeClaim": {"claimName": "m"}}}, **spec},
    }
    return check_manifest(document)[1]


@pytest.mark.parametrize(
    "peer",
    [
        {"podSelector": {"matchLabels": {"app": "web"}}},
        {"namespaceSelector": {}},
        {"namespaceSelector": {"matchLabels": {"a": "b"}}, "podSelector": {}},
        {"ipBlock": {"cidr": "10.0.0.0/8", "except": ["10.1.0.0/16"]}},
    ],
)
def test_peers_as_kubernetes_takes_them(peer: dict[str, Any]) -> None:
    assert findings(router={"allowFrom": [peer]}).ok


@pytest.mark.parametrize(
    ("peers", "path", "rule"),
    [
        ([], "spec.router.allowFrom", "OutOfRange"),
        ([{}], "spec.router.allowFrom[0]", "PeerUnusable"),
        ([{"podSelector": None}], "spec.router.allowFrom[0]", "PeerUnusable"),
        ([{"namespaceSelector": {}}, {"podSelectors": {}}],
         "spec.router.allowFrom[1].podSelectors", "UnknownField"),
        ([{"ipBlock": {"cidr": "10.0.0.0/8"}, "podSelector": {}}], "spec.router.allowFrom[0]",
         "PeerUnusable"),
        ([{"ipBlock": "10.0.0.0/8"}], "spec.router.allowFrom[0].ipBlock", "WrongType"),
        (["web"], "spec.router.allowFrom[0]", "WrongType"),
    ],
)  # fmt: skip
def test_peers_that_kubernetes_would_refuse_or_read_otherwise(
    peers: list[Any], path: str, rule: str
) -> None:
    """A list without peers would let everybody in, which nobody means who writes one."""
    assert (path, rule) in {(e.path, e.rule) for e in findings(router={"allowFrom": peers}).errors}


def keyed(container: str) -> dict[str, Any]:
    """A pod template that gives our container a key of its own."""
    env = [{"name": "VLLM_API_KEY", "value": "sk-1"}]
    return {"spec": {"containers": [{"name": container, "env": env}]}}


@pytest.mark.parametrize(
    "place",
    [
        {"engine": {"env": [{"name": "VLLM_API_KEY", "value": "sk-1"}]}},
        {"decode": {"engine": {"env": [{"name": "VLLM_API_KEY", "value": "sk-1"}]}}},
        {"engine": {"extraArgs": ["--api-key", "sk-1"]}},
        {"decode": {"podTemplate": keyed("engine")}},
        {"router": {"podTemplate": keyed("router"), "apiKeySecretRef": {"name": "keys"}}},
    ],
)
def test_a_key_in_the_manifest_is_refused_and_the_field_is_named(place: dict[str, Any]) -> None:
    (error,) = findings(**place).errors
    assert "spec.router.apiKeySecretRef" in error.remedy


def test_a_container_of_the_users_own_may_hold_a_key() -> None:
    template = keyed("proxy")
    template["spec"]["containers"][0]["image"] = "proxy:1"
    assert findings(decode={"podTemplate": template}).ok


def warned(**spec: Any) -> set[str]:
    found = findings(**spec)
    assert found.ok, found.errors
    return {warning.path for warning in found.warnings if warning.rule == "HostNamespace"}


def test_walls_between_pod_and_node_are_taken_down_with_a_warning() -> None:
    shared = {"podTemplate": {"spec": {"hostPID": True, "hostIPC": True, "hostNetwork": False}}}
    path = "spec.prefill.podTemplate.spec"
    assert warned(prefill=shared) == {f"{path}.hostPID", f"{path}.hostIPC"}
    privileged = {"name": "router", "securityContext": {"privileged": True}}
    containers = [{"name": "log", "image": "log:1"}, privileged]
    template = {"podTemplate": {"spec": {"containers": containers}}}
    assert warned(router=template) == {
        "spec.router.podTemplate.spec.containers[1].securityContext.privileged"
    }
    init = {"initContainers": [{**privileged, "name": "tune", "image": "busybox"}]}
    assert warned(decode={"podTemplate": {"spec": init}}) == {
        "spec.decode.podTemplate.spec.initContainers[0].securityContext.privileged"
    }
    assert warned() == set()


@pytest.mark.parametrize("part", ["prefill", "decode", "router"])
@pytest.mark.parametrize(
    ("field", "beside"),
    [
        ("hostPID", {"shareProcessNamespace": True}),
        ("hostPID", {"hostUsers": False}),
        ("hostIPC", {"hostUsers": False}),
    ],
)
def test_what_kubernetes_refuses_beside_a_namespace_of_the_node(
    part: str, field: str, beside: dict[str, bool]
) -> None:
    (error,) = findings(**{part: {"podTemplate": {"spec": {field: True, **beside}}}}).errors
    assert (error.path, error.rule) == (
        f"spec.{part}.podTemplate.spec.{field}",
        "ConflictingSettings",
    )
    other = {name: not value for name, value in beside.items()}
    assert findings(**{part: {"podTemplate": {"spec": {field: True, **other}}}}).ok


GONE = [
    "automountServiceAccountToken", "enableServiceLinks", "securityContext",
    "securityContext.seccompProfile", "serviceAccountName", "terminationGracePeriodSeconds",
    "own.resources", "own.resources.limits", "own.securityContext",
    "own.securityContext.capabilities", "own.securityContext.capabilities.drop",
    "own.securityContext.allowPrivilegeEscalation", "own.resources.limits.GPU",
]  # fmt: skip
GONE_OF_ENGINES = ["own.startupProbe"]
GONE_OF_ROUTERS = ["shareProcessNamespace", "own.lifecycle", "own.lifecycle.preStop"]
STAYS = ["nodeSelector", "hostPID", "volumes", "own.terminationMessagePath"]


def nulled(part: str, field: str) -> list[tuple[str, str]]:
    """What is said of a null in the pod, or in the operator's own container and another one."""
    value: Any = None
    names = [
        "nvidia.com/gpu" if name == "GPU" else name
        for name in field.removeprefix("own.").split(".")
    ]
    for name in reversed(names):
        value = {name: value}
    spec, path = value, f"spec.{part}.podTemplate.spec"
    if field.startswith("own."):
        own = "router" if part == "router" else "engine"
        spec = {"containers": [{"name": "log", "image": "log:1", **value}, {"name": own, **value}]}
        path = f"{path}.containers[1]"
    found = findings(**{part: {"podTemplate": {"spec": spec}}}).warnings
    said = [one for one in found if one.rule == "OwnFieldRemoved"]
    assert [one.path for one in said] == [".".join([path, *names])] * len(said)
    assert len(said) < 2, "one null is told once"
    return [(one.path, one.value) for one in said]


@pytest.mark.parametrize("part", ["prefill", "decode", "router"])
def test_a_null_that_removes_what_the_operator_writes_is_told(part: str) -> None:
    of_routers = GONE_OF_ROUTERS if part == "router" else []
    of_engines = GONE_OF_ENGINES if part != "router" else []
    fields = (*GONE, *GONE_OF_ENGINES, *GONE_OF_ROUTERS, *STAYS)
    assert [one for one in fields if nulled(part, one)] == [*GONE, *of_engines, *of_routers]


ROOT = "securityContext.readOnlyRootFilesystem"
USERS: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any], set[str]]] = [
    ({}, {}, {"readOnlyRootFilesystem": True}, {ROOT}),
    ({"env": [{"name": "HOME", "value": "/h"}]}, {}, {"readOnlyRootFilesystem": True}, {ROOT}),
    ({"env": [{"name": "HOME", "value": "/h"}, {"name": "TMPDIR", "value": "/h"}]}, {},
     {"readOnlyRootFilesystem": True}, set()),
    ({}, {}, {"runAsNonRoot": True}, {"securityContext.runAsNonRoot"}),
    ({}, {"runAsUser": 7}, {"runAsNonRoot": True}, {"securityContext.runAsUser"}),
    ({}, {"runAsUser": 0}, {}, set()),
    ({"env": [{"name": "HOME", "value": "/tmp"}]}, {"runAsUser": 7}, {}, set()),
    ({"image": "registry.example/team/vllm:1"}, {"runAsUser": 7}, {"runAsNonRoot": True}, set()),
]  # fmt: skip


@pytest.mark.parametrize(("engine", "pod", "own", "told"), USERS)
def test_users_with_whom_vllm_does_not_start_are_told(engine, pod, own, told) -> None:
    """Of other images the user is not known. HOME and TMPDIR may name folders that it may write."""
    spec = {"securityContext": pod, "containers": [{"name": "engine", "securityContext": own}]}
    found = findings(engine=engine, decode={"podTemplate": {"spec": spec}}).warnings
    said = {
        one.path.partition("securityContext")[2] for one in found if "securityContext" in one.path
    }
    assert {f"securityContext{one}" for one in said} == told


def test_a_null_for_all_pods_is_told_where_it_was_written() -> None:
    found = findings(podTemplate={"spec": {"terminationGracePeriodSeconds": None}}).warnings
    (said,) = [one for one in found if one.rule == "OwnFieldRemoved"]
    assert said.path == "spec.podTemplate.spec.terminationGracePeriodSeconds"
    own = {"podTemplate": {"spec": {"terminationGracePeriodSeconds": 3600}}}
    parts = dict.fromkeys(("prefill", "decode", "router"), own)
    found = findings(podTemplate={"spec": {"terminationGracePeriodSeconds": None}}, **parts)
    assert not [one for one in found.warnings if one.rule == "OwnFieldRemoved"]


@pytest.mark.parametrize("part", ["prefill", "router"])
@pytest.mark.parametrize(
    ("signal", "told"), [("SIGKILL", True), ("SIGINT", True), ("SIGTERM", False)]
)
def test_a_signal_on_which_nothing_drains_is_told(part: str, signal: str, told: bool) -> None:
    box = {"name": "router" if part == "router" else "engine", "lifecycle": {"stopSignal": signal}}
    pod = {"os": {"name": "linux"}, "containers": [box]}
    found = findings(**{part: {"podTemplate": {"spec": pod}}}).warnings
    assert ("GraceTooShort" in {one.rule for one in found}) is told


@pytest.mark.parametrize("spec", [None, [], "x", {"containers": {"a": 1}}, {"containers": [1]}])
def test_templates_of_any_shape_are_looked_at(spec: Any) -> None:
    found = findings(decode={"podTemplate": {"spec": spec}})
    assert not [warning for warning in found.warnings if warning.rule == "HostNamespace"]


@pytest.mark.parametrize(("seconds", "ok"), [(60, True), (604_800, True), (59, False)])
def test_how_long_a_start_may_take(seconds: int, ok: bool) -> None:
    assert findings(engine={"startupTimeoutSeconds": seconds}).ok is ok
