"""Both engines in one process each: no API server, no HTTP, no messages between vLLM's processes.

The client asks prefill's process and then decode's, by a pipe. Arms take turns as in the part
*served*.
"""

from __future__ import annotations

import functools
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from authority import Authority
from bench_kv import as_served, figures, noted, served, workers
from bench_kv.as_served import Size, Taken
from bench_kv.served import Arm
from bench_kv.workers import Worker
from models.tiny import model_path

REST_SECONDS = 0.001
"""After a step that has computed nothing, as vLLM's EngineCore process does."""


class Engine:
    """One engine, in this process."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._number = 0

    def rest(self) -> None:
        """Make a step without a request: leases end, and messages are read."""
        self._engine.step()

    def complete(self, prompt: list[int], params: dict[str, Any]) -> dict[str, Any] | None:
        """Compute one token of a prompt; return the parameters of the answer."""
        from vllm import RequestOutput, SamplingParams

        sampling = SamplingParams(
            max_tokens=1, temperature=0, ignore_eos=True, detokenize=False,
            extra_args={"kv_transfer_params": params},
        )  # fmt: skip
        self._number += 1
        self._engine.add_request(f"r{self._number}", {"prompt_token_ids": prompt}, sampling)
        while True:
            for output in self._engine.step():
                if isinstance(output, RequestOutput) and output.finished:
                    return output.kv_transfer_params
            time.sleep(REST_SECONDS)


def start(transfer: dict[str, Any], notes: Path) -> Engine:
    """Start an engine here. What its connector is called for is written down."""
    os.environ[noted.FILE] = str(notes)
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
    from vllm import LLM

    return Engine(LLM(
        str(model_path("llama")), dtype="float32", enforce_eager=True, block_size=32,
        skip_tokenizer_init=True, max_model_len=served.LONGEST, disable_log_stats=True,
        kv_transfer_config=transfer,
    ).llm_engine)  # fmt: skip


@dataclass
class Pair:
    """A prefill and a decode engine of one arm.

    Attributes:
        moments: the file that the engines write to.
    """

    arm: Arm
    prefill: Worker
    decode: Worker
    moments: Path

    def first_token(self, prompt: list[int]) -> dict[str, float]:
        """Serve a prompt; return the moments of its way.

        Raises:
            SystemExit: its KV did not move.
        """
        began = time.monotonic()
        params = self.prefill.ask("complete", prompt, self.arm.wanted)
        ticket = time.monotonic()
        answer = self.decode.ask("complete", prompt, params)
        ended = time.monotonic()
        served.see_moved(self.arm, answer)
        return {"began": began, "ticket": ticket, "sent": ticket, "answered": ended}

    def notes(self) -> list[str]:
        """Return the moments that the engines have written down."""
        return self.moments.read_text().splitlines()


def measure(arms: Sequence[Arm], size: Size, say: Any) -> dict[str, Any]:
    """Return the times to the first token; ``say`` tells a person how far it is."""
    taken = {arm.name: Taken() for arm in arms}
    shares = figures.shares(size.rounds, size.turns)
    workers.import_vllm()
    for number, rounds in enumerate(shares):
        for arm in figures.turn(arms, number):
            say(f"one process each, turn {number + 1} of {len(shares)}: {arm.name}")
            with _running(arm) as pair:
                as_served.first_tokens(pair, size.lengths, rounds, number, taken[arm.name])
    return {"in_process": as_served.times(taken, size.lengths, shares)}


@contextmanager
def _running(arm: Arm) -> Iterator[Pair]:
    """Start a pair of engines; end it afterwards."""
    with tempfile.TemporaryDirectory(prefix="bench-kv-") as name:
        folder = Path(name)
        notes, authority = folder / "notes", Authority() if arm.tls else None
        prefill, decode = (
            Worker(f"{arm.name}-{role}", folder, functools.partial(
                start, served.transfer_config(arm, role, folder, authority), notes))
            for role in served.KV_ROLES
        )  # fmt: skip
        with workers.ended(prefill, decode):
            yield Pair(arm, prefill, decode, notes)
