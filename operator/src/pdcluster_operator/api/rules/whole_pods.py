"""Rules of a template merged over the operator's pod: its ports, its mounts and its probes.

Each part may be right by itself. What another part of the pod has decides whether it works.
"""

import itertools
import posixpath
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pdcluster_operator.api import object_names
from pdcluster_operator.api.findings import FieldError, Rule, did_you_mean, shown
from pdcluster_operator.api.rules.pod_template import is_readable, sidecar_of
from pdcluster_operator.api.spec import engine_types, pod_templates, resolve
from pdcluster_operator.api.spec.pod_templates import (
    HANDLERS,
    HOOKS,
    PROBES,
    TCP,
    as_list,
    as_mapping,
)
from pdcluster_operator.api.spec.router_types import RouterType
from pdcluster_operator.api.spec.types import Cluster, Role, TlsMode

Container = tuple[str, Mapping[str, Any]]
"""A container of a template and its path in the spec."""
# What a handler asks. Without a command it is not complete.
_ASKS = {"httpGet": "port", "tcpSocket": "port", "grpc": "port", "exec": "command"}
# What the launcher and the router's gate answer to anybody.
READY_PATH = "/readyz"
# What engines answer without the API key.
OPEN_PATHS = frozenset({"/health", "/metrics"})


@dataclass(frozen=True, slots=True)
class Outline:
    """The operator's container of one template, as the builders of ``plan`` make it.

    Attributes:
        ports: numbers by name, all of them TCP.
        mounts: volumes by the folder that they are mounted at. A pod has no other volumes.
        handlers: the probes and hooks that the container has.
        unnamed: ports that are in use, too.
    """

    ports: Mapping[str, int]
    mounts: Mapping[str, str]
    handlers: frozenset[str]
    unnamed: frozenset[int] = frozenset()


def outline(cluster: Cluster, role: Role | None) -> Outline:
    """Return the outline of a role's engines; of routers for None."""
    connector = {"/pdcluster": "connector"}
    if role is None:
        gated = cluster.spec.router.api_key_secret_ref is not None
        ports = object_names.router_ports(gated=gated)
        return Outline(ports, connector if gated else {}, frozenset({"readinessProbe", "preStop"}))
    source = resolve.resolve_engine(cluster, role).connector
    mounts = connector if source is engine_types.ConnectorSource.BUNDLED else {}
    mounts |= dict(filter(None, [resolve.weights_mount(cluster.spec.model.source)]))
    mounts |= {"/pdcluster-keys": "ticket-key", "/dev/shm": "shm"}  # noqa: S108 (of the pod's own)
    if cluster.spec.transfer.tls is TlsMode.ENABLED:
        mounts[pod_templates.CERTIFICATE_FOLDER] = "certificate"
    parallel = cluster.spec.role(role).parallelism
    unnamed = {object_names.MASTER_PORT} if parallel.nodes > 1 else set[int]()
    if role is Role.DECODE and cluster.spec.router.type is RouterType.LLMD:
        unnamed.add(object_names.BEHIND_SIDECAR_PORT)
    handlers = frozenset({"startupProbe", "readinessProbe"})
    ports = object_names.engine_ports(parallel.data)
    return Outline(ports, mounts, handlers, frozenset(unnamed))


NOTHING = Outline({}, {}, frozenset())


def pod_errors(cluster: Cluster) -> Iterator[FieldError]:
    """Yield what the API server refuses in the whole pod, and what cannot work in it."""
    for pod in _pods(cluster):
        yield from _same_names(pod)
        yield from _missing(pod)
        yield from _replaced_volumes(pod)
        for place, one in pod.containers:
            own = pod.outline if pod.is_ours(place, one) else NOTHING
            yield from _mounts(place, one, own)
            yield from _ports(place, one, own)
            yield from _handlers(place, one, own)
            yield from _restarts(pod, place, one)
            if own is pod.outline:
                yield from _own_probes(cluster, pod.role, place, one)
        yield from _taken(pod, refused=True)


