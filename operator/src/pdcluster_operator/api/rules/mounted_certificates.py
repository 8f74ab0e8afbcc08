"""What a pod template may mount where engines have their certificates.

With ``spec.transfer.tls: Mounted`` it has to mount the files. With ``Enabled`` the operator does.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pdcluster_operator.api.findings import FieldError, Rule, shown
from pdcluster_operator.api.object_names import certificates_name
from pdcluster_operator.api.rules.certificate_volumes import (
    FILES,
    volume_errors,
    volume_warnings,
)
from pdcluster_operator.api.spec.enums import Role, TlsMode
from pdcluster_operator.api.spec.pod_templates import (
    CERTIFICATE_FOLDER,
    ENGINE_CONTAINER,
    engine_container,
    pod_spec,
)
from pdcluster_operator.api.spec.types import Cluster

TLS = "spec.transfer.tls"
Volume = tuple[str, Mapping[str, Any]]
"""A volume and its path in the spec."""


def mount_errors(cluster: Cluster) -> Iterator[FieldError]:
    """Yield what is wrong with the mounts of each role's engine container."""
    for role in Role:
        if cluster.spec.transfer.tls is TlsMode.MOUNTED:
            yield from _of_role(cluster, role)
        elif cluster.spec.transfer.tls is TlsMode.ENABLED:
            yield from _hidden(cluster, role)


def mount_warnings(cluster: Cluster) -> Iterator[FieldError]:
    """Yield what is legal in the volumes that hold certificates, but suspicious."""
    for role in Role:
        if cluster.spec.transfer.tls is TlsMode.MOUNTED:
            volumes = _volumes(cluster, role)
            for _, mount, at_folder in _mounts(engine_container(cluster, role)[1]):
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
            "Enabled. Local mode knows Enabled and Disabled only.",
        )


def support_warnings(cluster: Cluster) -> Iterator[FieldError]:
    """Yield the same as a warning, where it is not known which operator it will be."""
    for error in support_errors(cluster):
        message = "an operator of a default install has no certificate that such engines trust"
        yield replace(error, message=message)


def _hidden(cluster: Cluster, role: Role) -> Iterator[FieldError]:
    """Yield mounts that would hide the operator's certificate: engines could not start."""
    place, container = engine_container(cluster, role)
    for number, mount, _ in _mounts(container):
        yield FieldError(
            f"{place}.volumeMounts[{number}].mountPath",
            shown(mount.get("mountPath")),
            Rule.CERTIFICATE_HIDDEN,
            f"hides the certificate that the operator mounts at {CERTIFICATE_FOLDER}, because "
            f"{TLS} is Enabled",
            f"Remove this mount. To use certificates of your own, set {TLS} to Mounted.",
            (TLS,),
        )


def _mounts(container: Mapping[str, Any]) -> Iterator[tuple[int, Mapping[str, Any], bool]]:
    """Yield the mounts at the folder and below it: number, mount, whether it is at the folder."""
    for number, mount in enumerate(_list(container.get("volumeMounts"))):
        if isinstance(mount, Mapping):
            path = posixpath.normpath(str(mount.get("mountPath")))
            if path == CERTIFICATE_FOLDER or path.startswith(f"{CERTIFICATE_FOLDER}/"):
                yield number, mount, path == CERTIFICATE_FOLDER


def _of_role(cluster: Cluster, role: Role) -> Iterator[FieldError]:
    place, container = engine_container(cluster, role)
    path = f"{place}.volumeMounts" if container else place
    mounts = list(_mounts(container))
    if not any(at_folder for _, _, at_folder in mounts):
        yield FieldError(
            path,
            "",
            Rule.CERTIFICATE_NOT_MOUNTED,
            f"mounts nothing at {CERTIFICATE_FOLDER}, where {role} engines look for {FILES}, "
            f"because {TLS} is Mounted",
            f"Add a volume with the {role} engines' certificate to spec.{role}.podTemplate, and "
            f"mount it there in the container {ENGINE_CONTAINER}.",
        )
    volumes = _volumes(cluster, role)
    for number, mount, at_folder in mounts:
        named = volumes.get(str(mount.get("name")))
        if named is None:
            yield FieldError(
                f"{path}[{number}].name",
                shown(mount.get("name")),
                Rule.CERTIFICATE_NOT_MOUNTED,
                "is no volume of the same podTemplate",
                f"Add the volume to spec.{role}.podTemplate.spec.volumes.",
            )
        elif certificates_name(cluster.name) in _secrets(named[1]):
            yield FieldError(
                f"{path}[{number}].name",
                shown(mount.get("name")),
                Rule.CERTIFICATE_NOT_MOUNTED,
                f"is the Secret {certificates_name(cluster.name)}, which the operator writes only "
                f"while {TLS} is Enabled",
                f"Mount a Secret of your own, or set {TLS} to Enabled without this mount.",
            )
        elif at_folder:
            yield from volume_errors(role, *named)
        for field in ("subPath", "subPathExpr"):
            if mount.get(field):
                yield FieldError(
                    f"{path}[{number}].{field}",
                    shown(mount[field]),
                    Rule.CERTIFICATE_NOT_MOUNTED,
                    "never gets new files, because the kubelet does not update a subPath, and the "
                    "certificate expires",
                    "Mount the whole volume.",
                )


def _volumes(cluster: Cluster, role: Role) -> dict[str, Volume]:
    """Return the volumes of a role's pod template by name."""
    volumes = _list(pod_spec(cluster.spec.role(role).pod_template).get("volumes"))
    return {
        str(one.get("name")): (f"spec.{role}.podTemplate.spec.volumes[{number}]", one)
        for number, one in enumerate(volumes)
        if isinstance(one, Mapping)
    }


def _secrets(volume: Mapping[str, Any]) -> list[object]:
    """Return the names of the Secrets that a volume is made of."""
    projected = volume.get("projected")
    listed = _list(projected.get("sources")) if isinstance(projected, Mapping) else ()
    given = [one.get("secret") for one in listed if isinstance(one, Mapping)]
    named = [(volume.get("secret"), "secretName"), *((one, "name") for one in given)]
    return [secret.get(field) for secret, field in named if isinstance(secret, Mapping)]


def _list(value: object) -> Sequence[Any]:
    return value if isinstance(value, Sequence) and not isinstance(value, str | bytes) else ()
