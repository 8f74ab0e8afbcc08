"""A revision of one role, as the API server stores it: a ControllerRevision; and the pairing key.

A revision holds the pod template as it was rendered, and the spec that it was rendered from. It is
never rendered again, so another builder or another connector changes no engine that exists. What
forces a new one, :mod:`.targets` says.

The pairing key names what decides whether KV can be exchanged. It is part of the pod template, so a
change of it changes both roles' revisions, and a change of one role's environment only that role's.

At the end: the part of a spec that engines are made from, and the fields that differ in two specs.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

from pdcluster_operator.api import object_names
from pdcluster_operator.api.object_names import EngineName
from pdcluster_operator.api.spec.pod_templates import ENGINE_CONTAINER, as_mapping
from pdcluster_operator.api.spec.resolve import MODEL_FLAGS, engine_shape, resolve_engine
from pdcluster_operator.api.spec.types import Backend, Cluster, KvLayout, Role, TlsMode
from pdcluster_operator.plan.builders.secrets import renamed_volume
from pdcluster_operator.plan.objects.ownership import child_object
from pdcluster_operator.plan.types import Manifest, Observed

REVISION_KIND = "ControllerRevision"
REVISION_COMPONENT = "revision"
Template = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Revision:
    """What engines of one role are made from.

    Attributes:
        name: the hash in the names of its engines.
        pairing_key: engines of both roles pair when their keys are equal.
        connector: digest of the operator's connector when it was rendered. The pods mount it,
            unless the image holds a connector.
        nodes: pods of an engine.
        template: the pod template, for an engine that has no name yet; see :func:`engine_template`.
        spec: what the user wrote, without replicas and rollout.
        renew: ``rollout.renew`` when it was rendered.
        number: 1 for the first one that was stored; 0 for one that is not stored.
    """

    role: Role
    name: str
    pairing_key: str
    connector: str
    nodes: int
    template: Template
    spec: Mapping[str, Any]
    renew: str = ""
    number: int = 0


def stored_revisions(observed: Observed) -> tuple[Revision, ...]:
    """Return the revisions that are stored, the newest first."""
    known = revisions_in(observed.children)
    return tuple(sorted(known, key=lambda one: (-one.number, one.role, one.name)))


def revisions_in(children: Iterable[Manifest]) -> Iterator[Revision]:
    """Yield the revisions that are stored among the objects of a cluster."""
    for child in children:
        if child.get("kind") == REVISION_KIND and (revision := _read(child)) is not None:
            yield revision


def build_revision(cluster: Cluster, revision: Revision) -> dict[str, Any]:
    """Return the ControllerRevision. Kubernetes refuses every later change of its data."""
    labels = object_names.cluster_labels(cluster.name, REVISION_COMPONENT) | {
        object_names.ROLE_LABEL: revision.role.value,
        object_names.REVISION_LABEL: revision.name,
        object_names.PAIRING_LABEL: revision.pairing_key,
    }
    name = object_names.revision_name(cluster.name, revision.role, revision.name)
    data = {
        "connector": revision.connector,
        "nodes": revision.nodes,
        "renew": revision.renew,
        "spec": dict(revision.spec),
        "template": dict(revision.template),
    }
    number = revision.number
    return child_object(cluster, "apps/v1", REVISION_KIND, name, labels, revision=number, data=data)


def nameless(namespace: str, cluster: str, role: Role) -> EngineName:
    """Return the placeholder for an engine's name in a stored template."""
    return EngineName(namespace, cluster, role, "", 0)


def engine_template(revision: Revision, name: EngineName) -> dict[str, Any]:
    """Return the pod template of one engine."""
    nobody = nameless(name.namespace, name.cluster, name.role)
    return renamed(revision.template, nobody, name, revision.pairing_key)


