"""``status.transfer``: whose certificates the engines have, until when, and who has none.

It is judged from what the pods that run were made from, not from the spec. Engines can be older
than the field of the spec, and ``rollout.paused`` keeps engines of another revision.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from typing import Any

from pdcluster_connector.compat.counted import counted
from pdcluster_operator.api.conditions import timestamp
from pdcluster_operator.api.object_names import EngineName
from pdcluster_operator.api.spec.enums import Certificates
from pdcluster_operator.api.spec.types import Cluster
from pdcluster_operator.plan.builders.secrets import has_certificates
from pdcluster_operator.plan.observed.pods import is_lost
from pdcluster_operator.plan.secrets import certificates_by_engine
from pdcluster_operator.plan.status.progress import ChangeView
from pdcluster_operator.plan.types import Observed

DANGER = "whoever reaches their ports can read where their KV lies"


def transfer_status(
    observed: Observed, cluster: Cluster, change: ChangeView, lost: AbstractSet[str]
) -> dict[str, Any]:
    """Return ``status.transfer``; nothing while there are no pods of engines.

    Lost pods do not count: they may stay for ever, long after their objects are gone.

    Args:
        lost: names of the pods that are lost.
    """
    pods = [pod for pod in observed.pods if not is_lost(pod, lost)]
    found = certificates_by_engine(pods, observed.children)
    if not found:
        return {}
    sources = set(found.values())
    source = sources.pop() if len(sources) == 1 else Certificates.MIXED
    status: dict[str, Any] = {"certificates": source.value}
    if source is not Certificates.NONE and (moment := _not_after(observed, found)):
        status["notAfter"] = moment
    without = sum(one is Certificates.NONE for one in found.values())
    unknown = sum(one is Certificates.UNKNOWN for one in found.values())
    said = []
    if without and has_certificates(cluster):
        said.append(_without_tls(without, len(found), cluster, change))
    if unknown:
        said.append(_unknown(unknown, len(found)))
    if said:
        status["message"] = " ".join(said)
    return status


def tls_warning(status: object) -> str:
    """Return the message of ``status.transfer``, on engines without TLS; empty if it has none."""
    transfer = status.get("transfer") if isinstance(status, Mapping) else None
    message = transfer.get("message") if isinstance(transfer, Mapping) else None
    return message if isinstance(message, str) else ""


def _not_after(observed: Observed, engines: Iterable[EngineName]) -> str:
    """Return when the first certificate expires.

    An engine whose certificate has expired no longer answers. So while an engine does not answer,
    the moment in the former status stays if it is earlier.
    """
    reports = [observed.engines.get(engine.logical) for engine in engines]
    moments = [report.certificate_expires for report in reports if report is not None]
    known = [timestamp(moment) for moment in moments if moment is not None]
    before = (observed.cluster.get("status") or {}).get("transfer") or {}
    if None in reports or not known:
        known.append(str(before.get("notAfter") or ""))
    return min(filter(None, known), default="")


def _without_tls(without: int, engines: int, cluster: Cluster, change: ChangeView) -> str:
    tls = cluster.spec.transfer.tls.value
    if change.paused:
        remedy = "Set spec.rollout.paused to false to replace them"
    elif change.replacing:
        remedy = "They are being replaced"
    else:
        remedy = "Another value of spec.rollout.renew replaces them"
    return (
        f"{without} of {counted(engines, 'engine')} without TLS, made before spec.transfer.tls "
        f"was {tls}: {DANGER}. {remedy}."
    )


def _unknown(unknown: int, engines: int) -> str:
    return (
        f"It is not known which certificates {unknown} of {counted(engines, 'engine')} have: their "
        "StatefulSets and their stored revisions are gone. The operator speaks only TLS with them. "
        "Delete their pods if they stay."
    )
