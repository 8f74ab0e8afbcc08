"""``status.transfer``: whose certificates the engines have, until when, and who has none.

It is judged from the pods that run, not from the spec. Engines can be older than the field of the
spec, and ``rollout.paused`` keeps engines of another revision.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pdcluster_connector.compat.counted import counted
from pdcluster_operator.api.conditions import timestamp
from pdcluster_operator.api.labels import EngineName, engine_of
from pdcluster_operator.api.spec.enums import Certificates
from pdcluster_operator.api.spec.types import Cluster
from pdcluster_operator.plan.builders.certificates import certificates_of_pod, has_certificates
from pdcluster_operator.plan.model import Observed
from pdcluster_operator.plan.status.progress import ChangeView

DANGER = "whoever reaches their ports can read where their KV lies"


def transfer_status(observed: Observed, cluster: Cluster, change: ChangeView) -> dict[str, Any]:
    """Return ``status.transfer``; nothing while there are no pods of engines."""
    found = {
        engine: certificates_of_pod(pod)
        for pod in observed.pods
        if (engine := engine_of(pod)) is not None
    }
    if not found:
        return {}
    sources = set(found.values())
    source = sources.pop() if len(sources) == 1 else Certificates.MIXED
    status: dict[str, Any] = {"certificates": source.value}
    if source is not Certificates.NONE and (moment := _not_after(observed, found, source)):
        status["notAfter"] = moment
    without = sum(one is Certificates.NONE for one in found.values())
    if without and has_certificates(cluster):
        status["message"] = _without_tls(without, len(found), cluster, change)
    return status


def without_tls(status: object) -> str:
    """Return what a status says of engines without TLS that should have it; empty if nothing."""
    transfer = status.get("transfer") if isinstance(status, Mapping) else None
    message = transfer.get("message") if isinstance(transfer, Mapping) else None
    return message if isinstance(message, str) else ""


def _not_after(observed: Observed, engines: Iterable[EngineName], source: Certificates) -> str:
    """Return when the first certificate expires.

    An engine whose certificate has expired does not answer any more. So while one does not answer,
    the time that was known before stays, if it is earlier.
    """
    reports = [observed.engines.get(engine.logical) for engine in engines]
    told = [report.certificate_expires for report in reports if report is not None]
    known = [timestamp(moment) for moment in told if moment is not None]
    before = (observed.cluster.get("status") or {}).get("transfer") or {}
    if (None in reports or not known) and before.get("certificates") == source:
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
