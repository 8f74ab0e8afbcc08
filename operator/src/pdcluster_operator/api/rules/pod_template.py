"""Rules of a user's pod template: fields that Kubernetes does not have, and access to the node.

The API server stores the template unchecked. Later it would refuse the StatefulSet that is made
from it, with an error that does not name the field of the PDCluster.
"""

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from pdcluster_operator.api.findings import FieldError, Rule, did_you_mean, quoted, shown
from pdcluster_operator.api.spec import pod_templates, resources
from pdcluster_operator.api.spec.resolve import grace_period, router_grace_period
from pdcluster_operator.api.spec.router_types import RouterType
from pdcluster_operator.api.spec.types import Cluster

MOST_ERRORS = 16
LEAST_TIMEOUT = 10
"""The least ``spec.requestTimeoutSeconds``."""
# Strings in Kubernetes' types, but a manifest may give a number.
QUANTITIES = frozenset({"limits", "requests", "overhead", "sizeLimit", "divisor"})
# What identifies an item where the API server takes no two of a kind (x-kubernetes-list-map-keys).
# The mounts of a container are judged beside ours.
MAP_KEYS = {
    "containers": ("name",),
    "initContainers": ("name",),
    "volumes": ("name",),
    "env": ("name",),
    "ports": ("containerPort", "protocol"),
    "volumeDevices": ("devicePath",),
    "imagePullSecrets": ("name",),
    "resourceClaims": ("name",),
    "claims": ("name", "request"),
    "hostAliases": ("ip",),
    "schedulingGates": ("name",),
    "topologySpreadConstraints": ("topologyKey", "whenUnsatisfiable"),
}
DEFAULTS = {"protocol": pod_templates.TCP}
MAY_BE_EMPTY = frozenset({("V1HTTPHeader", "value"), ("V1Sysctl", "value")})
# Types that take one of these fields, how many they need, and the fields that are no choice.
ONE_OF: Mapping[str, tuple[int, frozenset[str]]] = {
    "V1DownwardAPIVolumeFile": (1, frozenset({"mode", "path", "user"})),
    "V1EnvFromSource": (1, frozenset({"prefix"})),
    "V1EnvVar": (0, frozenset({"name"})),
    "V1EnvVarSource": (1, frozenset()),
    "V1Volume": (0, frozenset({"name"})),
    "V1VolumeProjection": (0, frozenset()),
}
# Kubernetes' plain types, as the table of fields names them.
PLAIN = {
    "str": (str, "a string", "Put it in quotes."),
    "int": (int, "a whole number", "Write a number, without quotes."),
    "bool": (bool, "true or false", "Leave out any quotes."),
}


# The operator's own field -> what a null of it means.
_REMOVED = {
    "automountServiceAccountToken": "the pods get a token of the API server",
    "enableServiceLinks": "Services of the namespace set variables, such as VLLM_PORT",
    "securityContext.seccompProfile": "containers may make every call of the kernel",
    "serviceAccountName": "the pods run as the ServiceAccount default",
    "shareProcessNamespace": "a router that waits for engines ignores SIGTERM",
    "terminationGracePeriodSeconds": "Kubernetes kills the pods after 30 seconds",
}
_REMOVED_FROM_CONTAINER = {
    "startupProbe": "nothing restarts an engine that does not serve in startupTimeoutSeconds",
    "lifecycle.preStop": "a router stops while Services still send it requests",
    "resources.limits": "it has no limit, and an engine gets no GPU",
    "securityContext.capabilities.drop": "it has more of root's rights",
    "securityContext.allowPrivilegeEscalation": "its programs may gain rights",
}
_OF_ROUTERS = frozenset({"shareProcessNamespace", "lifecycle.preStop"})
_OF_ENGINES = frozenset({"startupProbe"})


def pod_template_errors(cluster: Cluster) -> Iterator[FieldError]:
    """Yield fields that Kubernetes would refuse, at most MOST_ERRORS of a template."""
    for path, template, ours in pod_templates.pod_templates(cluster):
        found = itertools.chain(
            _object(path, "V1PodTemplateSpec", template),
            _images(path, template, ours, sidecar_of(cluster, path)),
            _life(path, template),
        )
        yield from itertools.islice(found, MOST_ERRORS)
        seconds = _grace(template)
        if seconds is not None and seconds < 1:
            yield FieldError(
                f"{path}.spec.terminationGracePeriodSeconds",
                str(seconds),
                Rule.GRACE_TOO_SHORT,
                "kills the process at once: requests in flight end, and an engine's peers may "
                "read memory that is gone",
                "Leave it out: the operator knows how long a drain takes.",
            )


