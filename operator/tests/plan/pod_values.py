"""Values that Kubernetes refuses in a pod template, beside those that it takes.

Tests give each to our rules, and to a real API server.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pod_faults import BESIDE, BOX, engine, get, mount, sidecar, with_data

from pdcluster_operator.api.spec import pod_templates


def pod(**fields: Any) -> dict[str, Any]:
    return {"spec": fields}


def volume(**source: Any) -> Any:
    return pod(volumes=[{"name": "data", **source}])


def claim(**fields: Any) -> Any:
    spec = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}
    return volume(ephemeral={"volumeClaimTemplate": {"spec": {**spec, **fields}}})


def variable(**source: Any) -> Any:
    return engine(sidecar(env=[{"name": "A", "valueFrom": source}]))


def on_nodes(**requirement: Any) -> dict[str, Any]:
    terms = [{"matchExpressions": [{"key": "zone", **requirement}]}]
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
    return pod(affinity={"nodeAffinity": required})


def beside(**requirement: Any) -> dict[str, Any]:
    selector = {"matchExpressions": [{"key": "app", **requirement}]}
    term = {"topologyKey": "zone", "labelSelector": selector}
    return pod(affinity={"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}})


def spread(**fields: Any) -> dict[str, Any]:
    constraint = {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}
    return pod(topologySpreadConstraints=[{**constraint, **fields}])


def secured(**fields: Any) -> Any:
    return engine(sidecar(securityContext=fields))


def mounted(**fields: Any) -> Any:
    one = {"name": "data", "mountPath": "/data", "readOnly": True, **fields}
    privileged = {"securityContext": {"privileged": True}}
    return with_data(engine(sidecar(volumeMounts=[one], **privileged)))


def restarted(**rule: Any) -> Any:
    codes = {"exitCodes": {"operator": "In", "values": [1]}}
    rules = [{"action": "Restart", **codes, **rule}]
    return engine(sidecar(restartPolicy="Never", restartPolicyRules=rules))


def probed(**fields: Any) -> Any:
    return engine(sidecar(livenessProbe={"tcpSocket": {"port": 1}, **fields}))


def local(kind: str) -> dict[str, Any]:
    profile = {"localhostProfile": "one.json"} if kind == "Localhost" else {}
    return {"type": kind, **profile}


def chosen(operator: str) -> dict[str, Any]:
    values = {"In": ["1"], "NotIn": ["1"], "Gt": ["1"], "Lt": ["1"]}
    return {"operator": operator, "values": values.get(operator, [])}


# (Type, field) -> a template with a word there.
CHOICES: dict[tuple[str, str], Callable[[str], dict[str, Any]]] = {
    ("V1AppArmorProfile", "type"): lambda word: secured(appArmorProfile=local(word)),
    ("V1AzureDiskVolumeSource", "cachingMode"): lambda word: volume(
        azureDisk={"diskName": "a", "diskURI": "https://a", "kind": "Shared", "cachingMode": word}),
    ("V1AzureDiskVolumeSource", "kind"): lambda word: volume(
        azureDisk={"diskName": "a", "kind": word,
                   "diskURI": "/subscriptions/a" if word == "Managed" else "https://a"}),
    ("V1Container", "imagePullPolicy"): lambda word: engine(sidecar(imagePullPolicy=word)),
    ("V1Container", "restartPolicy"): lambda word: engine(sidecar(restartPolicy=word)),
    ("V1Container", "terminationMessagePolicy"): lambda word: engine(terminationMessagePolicy=word),
    ("V1ContainerPort", "protocol"): lambda word: engine(
        sidecar(ports=[{"containerPort": 53, "protocol": word}])),
    ("V1ContainerResizePolicy", "resourceName"): lambda word: engine(
        resizePolicy=[{"resourceName": word, "restartPolicy": "NotRequired"}]),
    ("V1ContainerResizePolicy", "restartPolicy"): lambda word: engine(
        resizePolicy=[{"resourceName": "cpu", "restartPolicy": word}]),
    ("V1ContainerRestartRule", "action"): lambda word: restarted(action=word),
    ("V1ContainerRestartRuleOnExitCodes", "operator"): lambda word: restarted(
        exitCodes={"operator": word, "values": [1]}),
    ("V1EmptyDirVolumeSource", "medium"): lambda word: volume(emptyDir={"medium": word}),
    ("V1GRPCAction", "mode"): lambda word: engine(
        sidecar(startupProbe={"grpc": {"port": 1, "mode": word}})),
    ("V1HTTPGetAction", "protocol"): lambda word: engine(
        sidecar(startupProbe=get(1, protocol=word))),
    ("V1HTTPGetAction", "scheme"): lambda word: engine(sidecar(startupProbe=get(1, scheme=word))),
    ("V1HostPathVolumeSource", "type"): lambda word: volume(hostPath={"path": "/d", "type": word}),
    ("V1ImageVolumeSource", "pullPolicy"): lambda word: volume(
        image={"reference": "a/b:v1", "pullPolicy": word}),
    ("V1LabelSelectorRequirement", "operator"): lambda word: beside(**chosen(word)),
    ("V1NodeSelectorRequirement", "operator"): lambda word: on_nodes(**chosen(word)),
    ("V1ObjectFieldSelector", "fieldPath"): lambda word: variable(fieldRef={"fieldPath": word}),
    ("V1PersistentVolumeClaimSpec", "accessModes"): lambda word: claim(accessModes=[word]),
    ("V1PersistentVolumeClaimSpec", "volumeMode"): lambda word: claim(volumeMode=word),
    ("V1PodSecurityContext", "fsGroupChangePolicy"): lambda word: pod(
        securityContext={"fsGroupChangePolicy": word}),
    ("V1PodSecurityContext", "seLinuxChangePolicy"): lambda word: pod(
        securityContext={"seLinuxChangePolicy": word}),
    ("V1PodSecurityContext", "supplementalGroupsPolicy"): lambda word: pod(
        securityContext={"supplementalGroupsPolicy": word}),
    ("V1PodSpec", "dnsPolicy"): lambda word: pod(
        dnsPolicy=word, dnsConfig={"nameservers": ["10.0.0.10"]}),
    ("V1PodSpec", "preemptionPolicy"): lambda word: pod(preemptionPolicy=word),
    ("V1ResourceFieldSelector", "resource"): lambda word: variable(
        resourceFieldRef={"resource": word}),
    ("V1SeccompProfile", "type"): lambda word: secured(seccompProfile=local(word)),
    ("V1SecurityContext", "procMount"): lambda word: pod(
        hostUsers=False, **secured(procMount=word)["spec"]),
    ("V1Toleration", "effect"): lambda word: pod(tolerations=[{"key": "a", "effect": word}]),
    ("V1Toleration", "operator"): lambda word: pod(
        tolerations=[{"key": "a", "operator": word, "value": "" if word == "Exists" else "1"}]),
    ("V1TopologySpreadConstraint", "nodeAffinityPolicy"): lambda word: spread(
        nodeAffinityPolicy=word),
    ("V1TopologySpreadConstraint", "nodeTaintsPolicy"): lambda word: spread(nodeTaintsPolicy=word),
    ("V1TopologySpreadConstraint", "whenUnsatisfiable"): lambda word: spread(
        whenUnsatisfiable=word),
    ("V1VolumeMount", "mountPropagation"): lambda word: mounted(mountPropagation=word),
    ("V1VolumeMount", "recursiveReadOnly"): lambda word: mounted(recursiveReadOnly=word),
}  # fmt: skip
ONLY_OURS = {
    ("V1EmptyDirVolumeSource", "medium"), ("V1GRPCAction", "mode"),
    ("V1HTTPGetAction", "protocol"),
}  # fmt: skip
"""The API server stores any word, and the kubelet fails later; or it drops a field of a gate."""
GATED = {
    ("V1ContainerRestartRule", "RestartAllContainers"), ("V1Toleration", "Gt"),
    ("V1Toleration", "Lt"),
}  # fmt: skip
"""What a server takes only with a feature gate."""
ENDS = {"metadata.labels*": "['a']", "metadata.annotations*": "['a']"}


def words_of(kind: str, field: str) -> list[str]:
    """Every word of a list; of one that others begin with, one of those."""
    words = pod_templates.LIMITS[kind, field].split("|")
    return [word[:-1] + ENDS.get(word, "2Mi") if word.endswith("*") else word for word in words]


def wrong_word(kind: str, field: str) -> str:
    """The first word with its case changed and a letter more."""
    return f"{words_of(kind, field)[0].swapcase()}x"


REQUIRED = "spec.affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution"
VALUES: dict[str, tuple[dict[str, Any], str, str, dict[str, Any]]] = {
    "a container's name": (
        engine({**sidecar(), "name": "side_car"}), f"{BESIDE}.name", "BadFormat", engine(sidecar()),
    ),
    "a volume's name": (
        pod(volumes=[{"name": "Data"}]), "spec.volumes[0].name", "BadFormat",
        pod(volumes=[{"name": "data-1"}]),
    ),
    "a long name": (
        pod(volumes=[{"name": "a" * 64}]), "spec.volumes[0].name", "BadFormat",
        pod(volumes=[{"name": "a" * 63}]),
    ),
    "a variable's name": (
        engine(env=[{"name": "A=B"}]), f"{BOX}.env[0].name", "BadFormat",
        engine(env=[{"name": "a.b c"}]),
    ),
    "a probe's port": (
        probed(tcpSocket={"port": 70000}), f"{BESIDE}.livenessProbe.tcpSocket.port", "OutOfRange",
        probed(tcpSocket={"port": 65535}),
    ),
    "a hostPort": (
        engine(sidecar(ports=[{"containerPort": 1, "hostPort": 65536}])),
        f"{BESIDE}.ports[0].hostPort", "OutOfRange",
        engine(sidecar(ports=[{"containerPort": 1, "hostPort": 65535}])),
    ),
    "negative seconds": (
        probed(periodSeconds=-1), f"{BESIDE}.livenessProbe.periodSeconds", "OutOfRange",
        probed(periodSeconds=0),
    ),
    "two successes": (
        probed(successThreshold=2), f"{BESIDE}.livenessProbe.successThreshold", "OutOfRange",
        engine(sidecar(readinessProbe={"tcpSocket": {"port": 1}, "successThreshold": 2})),
    ),
    "a grace of readiness": (
        engine(sidecar(readinessProbe={
            "tcpSocket": {"port": 1}, "terminationGracePeriodSeconds": 9})),
        f"{BESIDE}.readinessProbe.terminationGracePeriodSeconds", "NotAllowed",
        probed(terminationGracePeriodSeconds=9),
    ),
    "a mode in decimal": (
        volume(secret={"secretName": "s", "defaultMode": 644}),
        "spec.volumes[0].secret.defaultMode", "OutOfRange",
        volume(secret={"secretName": "s", "defaultMode": 0o644}),
    ),
    "a path out of its folder": (
        with_data(engine(volumeMounts=[{**mount("data")[0], "subPath": "../a"}])),
        f"{BOX}.volumeMounts[0].subPath", "BadFormat",
        with_data(engine(volumeMounts=[{**mount("data")[0], "subPath": "a..b/c"}])),
    ),
    "a path of the node": (
        volume(hostPath={"path": "/a/../b"}), "spec.volumes[0].hostPath.path", "BadFormat",
        volume(hostPath={"path": "/a/..b"}),
    ),
    "a user below 0": (
        secured(runAsUser=-1), f"{BESIDE}.securityContext.runAsUser", "OutOfRange",
        secured(runAsUser=0),
    ),
    "a weight of 0": (
        pod(affinity={"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [
            {"weight": 0, "preference": {}}]}}),
        "spec.affinity.nodeAffinity.preferredDuringSchedulingIgnoredDuringExecution[0].weight",
        "OutOfRange",
        pod(affinity={"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [
            {"weight": 1, "preference": {}}]}}),
    ),
    "no skew": (
        spread(maxSkew=0), "spec.topologySpreadConstraints[0].maxSkew", "OutOfRange",
        spread(maxSkew=2),
    ),
    "domains of a wish": (
        spread(minDomains=2, whenUnsatisfiable="ScheduleAnyway"),
        "spec.topologySpreadConstraints[0].minDomains", "ConflictingSettings", spread(minDomains=2),
    ),
    "a topology without a key": (
        spread(topologyKey=""), "spec.topologySpreadConstraints[0].topologyKey", "Required",
        spread(topologyKey="zone"),
    ),
    "a label of a node": (
        pod(nodeSelector={"gpu": "H100 SXM"}), "spec.nodeSelector.gpu", "BadFormat",
        pod(nodeSelector={"gpu": "H100-SXM"}),
    ),
    "a key of a label": (
        pod(nodeSelector={"a/b/c": "x"}), "spec.nodeSelector.a/b/c", "BadFormat",
        pod(nodeSelector={"b.example/c": "x"}),
    ),
    "a label of the pod": (
        {"metadata": {"labels": {"team": "a b"}}}, "metadata.labels.team", "BadFormat",
        {"metadata": {"labels": {"team": ""}, "annotations": {"Team": "a b"}}},
    ),
    "an annotation's key": (
        {"metadata": {"annotations": {"a b": ""}}}, "metadata.annotations.a b", "BadFormat",
        {"metadata": {"annotations": {"a.b/C": ""}}},
    ),
    "a toleration without a key": (
        pod(tolerations=[{"effect": "NoSchedule"}]), "spec.tolerations[0].operator",
        "ConflictingSettings", pod(tolerations=[{"operator": "Exists"}]),
    ),
    "a toleration of any value": (
        pod(tolerations=[{"key": "a", "operator": "Exists", "value": "b"}]),
        "spec.tolerations[0].value", "ConflictingSettings",
        pod(tolerations=[{"key": "a", "operator": "Equal", "value": "b"}]),
    ),
    "seconds of another effect": (
        pod(tolerations=[{"key": "a", "effect": "NoSchedule", "tolerationSeconds": 1}]),
        "spec.tolerations[0].tolerationSeconds", "ConflictingSettings",
        pod(tolerations=[{"key": "a", "effect": "NoExecute", "tolerationSeconds": 1}]),
    ),
    "no values": (
        on_nodes(operator="In"), f"{REQUIRED}.nodeSelectorTerms[0].matchExpressions[0].values",
        "Required", on_nodes(operator="Exists"),
    ),
    "values of what exists": (
        on_nodes(operator="Exists", values=["a"]),
        f"{REQUIRED}.nodeSelectorTerms[0].matchExpressions[0].values", "ConflictingSettings",
        on_nodes(operator="In", values=["a"]),
    ),
    "two numbers": (
        on_nodes(operator="Gt", values=["1", "2"]),
        f"{REQUIRED}.nodeSelectorTerms[0].matchExpressions[0].values", "ConflictingSettings",
        on_nodes(operator="Gt", values=["1"]),
    ),
    "no profile": (
        secured(seccompProfile={"type": "Localhost"}),
        f"{BESIDE}.securityContext.seccompProfile.localhostProfile", "Required",
        secured(seccompProfile=local("Localhost")),
    ),
    "no name server": (
        pod(dnsPolicy="None"), "spec.dnsPolicy", "Required", pod(dnsPolicy="Default"),
    ),
    "no IP address": (
        pod(hostAliases=[{"ip": "store", "hostnames": ["store"]}]), "spec.hostAliases[0].ip",
        "BadFormat", pod(hostAliases=[{"ip": "fd00::1", "hostnames": ["store"]}]),
    ),
    "a Secret without its name": (
        volume(secret={}), "spec.volumes[0].secret.secretName", "Required",
        volume(secret={"secretName": "s"}),
    ),
    "a key without its Secret": (
        variable(secretKeyRef={"key": "a"}), f"{BESIDE}.env[0].valueFrom.secretKeyRef.name",
        "Required", variable(secretKeyRef={"name": "s", "key": "a"}),
    ),
    "two sources of variables": (
        engine(envFrom=[{"secretRef": {"name": "a"}, "configMapRef": {"name": "a"}}]),
        f"{BOX}.envFrom[0]", "ExactlyOne", engine(envFrom=[{"secretRef": {"name": "a"}}]),
    ),
    "an NFS path": (
        volume(nfs={"server": "a", "path": "models"}), "spec.volumes[0].nfs.path", "BadFormat",
        volume(nfs={"server": "a", "path": "/models"}),
    ),
    "a claim without a size": (
        volume(ephemeral={"volumeClaimTemplate": {"spec": {"accessModes": ["ReadWriteOnce"]}}}),
        "spec.volumes[0].ephemeral.volumeClaimTemplate.spec.resources", "Required", claim(),
    ),
    "mounts that reach the node": (
        with_data(engine(volumeMounts=[
            {**mount("data")[0], "mountPropagation": "Bidirectional"}])),
        f"{BOX}.volumeMounts", "ConflictingSettings", mounted(mountPropagation="Bidirectional"),
    ),
    "a mount that is not read-only": (
        mounted(readOnly=False, recursiveReadOnly="Enabled"),
        f"{BESIDE}.volumeMounts[0].recursiveReadOnly", "ConflictingSettings",
        mounted(recursiveReadOnly="Enabled"),
    ),
    "a sidecar's mount without a volume": (
        engine(sidecar(volumeMounts=[{"mountPath": "/a"}])), f"{BESIDE}.volumeMounts[0].name",
        "Required", engine(sidecar(volumeMounts=mount("model"))),
    ),
    "Windows": (
        pod(os={"name": "windows"}), "spec.os.name", "NotAllowed", pod(os={"name": "linux"}),
    ),
    "a probe that waits": (
        engine(init=(sidecar(startupProbe={"tcpSocket": {"port": 1}}),)),
        "spec.initContainers[0].startupProbe", "NotAllowed",
        engine(init=(sidecar(startupProbe={"tcpSocket": {"port": 1}}, restartPolicy="Always"),)),
    ),
}  # fmt: skip
"""Template, path, rule, and the neighbour that is accepted. An API server agrees with both."""
