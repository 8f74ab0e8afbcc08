"""Each fault in each state of a receive, with real engines: every answer is judged by its tokens.

Requests are held in a state while the fault happens (``held_receives``). The same faults on the
in-memory NIXL are in connector/tests/testing/test_fault_matrix.py. What engines on one machine
cannot show:

* A cut of the KV's own way: they read each other's memory, which nothing cuts. Here only the side
  channel is cut, and with one pair it is the same to cut off P or D.
  connector/tests/transfer/test_cut_network.py cuts NIXL over TCP.
* What a client of a killed decode engine sees: there is no router. Its requests count as lost, and
  their tickets are tried again at the engine that starts in its place.
* Why a request failed, where the policy is ``fail``: vLLM's answer does not say it.
"""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fork_host import Engine

pytest.importorskip("vllm")

from engine_pair import Pair, connector_config, prompt

from loopback import free_port
from models.tiny import model_path
from pdcluster_connector.testing.judge import Judge, Verdict
from pdcluster_connector.transfer.receive_machine import State

pytestmark = [pytest.mark.engine, pytest.mark.soak]

STATES = (State.NEW, State.HANDSHAKE, State.POSTED, State.FENCE)
LEASE_SECONDS = 3.0
LASTS = 1.5 * LEASE_SECONDS
TOKENS = 8
PROMPTS = [prompt(200, seed) for seed in (3, 4)]


@pytest.fixture(scope="module")
def verdicts() -> Judge:
    return Judge()


@pytest.fixture
def judge(verdicts: Judge) -> Iterator[Judge]:
    yield verdicts
    if page := os.environ.get("PDCLUSTER_ENGINE_FAULT_MATRIX"):
        Path(page).write_text(verdicts.table() + "\n")


@pytest.fixture(scope="module")
def history(engines: Callable[..., Engine]) -> list[list[int]]:
    """A single engine's greedy tokens for each prompt."""
    single = engines("single", model=str(model_path("llama")), enable_prefix_caching=False)
    single.wait_ready()
    tokens = [single.generate(each, TOKENS).tokens for each in PROMPTS]
    single.stop()
    return tokens


class World:
    """A prefill and a decode engine that are started again after they were killed."""

    def __init__(
        self, engines: Callable[..., Engine], policy: str, judge: Judge, history: list[list[int]]
    ) -> None:
        self._engines, self._policy = engines, policy
        self._judge, self._history = judge, history
        self._port = free_port()
        self._salts = itertools.count()
        self.prefill, self.decode = self._start("P"), self._start("D")
        for engine in (self.prefill, self.decode):
            engine.wait_ready()

    def _start(self, role: str) -> Engine:
        model = str(model_path("llama"))
        if role == "P":
            config = connector_config(
                "kv_producer", side_channel_port=self._port, lease_seconds=LEASE_SECONDS
            )
            return self._engines("p", config, model=model)
        config = connector_config("kv_consumer", self._policy, lease_seconds=LEASE_SECONDS)
        return self._engines("d", config, model=model)

    def play(self, fault: str, state: State) -> None:
        """Have a fault happen to two requests that have come to ``state``, and judge all."""
        where = f"{fault} in {state.name}, policy {self._policy}"
        salts = [f"{where} {next(self._salts)}" for _ in PROMPTS]
        pair = Pair(self.prefill, self.decode)
        # HANDSHAKE needs an engine without a connection, the others one that is warm.
        self._works(f"{where}, before")
        self.decode.ask("hold", state.name)
        tickets = [pair.ticket(each, salt) for each, salt in zip(PROMPTS, salts, strict=True)]
        sent = [
            self.decode.submit(each, TOKENS, ticket, salt)
            for each, ticket, salt in zip(PROMPTS, tickets, salts, strict=True)
        ]
        self._until(lambda: self.decode.ask("stands", len(sent), state.name), where)
        self._happen(fault)
        if fault == "kill D":
            for _ in sent:
                self._judge.count(where, Verdict.LOST)
            self.decode = self._start("D").wait_ready()
            for number, (ticket, salt) in enumerate(zip(tickets, salts, strict=True)):
                again = self.decode.submit(PROMPTS[number], TOKENS, ticket, salt)
                self._answer(f"{where}, retried elsewhere", number, again)
        else:
            for number, request_id in enumerate(sent):
                self._answer(where, number, request_id)
        if fault == "kill P":
            self.prefill = self._start("P").wait_ready()
        self._works(f"{where}, afterwards")
        Pair(self.prefill, self.decode).check_nothing_held()

    def _happen(self, fault: str) -> None:
        if fault == "kill P":
            self.prefill.kill()
            self.decode.ask("release")
        elif fault == "kill D":
            self.decode.kill()
        elif fault == "stop P":
            self.prefill.freeze()
            self.decode.ask("release")
            time.sleep(LASTS)
            os.killpg(self.prefill.pid, signal.SIGCONT)
        elif fault == "stop D":
            self.decode.freeze()
            time.sleep(LASTS)
            os.killpg(self.decode.pid, signal.SIGCONT)
            self.decode.ask("release")
        else:
            self.decode.ask("cut", True)
            self.decode.ask("release")
            time.sleep(LASTS)
            self.decode.ask("cut", False)

    def _answer(self, where: str, number: int, request_id: str) -> Verdict:
        try:
            answer = self.decode.answer(request_id, timeout=90)
        except TimeoutError:
            self._judge.count(where, Verdict.HANGING)
            return Verdict.HANGING
        if answer.finish_reason == "error":
            verdict = Verdict.WRONG if answer.tokens else Verdict.FAILED
        elif list(answer.tokens) != list(self._history[number]):
            verdict = Verdict.WRONG
        else:
            moved = answer.path.get("outcome") == "transferred"
            verdict = Verdict.RIGHT if moved else Verdict.RECOMPUTED
        self._judge.count(where, verdict, str(answer.path.get("reason", "")))
        if self._policy == "recompute":
            assert verdict is not Verdict.FAILED, f"{where}: {answer}"
        return verdict

    def _works(self, where: str) -> None:
        """The pair moves KV, soon if not at once; until then each answer is judged too."""

        def moves() -> bool:
            salt = f"{where} {next(self._salts)}"
            ticket = Pair(self.prefill, self.decode).ticket(PROMPTS[0], salt)
            sent = self.decode.submit(PROMPTS[0], TOKENS, ticket, salt)
            return self._answer(where, 0, sent) is Verdict.RIGHT

        self._until(moves, where)

    @staticmethod
    def _until(condition: Callable[[], bool], where: str) -> None:
        deadline = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < deadline, where
            time.sleep(0.01)


@pytest.mark.parametrize("policy", ["recompute", "fail"])
@pytest.mark.parametrize("fault", ["kill P", "kill D", "stop P", "stop D", "cut"])
def test_each_answer_is_a_single_engines_or_a_clean_error(
    engines: Callable[..., Engine],
    judge: Judge,
    history: list[list[int]],
    fault: str,
    policy: str,
) -> None:
    world = World(engines, policy, judge, history)
    for state in STATES:
        world.play(fault, state)
    assert judge.faults == {}
    for engine in (world.decode, world.prefill):
        engine.stop()