def is_readable(path: str, template: Mapping[str, Any]) -> bool:
    """Whether all values of a template have the types of Kubernetes."""
    found = _object(path, "V1PodTemplateSpec", template)
    return all(error.rule is not Rule.WRONG_TYPE for error in found)


def env_source_errors(path: str, source: Mapping[str, Any] | None) -> Iterator[FieldError]:
    """Yield fields that Kubernetes would refuse in the source of a variable of spec.engine.env."""
    yield from itertools.islice(_value(path, "V1EnvVarSource", source), MOST_ERRORS)


def pod_template_warnings(cluster: Cluster) -> Iterator[FieldError]:
    """Yield what keeps an engine or a router from finishing its requests, and harmful nulls."""
    for path, template, ours in pod_templates.pod_templates(cluster):
        needed = grace_period(cluster) if ours == "engine" else router_grace_period(cluster)
        seconds = _grace(template)
        if seconds is not None and 0 < seconds < needed:
            yield FieldError(
                f"{path}.spec.terminationGracePeriodSeconds",
                str(seconds),
                Rule.GRACE_TOO_SHORT,
                f"the {ours} may need {needed} seconds to finish its requests and stop",
                _shorter(cluster, needed - seconds),
                ("spec.requestTimeoutSeconds",),
            )
        yield from _removed(f"{path}.spec", pod_templates.pod_spec(template), _REMOVED)


def _removed(path: str, given: Mapping[str, Any], means: Mapping[str, str]) -> Iterator[FieldError]:
    found: dict[str, str] = {}
    for field, meaning in means.items():
        at, inner = path, given
        if field not in (_OF_ENGINES if path.startswith("spec.router.") else _OF_ROUTERS):
            for name in field.split("."):
                at = f"{at}.{name}"
                if inner.get(name, "") is None:
                    found.setdefault(at, meaning)
                inner = pod_templates.as_mapping(inner.get(name))
    limits = pod_templates.amounts(given, "limits")
    others = [n for n in limits if limits[n] is not None and resources.is_accelerator(n)]
    others += pod_templates.as_list(pod_templates.as_mapping(given.get("resources")).get("claims"))
    for name, amount in limits.items():
        if amount is None and resources.is_accelerator(name) and not others:
            found[f"{path}.resources.limits.{name}"] = "an engine gets no GPU"
    for at, meaning in found.items():
        why = f"removes the operator's own: {meaning}", "Leave it out, or write a value."
        yield FieldError(at, "null", Rule.OWN_FIELD_REMOVED, *why)


def _shorter(cluster: Cluster, missing: int) -> str:
    left = cluster.spec.request_timeout_seconds - missing
    if left < LEAST_TIMEOUT:
        return "Leave it out: the operator writes what is needed."
    return f"Leave it out, or set spec.requestTimeoutSeconds to at most {left}."


def overlay_warnings(cluster: Cluster) -> Iterator[FieldError]:
    """Yield what replaces a command, arguments or signal of our containers, or removes a field."""
    for path, template, ours in pod_templates.pod_templates(cluster):
        sidecar = sidecar_of(cluster, path)
        for place, entry in pod_templates.containers(template):
            name, init = entry.get("name"), place.startswith("spec.initContainers")
            if name != (sidecar if init else ours):
                continue
            for field in ("command", "args"):
                if field in entry:
                    yield FieldError(
                        f"{path}.{place}.{field}",
                        shown(entry[field]),
                        Rule.ARGUMENTS_OVERLAID,
                        f"replaces the operator's own {field}, and no rule checks it",
                        "Remove it." if init else pod_templates.extra_args_instead(path, field),
                    )
            yield from () if init else _removed(f"{path}.{place}", entry, _REMOVED_FROM_CONTAINER)
            yield from _short_start(f"{path}.{place}", entry) if ours == "engine" else ()
            signal = pod_templates.as_mapping(entry.get("lifecycle")).get("stopSignal")
            if signal not in (None, "SIGTERM"):
                where = f"{path}.{place}.lifecycle.stopSignal"
                why = f"ends the {name} at once: it drains on SIGTERM only", "Remove it."
                yield FieldError(where, shown(signal), Rule.GRACE_TOO_SHORT, *why)


LEAST_START, PERIOD = 180, 2
"""Seconds: what most models need at least until they serve, and the period of our own probe."""


def _short_start(path: str, container: Mapping[str, Any]) -> Iterator[FieldError]:
    """Yield a startupProbe that gives up early. Its period is ours, not Kubernetes' 10 seconds."""
    probe = pod_templates.as_mapping(container.get("startupProbe"))
    times, every = probe.get("failureThreshold"), probe.get("periodSeconds") or PERIOD
    first = probe.get("initialDelaySeconds") or 0
    if not (isinstance(times, int) and isinstance(every, int) and isinstance(first, int)):
        return
    if first + times * every < LEAST_START:
        why = f"restarts an engine that does not serve within {times} x {every} seconds"
        remedy = "Remove it, and set engine.startupTimeoutSeconds."
        where = f"{path}.startupProbe.failureThreshold"
        yield FieldError(where, str(times), Rule.PROBE_FAILS, why, remedy)


