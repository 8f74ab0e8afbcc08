"""An exception at any line that an engine step runs costs at most the requests of that call.

A tracer raises at one line of the connector, while vLLM's own schedulers and the connector's own
two sides carry a few requests over the in-memory NIXL. Afterwards nothing may be left of any of
them, whether they went well or not, and the engines go on to the next line.

The lines are those below the guard ``engine_step``, in the thread that vLLM calls from. A line
raises when a frame comes to it for the first time. So a ``with`` raises before it has the lock, and
not while it gives the lock back.
"""

from __future__ import annotations

import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

pytest.importorskip("vllm")

from contract import ContractEngine, prompt
from real_worker import RealWorker
from vllm.v1.request import RequestStatus

import pdcluster_connector
from pdcluster_connector.protocol.messages import LeaseRequest
from pdcluster_connector.protocol.ticket import Ticket, ticket_of
from pdcluster_connector.testing.nixl import Fabric
from pdcluster_connector.vllm import connector
from ticket_key import KEYS

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("one_rank")]

HOME = str(Path(pdcluster_connector.__file__).parent)
LEASE = 0.3  # seconds; shorter than the options allow
PATIENCE = 20.0
TOKENS = 40
SEED = 31
DRAWN = 40

Line = tuple[str, int]
Place = tuple[Line, int]
"""A line, and which of the frames that come to it."""


class InjectedError(Exception):
    """What no code expects."""


class Tracer:
    """Notes the lines below the guard, and raises at one of them.

    Attributes:
        frames: how many frames have come to each line.
        raised: whether the line came.
    """

    def __init__(self, place: Place | None = None) -> None:
        self.frames: Counter[Line] = Counter()
        self.raised = False
        self._place = place

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Any:
        if not frame.f_code.co_filename.startswith(HOME) or not _guarded(frame):
            return None
        been: set[int] = set()

        def line(frame: FrameType, event: str, arg: Any) -> Any:
            if event == "line" and frame.f_lineno not in been:
                been.add(frame.f_lineno)
                here = frame.f_code.co_filename, frame.f_lineno
                self.frames[here] += 1
                if (here, self.frames[here]) == self._place:
                    self.raised = True
                    raise InjectedError(f"at {named(here)}")
            return line

        return line


def _guarded(frame: FrameType) -> bool:
    """Whether the guard of the connector's methods is further out."""
    outer = frame.f_back
    while outer is not None:
        if outer.f_code.co_name == "safe" and outer.f_code.co_filename == connector.__file__:
            return True
        outer = outer.f_back
    return False


def named(line: Line) -> str:
    return f"{Path(line[0]).relative_to(HOME)}:{line[1]}"


