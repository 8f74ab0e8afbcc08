"""Rules of the certificates that a pod template mounts into engines (``spec.transfer.tls``).

With ``Mounted`` the template has to mount the files. With ``Enabled`` the operator mounts its own.

A Secret or a CSI driver may hold anything, so there are no findings about those. A volume that can
never hold the files is an error. An emptyDir that no container fills is only a warning: a webhook
of the cluster may add a sidecar to the pods.
"""

import posixpath
from collections.abc import Iterator, Mapping
from typing import Any

from pdcluster_operator.api.findings import FieldError, Rule, shown
from pdcluster_operator.api.object_names import certificates_name
from pdcluster_operator.api.rules.whole_pods import outline
from pdcluster_operator.api.spec import pod_templates
from pdcluster_operator.api.spec.types import Cluster, Role, TlsMode

NAMES = ("ca.crt", "tls.crt", "tls.key")
FILES = "ca.crt, tls.crt and tls.key"
_NAMED = ("secret", "configMap")
_POD_CERTIFICATE_PATHS = ("credentialBundlePath", "keyPath", "certificateChainPath")
TLS = "spec.transfer.tls"
Volume = tuple[str, Mapping[str, Any]]
"""A volume and its path in the spec."""


def mount_errors(cluster: Cluster) -> Iterator[FieldError]:
    """Yield errors in the mounts of each role's engine container."""
    for role in Role:
        if cluster.spec.transfer.tls is TlsMode.MOUNTED:
            yield from _of_role(cluster, role)
        elif cluster.spec.transfer.tls is TlsMode.ENABLED:
            yield from _hidden(cluster, role)


def mount_warnings(cluster: Cluster) -> Iterator[FieldError]:
    """Yield volumes of certificates that are legal, but probably do not work."""
    for role in Role:
        if cluster.spec.transfer.tls is TlsMode.MOUNTED:
            volumes = _volumes(cluster, role)
            _, container = pod_templates.engine_container(cluster, role)
            for _, mount, at_folder in _mounts(container):
                if at_folder and (named := volumes.get(str(mount.get("name")))) is not None:
                    yield from volume_warnings(cluster, role, *named)


def support_errors(cluster: Cluster) -> Iterator[FieldError]:
    """Yield an error if certificates are to be mounted, for an operator that has none itself."""
    if cluster.spec.transfer.tls is TlsMode.MOUNTED:
        yield FieldError(
            TLS,
            TlsMode.MOUNTED.value,
            Rule.MOUNTED_NOT_SUPPORTED,
            "this operator has no certificate that such engines trust, so it cannot speak with "
            "them",
            "Give it one (the chart's operator.engineCertificate.existingSecret), or write "
            f"Enabled and mount nothing at {pod_templates.CERTIFICATE_FOLDER}. Local mode knows "
            "Enabled and Disabled only.",
        )


def _hidden(cluster: Cluster, role: Role) -> Iterator[FieldError]:
    """Yield mounts that would hide the operator's certificate: engines could not start."""
    place, container = pod_templates.engine_container(cluster, role)
    for number, mount, _ in _mounts(container):
        yield FieldError(
            f"{place}.volumeMounts[{number}].mountPath",
            shown(mount.get("mountPath")),
            Rule.CERTIFICATE_HIDDEN,
            "hides the certificate that the operator mounts at "
            f"{pod_templates.CERTIFICATE_FOLDER}, because {TLS} is Enabled",
            f"Remove this mount. To use certificates of your own, set {TLS} to Mounted.",
            (TLS,),
        )


def _mounts(container: Mapping[str, Any]) -> Iterator[tuple[int, Mapping[str, Any], bool]]:
    """Yield the mounts at the folder and below it: number, mount, whether it is at the folder."""
    for number, mount in enumerate(pod_templates.as_list(container.get("volumeMounts"))):
        if isinstance(mount, Mapping):
            path = posixpath.normpath(str(mount.get("mountPath")))
            if path == pod_templates.CERTIFICATE_FOLDER or path.startswith(
                f"{pod_templates.CERTIFICATE_FOLDER}/"
            ):
                yield number, mount, path == pod_templates.CERTIFICATE_FOLDER