def sidecar_of(cluster: Cluster, path: str) -> str:
    """Return the init container that the operator adds to a template's pods; empty without."""
    if cluster.spec.router.type is RouterType.LLMD and path == "spec.decode.podTemplate":
        return pod_templates.SIDECAR_CONTAINER
    return ""


def _grace(template: Mapping[str, object]) -> int | None:
    seconds = pod_templates.pod_spec(template).get("terminationGracePeriodSeconds")
    return seconds if isinstance(seconds, int) and not isinstance(seconds, bool) else None


def _images(
    path: str, template: Mapping[str, object], ours: str, sidecar: str
) -> Iterator[FieldError]:
    for place, entry in pod_templates.containers(template):
        name, init = entry.get("name"), place.startswith("spec.initContainers")
        if not entry.get("image") and isinstance(name, str) and name != (sidecar if init else ours):
            yield FieldError(
                f"{path}.{place}.name",
                shown(name),
                Rule.REQUIRED,
                "is a container without an image, and it is not one of the operator's",
                "Give it an image." if init else f"Give it an image, or did you mean {ours}?",
            )


def _life(path: str, template: Mapping[str, object]) -> Iterator[FieldError]:
    """Yield fields that Kubernetes refuses in the pods of a controller."""
    for field in sorted(pod_templates.REFUSED):
        value = pod_templates.pod_spec(template).get(field)
        if value is not None and (field, value) != ("restartPolicy", "Always"):
            why = Rule.NOT_ALLOWED, pod_templates.REFUSED_BECAUSE, "Remove it."
            yield _finding(f"{path}.spec.{field}", value, why)


def _value(path: str, kind: str, value: object, limit: str = "") -> Iterator[FieldError]:
    """Yield errors in a value. ``null`` fits every type: it removes a field."""
    if value is None:
        return
    if kind == "any":
        if path.endswith(".port") and (isinstance(value, bool) or not isinstance(value, int | str)):
            yield _wrong(path, value, "the number or name of a port", "Write for example http.")
            return
    elif kind.startswith("["):
        yield from _list(path, kind[1:-1], value, limit)
    elif kind.startswith("{"):
        yield from _free_keys(path, value, limit)
    elif kind in pod_templates.FIELDS:
        yield from _object(path, kind, value)
    elif kind == "str" and path.rpartition(".")[2] in QUANTITIES:
        yield from _amount(path, value)
    else:
        fitting, word, remedy = PLAIN[kind]
        # In Python a bool is an int.
        if not isinstance(value, fitting) or (isinstance(value, bool) and fitting is int):
            yield _wrong(path, value, word, remedy)
            return
    if kind in (*PLAIN, "any") and (why := pod_templates.wrong_value(limit, value)):
        yield _finding(path, value, why)


def _amount(path: str, value: object) -> Iterator[FieldError]:
    # Unlike our own resources, Kubernetes takes a fraction without quotes.
    if why := resources.why_no_amount(str(value)):
        yield _finding(path, value, (Rule.BAD_FORMAT, why, "Write for example 4, 500m or 16Gi."))


def _object(path: str, kind: str, value: object) -> Iterator[FieldError]:
    if not isinstance(value, Mapping):
        yield _wrong(path, value, "an object", "Write a mapping.")
        return
    known = pod_templates.FIELDS[kind]
    least, beside = ONE_OF.get(kind, (0, frozenset(known)))
    choice = [key for key in known if key not in beside]
    given = [key for key in choice if value.get(key) not in (None, "")]
    if not least <= len(given) <= 1:
        message = "takes only one of these" if given else "needs one of its fields"
        remedy = "Keep one of them." if given else f"Give one of {', '.join(choice)}."
        yield FieldError(path, ", ".join(given), Rule.EXACTLY_ONE, message, remedy)
    if value.keys() <= known.keys():  # else a field may be misspelt
        for key in pod_templates.NEEDED[kind]:
            empty = (None, []) if known[key].startswith("[") else (None, "")
            if value.get(key) in empty and (kind, key) not in MAY_BE_EMPTY:
                why = Rule.REQUIRED, "is missing", f"Give the {key}."
                yield _finding(f"{path}.{key}", None, why)
        field = path.rpartition(".")[2].partition("[")[0]
        for key, why in pod_templates.wrong_together(kind, field, value):
            yield _finding(f"{path}.{key}", value.get(key), why)
    for key, inner in value.items():
        if inner is None and pod_templates.KEPT_FIELDS.get(kind) == key:
            message = "removes what every pod needs"
            remedy = f"Leave {key} out: the operator's own stays, with what you add."
            yield FieldError(f"{path}.{key}", "null", Rule.REQUIRED, message, remedy)
        elif key in known:
            yield from _value(f"{path}.{key}", known[key], inner, pod_templates.LIMITS[kind, key])
        else:
            yield FieldError(
                f"{path}.{key}",
                "",
                Rule.UNKNOWN_FIELD,
                "is not a field of a Kubernetes pod template",
                _remedy(path, kind, str(key), known),
            )


