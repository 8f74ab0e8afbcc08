"""The pairs of a prefill and a decode engine, and the state of the link of each.

The connector judges each link: ``launcher/links/link_table.py`` joins what an engine's ranks
report, and the connector's ``link_keeper`` keeps their links. ``status/conditions.py`` makes
conditions of the pairs.

All pairs of a pairing key have a link, or a sample of them if there are very many: 64 engines of
each role have 4,096 pairs, and to probe each of them would cost more than it shows. A request over
a pair outside of the sample makes its connection when it arrives. The sample needs no memory: each
pair has a weight that is a hash of its two names. So an engine that comes or goes changes few links
of the other engines (rendezvous hashing).
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Set as AbstractSet
from dataclasses import dataclass
from functools import lru_cache, partial
from heapq import nsmallest

from pdcluster_connector.protocol.launcher_documents import (
    CanaryReport,
    CanaryState,
    LinkReport,
    LinksReport,
    LinkState,
)
from pdcluster_connector.protocol.load_report import ReceiveRate
from pdcluster_operator.api.conditions import StatusReason
from pdcluster_operator.api.object_names import EngineName
from pdcluster_operator.plan.observed.engines import EngineView

Group = tuple[tuple[EngineView, ...], tuple[EngineView, ...]]
"""The prefill engines and the decode engines of one pairing key."""


@dataclass(frozen=True, slots=True)
class PairView:
    """One pair.

    Attributes:
        state: Unknown if the launcher of the decode engine does not answer.
        reason: of the link if it was reported. WaitingForEngines while an engine is known not to be
            ready.
        canary: the last one between these incarnations, since the link was established.
        descriptors: how many NIXL descriptors the KV of 1,000 tokens takes; 0 if it is not known.
        receives: how fast its latest large receives were; None if it is not known.
    """

    prefill: EngineView
    decode: EngineView
    state: LinkState
    reason: str = ""
    message: str = ""
    bytes_per_second: float = 0.0
    canary: CanaryReport = CanaryReport()  # noqa: RUF009 (frozen)
    descriptors: int = 0
    receives: ReceiveRate | None = None

    @property
    def label(self) -> str:
        """The pair, for a message."""
        return f"{self.prefill.name.stateful_set} -> {self.decode.name.stateful_set}"

    @property
    def verified(self) -> bool:
        """Whether KV was seen to move over this link."""
        return self.state is LinkState.ESTABLISHED and self.canary.state is CanaryState.PASSED

    @property
    def canary_failed(self) -> bool:
        """Whether the link is established, and the last canary through it moved no KV."""
        return self.state is LinkState.ESTABLISHED and self.canary.state is CanaryState.FAILED


def observe_pairs(
    prefill: tuple[EngineView, ...],
    decode: tuple[EngineView, ...],
    links: Mapping[str, LinksReport],
) -> tuple[PairView, ...]:
    """Return the pairs of one pairing key that have a link, in a stable order."""
    pairs: list[PairView] = []
    for one, peers in zip(decode, links_of(prefill, decode), strict=True):
        report = links.get(one.name.logical)
        reported = {link.prefill: link for link in report.links} if report else {}
        pairs += [_pair(other, one, report, reported.get(other.name.logical)) for other in peers]
    return tuple(pairs)


def links_of(
    prefill: tuple[EngineView, ...], decode: tuple[EngineView, ...]
) -> list[tuple[EngineView, ...]]:
    """Return for each decode engine of one pairing key the prefill engines that it has links to."""
    readers = [engine.name.logical for engine in decode]
    sample = sample_pairs(tuple(one.name.logical for one in prefill), tuple(readers))
    return [
        prefill
        if len(sample[reader]) == len(prefill)
        else tuple(one for one in prefill if one.name.logical in sample[reader])
        for reader in readers
    ]


def by_pairing_key(
    prefill: Iterable[EngineView], decode: Iterable[EngineView], keys: Mapping[EngineName, str]
) -> Iterator[Group]:
    """Yield the engines of each pairing key. Engines of two keys are never paired."""
    prefill, decode = tuple(prefill), tuple(decode)
    for key in sorted({keys.get(view.name, "") for view in (*prefill, *decode)}):
        yield (
            tuple(view for view in prefill if keys.get(view.name, "") == key),
            tuple(view for view in decode if keys.get(view.name, "") == key),
        )


def linkable(group: Group, blocked: AbstractSet[EngineName] = frozenset()) -> Group:
    """Return the engines of one pairing key among which links are kept.

    A sample that counted engines which may not be made yet could give those that exist no link.
    They would never be verified, and the others wait for that.

    Args:
        blocked: engines that wait until others are gone.
    """
    prefill, decode = group
    if len(prefill) * len(decode) <= ALL_LINKS:
        return group
    prefill, decode = (tuple(one for one in side if one.name not in blocked) for side in group)
    return (prefill, decode) if prefill and decode else group


def _pair(
    prefill: EngineView, decode: EngineView, report: LinksReport | None, link: LinkReport | None
) -> PairView:
    if decode.ready is False:
        return _waiting(prefill, decode, decode)
    if report is None:
        return PairView(
            prefill,
            decode,
            LinkState.UNKNOWN,
            StatusReason.LAUNCHER_UNREACHABLE,
            f"the launcher of {decode.name.stateful_set} does not answer the operator",
        )
    if link is not None and link.state is LinkState.FAILED:
        # The reason that the decode engine reports is more exact than that a pod died.
        return _seen(prefill, decode, LinkState.FAILED, link)
    if prefill.ready is False:
        return _waiting(prefill, decode, prefill)
    ids = {prefill.engine_id, link.prefill_engine_id if link is not None else ""} - {""}
    if link is None or len(ids) > 1 or link.state is not LinkState.ESTABLISHED:
        message = link.message if link is not None else ""
        return PairView(prefill, decode, LinkState.PENDING, StatusReason.LINKS_PENDING, message)
    return _seen(prefill, decode, LinkState.ESTABLISHED, link)


def _seen(prefill: EngineView, decode: EngineView, state: LinkState, link: LinkReport) -> PairView:
    return PairView(
        prefill,
        decode,
        state,
        link.reason,
        link.message,
        link.bytes_per_second,
        link.canary,
        link.descriptors or 0,
        link.receives or None,
    )


def _waiting(prefill: EngineView, decode: EngineView, cause: EngineView) -> PairView:
    message = f"{cause.name.stateful_set} is not ready: {cause.reason}"
    return PairView(prefill, decode, LinkState.PENDING, StatusReason.WAITING_FOR_ENGINES, message)


ALL_LINKS = 64
"""Up to this number, every link of a pairing key is kept."""

PairSample = Mapping[str, frozenset[str]]
"""The prefill engines that each decode engine keeps links to."""


def sample_pairs(prefill: tuple[str, ...], decode: tuple[str, ...]) -> PairSample:
    """Return the links to keep between engines of one pairing key.

    Each prefill engine and each decode engine has a link. Beyond ``ALL_LINKS`` pairs, there are at
    least as many links, and at most one more for each engine. The order of the names does not
    matter.

    Args:
        prefill: names of the prefill engines.
        decode: names of the decode engines.
    """
    if len(prefill) * len(decode) <= ALL_LINKS:
        return dict.fromkeys(decode, frozenset(prefill))
    return _sampled(prefill, decode)


@lru_cache(maxsize=32)
def _sampled(prefill: tuple[str, ...], decode: tuple[str, ...]) -> PairSample:
    share = min(len(prefill), -(-ALL_LINKS // len(decode)))
    kept = {reader: set(nsmallest(share, prefill, partial(_weight, reader))) for reader in decode}
    for name in set(prefill).difference(*kept.values()):
        weights = {_weight(reader, name): reader for reader in decode}
        kept[weights[min(weights)]].add(name)
    return {reader: frozenset(names) for reader, names in kept.items()}


def _weight(decode: str, prefill: str) -> bytes:
    return hashlib.sha256(f"{decode} {prefill}".encode()).digest()