class Pair:
    """A prefill and a decode engine, for one course of requests after the other."""

    def __init__(self) -> None:
        # The next course has the same prompts: they must come from prefill again.
        options = {"ranks": 1, "publish": False, "prefixes": False, "lease_seconds": 1}
        self.prefill = ContractEngine("producer", **options)
        self.decode = ContractEngine("consumer", policy="recompute", **options)
        self.engines = self.prefill, self.decode
        RealWorker(self.prefill, 1.0)
        RealWorker(self.decode, 0.0)
        self.leases = self.prefill.connector._scheduler._leases
        self.leases._seconds = LEASE
        self.words = len(self.leases._free)
        self.blocks = [engine.free_blocks() for engine in self.engines]
        self.courses = 0

    def close(self) -> None:
        for engine in self.engines:
            engine.workers[0].connector.shutdown()
            engine.close()

    def course(self, place: Place | None = None) -> tuple[Tracer, list[str]]:
        """Run a few requests; returns what the tracer saw, and what was wrong afterwards."""
        self.courses += 1
        for engine in self.engines:
            engine.workers[0].reported.clear()
        tracer = Tracer(place)
        sys.settrace(tracer)
        try:
            self._requests()
            sys.settrace(None)
            self._run(lambda: not self._left())
        finally:
            sys.settrace(None)
        return tracer, self._left() + self._wrong()

    def _name(self, what: str) -> str:
        return f"{self.courses}-{what}"

    def _requests(self) -> None:
        tickets = ("whole", "other", "aborted", "unused", "lost", "both")
        for number, what in enumerate((*tickets, "given up")):
            params = {"do_remote_decode": True}
            self.prefill.add(self._name(what), prompt(TOKENS, first=number), params)
        self._end(self.prefill, "given up")
        self._run(lambda: all(self._name(what) in self.prefill.finished for what in tickets))
        given = {what: self.prefill.params[self._name(what)] for what in tickets}
        lost = ticket_of(given["lost"], KEYS)
        if isinstance(lost, Ticket):
            key = lost.request_id, lost.token
            self.leases.answer(LeaseRequest(lost.engine_id, "ns.c.d.r.0/1", releases=(key,)))
        for number, what in enumerate(tickets):
            if what == "unused":
                continue
            params = given[what] and {**given[what], "do_remote_decode": what == "both"}
            first = 99 if what == "other" else number
            self.decode.add(self._name(what), prompt(TOKENS, first=first), params, max_tokens=3)
        self.decode.add(self._name("local"), prompt(TOKENS, first=50), max_tokens=3)
        asks = {"do_remote_decode": True}
        self.decode.add(self._name("prefill"), prompt(TOKENS, first=60), asks, max_tokens=3)
        self.decode.step()
        self._end(self.decode, "aborted")
        here = ("whole", "other", "lost", "both", "local", "prefill")
        self._run(lambda: all(self._name(what) in self.decode.finished for what in here))
        self._run(lambda: not self._left())

    def _end(self, engine: ContractEngine, what: str) -> None:
        engine.scheduler.finish_requests(self._name(what), RequestStatus.FINISHED_ABORTED)

    def _run(self, until: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE
        while not until() and time.monotonic() < deadline:
            for engine in self.engines:
                engine.step()
            time.sleep(0.0005)

    def _left(self) -> list[str]:
        """What is still there of any request."""
        prefill = self.prefill.connector._scheduler.prefill
        decode = self.decode.connector._scheduler.decode
        executor = self.decode.workers[0].connector._worker._receiver._executor
        found = {
            "prefill's requests": self.prefill.scheduler.requests,
            "decode's requests": self.decode.scheduler.requests,
            "leases": [*self.leases._granted, *self.leases._armed],
            "owed": prefill._owed,
            "traces": prefill._traces,
            "decode's entries": decode._requests,
            "aborted": decode._aborted,
            "leases that decode renews": decode._tickets.held,
            "orders": [*decode._orders, *decode._abandoned],
            "local prompts": [*decode.local._requests, *decode.local._waiting],
            "receives": executor.jobs,
            "results": executor.ended,
        }
        for engine in self.engines:
            found[f"{engine.engine_id}: orders"] = engine.workers[0].connector._worker._left
        return [f"{what}: {list(left)}" for what, left in found.items() if left]

    def _wrong(self) -> list[str]:
        """What went wrong with requests of which nothing is left."""
        found = []
        for engine, blocks in zip(self.engines, self.blocks, strict=True):
            if engine.free_blocks() != blocks:
                found.append(f"{engine.engine_id}: {engine.free_blocks()} of {blocks} blocks")
            again = [key for key, count in engine.workers[0].reported.items() if count > 1]
            if again:
                found.append(f"{engine.engine_id}: reported twice: {again}")
        if self.words - len(self.leases._free) > 1:  # the line may have had one in its hands
            found.append(f"lease words: {len(self.leases._free)} of {self.words}")
        self.words = len(self.leases._free)
        for what in ("whole", "other", "lost", "both", "local", "prefill"):
            name = self._name(what)
            path = (self.decode.params.get(name) or {}).get("kv_path")
            if self.decode.tokens.get(name) != 3:
                found.append(f"{name}: {self.decode.tokens.get(name)} tokens")
            if path and path["outcome"] != "transferred" and not path["reason"]:
                found.append(f"{name}: no reason: {path}")
        return found


@pytest.fixture
def pairs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Pair]]:
    fabric = Fabric()
    monkeypatch.setattr(
        "pdcluster_connector.vllm.worker_side.worker.nixl_agent.NixlAgent",
        lambda name, **_: fabric.agent(name),
    )
    made: list[Pair] = []

    def make() -> Pair:
        """Another pair in place of one of which something is left."""
        while made:
            made.pop().close()
        made.append(Pair())
        return made[-1]

    yield make
    while made:
        made.pop().close()


def places(pair: Pair, draw: random.Random) -> list[Place]:
    """Every line that a course comes to, with the first frame of it or with a later one."""
    frames: Counter[Line] = Counter()
    for _ in range(3):
        tracer, wrong = pair.course()
        assert not wrong
        frames |= tracer.frames
    return [
        (line, draw.choice((1, draw.randint(1, count)))) for line, count in sorted(frames.items())
    ]


TENTHS = [pytest.param(tenth, marks=pytest.mark.soak) for tenth in range(10)]


@pytest.mark.parametrize("tenth", [None, *TENTHS])
def test_nothing_is_left_of_a_request_whichever_line_raises(
    pairs: Callable[[], Pair], tenth: int | None, record_property: Callable[[str, object], None]
) -> None:
    """Some of the lines, or one tenth of all."""
    draw = random.Random(SEED)
    pair = pairs()
    every = places(pair, draw)
    drawn = [place for place in every if place[0][1] % 10 == tenth] or draw.sample(every, DRAWN)
    problems, reached = {}, 0
    for place in drawn:
        try:
            tracer, wrong = pair.course(place)
        except Exception as error:  # noqa: BLE001
            tracer, wrong = None, [f"raised to vLLM, or by it: {error!r}"]
        reached += tracer is None or tracer.raised
        if wrong:
            problems[f"{named(place[0])}, frame {place[1]}"] = wrong
            pair = pairs()
    record_property("lines", f"{reached} of {len(every)}")
    print(f"{reached} of {len(drawn)} lines raised, of {len(every)}")
    assert not problems, "\n".join(f"{where}: {wrong}" for where, wrong in problems.items())
    assert reached > 0.8 * len(drawn), "most of the lines never came: nothing is shown"
