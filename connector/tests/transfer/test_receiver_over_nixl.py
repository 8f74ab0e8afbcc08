"""Real NIXL between processes: bytes for every pair of tensor sizes, and dying peers.

Prefill engines live in a process of their own; this one holds the decode ranks.
"""

from __future__ import annotations

import itertools
import random
import signal
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from nixl_prefill import Agents, PrefillProcess, patient
from transfer_rig import PROBE_BYTES, Decode, FakePeers, eventually

from pdcluster_connector.compat.reasons import Reason
from pdcluster_connector.nixl_io.nixl_agent import NixlAgent
from pdcluster_connector.protocol.failure import Failure
from pdcluster_connector.transfer.options import ReceiverOptions
from pdcluster_connector.transfer.probing import RECENT_SECONDS
from pdcluster_connector.transfer.receive_machine import State

pytestmark = pytest.mark.nixl

SIZES = (1, 2, 4)
CACHE = {"kv_heads": 4, "layers": 4, "num_blocks": 96, "block_tokens": 16, "token_bytes": 32}
BIG = {"kv_heads": 4, "layers": 2, "num_blocks": 160, "block_tokens": 16, "token_bytes": 256}
LONG = 600.0  # a lease that ends after the test


@pytest.fixture(scope="module")
def prefill() -> Iterator[PrefillProcess]:
    process = PrefillProcess({f"prefill-tp{size}/1": size for size in SIZES}, CACHE)
    yield process
    process.end()


@pytest.fixture(scope="module")
def decodes(prefill: PrefillProcess) -> Iterator[Callable[[int], list[Decode]]]:
    made: dict[int, list[Decode]] = {}

    def of_size(size: int) -> list[Decode]:
        if size not in made:
            made[size] = []
            for rank in range(size):
                peers = FakePeers()
                peers.table.update(prefill.metadata)
                options = patient(descriptors_per_transfer=64)
                made[size].append(
                    Decode(Agents(), peers, rank=rank, tensor=size, options=options, **CACHE)
                )
        return made[size]

    yield of_size
    for decode in itertools.chain(*made.values()):
        assert decode.receiver.close()


