"""Our scheduler side beside vLLM's other features, under vLLM's own schedulers."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

pytest.importorskip("vllm")

from contract import BLOCK, ContractEngine, closing_engines, prompt
from test_scheduler_contract import abort, released
from vllm.lora.request import LoRARequest
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion

from pdcluster_connector.launcher.arguments import engine_command
from pdcluster_connector.launcher.before_start import offload_problems
from pdcluster_connector.protocol.messages import LeaseRequest

pytestmark = pytest.mark.vllm

OFFLOADING = {
    "kv_connector": "OffloadingConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 24},
}


@pytest.fixture
def engines() -> Iterator[Any]:
    yield from closing_engines()


def nothing_left(prefill: ContractEngine, decode: ContractEngine, blocks: int = 63) -> None:
    decode.run(lambda: not decode.scheduler.requests)
    assert released(prefill)
    for engine in (prefill, decode):
        for _ in range(2):
            engine.step()
        assert engine.total("step_faults") == {}
    assert prefill.free_blocks() == 63
    assert decode.free_blocks() == blocks
    assert prefill.connector._scheduler.prefill.leases._armed == {}
    assert prefill.connector._scheduler.prefill.leases.held == 0
    role = decode.connector._scheduler.decode
    assert (role._requests, role._aborted, len(role._tickets.held)) == ({}, {}, 0)


@pytest.mark.parametrize("moment", ["never", "waiting", "parked", "landed", "decoding"])
def test_async_scheduling_and_aborts(engines: Any, moment: str) -> None:
    prefill = engines("producer", asynchronous=True, max_tokens_per_step=32)
    decode = engines("consumer", asynchronous=True, max_tokens_per_step=32)
    params = prefill.prefill("p0", prompt(100))
    decode.add("d0", prompt(100), params, max_tokens=8)
    if moment == "waiting":
        abort(decode, "d0")
        nothing_left(prefill, decode)
        return
    decode.run(lambda: "d0" in decode.parked())
    if moment == "parked":
        abort(decode, "d0")
        decode.run(lambda: decode.workers[1].abandoned == ["d0"])
        decode.land("d0", reason="TransferStalled")
        nothing_left(prefill, decode)
        return
    decode.land("d0")
    if moment == "landed":
        decode.step()
        abort(decode, "d0")
    elif moment == "decoding":
        decode.run(lambda: decode.tokens.get("d0", 0) >= 3)
        abort(decode, "d0")
    else:
        decode.run(lambda: "d0" in decode.finished)
        assert decode.tokens["d0"] == 8
        assert decode.params["d0"]["kv_path"]["outcome"] == "transferred"
    nothing_left(prefill, decode)
    # With a step in flight the order to give up may come when all ranks are through already.
    late = [["d0"], ["d0"]] if moment == "landed" else [[], []]
    assert [worker.abandoned for worker in decode.workers] == late


def test_async_scheduling_and_preemption(engines: Any) -> None:
    prefill = engines("producer", asynchronous=True)
    decode = engines("consumer", asynchronous=True, blocks=9)
    for i in range(2):
        params = prefill.prefill(f"p{i}", prompt(46, first=i))
        decode.add(f"d{i}", prompt(46, first=i), params, max_tokens=40)
    decode.run(lambda: decode.parked() == {"d0", "d1"})
    decode.land("d0")
    decode.land("d1")
    preempted: set[str] = set()

    def done() -> bool:
        preempted.update(
            r.request_id for r in decode.scheduler.requests.values() if r.num_preemptions
        )
        return len(decode.finished) == 2

    decode.step()
    decode.run(done)
    assert preempted, "the pool was large enough; the test shows nothing"
    assert decode.tokens == {"d0": 40, "d1": 40}
    assert all(decode.params[f"d{i}"]["kv_path"]["outcome"] == "transferred" for i in range(2))
    nothing_left(prefill, decode, blocks=8)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_aborted_prefill_leaves_no_lease(engines: Any, asynchronous: bool) -> None:
    prefill = engines("producer", asynchronous=asynchronous, max_tokens_per_step=16)
    for steps in range(8):
        prefill.add(f"p{steps}", prompt(60, first=steps), {"do_remote_decode": True})
        for _ in range(steps):
            prefill.step()
        abort(prefill, f"p{steps}")
    # Those that were through already gave out a ticket; nobody comes for it.
    role = prefill.connector._scheduler.prefill
    assert role.leases.held == len(prefill.finished) > 0
    for request_id in list(prefill.finished):
        token, _ = role.leases.place(request_id)
        role.leases.answer(LeaseRequest(prefill.engine_id, "d/1", ((request_id, token),)))
    prefill.run(lambda: not prefill.scheduler.requests)
    assert prefill.free_blocks() == 63
    assert len(role.leases._armed) == role.leases.held == 0


def test_another_adapter_is_another_prompt(engines: Any) -> None:
    prefill, decode = engines("producer"), engines("consumer")
    red, blue = LoRARequest("red", 1, "/red"), LoRARequest("blue", 2, "/blue")
    cases = [("same", red, red, ""), ("other", red, blue, "PromptMismatch")]
    cases += [("none", None, red, "PromptMismatch"), ("extra", red, None, "PromptMismatch")]
    for name, theirs, mine, reason in cases:
        prefill.add(f"p-{name}", prompt(40), {"do_remote_decode": True}, lora_request=theirs)
        prefill.run(lambda name=name: f"p-{name}" in prefill.finished)
        params = prefill.params[f"p-{name}"]
        decode.add(f"d-{name}", prompt(40, first=3), None)  # evicts nothing, only a neighbour
        decode.add(name, prompt(40), params, lora_request=mine, cache_salt=name)
        decode.run(lambda name=name: name in decode.parked() or name in decode.finished)
        if not reason:
            decode.land(name)
        decode.run(lambda name=name: name in decode.finished)
        assert decode.params[name]["kv_path"]["reason"] == reason
    nothing_left(prefill, decode)


def test_tickets_from_before_a_reset_are_not_used(engines: Any) -> None:
    """``pause_generation(mode="keep", clear_cache=True)`` around a weight update."""
    prefill, decode = engines("producer"), engines("consumer")
    decode.add("warm", prompt(40, first=9), None)
    decode.run(lambda: "warm" in decode.finished)
    params = prefill.prefill("p0", prompt(40))
    assert not prefill.scheduler.reset_prefix_cache(reset_connector=True), "a lease is held"
    assert not prefill.connector.reset_cache(), "also if vLLM's own blocks were free"
    decode.add("d0", prompt(40), params, max_tokens=2)
    assert decode.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    decode.run(lambda: "d0" in decode.finished)
    assert decode.tokens["d0"] == 2
    path = decode.params["d0"]["kv_path"]
    assert (path["outcome"], path["reason"]) == ("local", "CacheReset")
    nothing_left(prefill, decode)
    assert prefill.connector.reset_cache()
    assert prefill.scheduler.reset_prefix_cache(reset_connector=True)
    params = prefill.prefill("p1", prompt(40, first=9))
    decode.add("d1", prompt(40, first=9), params)
    decode.run(lambda: "d1" in decode.parked())
    assert decode.workers[0].parked["d1"].start == 0, "decode's own cache was cleared"
    decode.land("d1")
    nothing_left(prefill, decode)


@pytest.fixture
def offloading_pair(engines: Any) -> tuple[ContractEngine, ContractEngine]:
    return engines("producer", others=[OFFLOADING]), engines("consumer", others=[OFFLOADING])


def test_beside_the_cpu_offloading_connector(offloading_pair: Any) -> None:
    prefill, decode = offloading_pair
    params = prefill.prefill("p0", prompt(64))
    assert params["remote_request_id"] == "p0"
    decode.add("d0", prompt(64), params, max_tokens=2)
    decode.run(lambda: "d0" in decode.parked())
    decode.land("d0", ranks=[0])
    for _ in range(3):
        decode.step()
    assert "d0" not in decode.finished, "one rank of two is not enough"
    decode.land("d0", ranks=[1])
    decode.run(lambda: "d0" in decode.finished)
    assert decode.params["d0"]["kv_path"]["outcome"] == "transferred"
    nothing_left(prefill, decode)
    for engine in offloading_pair:
        assert engine.workers[0].stores > 0, "nothing was offloaded"


def test_offloaded_kv_is_used_where_there_is_no_ticket(offloading_pair: Any) -> None:
    prefill, decode = offloading_pair
    decode.add("first", prompt(64), None, max_tokens=2)
    decode.run(lambda: "first" in decode.finished)
    for _ in range(3):
        decode.step()
    assert decode.scheduler.kv_cache_manager.reset_prefix_cache()
    decode.add("again", prompt(64), None, max_tokens=2)
    decode.run(lambda: "again" in decode.finished)
    assert decode.workers[0].loads == 1
    # And with a ticket the prefill engine's KV comes first.
    assert decode.scheduler.kv_cache_manager.reset_prefix_cache()
    params = prefill.prefill("p0", prompt(64))
    decode.add("d0", prompt(64), params, max_tokens=2)
    decode.run(lambda: "d0" in decode.parked())
    decode.land("d0")
    decode.run(lambda: "d0" in decode.finished)
    assert decode.workers[0].loads == 1
    nothing_left(prefill, decode)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_prefill_hands_over_what_it_loaded_from_host_memory(
    engines: Any, asynchronous: bool
) -> None:
    """A prompt that begins like an earlier one, after the earlier one has left the GPU."""
    prefill = engines("producer", others=[OFFLOADING], asynchronous=asynchronous)
    decode = engines("consumer")
    first = prefill.prefill("p0", prompt(64))
    decode.add("d0", prompt(64), first)
    decode.run(lambda: "d0" in decode.parked())
    decode.land("d0")
    nothing_left(prefill, decode)
    assert prefill.scheduler.kv_cache_manager.reset_prefix_cache()
    assert decode.scheduler.kv_cache_manager.reset_prefix_cache()

    longer = [*prompt(64), *prompt(30, first=9)]
    params = prefill.prefill("p1", longer)
    assert [worker.loads for worker in prefill.workers] == [1, 1]
    decode.add("d1", longer, params, max_tokens=3)
    decode.run(lambda: "d1" in decode.parked())
    order = decode.workers[0].parked["d1"]
    assert (order.start, order.stop, len(order.blocks[0].blocks)) == (0, 94, 6)
    decode.land("d1")
    decode.run(lambda: "d1" in decode.finished)
    assert decode.prompts() == {("transferred", ""): 2}
    nothing_left(prefill, decode)


def test_a_preempted_prefill_loads_its_kv_again_and_hands_it_off_once(engines: Any) -> None:
    """Two prompts of four blocks grow side by side in a pool of six."""
    prefill = engines("producer", others=[OFFLOADING], blocks=7)
    prefill.scheduler.scheduler_config.long_prefill_token_threshold = BLOCK
    prefill.add("p0", prompt(60), {"do_remote_decode": True})
    second = prefill.add("p1", prompt(60, first=9), {"do_remote_decode": True})
    role = prefill.connector._scheduler.prefill
    for name in ("p0", "p1"):
        prefill.run(lambda name=name: name in prefill.finished)
        assert prefill.params[name]["remote_request_id"] == name
        prefill.scheduler.kv_cache_manager.evict_blocks(set(range(1, 7)))
        token, _ = role.leases.place(name)
        role.leases.answer(LeaseRequest(prefill.engine_id, "d/1", ((name, token),)))
    assert second.num_preemptions == 1
    assert prefill.workers[0].loads == 1, "all of it was computed again"
    assert released(prefill)
    assert [worker.sent for worker in prefill.workers] == [["p0", "p1"]] * 2
    assert prefill.free_blocks() == 6


@pytest.mark.parametrize("comes", [False, True])
def test_why_a_decode_engine_may_not_offload(engines: Any, comes: bool) -> None:
    """Remove the refusal when this fails: vLLM then waits for copies out of blocks that it reuses.

    KV from prefill is written to blocks of an earlier prompt while these are still copied to host
    memory. The copies are then kept under the earlier prompt's name. vLLM waits for such copies
    only if a prompt is computed in these blocks.
    """
    prefill = engines("producer")
    decode = engines("consumer", others=[OFFLOADING], blocks=6)
    for worker in decode.workers:
        worker.stores_slowly = True
    decode.add("earlier", prompt(64), None)
    decode.run(lambda: "earlier" in decode.finished)
    decode.step()
    assert decode.workers[0].stores > 0
    assert decode.free_blocks() == 5, "all blocks can be reused, but the copies are under way"
    params = prefill.prefill("p0", prompt(64, first=9)) if comes else None
    decode.add("d0", prompt(64, first=9), params)
    decode.run(lambda: "d0" in decode.parked() or "d0" in decode.finished)
    assert bool(decode.workers[0].flushed) is not comes


def test_the_launcher_makes_the_folder_of_vllms_file(request: pytest.FixtureRequest) -> None:
    """vLLM names a file of shared memory by the engine id, and ours has a slash in it."""
    engine_id = f"test.c.prefill.r.{os.getpid()}/0123456789abcdef"

    def region() -> SharedOffloadRegion:
        return SharedOffloadRegion(engine_id, 2, 0, kv_bytes_per_chunk=4096, cpu_page_size=4096)

    with pytest.raises(FileNotFoundError):
        region()
    ours = {"kv_connector": "PDClusterConnector", "kv_role": "kv_producer"}
    config = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": [ours, OFFLOADING]},
    }
    words = ["m", "--kv-transfer-config", json.dumps(config)]
    folder = Path(engine_command(words, engine_id=engine_id, role="prefill").offload_folder)
    request.addfinalizer(folder.rmdir)
    assert list(offload_problems(str(folder))) == []
    made = region()
    assert list(folder.iterdir()) == [Path(made.mmap_path)]
    made.cleanup()
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("moment", ["waiting", "parked", "decoding"])
def test_aborts_beside_the_cpu_offloading_connector(offloading_pair: Any, moment: str) -> None:
    prefill, decode = offloading_pair
    params = prefill.prefill("p0", prompt(64))
    decode.add("d0", prompt(64), params, max_tokens=20)
    if moment != "waiting":
        decode.run(lambda: "d0" in decode.parked())
    if moment == "decoding":
        decode.land("d0")
        decode.run(lambda: decode.tokens.get("d0", 0) > 2)
    abort(decode, "d0")
    if moment == "parked":
        decode.step()
        decode.land("d0", reason="TransferStalled")
    nothing_left(prefill, decode)


def test_ranks_of_one_engine_agree_before_it_serves(engines: Any) -> None:
    engine = engines("producer", publish=False)
    publish = engine.connector.set_xfer_handshake_metadata_pp_aware
    mine = engine._handshake(0)

    stranger = engine._handshake(1)
    stranger.engine_id = "ns.c.producer.r.0/other"
    with pytest.raises(RuntimeError, match=r"EngineIdInconsistent: rank \(0, 1\).*r\.0/other"):
        publish({(0, 0): mine, (0, 1): stranger})
    with pytest.raises(RuntimeError, match="ShardMissing: 1 of 2"):
        publish({(0, 0): mine})
    for changes in ({"model": "other weights"}, {"packing": "CPU_ATTN/amx"}, {"block_size": 32}):
        other = engine._handshake(1)
        other.shape = msgspec.structs.replace(other.shape, **changes)
        (field,) = changes
        with pytest.raises(RuntimeError, match=rf"rank \(0, 1\) has {field}.*same model files"):
            publish({(0, 0): mine, (0, 1): other})
    assert engine.connector._scheduler._side_channel is None, "nobody can shake hands with it"

    publish({(0, 0): mine, (0, 1): engine._handshake(1)})
    server = engine.connector._scheduler._side_channel
    publish({(0, 0): mine, (0, 1): engine._handshake(1)})  # again, after waking up
    assert engine.connector._scheduler._side_channel is server
