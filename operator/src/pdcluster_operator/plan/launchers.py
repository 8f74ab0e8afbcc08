"""Which launchers the operator polls, under which address, and what follows from their answers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from pdcluster_connector.protocol.launcher_documents import LinksReport, PeersDocument
from pdcluster_operator.api.labels import POD_INDEX_LABEL, engine_of
from pdcluster_operator.api.object_names import LAUNCHER_PORT
from pdcluster_operator.api.spec.enums import Certificates, Role
from pdcluster_operator.plan.secrets import certificates_by_engine
from pdcluster_operator.plan.types import Manifest

MISSES = 2
"""Polls in a row that must fail before an engine counts as unreachable."""


@dataclass(frozen=True, slots=True)
class Target:
    """The launcher to poll for one engine: that of its leading pod.

    Attributes:
        engine: logical id.
        url: base URL of the launcher.
        process: changes with the pod and with every restart of its container. What the old
            process said is dropped when it changes.
        certificates: which ones the engine has. With Unknown, it has to show the operator's.
    """

    engine: str
    role: Role
    url: str
    process: str
    certificates: Certificates = Certificates.OPERATOR


def launchers_to_poll(pods: Iterable[Manifest], children: Iterable[Manifest]) -> Iterator[Target]:
    """Yield one target for every engine whose leading pod has an address.

    What the operator made (``children``) says whether the launcher speaks HTTPS. Where that is not
    known, it is asked over HTTPS.
    """
    pods = tuple(pods)
    certificates = certificates_by_engine(pods, children)
    for pod in pods:
        metadata, status = pod["metadata"], pod.get("status") or {}
        engine, address = engine_of(pod), status.get("podIP")
        if engine and address and metadata["labels"].get(POD_INDEX_LABEL, "0") == "0":
            restarts = sum(c.get("restartCount", 0) for c in status.get("containerStatuses") or ())
            process = f"{metadata['uid']}/{restarts}"
            held = certificates[engine]
            url = launcher_url(address, secured=held is not Certificates.NONE)
            yield Target(engine.logical, engine.role, url, process, held)


def launcher_url(address: str, *, secured: bool) -> str:
    """Return the base URL of the launcher in the pod with this address."""
    return f"{'https' if secured else 'http'}://{url_host(address)}:{LAUNCHER_PORT}"


def url_host(address: str) -> str:
    """Return an IP address as a URL writes it: IPv6 in brackets."""
    return f"[{address}]" if ":" in address else address


def is_unreachable(misses: int) -> bool:
    """Whether an engine counts as unreachable after so many failed polls in a row."""
    return misses >= MISSES


def has_other_peers(sent: PeersDocument, links: LinksReport) -> bool:
    """Return whether a launcher has links to other peers than those that were sent to it last.

    A request with an older document may have timed out and still arrive after ``sent``. That
    document may name fewer engines, or engines that are gone. The peers must then be sent again.
    """
    peers = {peer.engine for peer in sent.peers}
    return peers != {link.prefill for link in links.links}
