"""Revisions that were stored before ``spec.transfer.tls`` existed: they do not mention TLS.

An upgrade replaces no engine, so their engines run without TLS. Engines with TLS and engines
without it never pair. So when one role gets another revision, the other role may need one too.
Once their engines are gone, such a revision is not used again where the spec wants TLS.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pdcluster_operator.api.spec.enums import Certificates, TlsMode
from pdcluster_operator.api.spec.types import Cluster
from pdcluster_operator.plan.builders.certificates import (
    certificates_of,
    certificates_of_template,
)
from pdcluster_operator.plan.rollout.stored import Revision


def spec_with_tls(one: Revision, cluster: Cluster) -> dict[str, Any]:
    """Return the spec of a revision. One from before there was TLS agrees with ``cluster``.

    So neither today's default nor a spec that says Disabled replaces its engines. A spec that says
    Mounted does: its user wants TLS.
    """
    transfer = one.spec.get("transfer") or {}
    wanted = cluster.spec.transfer.tls
    held = certificates_of_template(one.template, cluster.name)
    if "tls" in transfer or held is Certificates.OPERATOR or wanted is TlsMode.MOUNTED:
        return dict(one.spec)
    return {**one.spec, "transfer": {**transfer, "tls": wanted.value}}


def speaking_alike(cluster: Cluster, found: Iterable[Revision]) -> list[Revision]:
    """Return the revisions whose engines can pair with one that is rendered today."""
    return [one for one in found if speaks_alike(one, cluster)]


def speaks_alike(one: Revision, cluster: Cluster) -> bool:
    """Whether the engines of a revision can pair with one that is rendered today."""
    return certificates_of_template(one.template, cluster.name) is certificates_of(cluster)