def _remedy(path: str, kind: str, key: str, known: Mapping[str, str]) -> str:
    if kind in ("V1PodTemplateSpec", "V1PodSpec") and key in pod_templates.PROCESS:
        return pod_templates.extra_args_instead(path, key)
    if kind == "V1PodTemplateSpec" and key in pod_templates.REFUSED:
        return f"Remove it: {pod_templates.REFUSED_BECAUSE}."
    if kind == "V1PodTemplateSpec" and key in pod_templates.FIELDS["V1PodSpec"]:
        return f"Write it as {path}.spec.{key}."
    if kind == "V1PodSpec" and key in pod_templates.FIELDS["V1Container"]:
        return f"Write it in an entry of {path}.containers."
    return did_you_mean(key, known) or f"Known are: {', '.join(known)}."


def _list(path: str, kind: str, value: object, limit: str) -> Iterator[FieldError]:
    field = path.rpartition(".")[2]
    if not pod_templates.is_list(value):
        yield _wrong(path, value, "a list", "Write a list: a hyphen before each item.")
        return
    keys = MAP_KEYS.get(field, ())
    seen = set[str]()
    for place, item in enumerate(value):
        here = f"{path}[{place}]"
        if item is None:
            yield _wrong(here, item, "given", "Write the item, or leave it out.")
        yield from _value(here, kind, item, limit)
        if keys and isinstance(item, Mapping) and item.get(keys[0]) is not None:
            name = " ".join(str(item.get(key) or DEFAULTS.get(key, "")) for key in keys)
            if name in seen:
                why = Rule.DUPLICATE, "is given twice", "Keep one of them."
                yield _finding(f"{here}.{keys[0]}", item[keys[0]], why)
            seen.add(name)


def _free_keys(path: str, value: object, limit: str) -> Iterator[FieldError]:
    if not isinstance(value, Mapping):
        yield _wrong(path, value, "an object", "Write a mapping.")
        return
    quantities = path.rpartition(".")[2] in QUANTITIES
    labels = limit == "@labels"
    for key, inner in value.items():
        if inner is None:
            continue
        why = pod_templates.wrong_value("@key", key if labels else key.lower()) if limit else None
        if labels and why is None:
            why = pod_templates.wrong_value("@value", inner)
        if why is not None:
            yield _finding(f"{path}.{key}", inner, why)
        if quantities:
            yield from _amount(f"{path}.{key}", inner)
        elif not isinstance(inner, str):
            yield _wrong(f"{path}.{key}", inner, "a string", "Put it in quotes.")


def _finding(path: str, value: object, why: pod_templates.Wrong) -> FieldError:
    return FieldError(path, "" if value is None else shown(value), *why)


def _wrong(path: str, value: object, word: str, remedy: str) -> FieldError:
    return FieldError(path, quoted(value), Rule.WRONG_TYPE, f"must be {word}", remedy)


HOST_FIELDS = {
    "hostPID": "see all processes of the node, and can stop those of the same user",
    "hostIPC": "can read shared memory of all processes on the node that also use hostIPC",
    "hostNetwork": "use the node's network: two of them on one node need the same ports, and "
    "NetworkPolicies do not protect them",
}


def exposure_warnings(cluster: Cluster) -> Iterator[FieldError]:
    """Yield settings that give a pod access to its node."""
    for path, template, ours in pod_templates.pod_templates(cluster):
        spec = pod_templates.pod_spec(template)
        for name, means in HOST_FIELDS.items():
            if spec.get(name) is True:
                yield _host_field(f"{path}.spec.{name}", f"these {ours}s {means}")
        for place, container in pod_templates.containers(template):
            if pod_templates.as_mapping(container.get("securityContext")).get("privileged") is True:
                where = f"{path}.{place}.securityContext.privileged"
                yield _host_field(where, f"these {ours}s have the rights of root on the node")


def _host_field(path: str, message: str) -> FieldError:
    return FieldError(
        path,
        "true",
        Rule.HOST_NAMESPACE,
        message,
        "Leave it out, unless you trust what runs in the pod and on the node; docs/operations.md "
        "says what needs it.",
    )
