"""Real NIXL: of two decode engines that read from one prefill engine, one is killed meanwhile.

The other must never believe wrong bytes, and goes on: with the same prefill engine, or with its
next start. Over TCP, UCX can end a process whose reader died (a known fault of UCX).
"""

from __future__ import annotations

import multiprocessing
import random
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import pytest
from nixl_prefill import Agents, PrefillProcess, patient
from transfer_rig import Decode, FakePeers, eventually

from pdcluster_connector.protocol.ticket import Ticket

pytestmark = pytest.mark.nixl

BLOCKS, BLOCK_TOKENS = 128, 16
TOKENS = BLOCKS * BLOCK_TOKENS
HALVES = tuple(range(1, BLOCKS + 1)), tuple(range(BLOCKS + 1, 2 * BLOCKS + 1))
CACHE = {
    "kv_heads": 4, "layers": 4, "block_tokens": BLOCK_TOKENS, "token_bytes": 128,
    "num_blocks": 2 * BLOCKS + 1,
}  # fmt: skip
LEASE_SECONDS = 60.0
CRASH_SECONDS = 60.0  # UCX writes a backtrace before it ends the process


class Reader:
    """One decode engine, in its process."""

    def __init__(self) -> None:
        self.peers = FakePeers()
        options = patient(drain_deadline_seconds=5.0)
        self.decode = Decode(Agents(), self.peers, options=options, **CACHE)  # type: ignore[arg-type]

    def know(self, metadata: dict[str, Any]) -> None:
        self.peers.table.update(metadata)

    def begin(self, request_id: str, ticket: Ticket, blocks: tuple[int, ...]) -> None:
        """Return when the first of its reads is posted."""
        request = self.decode.request(request_id, ticket, blocks, lease=LEASE_SECONDS)
        self.decode.receive(request)
        executor = self.decode.receiver._executor
        eventually(lambda: bool(executor.transfers) or not executor.jobs)

    def end_of(self, request_id: str, seed: int, blocks: tuple[int, ...]) -> tuple[str, int]:
        """Wait for a request; returns (why it failed, tokens that are wrong if it did not)."""
        results = self.decode.wait(request_id)
        if request_id in results.failed:
            return str(results.failed[request_id]), 0
        return "", len(self.decode.cache.wrong_tokens(seed, blocks, 0, TOKENS))


def read(pipe: Connection) -> None:
    reader = Reader()
    pipe.send("ready")
    while True:
        try:
            name, *args = pipe.recv()
        except EOFError:
            return
        pipe.send(getattr(reader, name)(*args))


class ReaderProcess:
    """The handle of such a process."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=read, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()

    def wait(self) -> Any:
        assert self._pipe.poll(150), "no answer"
        return self._pipe.recv()

    def ask(self, *message: Any) -> Any:
        self._pipe.send(message)
        return self.wait()

    def kill(self) -> None:
        self._process.kill()
        self._process.join(20)
        self._pipe.close()


class Rig:
    """A prefill engine that is started again when it dies, the survivor, and readers to kill."""

    def __init__(self) -> None:
        self.starts = 0
        self.prefill = self._start_prefill()
        self.survivor = ReaderProcess()
        self.doomed = ReaderProcess()
        assert self.survivor.wait() == "ready"
        self.survivor.ask("know", self.prefill.metadata)
        self.seed = 0
        self.outcomes = {"right": 0, "failed": 0}

    @property
    def engine_id(self) -> str:
        return f"prefill/{self.starts}"

    def _start_prefill(self) -> PrefillProcess:
        self.starts += 1
        return PrefillProcess({self.engine_id: 1}, CACHE)

    def ticket(self, blocks: tuple[int, ...]) -> tuple[int, Ticket]:
        self.seed += 1
        return self.seed, self.prefill.ticket(self.engine_id, self.seed, blocks, TOKENS)

    def judge(self, request_id: str, seed: int, blocks: tuple[int, ...]) -> str:
        why, wrong = self.survivor.ask("end_of", request_id, seed, blocks)
        assert wrong == 0, f"{wrong} wrong tokens were believed"
        self.outcomes["failed" if why else "right"] += 1
        return str(why)

    def round(self, number: int, *, stopped: bool, delay: float) -> None:
        """Both read, one is killed, the other ends well or fails, and then it reads again."""
        doomed, self.doomed = self.doomed, ReaderProcess()  # the next one's start takes seconds
        assert doomed.wait() == "ready"
        doomed.ask("know", self.prefill.metadata)
        _, his = self.ticket(HALVES[0])
        seed, mine = self.ticket(HALVES[1])
        if stopped:
            self.prefill.signal(signal.SIGSTOP)  # so that neither read can have ended
        doomed.ask("begin", "r", his, HALVES[0])
        self.survivor.ask("begin", f"beside{number}", mine, HALVES[1])
        time.sleep(delay)
        doomed.kill()
        if stopped:
            self.prefill.signal(signal.SIGCONT)
        why = self.judge(f"beside{number}", seed, HALVES[1])
        if why or self.died(0.5):
            self.restart(why)
        if why := self.reads_again(f"after{number}"):
            self.restart(why)  # it died only now
            assert self.reads_again(f"at last{number}") == ""

    def restart(self, why: str) -> None:
        assert self.died(CRASH_SECONDS), f"prefill lives, and a request failed: {why}"
        self.prefill.end()
        self.prefill = self._start_prefill()
        self.survivor.ask("know", self.prefill.metadata)

    def reads_again(self, request_id: str) -> str:
        """Have the survivor read once more; returns why that failed."""
        try:
            seed, mine = self.ticket(HALVES[0])
        except (EOFError, OSError):
            return "prefill does not answer"
        self.survivor.ask("begin", request_id, mine, HALVES[0])
        return self.judge(request_id, seed, HALVES[0])

    def died(self, seconds: float) -> bool:
        self.prefill.process.join(seconds)
        return not self.prefill.process.is_alive()

    def end(self) -> None:
        for process in (self.survivor, self.doomed):
            process.kill()
        self.prefill.end()


@pytest.mark.parametrize("rounds", [2, pytest.param(20, marks=pytest.mark.soak)])
@pytest.mark.parametrize("transport", ["shared memory", "tcp"])
def test_a_reader_that_is_killed_costs_the_other_no_wrong_token(
    transport: str,
    rounds: int,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Callable[[str, object], None],
) -> None:
    if transport == "tcp":
        monkeypatch.setenv("UCX_TLS", "tcp")
    dice = random.Random(rounds)
    rig = Rig()
    try:
        for number in range(rounds):
            # Over shared memory a reader needs no help of the process that it reads.
            rig.round(number, stopped=transport == "tcp", delay=dice.uniform(0, 0.01))
        record_property(f"killed_readers_{transport.replace(' ', '_')}_{rounds}", {
            **rig.outcomes, "prefill starts": rig.starts,
        })  # fmt: skip
        assert rig.outcomes["right"] + rig.outcomes["failed"] >= 2 * rounds
        assert rig.outcomes["right"] >= rounds
        if transport != "tcp":
            assert rig.starts == 1, "nothing ends a prefill engine whose reader dies"
    finally:
        rig.end()
