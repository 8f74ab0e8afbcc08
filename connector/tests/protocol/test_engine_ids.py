"""Engine ids with and without a data-parallel rank."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from pdcluster_connector.protocol.engine_id import (
    EngineId,
    id_of_rank,
    parse_engine_id,
    short_name,
)

LOGICAL = "ns.c.prefill.r.0"
IDS = st.text(max_size=30).filter(lambda text: not text.endswith("/"))


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (f"{LOGICAL}/00ff", EngineId(LOGICAL, "00ff")),
        (f"{LOGICAL}/00ff_dp0", EngineId(LOGICAL, "00ff", 0)),
        (f"{LOGICAL}/00ff_dp4095", EngineId(LOGICAL, "00ff", 4095)),
        (f"{LOGICAL}/00ff_dp01", EngineId(LOGICAL, "00ff_dp01")),
        (f"{LOGICAL}/00ff_dp10000", EngineId(LOGICAL, "00ff_dp10000")),
        (f"{LOGICAL}/00ff_dp٣", EngineId(LOGICAL, "00ff_dp٣")),
        (f"{LOGICAL}/00ff_dp1_dp2", EngineId(LOGICAL, "00ff_dp1", 2)),
        (f"{LOGICAL}_dp1/00ff", EngineId(f"{LOGICAL}_dp1", "00ff")),  # a name is no rank
        ("by-hand", EngineId("by-hand", "")),
        ("by-hand_dp1", EngineId("by-hand", "", 1)),
        ("", EngineId("", "")),
    ],
)
def test_parts(text: str, parts: EngineId) -> None:
    assert parse_engine_id(text) == parts


@pytest.mark.parametrize(
    ("engine_id", "short"),
    [(f"{LOGICAL}/00ff_dp1", "prefill/0"), ("by.hand/00ff", "by.hand"), ("by-hand", "by-hand")],
)
def test_short_names(engine_id: str, short: str) -> None:
    assert short_name(engine_id) == short


@given(IDS, st.integers(0, 4095), st.integers(1, 4096))
def test_an_id_and_its_ranks(engine_id: str, rank: int, size: int) -> None:
    parts = parse_engine_id(id_of_rank(engine_id, rank, size))
    if size > 1:
        assert (parts.data_rank, parts.engine) == (rank, engine_id)
    else:
        assert parts == parse_engine_id(engine_id)


def test_a_rank_does_not_succeed_another_rank_of_the_same_start() -> None:
    first, second, later = (
        parse_engine_id(f"{LOGICAL}/{rest}") for rest in ("aa_dp0", "aa_dp1", "bb_dp0")
    )
    assert not first.succeeds(second)
    assert not second.succeeds(first)
    assert later.succeeds(first)
    assert later.succeeds(second)
    assert not later.succeeds(parse_engine_id("ns.c.prefill.r.1/aa_dp0"))
    assert not parse_engine_id("by-hand_dp1").succeeds(parse_engine_id("by-hand_dp0"))
    without = parse_engine_id(LOGICAL)
    assert not without.succeeds(later), "an id without an incarnation says nothing of a restart"
    assert not later.succeeds(without)


@pytest.mark.parametrize(("size", "names"), [(1, ["e/1"]), (2, ["e/1_dp0", "e/1_dp1"])])
def test_only_an_engine_of_one_rank_has_its_name_alone(size: int, names: list[str]) -> None:
    assert [id_of_rank("e/1", rank, size) for rank in range(size)] == names