def pod_warnings(cluster: Cluster) -> Iterator[FieldError]:
    """Yield ports that two containers name, and what the operator does not count on.

    That is another readiness, and other weights.
    """
    for pod in _pods(cluster):
        yield from _taken(pod, refused=False)
        for place, volume in pod_templates.mappings(pod.template, "volumes"):
            if (name := volume.get("name")) == WEIGHTS and name in pod.outline.mounts.values():
                message = "replaces the operator's volume of the weights: no rule sees its files"
                remedy = "Say it as spec.model.source, or give both roles equal files."
                yield _wrong(f"{pod.path}.{place}.name", name, Rule.WEIGHTS_UNSEEN, message, remedy)
        for place, one in pod.containers:
            if pod.is_ours(place, one):
                yield from _replaced(pod, place, one)


def _replaced(pod: "_Pod", place: str, container: Mapping[str, Any]) -> Iterator[FieldError]:
    """Yield probes of our own container that may not tell what the operator counts on."""
    ports = [item for at, one in pod.containers for item in _items(at, one, "ports")]
    known = {port.get("containerPort") for _, port in ports}
    known |= {*pod.outline.ports.values(), *pod.outline.unnamed}
    for name in PROBES:
        probe = container.get(name, {})
        if name == "readinessProbe" and (probe is None or _asked(probe)):
            message = f"replaces the operator's own: a pod may then be ready before its {pod.ours}"
            remedy = "Leave it out, or write only its seconds and thresholds."
            yield _wrong(f"{place}.{name}", shown(probe), Rule.READINESS_REPLACED, message, remedy)
        for kind in _asked(probe):
            port = probe[kind].get("port")
            if isinstance(port, int) and port not in known and not probe[kind].get("host"):
                message = "is a port that no container of the pod names"
                remedy = f"Ask one of these: {', '.join(pod.outline.ports)}."
                yield _wrong(f"{place}.{name}.{kind}.port", port, Rule.PROBE_FAILS, message, remedy)


@dataclass(frozen=True, slots=True)
class _Pod:
    """A user's template with what the operator's pod has; ``role`` is None for routers."""

    path: str
    template: Mapping[str, Any]
    ours: str
    sidecar: str
    role: Role | None
    outline: Outline
    containers: tuple[Container, ...]

    def is_ours(self, place: str, container: Mapping[str, Any]) -> bool:
        return container.get("name") == self.ours and not _is_init(place)

    def is_sidecar(self, place: str, container: Mapping[str, Any]) -> bool:
        return _is_init(place) and container.get("name") == self.sidecar != ""


def _pods(cluster: Cluster) -> Iterator[_Pod]:
    """Yield each template whose values have the types of Kubernetes."""
    for path, template, ours in pod_templates.pod_templates(cluster):
        if not is_readable(path, template):
            continue
        role = Role(path.split(".")[1]) if ours == pod_templates.ENGINE_CONTAINER else None
        containers = [(f"{path}.{place}", one) for place, one in pod_templates.containers(template)]
        own = outline(cluster, role)
        sidecar = sidecar_of(cluster, path)
        yield _Pod(path, template, ours, sidecar, role, own, tuple(containers))


def _is_init(place: str) -> bool:
    return ".initContainers[" in place


def _items(path: str, container: Mapping[str, Any], field: str) -> Iterator[Container]:
    for number, item in enumerate(as_list(container.get(field))):
        if isinstance(item, Mapping):
            yield f"{path}.{field}[{number}]", item


def _same_names(pod: _Pod) -> Iterator[FieldError]:
    seen: dict[object, str] = {pod.ours: f"the container {pod.ours}"}
    for place, one in pod.containers:
        first = seen.setdefault(one.get("name"), place)
        if _is_init(first) is not _is_init(place) and one.get("image"):
            message, remedy = f"is the name of {first}, too", "Rename one of them."
            yield _wrong(f"{place}.name", one.get("name"), Rule.DUPLICATE, message, remedy)


