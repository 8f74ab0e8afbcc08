"""``spec.transfer.tls: Mounted``: engines use files that the user's pod templates mount."""

from __future__ import annotations

import posixpath
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pdcluster_operator.api.findings import FieldError, Rule, shown
from pdcluster_operator.api.spec.enums import Role, TlsMode
from pdcluster_operator.api.spec.pod_templates import (
    CERTIFICATE_FOLDER,
    ENGINE_CONTAINER,
    engine_container,
    pod_spec,
)
from pdcluster_operator.api.spec.types import Cluster

TLS = "spec.transfer.tls"
FILES = "ca.crt, tls.crt and tls.key"


def mount_errors(cluster: Cluster) -> Iterator[FieldError]:
    """Yield what is wrong with the mount of each role, if certificates are to be mounted."""
    if cluster.spec.transfer.tls is TlsMode.MOUNTED:
        for role in Role:
            yield from _of_role(cluster, role)


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


def _of_role(cluster: Cluster, role: Role) -> Iterator[FieldError]:
    place, container = engine_container(cluster, role)
    path = f"{place}.volumeMounts" if container else place
    mounts = [
        (number, mount)
        for number, mount in enumerate(_list(container.get("volumeMounts")))
        if isinstance(mount, Mapping)
        and posixpath.normpath(str(mount.get("mountPath"))) == CERTIFICATE_FOLDER
    ]
    if not mounts:
        yield FieldError(
            path,
            "",
            Rule.CERTIFICATE_NOT_MOUNTED,
            f"mounts nothing at {CERTIFICATE_FOLDER}, where {role} engines look for {FILES}, "
            f"because {TLS} is Mounted",
            f"Add a volume with the {role} engines' certificate to spec.{role}.podTemplate, and "
            f"mount it there in the container {ENGINE_CONTAINER}.",
            (TLS,),
        )
    volumes = _list(pod_spec(cluster.spec.role(role).pod_template).get("volumes"))
    names = {volume.get("name") for volume in volumes if isinstance(volume, Mapping)}
    for number, mount in mounts:
        if mount.get("name") not in names:
            yield FieldError(
                f"{path}[{number}].name",
                shown(mount.get("name")),
                Rule.CERTIFICATE_NOT_MOUNTED,
                "is no volume of the same podTemplate",
                f"Add the volume to spec.{role}.podTemplate.spec.volumes.",
                (TLS,),
            )
        for field in ("subPath", "subPathExpr"):
            if mount.get(field):
                yield FieldError(
                    f"{path}[{number}].{field}",
                    shown(mount[field]),
                    Rule.CERTIFICATE_NOT_MOUNTED,
                    "keeps the files of the pod's start: the kubelet updates no subPath, so the "
                    "certificate expires",
                    "Mount the whole volume.",
                    (TLS,),
                )


def _list(value: object) -> Sequence[Any]:
    return value if isinstance(value, Sequence) and not isinstance(value, str | bytes) else ()