@pytest.mark.parametrize(("prefill_size", "decode_size"), itertools.product(SIZES, SIZES))
def test_every_byte_arrives_in_its_place(
    prefill: PrefillProcess,
    decodes: Callable[[int], list[Decode]],
    prefill_size: int,
    decode_size: int,
) -> None:
    dice = random.Random(10 * prefill_size + decode_size)
    ranks = decodes(decode_size)
    # (tokens, tokens that decode has already): ragged ends, prefix hits, one block, many.
    shapes = [(1, 0), (15, 0), (16, 0), (17, 16), (200, 0), (333, 64), (400, 384)]
    free = {side: dice.sample(range(1, 96), 95) for side in ("prefill", "decode")}
    sent = []
    for number, (tokens, start) in enumerate(shapes):
        blocks = {side: [free[side].pop() for _ in range(-(-tokens // 16))] for side in free}
        seed = 1000 * prefill_size + 100 * decode_size + number
        ticket = prefill.ticket(f"prefill-tp{prefill_size}/1", seed, blocks["prefill"], tokens)
        request_id = f"r{seed}"
        sent.append((request_id, seed, blocks["decode"], start, tokens))
        for decode in ranks:
            if number == 0:
                decode.cache.bytes[:] = 0xEE
            decode.receive(decode.request(request_id, ticket, blocks["decode"], start=start))
    for decode in ranks:
        results = decode.wait(*(request[0] for request in sent))
        assert results.failed == {}
        touched = np.zeros(96, bool)
        for request_id, seed, blocks, start, tokens in sent:
            assert decode.cache.wrong_tokens(seed, blocks, start, tokens) == []
            read = blocks[start // 16 :]
            touched[read] = True
            heads = len(decode.cache.heads)
            assert results.received[request_id].nbytes == len(read) * heads * 4 * 16 * 32
        assert (decode.cache.bytes[:, ~touched] == 0xEE).all(), "a foreign block changed"


def test_probes_measure_the_link(
    prefill: PrefillProcess, decodes: Callable[[int], list[Decode]]
) -> None:
    receiver, metadata = decodes(1)[0].receiver, prefill.metadata["prefill-tp4/1"]
    began = time.monotonic()
    result = receiver.probe(metadata).result(timeout=120)
    took = time.monotonic() - began
    assert result.failure is None
    assert result.nbytes == 4 * PROBE_BYTES
    assert result.bytes_per_second >= result.nbytes / took, "its reads lasted no longer than all"


# Peers that stop and die, over TCP as between pods: with shared memory a stopped peer can
# still be read.


@pytest.fixture(params=[0, 4], ids=lambda threads: f"{threads} threads")
def tcp(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """NIXL's threads on the reading side."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    return int(request.param)


class OverTcp:
    """A big prefill engine in its own process and one decode rank, the link warmed up."""

    BLOCKS = tuple(range(1, 151))

    def __init__(self, drain_seconds: float, threads: int, probe_seconds: float = 60.0) -> None:
        self.peers = FakePeers()
        self.prefill = self.start_prefill("prefill/1")
        self.decode = Decode(
            Agents(threads),  # type: ignore[arg-type]
            self.peers,
            options=ReceiverOptions(
                drain_deadline_seconds=drain_seconds, probe_seconds=probe_seconds
            ),
            **BIG,
        )
        self.engine = "prefill/1"
        self.works("warm")

    def start_prefill(self, engine_id: str) -> PrefillProcess:
        prefill = PrefillProcess({engine_id: 1}, BIG)
        self.peers.table.update(prefill.metadata)
        return prefill

    def works(self, request_id: str) -> None:
        ticket = self.prefill.ticket(self.engine, 5, [3, 1, 2], 48)
        self.decode.receive(self.decode.request(request_id, ticket, [151, 152, 153]))
        results = self.decode.wait(request_id)
        assert request_id in results.received, results.failed
        assert self.decode.cache.wrong_tokens(5, [151, 152, 153], 0, 48) == []

    def stop_in_the_middle(self, lease: float) -> None:
        """Begin a 5 MB read from an engine that has just been stopped.

        The lease ends so many seconds after the read was posted, whenever that was.
        """
        ticket = self.prefill.ticket(self.engine, 6, self.BLOCKS, 2400)
        self.prefill.signal(signal.SIGSTOP)
        self.decode.cache.bytes[:] = 0xEE
        self.decode.receive(
            self.decode.request("r", ticket, self.BLOCKS, lease=LONG, claimed=False)
        )
        executor = self.decode.receiver._executor
        eventually(lambda: bool(executor.transfers))
        [self.job] = executor.jobs.values()
        self.decode.acknowledge("r", until=time.monotonic() + lease)

    def restart(self, number: int) -> None:
        self.prefill.signal(signal.SIGKILL)
        self.prefill.end()
        self.engine = f"prefill/{number}"
        self.prefill = self.start_prefill(self.engine)

    def end(self) -> None:
        self.prefill.signal(signal.SIGKILL)
        self.prefill.end()
        assert self.decode.receiver.close()
        assert self.decode.fatal == []


def test_a_killed_prefill_engine_fails_the_request_and_its_successor_serves(tcp: int) -> None:
    rig = OverTcp(20, tcp)
    rig.stop_in_the_middle(lease=LONG)
    rig.decode.nothing(0.2)
    rig.prefill.signal(signal.SIGKILL)
    failure = rig.decode.wait("r").failed["r"]  # long before the lease's end
    assert failure.reason is Reason.BACKEND_ERROR
    rig.restart(2)
    rig.works("after")
    rig.restart(3)  # killed while idle
    rig.works("again")
    rig.end()


def test_what_lands_late_lands_before_the_report(tcp: int) -> None:
    rig = OverTcp(60, tcp)
    rig.stop_in_the_middle(lease=0.2)
    eventually(lambda: rig.job.machine.state is State.QUARANTINE)
    rig.decode.nothing(0.5)  # past the lease's end, and the blocks are not given back
    rig.prefill.signal(signal.SIGCONT)
    assert rig.decode.wait("r").failed["r"].reason is Reason.TRANSFER_STALLED
    rig.decode.cache.bytes[:] = 0xEE
    time.sleep(0.5)
    assert (rig.decode.cache.bytes == 0xEE).all()
    rig.end()


def test_nothing_lands_after_the_agent_was_destroyed(tcp: int) -> None:
    rig = OverTcp(0.5, tcp)
    rig.stop_in_the_middle(lease=0.2)
    assert rig.decode.wait("r").failed["r"].reason is Reason.TRANSFER_STALLED
    rig.decode.cache.bytes[:] = 0xEE
    rig.prefill.signal(signal.SIGCONT)
    time.sleep(1.0)
    assert (rig.decode.cache.bytes == 0xEE).all(), "a released transfer landed"
    rig.restart(2)  # UCX may have taken the first one down: facts about NIXL over TCP
    rig.works("after")
    rig.end()


def test_a_link_that_carries_nothing_for_a_while_is_named_and_heals(tcp: int) -> None:
    rig = OverTcp(60, tcp, probe_seconds=100.0)
    metadata = rig.prefill.metadata[rig.engine]

    def check() -> Failure | None:
        """Check the link. This waits shorter than a probe would."""
        return rig.decode.receiver.probe(metadata, check=True).result(timeout=90).failure

    time.sleep(RECENT_SECONDS)
    eventually(lambda: check() is None)
    rig.prefill.signal(signal.SIGSTOP)
    failure = check()
    rig.prefill.signal(signal.SIGCONT)
    assert failure is not None
    assert failure.reason is Reason.TRANSFER_STALLED
    assert rig.engine in failure.message
    eventually(lambda: rig.decode.receiver._connections.by_engine[rig.engine].stalled is None)
    rig.works("healed")
    assert rig.decode.receiver.probe(metadata).result(timeout=120).failure is None
    rig.end()


def test_an_agent_that_registered_nothing_is_destroyed_too() -> None:
    """As when NIXL refuses the memory: the refusal is what must be seen."""
    agent = NixlAgent("without-memory")
    agent.close()
    agent.close()