def _missing(pod: _Pod) -> Iterator[FieldError]:
    """Yield what containers name and the pod does not have."""
    given = {
        field: {str(one.get("name")) for _, one in pod_templates.mappings(pod.template, field)}
        for field in ("volumes", "resourceClaims")
    }
    given["volumes"] |= set(pod.outline.mounts.values())
    for place, one in pod.containers:
        claims = _items(f"{place}.resources", as_mapping(one.get("resources")), "claims")
        mounted = (_items(place, one, "volumeMounts"), _items(place, one, "volumeDevices"))
        named = [("volumes", *item) for item in itertools.chain(*mounted)]
        for field, here, item in (*named, *(("resourceClaims", *item) for item in claims)):
            name = item.get("name")
            if name is not None and name not in given[field]:
                missing = f"Add it to {pod.path}.spec.{field}."
                remedy = did_you_mean(name, sorted(given[field])) or missing
                message = f"is not in {pod.path}.spec.{field}, nor is it the operator's own"
                yield _wrong(f"{here}.name", name, Rule.NOT_IN_POD, message, remedy)


OWN_MOUNT = "the operator's own mount"
REPLACEABLE = frozenset({"shm", "cache"})
"""The operator's volumes that hold nothing which an engine needs at its start."""
WEIGHTS = "model"
"""The operator's volume that a template may replace: a CSI driver mounts weights, for example."""


def _replaced_volumes(pod: _Pod) -> Iterator[FieldError]:
    """Yield volumes with the name of one of ours, which are taken instead of it."""
    for place, volume in pod_templates.mappings(pod.template, "volumes"):
        if (name := volume.get("name")) in {*pod.outline.mounts.values()} - REPLACEABLE - {WEIGHTS}:
            message = f"replaces the operator's volume, which the container {pod.ours} needs"
            where, remedy = f"{pod.path}.{place}.name", "Choose another name."
            yield _wrong(where, name, Rule.CONFLICTING_SETTINGS, message, remedy)


def _mounts(place: str, container: Mapping[str, Any], own: Outline) -> Iterator[FieldError]:
    """Yield folders that are mounted twice. A mount of exactly our folder replaces ours."""
    seen = dict.fromkeys(own.mounts.keys() - {pod_templates.CERTIFICATE_FOLDER}, OWN_MOUNT)
    for here, mount in _items(place, container, "volumeMounts"):
        written = mount.get("mountPath")
        if written is None:
            continue
        if mount.get("name") is None and written not in own.mounts:
            remedy = "Name a volume of the pod."
            yield _wrong(f"{here}.name", "", Rule.REQUIRED, "is missing", remedy)
        folder = posixpath.normpath(f"/{written}").replace("//", "/")
        if folder in seen and not (written in own.mounts and seen[folder] == OWN_MOUNT):
            message, remedy = f"is the folder of {seen[folder]}, too", "Mount one volume there."
            yield _wrong(f"{here}.mountPath", written, Rule.DUPLICATE, message, remedy)
        ours, name = own.mounts.get(written, "shm"), mount.get("name")
        part = ours != WEIGHTS and (mount.get("subPath") or mount.get("subPathExpr"))
        # CertificateHidden reports mounts over the certificate.
        if ours not in {*REPLACEABLE, "certificate"} and (part or name not in (None, ours)):
            message = f"replaces the operator's mount of its volume {ours}, which is needed there"
            remedy = "Mount it at another folder."
            yield _wrong(f"{here}.mountPath", written, Rule.CONFLICTING_SETTINGS, message, remedy)
        seen[folder] = here


def _ports(place: str, container: Mapping[str, Any], own: Outline) -> Iterator[FieldError]:
    """Yield ports of one container that Kubernetes refuses, and new names of ours."""
    owners = {number: name for name, number in own.ports.items()}
    names: dict[str, object] = dict(own.ports)
    for here, port in _items(place, container, "ports"):
        number, name = port.get("containerPort"), port.get("name")
        if name is None:
            continue
        if number in owners and _protocol(port) == TCP and name != owners[number]:
            message = (
                f"renames the operator's port {owners[number]}, which probes and Services name"
            )
            remedy = f"Write name: {owners[number]}, or leave the name out."
            yield _wrong(f"{here}.name", name, Rule.CONFLICTING_SETTINGS, message, remedy)
        elif names.setdefault(name, number) != number:
            message = f"is the name of port {names[name]} of this container, too"
            yield _wrong(f"{here}.name", name, Rule.DUPLICATE, message, "Choose another name.")


