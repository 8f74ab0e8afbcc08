"""When the Secret with the engines' certificates is written, and for how long it serves.

All certificates of a cluster are made for the same period. In the next period they are made again,
long before they expire. The kubelet brings the new files into the pods, and the engines read them
for new connections, so nothing is restarted.
"""

from __future__ import annotations

from collections.abc import Iterable

from pdcluster_operator.api.labels import engine_of
from pdcluster_operator.api.object_names import EngineName
from pdcluster_operator.api.spec.enums import Certificates
from pdcluster_operator.api.spec.types import Cluster
from pdcluster_operator.plan.builders.certificates import (
    build_certificates_secret,
    certificates_of,
    entry_of,
)
from pdcluster_operator.plan.model import (
    HeldCertificates,
    Manifest,
    Observed,
    WriteCertificates,
)
from pdcluster_operator.plan.rollout.desired import live_engines
from pdcluster_operator.plan.secrets.engine_certificates import certificates_by_engine

DAY = 86_400.0
PERIOD_SECONDS = 30 * DAY
PERIODS = 3
"""How many periods a certificate is valid: so an operator may be away for two."""
CLOCKS_DIFFER = DAY


def certificates_step(
    observed: Observed, cluster: Cluster, wanted: Iterable[EngineName], begin: float
) -> WriteCertificates | None:
    """Return the step that the Secret needs; None if it is as it should be.

    An engine that leaves keeps its certificate until its last pod is gone. So do engines whose
    spec is not accepted any more, or has TLS no longer.

    It is for clusters of which some ``are_needed``.

    Args:
        begin: when the period began.
    """
    pods = (engine_of(pod) for pod in observed.pods)
    names = {*wanted, *live_engines(observed), *(name for name in pods if name is not None)}
    engines = {entry_of(name): name.logical for name in sorted(names)}
    if not engines:
        return None
    issue = f"{observed.certificates.authority}.{int(begin)}"
    held = observed.certificates
    if held.issue == issue and held.engines == engines.keys():
        return None
    return WriteCertificates(
        build_certificates_secret(cluster, issue),
        engines,
        begin - CLOCKS_DIFFER,
        begin + PERIODS * PERIOD_SECONDS,
        _why(observed, issue),
        held.uid,
    )


def certificates_as_due(children: Iterable[Manifest], now: float) -> HeldCertificates:
    """Return what the Secret holds if nothing is left to write, for who may not read it."""
    names = (engine_of(child) for child in children if child.get("kind") == "StatefulSet")
    entries = frozenset(entry_of(name) for name in names if name is not None)
    return HeldCertificates("", f".{int(period_start(now))}", entries)


def seconds_to_renewal(now: float) -> float:
    """Return when the next period begins. A cluster at rest has no event that tells of it."""
    return period_start(now) + PERIOD_SECONDS - now


def are_needed(observed: Observed, cluster: Cluster) -> bool:
    """Whether an engine has certificates of the operator, or is to have them."""
    if certificates_of(cluster) is Certificates.OPERATOR:
        return True
    live = certificates_by_engine(observed.pods, observed.children).values()
    return Certificates.OPERATOR in live


def period_start(now: float) -> float:
    """Return when the period began in which all certificates are made alike."""
    return now // PERIOD_SECONDS * PERIOD_SECONDS


def _why(observed: Observed, issue: str) -> str:
    held = observed.certificates.issue
    if held is None:
        return "the engines' certificates"
    if held != issue:
        return "the engines' certificates, made again before they expire"
    return "the certificates of the engines that there are now"
