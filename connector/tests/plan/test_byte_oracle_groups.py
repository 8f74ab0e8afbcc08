"""The byte oracle over two KV cache groups: one plan, each group with blocks of its own."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from labelled_engine import Engine, execute
from msgspec.structs import replace
from test_byte_oracle import Case, random_case

from pdcluster_connector.plan.block_pairs import BlockList, pair_blocks
from pdcluster_connector.plan.geometry import Shard
from pdcluster_connector.plan.peer_plan import plan_peer
from pdcluster_connector.plan.request_descriptors import descriptor_indices


def joined(*engines: Engine) -> list[Shard]:
    """Shards that hold the regions of all engines' shards of the same rank."""
    return [
        replace(
            shards[0],
            regions=tuple(
                replace(region, group=group)
                for group, shard in enumerate(shards)
                for region in shard.regions
            ),
        )
        for shards in zip(*(engine.shards for engine in engines), strict=True)
    ]


def two_groups(rng: np.random.Generator) -> list[Case]:
    """Two random cases whose engines have the same ranks, as one model's groups have."""
    first, second = random_case(rng), random_case(rng)
    for ours, theirs in ((first.prefill, second.prefill), (first.decode, second.decode)):
        shared = {field: ours[field] for field in ("heads", "tensor", "pipeline")}
        apart = {"name": "model.other", "address": ours["address"] + 2**50}
        theirs.update(shared | apart | {"layers": max(theirs["layers"], 2)})
    second.decode["layers"] = second.prefill["layers"]
    return [first, second]


def run_groups(cases: list[Case]) -> int:
    prefill = [Engine(**case.prefill) for case in cases]
    decode = [Engine(**case.decode) for case in cases]
    before = [engine.memory.copy() for engine in decode]
    writes = [np.zeros(engine.memory.size, np.int64) for engine in decode]
    for case, engine in zip(cases, prefill, strict=True):
        engine.store(case.prefill_blocks, case.prompt)
    moved = 0
    for shard in joined(*decode):
        plan = plan_peer(shard, joined(*prefill))
        for group, case in enumerate(cases):
            pairs = pair_blocks(
                BlockList(case.prefill_blocks, prefill[group].block_tokens),
                BlockList(case.decode_blocks, decode[group].block_tokens),
                case.start,
                case.stop,
            )
            moved += execute(
                plan,
                descriptor_indices(plan, pairs, (group, group)),
                prefill[group],
                decode[group],
                writes=writes[group],
                readable=np.ones(prefill[group].memory.size, bool),
            )
    for group, case in enumerate(cases):
        decode[group].check_received(
            case.decode_blocks, case.start, case.stop, before[group], writes[group]
        )
    return moved


@pytest.mark.parametrize("chunk", range(4))
def test_random_engines_with_two_groups(chunk: int) -> None:
    moved = 0
    for number in range(settings().max_examples // 2):
        cases = two_groups(np.random.default_rng([chunk, number, 2]))
        try:
            moved += run_groups(cases)
        except Exception as error:
            error.add_note(f"chunk {chunk}, number {number}: {cases}")
            raise
    assert moved > 0