def _taken(pod: _Pod, *, refused: bool) -> Iterator[FieldError]:
    """Yield ports that containers which run side by side have in common.

    They share one network. A port of the operator's is in use in any case. On the node's network
    the API server refuses pods in which a port comes twice.
    """
    on_host = pod_templates.pod_spec(pod.template).get("hostNetwork") is True
    owner = f"the container {pod.ours}"
    in_use = {*pod.outline.ports.values(), *pod.outline.unnamed}
    numbers: dict[object, str] = {(number, TCP): owner for number in in_use}
    hosts: dict[tuple[object, ...], str] = {}
    for place, one in pod.containers:
        if _is_init(place) and one.get("restartPolicy") != "Always":
            continue
        own = pod.is_ours(place, one)
        for here, port in _items(place, one, "ports"):
            number, name = port.get("containerPort"), port.get("name")
            first = numbers.setdefault((number, _protocol(port)), place)
            same = first == place or (own and first == owner)
            if not same and (on_host or first == owner) is refused:
                message = f"is a port of {first}, too, and both share one network"
                remedy = "Let one of them listen on another port."
                yield _wrong(f"{here}.containerPort", number, Rule.DUPLICATE, message, remedy)
            if not own and not refused and name in pod.outline.ports:
                message = f"is a port's name of {owner}, too: Services and PodMonitors find both"
                yield _wrong(f"{here}.name", name, Rule.DUPLICATE, message, "Choose another name.")
            if not (host := port.get("hostPort")) or not refused:
                continue
            before = hosts.setdefault((host, _protocol(port), port.get("hostIP")), here)
            if before != here:
                message, remedy = f"is the hostPort of {before}, too", "Choose another one."
                yield _wrong(f"{here}.hostPort", host, Rule.DUPLICATE, message, remedy)
            elif on_host and host != number:
                message = f"differs from containerPort {number}, which hostNetwork does not allow"
                remedy = "Leave it out."
                yield _wrong(f"{here}.hostPort", host, Rule.CONFLICTING_SETTINGS, message, remedy)


def _protocol(port: Mapping[str, Any]) -> str:
    return str(port.get("protocol") or TCP)


def _asked(probe: object) -> list[str]:
    """Return what a probe or hook asks; one name if it is right."""
    return [name for name in HANDLERS if as_mapping(probe).get(name) is not None]


def _handlers(place: str, container: Mapping[str, Any], own: Outline) -> Iterator[FieldError]:
    """Yield probes and hooks that are not complete, or that name a port of another container."""
    hooks = as_mapping(container.get("lifecycle"))
    found = [(f"{place}.{name}", container.get(name)) for name in PROBES]
    found += [(f"{place}.lifecycle.{name}", hooks.get(name)) for name in HOOKS]
    ports = {str(one.get("name")) for _, one in _items(place, container, "ports")} | {*own.ports}
    for here, probe in found:
        if probe is None:
            continue
        given = _asked(probe)
        if len(given) != 1 and (given or here.rpartition(".")[2] not in own.handlers):
            message = "needs exactly one of exec, grpc, httpGet, sleep and tcpSocket"
            remedy = "Keep one of them." if given else "Say what is to be asked or done."
            yield _wrong(here, ", ".join(given), Rule.EXACTLY_ONE, message, remedy)
        for name in given[:1]:
            field, handler = _ASKS.get(name, ""), probe[name]
            value, where = handler.get(field), f"{here}.{name}.{field}"
            if field == "command" and not value:
                yield _wrong(where, "", Rule.REQUIRED, "is missing", f"Give the {field}.")
            elif field == "port" and value and not isinstance(value, int) and value not in ports:
                other = "Name a port of the same container."
                remedy = did_you_mean(str(value), sorted(ports)) or other
                remedy = "Leave out the quotes." if str(value).isdecimal() else remedy
                message = "is the name of no port of this container"
                yield _wrong(where, value, Rule.NOT_IN_POD, message, remedy)


