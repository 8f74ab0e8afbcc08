"""What cannot work in a pod that a user's template and the operator make together."""

from __future__ import annotations

from typing import Any

import pytest
from pod_faults import FAULTS, engine, get, mount, on_host, sidecar
from said_findings import check_manifest


def judge(part: str = "decode", template: Any = None, **spec: Any) -> list[tuple[str, str, bool]]:
    """(path in the template, rule, whether it is an error) of each finding about it."""
    memory = {"resources": {"requests": {"memory": "1Gi"}}}
    roles = {role: memory | spec.pop(role, {}) for role in ("prefill", "decode")}
    spec = {
        "model": {"source": {"persistentVolumeClaim": {"claimName": "weights"}}},
        **roles,
        **spec,
    }
    spec[part] = {**spec.get(part, {}), "podTemplate": template}
    metadata = {
        "apiVersion": "pdcluster.dev/v1alpha1",
        "kind": "PDCluster",
        "metadata": {"name": "x"},
    }
    found = check_manifest({**metadata, "spec": spec})[1]
    prefix = f"spec.{part}.podTemplate."
    return [
        (one.path.removeprefix(prefix), str(one.rule), refused)
        for findings, refused in ((found.errors, True), (found.warnings, False))
        for one in findings
        if one.path.startswith(prefix)
    ]


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found_once_and_its_neighbour_is_none(name: str) -> None:
    fault = FAULTS[name]
    assert (fault.path, fault.rule, not fault.warned) in judge(template=fault.wrong)
    others = [one for one in judge(template=fault.wrong) if one[0] == fault.path]
    assert len(others) == 1
    assert fault.rule not in {rule for _, rule, _ in judge(template=fault.right)}
    assert not [one for one in judge(template=fault.right) if one[2]]


def test_the_probes_of_an_engine_of_several_pods() -> None:
    """vLLM's API and the page of metrics are open in the first pod alone."""
    two = {"decode": {"parallelism": {"tensor": 2, "nodes": 2}}}
    path = "spec.containers[0].livenessProbe.{}.port"
    for port in ("http", 8000, "metrics", 5591):
        found = judge(template=engine(livenessProbe=get(port)), **two)
        assert (path.format("httpGet"), "ProbeFails", True) in found
        assert judge(template=engine(livenessProbe=get(port))) == []
    found = judge(template=engine(livenessProbe={"tcpSocket": {"port": 8000}}), **two)
    assert found == [(path.format("tcpSocket"), "ProbeFails", True)]
    elsewhere = {"tcpSocket": {"port": 8000, "host": "10.0.0.1"}}
    for probe in ({"tcpSocket": {"port": 5590}}, {"exec": {"command": ["a"]}}, elsewhere):
        assert judge(template=engine(livenessProbe=probe), **two) == []


def test_a_plain_launcher_is_asked_in_plain_words() -> None:
    disabled = {"transfer": {"tls": "Disabled"}}
    plain = engine(startupProbe=get("launcher", "/readyz"))
    assert judge(template=plain, **disabled) == []
    safe = engine(startupProbe=get("launcher", "/readyz", scheme="HTTPS"))
    [(path, rule, _)] = judge(template=safe, **disabled)
    assert (path, rule) == ("spec.containers[0].startupProbe.httpGet.scheme", "ProbeFails")


def test_ports_that_are_not_known_to_answer_otherwise_are_not_judged() -> None:
    """The side channel may speak TLS or not; a router has no launcher."""
    for scheme in ("HTTP", "HTTPS"):
        side = engine(livenessProbe=get("side-channel", "/healthz", scheme=scheme))
        assert judge(template=side) == []
        probe = get(5590, "/any", scheme=scheme)
        beside = sidecar(ports=[{"containerPort": 5590}])
        router = {"containers": [{"name": "router", "livenessProbe": probe}, beside]}
        assert judge("router", {"spec": router}) == []
    secure = {"name": "router", "livenessProbe": get("metrics", "/metrics", scheme="HTTPS")}
    [(_, rule, _)] = judge("router", {"spec": {"containers": [secure]}})
    assert rule == "ProbeFails"


@pytest.mark.parametrize("part", ["decode", "router"])
def test_a_probe_without_the_api_key_asks_only_what_is_open(part: str) -> None:
    name = "engine" if part == "decode" else "router"

    def found(probe: dict[str, Any], **spec: Any) -> list[tuple[str, str, bool]]:
        template = {"spec": {"containers": [{"name": name, "livenessProbe": probe}]}}
        if part == "router":
            spec["router"] = spec.get("router", {})
        return judge(part, template, **spec)

    key = {"router": {"apiKeySecretRef": {"name": "api"}}}
    path = "spec.containers[0].livenessProbe.httpGet.path"
    assert found(get("http", "/v1/models")) == []
    assert found(get("http", "/v1/models"), **key) == [(path, "ProbeFails", True)]
    shown = [{"name": "authorization", "value": "Bearer x"}]
    assert found(get("http", "/v1/models", httpHeaders=shown), **key) == []
    said = found(get("http"), **key)
    assert said == ([] if part == "decode" else [(path, "ProbeFails", True)])
    if part == "router":
        assert found(get("gate", "/readyz"), **key) == []
        assert found(get("gate", "/check"), **key) == [(path, "ProbeFails", True)]
        assert [rule for _, rule, _ in found(get("gate", "/readyz"))] == ["NotInPod"]


