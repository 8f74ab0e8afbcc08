"""Data-parallel engines in local mode: one engine, but each of its ranks is a separate peer."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
from local_run import BLOCK_TOKENS, KV_BYTES_PER_TOKEN, LocalRun, manifest
from reply import Reply

from models.tiny import model_path
from pdcluster_operator.api.object_names import HTTP_PORT, LAUNCHER_PORT

pytestmark = [pytest.mark.local, pytest.mark.timeout(900)]

PROMPTS = 8
SAMPLE = r'^(?P<name>\w+)\{(?:[^}]*,)?engine="(?P<rank>\d+)"[^}]*\} (?P<value>\S+)'
# As vLLM for CPU starts them: several cores, and a process for each rank.
PROCESS_A_RANK = {"name": "VLLM_ENABLE_V1_MULTIPROCESSING", "value": "1"}
CANARY_BLOCKS = 4  # three blocks and one token


@dataclass(frozen=True)
class Case:
    """Data-parallel sizes of the two engines, and the pods that prefill's ranks are spread over."""

    model: str
    prefill: int
    decode: int
    pods: int = 1

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """(Prefill rank, decode rank) of each prompt. Every pair occurs, several times."""
        every = [(p, d) for p in range(self.prefill) for d in range(self.decode)]
        return [every[n % len(every)] for n in range(PROMPTS)]


# Ranks that are independent of each other, and ranks that step together (see the recipe).
CASES = (
    Case("llama", prefill=2, decode=1, pods=2),
    Case("llama-lockstep", prefill=2, decode=3),
)


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case.model)
def case(request: pytest.FixtureRequest) -> Case:
    return request.param


@pytest.fixture(scope="module")
def run(case: Case, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalRun]:
    engine = {"env": [PROCESS_A_RANK]}
    document = manifest(
        model={"source": {"hostPath": {"path": str(model_path(case.model))}}},
        prefill={"parallelism": {"data": case.prefill, "nodes": case.pods}, "engine": engine},
        decode={"parallelism": {"data": case.decode}, "engine": engine},
        transfer={"internalNames": "Shown"},
    )
    with LocalRun(document, tmp_path_factory.mktemp("local")) as run:
        run.wait_ready()
        yield run


def text(seed: int) -> str:
    source = random.Random(seed)
    return " ".join(f"{source.randrange(16**4):04x}" for _ in range(60))


def rank_id(engine_id: str, rank: int, size: int) -> str:
    return engine_id if size == 1 else f"{engine_id}_dp{rank}"


def moved_rightly(run: LocalRun, prompt: str, reply: Reply) -> None:
    """All of the prompt's blocks, and the tokens that prefill itself would have sent."""
    assert reply.status == 200, reply.text
    assert reply.kv_path["outcome"] == "transferred", reply.kv_path
    blocks = -(-len(prompt) // BLOCK_TOKENS)  # the tokenizer has one token a byte
    assert reply.kv_path["bytes"] == blocks * BLOCK_TOKENS * KV_BYTES_PER_TOKEN
    assert reply.completion == run.complete(prompt, role="prefill").completion


def test_one_link_of_all_ranks_and_a_canary_through_each(run: LocalRun, case: Case) -> None:
    (link,) = json.loads(run.get("decode", LAUNCHER_PORT, "/v1/links"))["links"]
    pairs = case.prefill * case.decode
    assert (link["state"], link["shards"]) == ("Established", f"{pairs}/{pairs}")
    assert link["prefill_engine_id"] == run.engine_id("prefill")
    one = CANARY_BLOCKS * BLOCK_TOKENS * KV_BYTES_PER_TOKEN
    assert link["canary"]["bytes"] == max(case.prefill, case.decode) * one
    for role, size in (("prefill", case.prefill), ("decode", case.decode)):
        for rank in range(size):
            node = rank * case.pods // size if role == "prefill" else 0
            health = json.loads(run.get(role, 5600 + rank, "/healthz", node))
            assert health["engine_id"] == rank_id(run.engine_id(role), rank, size)


def test_kv_goes_from_each_rank_to_each_and_is_released_there(run: LocalRun, case: Case) -> None:
    ids = {role: run.engine_id(role) for role in ("prefill", "decode")}
    for seed, (p, d) in enumerate(case.pairs):
        prompt = text(seed)
        asked = {"do_remote_decode": True}
        first = run.complete(
            prompt, role="prefill", tokens=1, data_rank=p, kv_transfer_params=asked
        )
        assert first.status == 200, first.text
        ticket = first.document["kv_transfer_params"]
        reply = run.complete(prompt, role="decode", data_rank=d, kv_transfer_params=ticket)
        moved_rightly(run, prompt, reply)
        assert reply.kv_path["prefill"] == rank_id(ids["prefill"], p, case.prefill)
        assert reply.kv_path["decode"] == rank_id(ids["decode"], d, case.decode)

    def samples(name: str) -> dict[str, float]:
        """Values by data-parallel rank, which vLLM calls engine."""
        metrics = run.get("prefill", HTTP_PORT, "/metrics")
        return {
            match["rank"]: float(match["value"])
            for match in re.finditer(SAMPLE, metrics, re.MULTILINE)
            if match["name"] == name
        }

    run.wait("release", lambda: not any(samples("pdcluster_kv_leases_held").values()), 120)
    ranks = {str(rank) for rank in range(case.prefill)}
    assert samples("pdcluster_kv_leases_held").keys() == ranks
    assert not any(samples("pdcluster_kv_leases_expired_total").values())


def test_requests_through_the_router_at_once(run: LocalRun) -> None:
    prompts = [text(seed) for seed in range(100, 100 + PROMPTS)]
    with ThreadPoolExecutor(PROMPTS) as threads:
        replies = list(threads.map(run.complete, prompts))
    for prompt, reply in zip(prompts, replies, strict=True):
        moved_rightly(run, prompt, reply)
