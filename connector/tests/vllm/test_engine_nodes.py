"""A real engine whose tensor-parallel ranks are on two nodes hands its KV over, byte by byte."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from fork_host import Engine

pytest.importorskip("vllm")

from engine_pair import Pair, connector_config, prompt
from test_engine_layouts import FULL, HIT, TOKENS, WARM, Case, handed_over

from loopback import free_port

pytestmark = pytest.mark.engine


def test_the_kv_of_a_prefill_engine_on_two_nodes(engines: Callable[..., Engine]) -> None:
    """The second node runs vLLM's headless executor: one worker, and no scheduler."""
    case = Case("llama", (1, 2), (1, 1), [FULL] * 4)
    nodes: dict[str, Any] = {
        "nnodes": 2,
        "master_addr": "127.0.0.1",
        "master_port": free_port(),
        "distributed_executor_backend": "mp",
        **case.engine(case.prefill),
    }
    config = connector_config("kv_producer")
    leader = engines("leader", config, node_rank=0, **nodes)
    follower = engines("follower", config, node_rank=1, **nodes)
    decode = engines("d", connector_config("kv_consumer"), **case.engine(case.decode))
    pair = Pair(leader.wait_ready(), decode.wait_ready())
    assert leader.ask("groups") == [leader.pid, follower.pid]
    decode.generate(WARM, 1)
    for name, tokens, start in (
        ("a block and one", prompt(33, 1), 0),
        ("in chunks", prompt(700, 2), 0),
        ("a prefix hit", WARM[:HIT] + prompt(97, 3), HIT),
    ):
        made, held = handed_over(case, pair, tokens, start, len(tokens), name)
        assert made == decode.generate(tokens, TOKENS, salt="alone").tokens, name
        assert [rank for rank, _ in held] == [(0, 0), (0, 1)]
    leader.stop()
    follower.kill()