def test_the_router_is_judged_by_what_the_router_has() -> None:
    def router(*more: Any, **fields: Any) -> Any:
        return {"spec": {"containers": [{"name": "router", **fields}, *more]}}

    taken = sidecar(ports=[{"containerPort": 29000}])
    assert judge("router", router(taken)) == [
        ("spec.containers[1].ports[0].containerPort", "Duplicate", True)
    ]
    free = sidecar(ports=[{"containerPort": 5590}])
    assert judge("router", router(free)) == []
    assert [rule for _, rule, _ in judge("router", router(volumeMounts=mount("shm")))] == [
        "NotInPod"
    ]
    assert judge("router", router(lifecycle={"preStop": {}})) == [], "ours sleeps"
    found = judge("router", router(readinessProbe={"tcpSocket": {"port": "http"}}))
    assert [rule for _, rule, _ in found] == ["ReadinessReplaced"]


def test_what_others_write_stays_accepted() -> None:
    """Templates of other projects: a mesh's sidecar, an exporter, a cache that is shared."""
    proxy = {
        "name": "istio-proxy",
        "image": "docker.io/istio/proxyv2:1.24.0",
        "restartPolicy": "Always",
        "ports": [{"containerPort": 15090, "name": "http-envoy-prom", "protocol": "TCP"}],
        "readinessProbe": get(15021, "/healthz/ready"),
        "volumeMounts": [{"name": "istio-data", "mountPath": "/var/lib/istio/data"}],
        "lifecycle": {"preStop": {"exec": {"command": ["drain"]}}},
    }
    exporter = sidecar(
        ports=[{"containerPort": 9400, "name": "dcgm"}],
        livenessProbe=get("dcgm"),
        startupProbe={"grpc": {"port": 9401, "service": "x"}},
        volumeMounts=[
            *mount("model", "/model"),
            *mount("shm", "/dev/shm"),
            *mount("own", "/dev/shm/x"),
        ],
    )
    template = engine(
        exporter, init=(proxy,), livenessProbe=get("http"),
        startupProbe={"failureThreshold": 720}, ports=[{"containerPort": 8000, "hostPort": 8000}],
    )  # fmt: skip
    claim = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}
    template["spec"]["volumes"] = [
        {"name": "istio-data", "emptyDir": {}},
        {"name": "own", "ephemeral": {"volumeClaimTemplate": {"spec": claim}}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "32Gi"}},
    ]
    assert judge(template=template) == []
    hosted = {rule for _, rule, _ in judge(template=on_host(template))}
    assert hosted == {"HostNamespace"}


@pytest.mark.parametrize(
    "source", [{"csi": {"driver": "gcsfuse"}}, {"nfs": {"server": "a", "path": "/m"}}]
)
def test_weights_of_another_volume_are_allowed_and_warned_of(source: dict[str, Any]) -> None:
    """A template can mount what spec.model.source cannot say."""
    template = {"spec": {"volumes": [{"name": "model", **source}]}}
    [(path, rule, refused)] = judge(template=template)
    assert (path, refused) == ("spec.volumes[0].name", False)
    assert rule == "WeightsUnseen"
    assert judge("router", template) == []
    keys = {"spec": {"volumes": [{"name": "ticket-key", **source}]}}
    assert judge(template=keys) == [("spec.volumes[0].name", "ConflictingSettings", True)]


LLMD = {
    "router": {
        "type": "LLMD",
        "allowFrom": [{"podSelector": {}}],
        "sidecarImage": "example/sidecar:v1",
    }
}
TWO_NODES = {"decode": {"parallelism": {"tensor": 2, "nodes": 2}}}


@pytest.mark.parametrize(("number", "with_it"), [(8200, LLMD), (29500, TWO_NODES)])
def test_a_port_without_a_name_is_in_use_too(number: int, with_it: dict[str, Any]) -> None:
    beside = engine(sidecar(ports=[{"containerPort": number}]))
    assert judge(template=beside) == []
    found = judge(template=beside, **with_it)
    assert found == [("spec.containers[1].ports[0].containerPort", "Duplicate", True)]
    assert judge("prefill", beside, **with_it) == []
    named = engine(ports=[{"containerPort": number, "name": "more"}])
    assert judge(template=named, **with_it) == []