def _of_role(cluster: Cluster, role: Role) -> Iterator[FieldError]:
    place, container = pod_templates.engine_container(cluster, role)
    path = f"{place}.volumeMounts" if container else place
    mounts = list(_mounts(container))
    if not any(at_folder for _, _, at_folder in mounts):
        yield FieldError(
            path,
            "",
            Rule.CERTIFICATE_NOT_MOUNTED,
            f"mounts nothing at {pod_templates.CERTIFICATE_FOLDER}, where {role} engines look for "
            f"{FILES}, because {TLS} is Mounted",
            f"Add a volume with the {role} engines' certificate to spec.{role}.podTemplate, and "
            f"mount it there in the container {pod_templates.ENGINE_CONTAINER}.",
        )
    volumes = _volumes(cluster, role)
    for number, mount, at_folder in mounts:
        where, volume = volumes.get(str(mount.get("name")), ("", None))
        wrong: dict[str, tuple[str, str]] = {}
        if volume is None:  # any other one is NotInPod
            if mount.get("name") in outline(cluster, role).mounts.values():
                remedy = "Mount a volume with your certificate."
                wrong["name"] = "is a volume of the operator's", remedy
        elif certificates_name(cluster.name) in _secrets(volume):
            why = f"is the Secret {certificates_name(cluster.name)}, which the operator writes only"
            remedy = f"Mount a Secret of your own, or set {TLS} to Enabled without this mount."
            wrong["name"] = f"{why} while {TLS} is Enabled", remedy
        elif at_folder:
            yield from volume_errors(role, where, volume)
        for field in ("subPath", "subPathExpr"):
            if mount.get(field):
                why = "never gets new files, because the kubelet does not update a subPath"
                wrong[field] = f"{why}, and the certificate expires", "Mount the whole volume."
        for field, (why, remedy) in wrong.items():
            value = shown(mount.get(field))
            place = f"{path}[{number}].{field}"
            yield FieldError(place, value, Rule.CERTIFICATE_NOT_MOUNTED, why, remedy)


def _volumes(cluster: Cluster, role: Role) -> dict[str, Volume]:
    """Return the volumes of a role's pod template by name."""
    volumes = pod_templates.mappings(cluster.spec.role(role).pod_template, "volumes")
    return {
        str(one.get("name")): (f"spec.{role}.podTemplate.{place}", one) for place, one in volumes
    }


def _secrets(volume: Mapping[str, Any]) -> list[object]:
    """Return the names of the Secrets that a volume is made of."""
    given = [one.get("secret") for one in _projected(volume)]
    named = [(volume.get("secret"), "secretName"), *((one, "name") for one in given)]
    return [secret.get(field) for secret, field in named if isinstance(secret, Mapping)]


def volume_errors(role: Role, path: str, volume: Mapping[str, Any]) -> Iterator[FieldError]:
    """Yield an error if a volume that engines mount at the folder can never hold the files.

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
            f"{pod_templates.CERTIFICATE_FOLDER}",
            f"Give files with the paths {FILES}, or leave items out.",
        )


def volume_warnings(
    cluster: Cluster, role: Role, path: str, volume: Mapping[str, Any]
) -> Iterator[FieldError]:
    """Yield settings of such a volume that are legal, but probably not meant."""
    given = {kind for kind, source in volume.items() if kind != "name" and source is not None}
    empty = given <= {"emptyDir"}  # Kubernetes makes one where no source is given
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
    if writers and all(  # each of them ends before the engine starts
        place.startswith("spec.initContainers") and one.get("restartPolicy") != "Always"
        for place, one in writers.items()
    ):
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


def _writers(
    cluster: Cluster, role: Role, volume: Mapping[str, Any]
) -> dict[str, Mapping[str, Any]]:
    """Return the containers that could write to a volume, by their paths.

    The engine's own container writes nothing there, unless the user's template gives it something
    else to run.
    """
    return {
        path: one
        for path, one in pod_templates.containers(cluster.spec.role(role).pod_template)
        if (
            one.get("name") != pod_templates.ENGINE_CONTAINER
            or "command" in one
            or "lifecycle" in one
        )
        and any(
            mount.get("name") == volume.get("name") and mount.get("readOnly") is not True
            for mount in _mappings(one.get("volumeMounts"))
        )
    }


def _sources(path: str, volume: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield (path, source) of the sources of a volume's files that Kubernetes describes."""
    for kind in (*_NAMED, "downwardAPI"):
        if isinstance(source := volume.get(kind), Mapping):
            yield f"{path}.{kind}", {**source, "kind": kind}
    for number, one in enumerate(_projected(volume)):
        for kind, source in one.items():
            if isinstance(source, Mapping):
                yield f"{path}.projected.sources[{number}].{kind}", {**source, "kind": kind}


def _paths(source: Mapping[str, Any]) -> set[str] | None:
    """Return the paths of the files of a source; None for a source that may hold any file."""
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


def _projected(volume: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the sources of a projected volume; nothing for another volume."""
    return _mappings(pod_templates.as_mapping(volume.get("projected")).get("sources"))


def _mappings(value: object) -> Iterator[Mapping[str, Any]]:
    return (one for one in pod_templates.as_list(value) if isinstance(one, Mapping))
