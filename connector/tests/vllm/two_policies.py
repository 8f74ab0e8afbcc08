"""A prefill engine, and a decode engine of each policy, that meet the same faults.

Each answer is judged by its tokens. One of a request that failed has what vLLM's API server sends.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

from engine_pair import LEASE_SECONDS, ROLES, Pair, connector_config, prompt
from fork_host import Answer, Engine

from loopback import free_port
from models.tiny import model_path

TOKENS = 8
BOUND = 2.0
LOADED = 1.5  # what a machine with two busy cores may add
Tickets = dict[str, tuple[str, dict[str, object]]]
Sent = dict[str, tuple[Engine, str]]


class World:
    """A prefill engine, and a decode engine for each policy.

    ``lease``: of all, in seconds. ``llm``: more of vLLM's options, for all.
    """

    def __init__(
        self, engines: Callable[..., Engine], *, lease: float = LEASE_SECONDS, **llm: Any
    ) -> None:
        self._engines, self._lease = engines, lease
        self._llm = {"model": str(model_path("llama")), **llm}
        self.port = free_port()  # of the first prefill engine's side channel
        self.prefill = self.start_prefill(self.port)
        self.decodes = {
            policy: self._start("kv_consumer", policy) for policy in ("fail", "recompute")
        }
        for engine in (self.prefill, *self.decodes.values()):
            engine.wait_ready()
        for decode in self.decodes.values():
            decode.ask("explain")
        self._salts = 0
        self._seeds: dict[str, int] = {}
        self.history: dict[int, list[int]] = {}
        self.last: dict[str, Answer] = {}
        for seed in (3, 4):
            self.history[seed] = self.prefill.generate(prompt(200, seed), TOKENS).tokens

    def start_prefill(self, port: int = 0, **llm: Any) -> Engine:
        return self._start("kv_producer", "fail", port, **llm)

    def _start(self, role: str, policy: str, port: int = 0, **llm: Any) -> Engine:
        place = {"side_channel_port": port or free_port()}
        config = connector_config(role, policy, lease_seconds=self._lease, **place)
        return self._engines(ROLES[role][0], config, **{**self._llm, **llm})

    def stop(self) -> None:
        for engine in (*self.decodes.values(), self.prefill):
            engine.stop()

    def works(self) -> None:
        """KV moves to each decode engine."""
        for decode in self.decodes.values():
            self._salts += 1
            Pair(self.prefill, decode).moves_soon(prompt(200, 3), self.history[3], str(self._salts))

    def tickets(self, seed: int, prefill: Engine | None = None) -> Tickets:
        """A salt and a ticket for each decode engine, of this prefill engine or of another."""
        found = {}
        for policy, decode in self.decodes.items():
            self._salts += 1
            salt = f"ticket {self._salts}"
            pair = Pair(prefill or self.prefill, decode)
            found[policy] = salt, pair.ticket(prompt(200, seed), salt)
        return found

    def send(self, seed: int, tickets: Tickets) -> Sent:
        sent = {}
        for policy, (salt, ticket) in tickets.items():
            decode = self.decodes[policy]
            request_id = decode.submit(prompt(200, seed), TOKENS, ticket, salt)
            sent[policy] = decode, request_id
            self._seeds[request_id] = seed
        return sent

    def ends(self, what: str, sent: Sent, began: float | None = None) -> dict[str, float]:
        """Judge each answer; returns after how many seconds it came, from ``began`` or now on."""
        began = time.monotonic() if began is None else began
        left, took = dict(sent), {}
        while left:
            for policy, (decode, request_id) in list(left.items()):
                if (found := decode.ask("answer", request_id)) is not None:
                    took[policy] = round(time.monotonic() - began, 2)
                    self._judge(policy, request_id, Answer(*found))
                    del left[policy]
            assert time.monotonic() - began < 60, f"{what}: {left} have no answer"
            time.sleep(0.01)
        print(f"{what}: {took}")
        return took

    def _judge(self, policy: str, request_id: str, answer: Answer) -> None:
        expected = self.history[self._seeds[request_id]]
        if policy == "fail" and answer.finish_reason == "error":
            assert answer.tokens == []
        else:
            assert answer.tokens == expected
        self.last[policy] = answer

    def unanswered(self, sent: Sent) -> bool:
        """Whether requests still wait."""
        return not any(decode.ask("answer", one) for decode, one in sent.values())

    def lived(self) -> bool:
        """Whether the last answers are of KV that came."""
        return all(a.path.get("outcome") == "transferred" for a in self.last.values())

    def gave_up(self, *reasons: str) -> None:
        """The last request got 503 with the reason, or was computed on decode for that reason."""
        error = self.last["fail"].error
        assert error is not None, self.last["fail"]
        assert (error["code"], error["type"]) == (503, "ServiceUnavailableError")
        says = r"KV was not received: (\w+), from \S+ to \S+: .+ \(request \S+\)"
        found = re.fullmatch(says, error["message"], re.DOTALL)
        assert found is not None, error
        assert found[1] in reasons, error
        path = self.last["recompute"].path
        assert path["outcome"] == "failed", path
        assert path["reason"] in reasons, path
        print(error["message"])
