"""Whether a volume of a pod template can hold the files of a certificate that engines look for.

A Secret or a CSI driver may hold anything, so nothing is said of those. What is refused can never
hold the files. An emptyDir that no container fills is only warned of: a webhook of the cluster may
add a sidecar to the pods.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pdcluster_operator.api.findings import FieldError, Rule, shown
from pdcluster_operator.api.spec.enums import Role
from pdcluster_operator.api.spec.pod_templates import (
    CERTIFICATE_FOLDER,
    ENGINE_CONTAINER,
    containers,
)
from pdcluster_operator.api.spec.types import Cluster

NAMES = ("ca.crt", "tls.crt", "tls.key")
FILES = "ca.crt, tls.crt and tls.key"
_NAMED = ("secret", "configMap")
_POD_CERTIFICATE_PATHS = ("credentialBundlePath", "keyPath", "certificateChainPath")


def volume_errors(role: Role, path: str, volume: Mapping[str, Any]) -> Iterator[FieldError]:
    """Yield why a volume that engines mount at the folder can never hold the files.

    Args:
        path: of the volume in the spec.
    """
    found = [(place, source, _paths(source)) for place, source in _sources(path, volume)]
    if not found or any(paths is None for _, _, paths in found):
        return
    held = {one for _, _, paths in found for one in paths or ()}
    missing = [name for name in NAMES if name not in held]
    if missing:
        only, source, _ = found[0]
        only = f"{only}.items" if "items" in source else only
        yield FieldError(
            only if len(found) == 1 else f"{path}.projected.sources",
            ", ".join(sorted(held)),
            Rule.CERTIFICATE_NOT_MOUNTED,
            f"leaves out {', '.join(missing)}, which {role} engines look for in "
            f"{CERTIFICATE_FOLDER}",
            f"Give files with the paths {FILES}, or leave items out.",
        )


def volume_warnings(
    cluster: Cluster, role: Role, path: str, volume: Mapping[str, Any]
) -> Iterator[FieldError]:
    """Yield what is legal in such a volume, but does not do what the user means."""
    empty = _begins_empty(volume)
    writers = _writers(cluster, role, volume) if empty else {}
    if empty and not writers:
        yield FieldError(
            f"{path}.emptyDir",
            shown(volume.get("emptyDir")),
            Rule.CERTIFICATE_NOT_MOUNTED,
            "stays empty, because no other container of the podTemplate mounts this volume to "
            f"write {FILES}",
            f"Mount it in a sidecar that writes the files, or use a Secret with the {role} "
            "engines' certificate. If a webhook adds such a sidecar to the pods, nothing has to "
            "be done.",
        )
    if writers and all(_ends(place, one) for place, one in writers.items()):
        yield FieldError(
            f"{path}.emptyDir",
            shown(volume.get("emptyDir")),
            Rule.CERTIFICATE_NOT_RENEWED,
            "only init containers write to it, so the engine keeps the certificate of the pod's "
            "start until it expires",
            "Let a sidecar write the files (an init container with restartPolicy: Always), or use "
            "a Secret.",
        )
    for place, source in _sources(path, volume):
        if source.get("optional") is True:
            yield FieldError(
                f"{place}.optional",
                "true",
                Rule.CERTIFICATE_NOT_MOUNTED,
                "lets the pod start while the certificate is missing: the engine then ends with an "
                "error",
                "Remove it, so that the pod waits for its certificate.",
            )


def _begins_empty(volume: Mapping[str, Any]) -> bool:
    """Whether a volume is an emptyDir. Kubernetes makes one where no source is given."""
    given = {kind for kind, source in volume.items() if kind != "name" and source is not None}
    return given <= {"emptyDir"}


def _writers(
    cluster: Cluster, role: Role, volume: Mapping[str, Any]
) -> dict[str, Mapping[str, Any]]:
    """Return the containers that could write to a volume, by their paths.

    The engine's own container writes nothing there, unless the user's template gives it something
    else to run.
    """
    return {
        path: one
        for path, one in containers(cluster.spec.role(role).pod_template)
        if (one.get("name") != ENGINE_CONTAINER or "command" in one or "lifecycle" in one)
        and any(
            mount.get("name") == volume.get("name") and mount.get("readOnly") is not True
            for mount in _mappings(one.get("volumeMounts"))
        )
    }


def _ends(path: str, container: Mapping[str, Any]) -> bool:
    """Whether a container ends before the engine starts, so that it writes only once."""
    return path.startswith("spec.initContainers") and container.get("restartPolicy") != "Always"


def _sources(path: str, volume: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield what a volume's files come from, with the path; nothing if Kubernetes does not say."""
    for kind in (*_NAMED, "downwardAPI"):
        if isinstance(source := volume.get(kind), Mapping):
            yield f"{path}.{kind}", {**source, "kind": kind}
    projected = volume.get("projected")
    listed = projected.get("sources") if isinstance(projected, Mapping) else ()
    for number, one in enumerate(_mappings(listed)):
        for kind, source in one.items():
            if isinstance(source, Mapping):
                yield f"{path}.projected.sources[{number}].{kind}", {**source, "kind": kind}


def _paths(source: Mapping[str, Any]) -> set[str] | None:
    """Return the files that a source gives; None if that is not known."""
    kind = source["kind"]
    if kind in _NAMED and not source.get("items"):
        return None
    if kind in (*_NAMED, "downwardAPI"):
        given = [item.get("path") for item in _mappings(source.get("items"))]
    elif kind in ("serviceAccountToken", "clusterTrustBundle"):
        given = [source.get("path")]
    elif kind == "podCertificate":
        given = [source.get(field) for field in _POD_CERTIFICATE_PATHS]
    else:
        return None
    return {posixpath.normpath(str(path)) for path in given if path}


def _mappings(value: object) -> Iterator[Mapping[str, Any]]:
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        yield from (one for one in value if isinstance(one, Mapping))
