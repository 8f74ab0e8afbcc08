"""One request goes the way that docs/design.md tells, row by row.

The schedulers are vLLM's own, and the workers are the connector's. Only the model and NIXL are not
there: the KV moves over the in-memory NIXL.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from contract import BLOCK, closing_engines, prompt
from real_worker import RealWorker

from design_walk import Calls, happened
from pdcluster_connector.testing.nixl import Fabric

pytestmark = pytest.mark.vllm


@pytest.fixture
def engines() -> Iterator[Any]:
    yield from closing_engines(ranks=1, publish=False)


def test_a_request_goes_the_way_of_the_walk(
    engines: Any, one_rank: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    fabric, parked = Fabric(), threading.Event()
    monkeypatch.setattr(
        "pdcluster_connector.vllm.worker_side.worker.nixl_agent.NixlAgent",
        lambda name, **_: fabric.agent(name),
    )
    with Calls("request") as calls:
        prefill, decode = engines("producer"), engines("consumer")
        workers = [RealWorker(prefill, 1.0), RealWorker(decode, 0.0)]
        params = prefill.prefill("p0", prompt(40))
        desk = prefill.connector._scheduler._leases
        answer = desk.answer
        # Otherwise the claim may be acknowledged before there is a receive to be told of it.
        desk.answer = lambda request: parked.wait(60) and answer(request)
        decode.add("d0", prompt(40), params, max_tokens=2)
        decode.step()
        parked.set()
        decode.run(lambda: "d0" in decode.finished)
        prefill.run(lambda: not prefill.scheduler.requests)
    for worker in workers:
        worker.connector.shutdown()
    assert decode.params["d0"]["kv_path"]["outcome"] == "transferred"
    assert torch.count_nonzero(workers[1].cache[:, :, :, 0]) == 3 * BLOCK

    seen = calls.seen
    happened(seen, "request", "1")
    happened(
        seen, "request", "2", "3", "4", "5", "6", "7", "8", "9", "10", "11", "12", "14", "15",
        but=("NixlAgent.read",),
    )  # fmt: skip
    happened(seen, "request", "13")
    happened(seen, "request", "CONNECT", "POST", "FENCE", "REPORT")