def test_the_sidecar_of_llm_d_may_be_changed_by_its_name() -> None:
    bounds = {"limits": {"memory": "128Mi"}}
    changed = {"spec": {"initContainers": [{"name": "routing-proxy", "resources": bounds}]}}
    assert judge(template=changed, **LLMD) == []
    missing = [("spec.initContainers[0].name", "Required", True)]
    assert judge(template=changed) == missing
    assert judge("prefill", changed, **LLMD) == missing


PROXY = "spec.initContainers[0]"


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        ({"restartPolicy": None}, [(f"{PROXY}.restartPolicy", "ConflictingSettings", True)]),
        ({"restartPolicy": "OnFailure"}, [(f"{PROXY}.restartPolicy", "ConflictingSettings", True)]),
        ({"restartPolicy": "Always"}, []),
        ({"args": ["--kv-connector=nixlv2", "--port", "9000"]},
         [(f"{PROXY}.args", "ConflictingSettings", True),
          (f"{PROXY}.args", "ArgumentsOverlaid", False)]),
        ({"args": ["-port=8000"]}, [(f"{PROXY}.args", "ArgumentsOverlaid", False)]),
        ({"args": None}, [(f"{PROXY}.args", "ArgumentsOverlaid", False)]),
        ({"command": ["proxy"]}, [(f"{PROXY}.command", "ArgumentsOverlaid", False)]),
        ({"image": "example/sidecar:v2"}, []),
        ({"env": [{"name": "LOG", "value": "debug"}]}, []),
        ({"livenessProbe": {"tcpSocket": {"port": 8000}}}, []),
    ],
)  # fmt: skip
def test_what_llm_d_s_sidecar_needs_is_kept(fields: Any, found: Any) -> None:
    changed = {"spec": {"initContainers": [{"name": "routing-proxy", **fields}]}}
    assert judge(template=changed, **LLMD) == found


def test_a_container_of_ours_starts_again_after_a_failure() -> None:
    for part, name in (("decode", "engine"), ("router", "router")):
        for given, found in (("Never", 1), ("OnFailure", 1), ("Always", 0), (None, 0)):
            own = {"spec": {"containers": [{"name": name, "restartPolicy": given}]}}
            assert len(judge(part, own)) == found
    assert judge(template=engine(sidecar(restartPolicy="Never"))) == []
    assert judge(template={"spec": {"initContainers": None}}, **LLMD) == [], "ours stays"


def test_an_init_container_that_ends_has_no_probes() -> None:
    probe = {"exec": {"command": ["true"]}}
    ends = engine(init=(sidecar(livenessProbe=probe),))
    assert judge(template=ends) == [("spec.initContainers[0].livenessProbe", "NotAllowed", True)]
    assert (
        judge(template=engine(init=(sidecar(livenessProbe=probe, restartPolicy="Always"),))) == []
    )


OURS = {
    ("router", "router"): {"/pdcluster": "connector"},
    ("decode", "engine"): {"/pdcluster": "connector", "/pdcluster-keys": "ticket-key"},
}


@pytest.mark.parametrize(
    ("part", "container", "folder", "volume"),
    [(*place, *one) for place, mounts in OURS.items() for one in mounts.items()],
)
def test_what_is_mounted_of_ours_stays_as_it_is(
    part: str, container: str, folder: str, volume: str
) -> None:
    def mounted(*names: str, **fields: Any) -> list[tuple[str, str, bool]]:
        mounts = [{"mountPath": folder, **fields}]
        volumes = [{"name": name, "emptyDir": {}} for name in names]
        spec = {"volumes": volumes, "containers": [{"name": container, "volumeMounts": mounts}]}
        return judge(part, {"spec": spec}, router={"apiKeySecretRef": {"name": "api"}})

    wrong = [("spec.containers[0].volumeMounts[0].mountPath", "ConflictingSettings", True)]
    assert mounted("mine", name="mine") == wrong
    assert mounted(name=volume, subPath="a") == mounted(subPathExpr="$(POD_NAME)") == wrong
    replaced = [("spec.volumes[0].name", "ConflictingSettings", True)]
    assert mounted(volume, name=volume, mountPath="/elsewhere") == replaced
    for harmless in ({"readOnly": True}, {"name": volume, "subPath": "a", "mountPath": "/copy"}):
        assert mounted(**harmless) == []


def test_without_a_key_no_volume_of_the_router_is_ours() -> None:
    mounts = [{"name": "connector", "mountPath": "/pdcluster"}]
    spec = {
        "volumes": [{"name": "connector", "emptyDir": {}}],
        "containers": [{"name": "router", "volumeMounts": mounts}],
    }
    assert judge("router", {"spec": spec}) == []
    assert judge("router", {"spec": spec}, router={"apiKeySecretRef": {"name": "api"}})