def template_of_engine(engine: Manifest, name: EngineName) -> dict[str, Any]:
    """Return the template of a revision from a StatefulSet that was made of it; see above.

    Without the PodGroup that the operator gave it, and an empty field that an API server adds.
    """
    live = engine["spec"]["template"]
    metadata = {field: value for field, value in live["metadata"].items() if value is not None}
    pod = dict(live["spec"])
    if object_names.is_group_of(name, (pod.get("schedulingGroup") or {}).get("podGroupName") or ""):
        del pod["schedulingGroup"]
    nobody = nameless(name.namespace, name.cluster, name.role)
    key = object_names.pairing_key_of(engine)
    return renamed({**live, "metadata": metadata, "spec": pod}, name, nobody, key)


def renamed(
    template: Template, old: EngineName, new: EngineName, pairing_key: str
) -> dict[str, Any]:
    """Return a pod template of the engine ``old`` as the engine ``new`` has it.

    An engine's name stands in the labels, as whole words on the command line, and in the volume of
    its certificate.
    """
    words = {old.logical: new.logical, old.host(): new.host()}
    containers = [
        {**container, "args": [words.get(word, word) for word in container["args"]]}
        if container.get("name") == ENGINE_CONTAINER and container.get("args")
        else container
        for container in template["spec"]["containers"]
    ]
    volumes = [renamed_volume(one, old, new) for one in template["spec"].get("volumes") or ()]
    metadata = template["metadata"]
    labels = {**metadata["labels"], **object_names.engine_labels(new, pairing_key)}
    return {
        **template,
        "metadata": {**metadata, "labels": labels},
        "spec": {**template["spec"], "containers": containers, "volumes": volumes},
    }


def is_pod_template(given: Any) -> TypeGuard[Mapping[str, Any]]:
    """Whether what is stored can be used as a pod template. The API server judges the rest.

    Others may write such objects, too.
    """
    metadata, pod = (as_mapping(given).get(part) for part in ("metadata", "spec"))
    containers, volumes = (as_mapping(pod).get(part) or [] for part in ("containers", "volumes"))
    if not isinstance(as_mapping(metadata).get("labels"), Mapping) or not containers:
        return False
    return all(
        isinstance(items, list) and all(isinstance(one, Mapping) for one in items)
        for items in (containers, volumes)
    ) and all(
        isinstance(args := one.get("args") or [], list)
        and all(isinstance(word, str) for word in args)
        for one in containers
    )


def _read(child: Manifest) -> Revision | None:
    """Return the revision that a ControllerRevision holds; None if it is not one of ours."""
    data = child.get("data")
    if not isinstance(data, Mapping) or not is_pod_template(data.get("template")):
        return None
    # Somebody may change labels. Nobody can change the name and the data.
    _, role, name = f"--{child['metadata']['name']}".rsplit("-", 2)
    if role not in list(Role):
        return None
    return Revision(
        role=Role(role),
        name=name,
        pairing_key=object_names.pairing_key_of(data["template"]),
        connector=str(data.get("connector") or ""),
        nodes=data["nodes"] if isinstance(data.get("nodes"), int) else 1,
        template=data["template"],
        spec=as_mapping(data.get("spec")),
        renew=str(data.get("renew") or ""),
        number=int(child.get("revision") or 0),
    )


# No vowels, so that no word appears by accident, and no characters that look alike.
ALPHABET = "bcdfghjklmnpqrstvwxz2456789"


def is_same_json(one: Any, other: Any) -> bool:
    """Whether two documents are the same JSON. For Python, 1 and true are equal."""
    return one == other and json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


def short_hash(document: Any, length: int = object_names.REVISION_LENGTH) -> str:
    """Return a short name of a JSON document, fit for object names and labels."""
    text = json.dumps(document, sort_keys=True, separators=(",", ":"), default=str)
    number = int.from_bytes(hashlib.sha256(text.encode()).digest(), "big")
    letters = []
    for _ in range(length):
        number, rest = divmod(number, len(ALPHABET))
        letters.append(ALPHABET[rest])
    return "".join(letters)


