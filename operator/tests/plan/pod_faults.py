"""Pod templates that cannot work in the operator's pod, and their nearest neighbours that can.

Tests give each to our rules, and to a real API server.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Fault:
    """A template of a role's engines.

    Attributes:
        rule: what we call it; an error, unless `warned`.
        server: whether an API server refuses the StatefulSet, too.
        path: in the podTemplate, of the finding.
        right: the neighbour that must stay without a finding of that rule.
    """

    wrong: dict[str, Any]
    rule: str
    path: str
    right: dict[str, Any]
    server: bool = False
    warned: bool = False


def engine(*more: dict[str, Any], init: tuple[dict[str, Any], ...] = (), **fields: Any) -> Any:
    """A template of our container with these fields, beside others."""
    pod: dict[str, Any] = {"containers": [{"name": "engine", **fields}, *more]}
    return {"spec": {**pod, **({"initContainers": list(init)} if init else {})}}


def sidecar(**fields: Any) -> dict[str, Any]:
    return {"name": "sidecar", "image": "docker.io/library/busybox:1.36", **fields}


def on_host(template: dict[str, Any]) -> dict[str, Any]:
    dns = {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}
    return {"spec": {**template["spec"], **dns}}


def mount(name: str, path: str = "/data") -> list[dict[str, Any]]:
    return [{"name": name, "mountPath": path}]


DATA = {"volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}]}


def with_data(template: dict[str, Any]) -> dict[str, Any]:
    return {"spec": {**DATA, **template["spec"]}}


def get(port: Any, path: str = "/health", **fields: Any) -> dict[str, Any]:
    return {"httpGet": {"path": path, "port": port, **fields}}


BOX = "spec.containers[0]"
BESIDE = "spec.containers[1]"
SECRET = {"name": "data", "secret": {"secretName": "s"}}
FROM_FIELD = {"fieldRef": {"fieldPath": "metadata.name"}}
KEY = {"name": "s", "key": "k"}
FAULTS = {
    "a mount of no volume": Fault(
        engine(volumeMounts=mount("dta")), "NotInPod", f"{BOX}.volumeMounts[0].name",
        with_data(engine(volumeMounts=mount("data"))), server=True,
    ),
    "a sidecar's mount of no volume": Fault(
        engine(sidecar(volumeMounts=mount("dta"))), "NotInPod", f"{BESIDE}.volumeMounts[0].name",
        engine(sidecar(volumeMounts=mount("model"))), server=True,
    ),
    "an init container's mount of no volume": Fault(
        engine(init=(sidecar(volumeMounts=mount("cache")),)), "NotInPod",
        "spec.initContainers[0].volumeMounts[0].name",
        engine(init=(sidecar(volumeMounts=mount("shm", "/s")),)), server=True,
    ),
    "a claim that the pod has not": Fault(
        engine(resources={"claims": [{"name": "gpu"}]}), "NotInPod",
        f"{BOX}.resources.claims[0].name",
        {"spec": {"resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": "one"}],
                  **engine(resources={"claims": [{"name": "gpu"}]})["spec"]}}, server=True,
    ),
    "a volume twice": Fault(
        {"spec": {"volumes": [*DATA["volumes"], SECRET]}}, "Duplicate", "spec.volumes[1].name",
        {"spec": {"volumes": [*DATA["volumes"], {**SECRET, "name": "more"}]}}, server=True,
    ),
    "a variable twice": Fault(
        engine(env=[{"name": "A", "value": "1"}, {"name": "A", "value": "2"}]), "Duplicate",
        f"{BOX}.env[1].name",
        engine(env=[{"name": "A", "value": "1"}, {"name": "B", "value": "2"}]), server=True,
    ),
    "two containers of one name": Fault(
        engine(sidecar(), sidecar()), "Duplicate", "spec.containers[2].name",
        engine(sidecar(), {**sidecar(), "name": "other"}), server=True,
    ),
    "an init container with our name": Fault(
        engine(init=({**sidecar(), "name": "engine"},)), "Duplicate", "spec.initContainers[0].name",
        engine(init=(sidecar(),)), server=True,
    ),
    "a folder twice": Fault(
        with_data(engine(volumeMounts=[*mount("data"), *mount("shm")])), "Duplicate",
        f"{BOX}.volumeMounts[1].mountPath",
        with_data(engine(volumeMounts=[*mount("data"), *mount("shm", "/data/shm")])), server=True,
    ),
    "our folder twice": Fault(
        with_data(engine(volumeMounts=mount("data", "/dev/shm/"))), "Duplicate",
        f"{BOX}.volumeMounts[0].mountPath",
        with_data(engine(volumeMounts=mount("data", "/dev/shm"))),
    ),
    "another name for our port": Fault(
        engine(ports=[{"name": "admin", "containerPort": 5590}]), "ConflictingSettings",
        f"{BOX}.ports[0].name", engine(ports=[{"name": "launcher", "containerPort": 5590}]),
    ),
    "our name for another port": Fault(
        engine(ports=[{"name": "http", "containerPort": 9}]), "Duplicate", f"{BOX}.ports[0].name",
        engine(ports=[{"name": "more", "containerPort": 9000}]), server=True,
    ),
    "a port twice": Fault(
        engine(sidecar(ports=[{"containerPort": 53}, {"containerPort": 53, "protocol": "TCP"}])),
        "Duplicate", f"{BESIDE}.ports[1].containerPort",
        engine(sidecar(ports=[{"containerPort": 53}, {"containerPort": 53, "protocol": "UDP"}])),
        server=True,
    ),
    "a port with a long name": Fault(
        engine(sidecar(ports=[{"containerPort": 53, "name": "prometheus-metrics"}])), "BadFormat",
        f"{BESIDE}.ports[0].name",
        engine(sidecar(ports=[{"containerPort": 53, "name": "prometheus-metr"}])), server=True,
    ),
    "a port that there is not": Fault(
        engine(sidecar(ports=[{"containerPort": 80000}])), "OutOfRange",
        f"{BESIDE}.ports[0].containerPort", engine(sidecar(ports=[{"containerPort": 65535}])),
        server=True,
    ),
    "a sidecar on our port": Fault(
        engine(sidecar(ports=[{"containerPort": 8000}])), "Duplicate",
        f"{BESIDE}.ports[0].containerPort",
        engine(sidecar(ports=[{"containerPort": 8000, "protocol": "UDP"}])),
    ),
    "a restarted init container on our port": Fault(
        engine(init=(sidecar(restartPolicy="Always", ports=[{"containerPort": 5600}]),)),
        "Duplicate", "spec.initContainers[0].ports[0].containerPort",
        engine(init=(sidecar(ports=[{"containerPort": 5600}]),)),
    ),
    "two sidecars on one port": Fault(
        engine(sidecar(ports=[{"containerPort": 9}]),
               {**sidecar(ports=[{"containerPort": 9}]), "name": "other"}),
        "Duplicate", "spec.containers[2].ports[0].containerPort",
        engine(sidecar(ports=[{"containerPort": 9}]),
               {**sidecar(ports=[{"containerPort": 10}]), "name": "other"}), warned=True,
    ),
    "two sidecars on one port of the node": Fault(
        on_host(engine(sidecar(ports=[{"containerPort": 9}]),
                       {**sidecar(ports=[{"containerPort": 9}]), "name": "other"})),
        "Duplicate", "spec.containers[2].ports[0].containerPort",
        on_host(engine(sidecar(ports=[{"containerPort": 9}]),
                       {**sidecar(ports=[{"containerPort": 10}]), "name": "other"})),
    ),
    "one hostPort of two containers": Fault(
        engine(sidecar(ports=[{"containerPort": 1, "hostPort": 9}]),
               ports=[{"containerPort": 8000, "hostPort": 9}]),
        "Duplicate", f"{BESIDE}.ports[0].hostPort",
        engine(sidecar(ports=[{"containerPort": 1, "hostPort": 9}]),
               ports=[{"containerPort": 8000, "hostPort": 10}]), server=True,
    ),
    "another hostPort with hostNetwork": Fault(
        on_host(engine(sidecar(ports=[{"containerPort": 1, "hostPort": 9}]))),
        "ConflictingSettings", f"{BESIDE}.ports[0].hostPort",
        on_host(engine(sidecar(ports=[{"containerPort": 9, "hostPort": 9}]))), server=True,
    ),
    "our port's name in a sidecar": Fault(
        engine(sidecar(ports=[{"containerPort": 9102, "name": "metrics"}])), "Duplicate",
        f"{BESIDE}.ports[0].name",
        engine(sidecar(ports=[{"containerPort": 9102, "name": "http-metrics"}])), warned=True,
    ),
    "a probe of two kinds": Fault(
        engine(startupProbe={"httpGet": {"port": 8000}, "tcpSocket": {"port": 8000}}), "ExactlyOne",
        f"{BOX}.startupProbe", engine(startupProbe={"tcpSocket": {"port": 8000}}), server=True,
    ),
    "a probe that asks nothing": Fault(
        engine(livenessProbe={"periodSeconds": 5}), "ExactlyOne", f"{BOX}.livenessProbe",
        engine(startupProbe={"periodSeconds": 5}), server=True,
    ),
    "a sidecar's probe that asks nothing": Fault(
        engine(sidecar(startupProbe={"periodSeconds": 5})), "ExactlyOne", f"{BESIDE}.startupProbe",
        engine(sidecar(startupProbe={"exec": {"command": ["true"]}})), server=True,
    ),
    "a hook that does nothing": Fault(
        engine(lifecycle={"preStop": {}}), "ExactlyOne", f"{BOX}.lifecycle.preStop",
        engine(lifecycle={"preStop": {"sleep": {"seconds": 1}}}), server=True,
    ),
    "a probe without a port": Fault(
        engine(startupProbe={"httpGet": {"path": "/health"}}), "Required",
        f"{BOX}.startupProbe.httpGet.port", engine(startupProbe=get(8000)), server=True,
    ),
    "a probe without a command": Fault(
        engine(sidecar(livenessProbe={"exec": {"command": []}})), "Required",
        f"{BESIDE}.livenessProbe.exec.command",
        engine(sidecar(livenessProbe={"exec": {"command": ["a"]}})), server=True,
    ),
    "a port in quotes": Fault(
        engine(startupProbe=get("8000")), "NotInPod", f"{BOX}.startupProbe.httpGet.port",
        engine(startupProbe=get("http")), server=True,
    ),
    "a port of another container": Fault(
        engine(sidecar(readinessProbe=get("launcher"))), "NotInPod",
        f"{BESIDE}.readinessProbe.httpGet.port",
        engine(sidecar(readinessProbe=get("web"), ports=[{"name": "web", "containerPort": 80}])),
    ),
    "plain HTTP to the launcher": Fault(
        engine(startupProbe=get(5590, "/readyz")), "ProbeFails",
        f"{BOX}.startupProbe.httpGet.scheme",
        engine(startupProbe=get(5590, "/readyz", scheme="HTTPS")),
    ),
    "HTTPS to vLLM": Fault(
        engine(startupProbe=get(8000, scheme="HTTPS")), "ProbeFails",
        f"{BOX}.startupProbe.httpGet.scheme", engine(startupProbe=get(8000, scheme="HTTP")),
    ),
    "a path that the launcher keeps to itself": Fault(
        engine(livenessProbe=get("launcher", "/v1/links", scheme="HTTPS")), "ProbeFails",
        f"{BOX}.livenessProbe.httpGet.path",
        engine(livenessProbe=get("launcher", "/readyz", scheme="HTTPS")),
    ),
    "a port that nobody names": Fault(
        engine(startupProbe=get(8080)), "ProbeFails", f"{BOX}.startupProbe.httpGet.port",
        engine(sidecar(ports=[{"containerPort": 8080}]), startupProbe=get(8080)), warned=True,
    ),
    "another readiness": Fault(
        engine(readinessProbe=get(8000)), "ReadinessReplaced", f"{BOX}.readinessProbe",
        engine(readinessProbe={"timeoutSeconds": 9}), warned=True,
    ),
    "the name of our volume": Fault(
        {"spec": {"volumes": [{"name": "connector", "emptyDir": {}}]}}, "ConflictingSettings",
        "spec.volumes[0].name", {"spec": {"volumes": [{"name": "shm", "emptyDir": {}}]}},
    ),
    "another volume at our folder": Fault(
        with_data(engine(volumeMounts=mount("data", "/pdcluster-keys"))), "ConflictingSettings",
        f"{BOX}.volumeMounts[0].mountPath",
        with_data(engine(volumeMounts=mount("data", "/dev/shm"))),
    ),
    "no image": Fault(
        engine(image=None), "Required", f"{BOX}.image",
        {"spec": {**engine(env=None, volumeMounts=None, ports=None)["spec"], "volumes": None}},
    ),
    "a resource without a domain": Fault(
        engine(sidecar(resources={"limits": {"nic": 1}})), "BadFormat",
        f"{BESIDE}.resources.limits.nic",
        engine(sidecar(resources={"limits": {"example.com/nic": 1}})), server=True,
    ),
    "a part of a device": Fault(
        engine(sidecar(resources={"limits": {"example.com/nic": "500m"}})), "BadFormat",
        f"{BESIDE}.resources.limits.example.com/nic",
        engine(sidecar(resources={"limits": {"example.com/nic": 1, "cpu": "500m"}})), server=True,
    ),
    "a variable of two sources": Fault(
        engine(env=[{"name": "A", "valueFrom": {**FROM_FIELD, "secretKeyRef": KEY}}]), "ExactlyOne",
        f"{BOX}.env[0].valueFrom", engine(env=[{"name": "A", "valueFrom": FROM_FIELD}]),
        server=True,
    ),
    "a variable of an empty source": Fault(
        engine(env=[{"name": "A", "valueFrom": {}}]), "ExactlyOne", f"{BOX}.env[0].valueFrom",
        engine(env=[{"name": "A"}]), server=True,
    ),
    "a variable with a value and a source": Fault(
        engine(env=[{"name": "A", "value": "1", "valueFrom": FROM_FIELD}]), "ExactlyOne",
        f"{BOX}.env[0]", engine(env=[{"name": "A", "value": "", "valueFrom": FROM_FIELD}]),
        server=True,
    ),
    "a volume of two kinds": Fault(
        {"spec": {"volumes": [{**SECRET, "emptyDir": {}}]}}, "ExactlyOne", "spec.volumes[0]",
        {"spec": {"volumes": [SECRET]}}, server=True,
    ),
    "an init container with our name alone": Fault(
        {"spec": {"initContainers": [{**sidecar(), "name": "engine"}]}}, "Duplicate",
        "spec.initContainers[0].name", {"spec": {"initContainers": [sidecar()]}}, server=True,
    ),
    "a port 0": Fault(
        engine(sidecar(ports=[{"containerPort": 0}])), "OutOfRange",
        f"{BESIDE}.ports[0].containerPort",
        engine(sidecar(ports=[{"containerPort": 53, "hostPort": 0}]),
               {**sidecar(ports=[{"containerPort": 54, "hostPort": 0}]), "name": "other"}),
        server=True,
    ),
    "no readiness": Fault(
        engine(readinessProbe=None), "ReadinessReplaced", f"{BOX}.readinessProbe",
        engine(sidecar(readinessProbe=get(1))), warned=True,
    ),
}  # fmt: skip