def _restarts(pod: _Pod, place: str, container: Mapping[str, Any]) -> Iterator[FieldError]:
    """Yield what ends our containers for good, or keeps llm-d's sidecar from its port."""
    given = container.get("restartPolicy")
    if pod.is_sidecar(place, container):
        if "restartPolicy" in container and given != "Always":
            message = "lets the engine start only after this sidecar has ended, which it never does"
            where, remedy = f"{place}.restartPolicy", "Leave it out, or write Always."
            yield _wrong(where, shown(given), Rule.CONFLICTING_SETTINGS, message, remedy)
        words = " ".join(map(str, as_list(container.get("args"))))
        port = re.search(r"(?<!\S)--?port[= ](\S+)", words)
        if port and port[1] != str(object_names.HTTP_PORT):
            message = f"leaves nothing on port {object_names.HTTP_PORT}, where llm-d sends requests"
            remedy = f"Write --port={object_names.HTTP_PORT}."
            yield _wrong(f"{place}.args", port[0], Rule.CONFLICTING_SETTINGS, message, remedy)
    elif pod.is_ours(place, container) and given not in (None, "Always"):
        message = f"lets the {pod.ours} stay down after it has failed once"
        where, remedy = f"{place}.restartPolicy", "Leave it out."
        yield _wrong(where, given, Rule.CONFLICTING_SETTINGS, message, remedy)


def _own_probes(
    cluster: Cluster, role: Role | None, place: str, container: Mapping[str, Any]
) -> Iterator[FieldError]:
    """Yield probes of our own container that never succeed."""
    numbers = outline(cluster, role).ports
    for name in PROBES:
        probe = as_mapping(container.get(name))
        for kind in _asked(probe):
            port = probe[kind].get("port")
            if port is not None and not probe[kind].get("host"):
                number = numbers.get(str(port), port)
                for field, message, remedy in _fails(cluster, role, kind, probe[kind], number):
                    here, value = f"{place}.{name}.{kind}.{field}", probe[kind].get(field, "")
                    yield _wrong(here, value, Rule.PROBE_FAILS, message, remedy)


def _fails(
    cluster: Cluster, role: Role | None, kind: str, handler: Mapping[str, Any], number: object
) -> Iterator[tuple[str, str, str]]:
    """Yield (field, message, remedy) of why our container never answers a probe as it should."""
    tls = cluster.spec.transfer.tls is not TlsMode.DISABLED and role is not None
    key = cluster.spec.router.api_key_secret_ref is not None
    api = object_names.HTTP_PORT if role else object_names.ROUTER_PORT
    metrics = object_names.ENGINE_METRICS_PORT if role else object_names.ROUTER_METRICS_PORT
    launcher = object_names.LAUNCHER_PORT if role or key else None
    if role and cluster.spec.role(role).parallelism.nodes > 1 and number in (api, metrics):
        yield "port", "is open in the first pod of an engine only", "Ask the port launcher."
    if kind != "httpGet" or number not in (api, metrics, launcher):
        return
    scheme = "HTTPS" if tls and number == launcher else "HTTP"
    if (given := handler.get("scheme") or "HTTP") != scheme:
        message = f"port {number} is answered over {scheme}, and the probe speaks {given}"
        yield "scheme", message, f"Write scheme: {scheme}."
    path = str(handler.get("path") or "/").partition("?")[0]
    if number == launcher and path != READY_PATH:
        yield "path", f"is not answered to the kubelet on port {number}", f"Write {READY_PATH}."
    headers = [as_mapping(one).get("name") for one in as_list(handler.get("httpHeaders"))]
    known = any(str(one).lower() == "authorization" for one in headers)
    if number == api and key and not known and not (role and path in OPEN_PATHS):
        remedy = f"Ask {READY_PATH} on the port {'launcher' if role else object_names.GATE}."
        yield "path", "is answered only to who sends the API key", remedy


def _wrong(path: str, value: object, rule: Rule, message: str, remedy: str) -> FieldError:
    return FieldError(path, shown(value) if value not in ("", None) else "", rule, message, remedy)
