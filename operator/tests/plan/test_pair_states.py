"""What is known of a pair: from its two engines, and from what decode's launcher says."""

from __future__ import annotations

from msgspec import structs

from pdcluster_connector.protocol.launcher_documents import LinkReport, LinksReport, LinkState
from pdcluster_operator.api.conditions import StatusReason
from pdcluster_operator.api.object_names import EngineName
from pdcluster_operator.api.spec.types import Role
from pdcluster_operator.plan.observed.engines import EngineView
from pdcluster_operator.plan.observed.links import PairView, observe_pairs


def engine(role: Role, ready: bool | None, engine_id: str) -> EngineView:
    name = EngineName("ns", "c", role, "aaaaa", 0)
    reason = StatusReason.ENGINES_READY if ready else StatusReason.LOADING_WEIGHTS
    return EngineView(name, ready, reason, "", engine_id, "10.0.0.1", 1)


def pair(prefill: EngineView, decode: EngineView, told: str = "p/1") -> PairView:
    """Return the pair, where decode's launcher has an established link to incarnation ``told``."""
    link = LinkReport(prefill.name.logical, told, LinkState.ESTABLISHED)
    links = {decode.name.logical: LinksReport(decode.name.logical, "d/1", (link,))}
    [found] = observe_pairs((prefill,), (decode,), links)
    return found


def test_a_link_to_the_incarnation_that_runs_is_established() -> None:
    prefill, decode = engine(Role.PREFILL, True, "p/1"), engine(Role.DECODE, True, "d/1")
    assert pair(prefill, decode).state is LinkState.ESTABLISHED
    assert pair(prefill, decode, told="p/0").state is LinkState.PENDING


def test_a_link_to_an_engine_that_never_answered_the_operator_is_what_decode_says() -> None:
    """The operator does not know the engine's incarnation, so it cannot contradict decode."""
    prefill, decode = engine(Role.PREFILL, None, ""), engine(Role.DECODE, True, "d/1")
    assert pair(prefill, decode).state is LinkState.ESTABLISHED


def test_a_pair_that_waits_names_the_engine_that_is_not_ready() -> None:
    ready = {role: engine(role, True, "x/1") for role in Role}
    for role in Role:
        late = engine(role, False, "")
        found = pair(*(ready | {role: late}).values())
        assert found.state is LinkState.PENDING
        assert found.reason is StatusReason.WAITING_FOR_ENGINES
        assert found.message == f"c-{role}-aaaaa-0 is not ready: LoadingWeights"


def test_a_decode_engine_whose_launcher_is_silent_has_links_that_nobody_knows() -> None:
    prefill, decode = engine(Role.PREFILL, True, "p/1"), engine(Role.DECODE, None, "d/1")
    [found] = observe_pairs((prefill,), (decode,), {})
    assert found.state is LinkState.UNKNOWN
    assert found.reason is StatusReason.LAUNCHER_UNREACHABLE
    assert found.message == "the launcher of c-decode-aaaaa-0 does not answer the operator"
    late = engine(Role.DECODE, False, "")
    [found] = observe_pairs((prefill,), (late,), {})
    assert found.state is LinkState.PENDING, "it is known why it says nothing"


def test_a_launcher_that_names_no_incarnation_is_not_contradicted() -> None:
    prefill, decode = engine(Role.PREFILL, True, "p/1"), engine(Role.DECODE, True, "d/1")
    assert pair(prefill, decode, told="").state is LinkState.ESTABLISHED


def test_a_link_on_its_way_says_what_its_launcher_says() -> None:
    prefill, decode = engine(Role.PREFILL, True, "p/1"), engine(Role.DECODE, True, "d/1")
    link = LinkReport("c", "p/1", LinkState.PENDING, "Ignored", message="1 of 2 ranks")
    for told, words in (
        (structs.replace(link, prefill=prefill.name.logical), "1 of 2 ranks"),
        (link, ""),
    ):
        links = {decode.name.logical: LinksReport(decode.name.logical, "d/1", (told,))}
        [found] = observe_pairs((prefill,), (decode,), links)
        assert found.state is LinkState.PENDING
        assert (found.reason, found.message) == (StatusReason.LINKS_PENDING, words)