def pairing_key(cluster: Cluster) -> str:
    """Return the key of all engines of a spec; engines pair when their keys are equal."""
    document: dict[str, Any] = {"model": repr(cluster.spec.model.source)}
    source = cluster.spec.model.source
    if (newer := source.oci or source.object_storage) is not None:  # others keep their key
        document["source"] = repr(newer)
    if (tls := cluster.spec.transfer.tls) is not TlsMode.DISABLED:
        # An engine without TLS has no entry, and so never the key of one with it.
        document["tls"] = True if tls is TlsMode.ENABLED else tls.value
    if Backend.LIBFABRIC in cluster.spec.transfer.backends:  # UCX does not understand it
        document["backend"] = Backend.LIBFABRIC.value
    if (layout := cluster.spec.transfer.kv_layout) is not KvLayout.AUTO:
        document["layout"] = layout.value  # another one would be read in many more descriptors
    for role in Role:
        engine = resolve_engine(cluster, role)
        shape = engine_shape(cluster, engine)
        document[role.value] = {
            "model": shape.model,
            "kv_dtype": shape.kv_dtype,
            "block_size": shape.block_size,
            "memory": shape.memory,
            "attention_backend": engine.attention_backend,
            "flags": sorted(flag.words for flag in engine.flags if flag.head in MODEL_FLAGS),
            # Engines of before have no entry, and those without a draft model keep their key.
            **({"draft": shape.draft} if shape.draft else {}),
        }
    return short_hash(document)


# None of these is a part of an engine.
ELSEWHERE = (
    *("rollout", "monitoring", "verification", "operatorClass", "scheduling", "autoscaling"),
)
FIELDS_OF_THE_ROUTER = ("apiKeySecretRef", "type", "sidecarImage")
PARTLY = (*(role.value for role in Role), "router")
"""Parts of the spec of which engines have some fields."""
MOST_SHOWN = 3


def spec_of_engines(cluster: Manifest) -> dict[str, Any]:
    """Return the spec as the user wrote it, without the fields that change no engine."""
    given = as_mapping(cluster.get("spec"))
    spec = {name: value for name, value in given.items() if name not in (*ELSEWHERE, *PARTLY)}
    for part in PARTLY:
        fields = as_mapping(given.get(part)).items()
        if kept := {name: value for name, value in fields if _is_of_engines(part, name)}:
            spec[part] = kept
    return spec


def with_spec_of_engines(given: Manifest, engines: Manifest) -> dict[str, Any]:
    """Return a spec with its engines' part replaced; see :func:`spec_of_engines`.

    ``rollout.renew`` is left out, because it asks for a newer revision than the one of ``engines``.
    """
    spec = {**engines, **{name: given[name] for name in ELSEWHERE if name in given}}
    for part in PARTLY:
        old = as_mapping(given.get(part))
        stays = {n: v for n, v in old.items() if not _is_of_engines(part, n)}
        if stays:
            spec[part] = {**as_mapping(spec.get(part)), **stays}
    if isinstance(rollout := spec.get("rollout"), Mapping):
        spec["rollout"] = {name: value for name, value in rollout.items() if name != "renew"}
    return spec


def changed_fields(before: Any, after: Any, path: str = "") -> Iterator[str]:
    """Yield the path of each field that is not the same in both: ``decode.engine.env[0].value``."""
    before = {} if before is None and isinstance(after, Mapping) else before
    after = {} if after is None and isinstance(before, Mapping) else after
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        for name in sorted(before.keys() | after.keys()):
            inner = f"{path}.{name}" if path else str(name)
            yield from changed_fields(before.get(name), after.get(name), inner)
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for number, (old, new) in enumerate(zip(before, after, strict=True)):
            yield from changed_fields(old, new, f"{path}[{number}]")
    elif before != after:
        yield path


def in_words(paths: Iterable[str]) -> str:
    """Return a few of the paths and how many there are beside them; empty if there are none."""
    unique = sorted(set(paths))
    if not unique:
        return ""
    more = len(unique) - MOST_SHOWN
    tail = f" and {more} more" if more > 0 else ""
    return f"{', '.join(unique[:MOST_SHOWN])}{tail} changed"


def _is_of_engines(part: str, name: str) -> bool:
    return name in FIELDS_OF_THE_ROUTER if part == "router" else name != "replicas"
