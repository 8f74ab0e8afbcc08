"""Real CPU engines in seconds: one process imports vLLM once and forks an engine each time.

This is the test's side: :class:`ForkHost` starts the process (``forked_engine.py``) and asks it
for engines; an :class:`Engine` is the handle of one.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any

import psutil
import pytest

import machine
import pdcluster_connector

SOURCES = Path(pdcluster_connector.__file__).parents[1]
ANSWER_SECONDS = 200.0  # less than pytest gives a test, so that a failure shows the engine's log
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "INFO",
    "VLLM_NO_USAGE_STATS": "1",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # With several ranks vLLM compiles one tiny function with the C++ compiler: 10 s each.
    "TORCHDYNAMO_DISABLE": "1",
    # Conv states as (channels, rows): their heads can be told apart.
    "VLLM_SSM_CONV_STATE_LAYOUT": "DS",
}
# forked_engine.py hides AVX-512 from vLLM; these are for torch and for its oneDNN.
HIDES_AVX512 = {"HIDES_AVX512": "1", "ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}


@dataclass
class Answer:
    """What became of one request."""

    tokens: list[int]
    finish_reason: str | None
    params: dict[str, Any] | None
    choices: list[list[int]] = field(default_factory=list)  # with n > 1
    error: dict[str, Any] | None = None  # what a client gets, if the engine was asked to explain

    @property
    def path(self) -> dict[str, Any]:
        """Decode's account of the KV path."""
        return (self.params or {}).get("kv_path", {})


class EngineDiedError(Exception):
    """The engine's process ended; the message holds the end of its log."""


@dataclass
class Engine:
    """The test's handle of one forked engine."""

    name: str
    pid: int
    log: Path
    address: str
    _connection: Connection | None = None
    _ids: Any = field(default_factory=itertools.count)

    def wait_ready(self, timeout: float = ANSWER_SECONDS) -> Engine:
        """Block until the engine serves."""
        deadline = time.monotonic() + timeout
        while True:
            try:
                self._connection = Client(self.address, "AF_UNIX")
                return self
            except OSError:
                if not self.alive() or time.monotonic() > deadline:
                    raise EngineDiedError(f"{self.name}: {self.tail()}") from None
                time.sleep(0.05)

    def submit(
        self, prompt: list[int], max_tokens: int = 1, params: dict[str, Any] | None = None,
        salt: str | None = None, lora: tuple[str, int, str] | None = None, **sampling: Any,
    ) -> str:  # fmt: skip
        """Send a request; returns its id. ``lora`` is an adapter's (name, number, folder)."""
        request_id = f"{self.name}-{next(self._ids)}"
        self.ask("submit", request_id, prompt, max_tokens, params, salt, sampling, lora)
        return request_id

    def answer(self, request_id: str, timeout: float = ANSWER_SECONDS) -> Answer:
        """Wait for a request's end."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            found = self.ask("answer", request_id)
            if found is not None:
                return Answer(*found)
            time.sleep(0.005)
        raise TimeoutError(f"{request_id} has no answer after {timeout} s; {self.tail()}")

    def generate(self, *args: Any, timeout: float = ANSWER_SECONDS, **kwargs: Any) -> Answer:
        """Submit and wait."""
        return self.answer(self.submit(*args, **kwargs), timeout)

    def abort(self, request_id: str) -> None:
        """Abort a request, as a client that hangs up does."""
        self.ask("abort", request_id)

    def held(self) -> int:
        """Requests that the scheduler still knows, finished ones with kept blocks included."""
        return self.ask("held")

    def free_blocks(self) -> int:
        """Blocks in the pool that no request holds."""
        return self.ask("free_blocks")

    def metrics(self) -> dict[str, float]:
        """Prometheus samples of this engine: ``name{labels}`` without model and engine."""
        return self.ask("metrics")

    def ask(self, *message: Any) -> Any:
        """One command; raises what went wrong in the engine."""
        assert self._connection is not None, "wait_ready first"
        try:
            self._connection.send(message)
            ok, value = self._connection.recv()
        except (EOFError, OSError):
            raise EngineDiedError(f"{self.name}: {self.tail()}") from None
        if not ok:
            raise RuntimeError(f"{self.name}: {value}")
        return value

    def alive(self) -> bool:
        try:  # it can end between the opening of its file and the reading
            stat = Path(f"/proc/{self.pid}/stat").read_text()
        except OSError:
            return False
        return stat.rpartition(")")[2].split()[0] != "Z"

    def kill(self) -> None:
        """SIGKILL the engine and its workers."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        # A process that is about to die can still be read from: wait for its end.
        deadline = time.monotonic() + 120
        while self.alive() and time.monotonic() < deadline:
            time.sleep(0.01)

    def freeze(self) -> None:
        """SIGSTOP: the process is there and does nothing.

        Its threads go on for a moment, and one may answer a claim. So wait until all stand still.
        """
        os.killpg(self.pid, signal.SIGSTOP)
        deadline = time.monotonic() + 60
        while not set(self._thread_states()) <= {"T", "Z"}:
            assert time.monotonic() < deadline, f"{self.name} does not stop"
            time.sleep(0.001)

    def _thread_states(self) -> Iterator[str]:
        children = psutil.Process(self.pid).children(recursive=True)
        for pid in (self.pid, *(child.pid for child in children)):
            for thread in Path(f"/proc/{pid}/task").glob("*/stat"):
                with contextlib.suppress(ProcessLookupError, FileNotFoundError):  # it ends now
                    state, _, group_id = thread.read_text().rpartition(")")[2].split()[:3]
                    if int(group_id) == self.pid:
                        yield state

    def stop(self) -> None:
        """End it in an orderly way, with force after five seconds."""
        with contextlib.suppress(EngineDiedError, RuntimeError, AssertionError, ProcessLookupError):
            os.killpg(self.pid, signal.SIGCONT)  # a test may have failed while it was frozen
            self.ask("stop")
        deadline = time.monotonic() + 5
        while self.alive() and time.monotonic() < deadline:
            time.sleep(0.02)
        self.kill()

    def tail(self, lines: int = 40) -> str:
        """End of its log."""
        text = self.log.read_text(errors="replace") if self.log.exists() else "no log"
        return "\n".join(text.splitlines()[-lines:])


class ForkHost:
    """Starts the host process and asks it for engines.

    ``hides_avx512``: vLLM finds a processor that has AVX2 only, and takes its kernels for it.
    """

    def __init__(self, folder: Path, *, hides_avx512: bool = False) -> None:
        self.folder = folder
        self._log = (folder / "host.log").open("wb")
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("forked_engine.py")), str(folder)],
            env={
                **os.environ,
                **ENVIRONMENT,
                **(HIDES_AVX512 if hides_avx512 else {}),
                "PYTHONPATH": f"{SOURCES}:{Path(__file__).parent}",
            },
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._count = itertools.count()
        self.engines: list[Engine] = []

    @functools.cached_property
    def refusal_of_fp8(self) -> str:
        """Why vLLM takes no fp8 KV cache on this processor, in its words; nothing if it does."""
        self._connection.send("refusal_of_fp8")
        return self._connection.recv()

    def engine(self, name: str, connector: dict[str, Any] | None = None, **llm: Any) -> Engine:
        """Fork an engine; not ready yet. ``connector`` is its kv-transfer-config.

        ``llm`` may hold the ``environment`` of the engine's process beside vLLM's options.

        The test is skipped if this machine has no room for what the engine's processes share.
        """
        ranks = llm.get("tensor_parallel_size", 1) * llm.get("pipeline_parallel_size", 1)
        if ranks > 1 and (why := machine.reason(["rings"])):
            pytest.skip(why)
        name = f"{name}{next(self._count)}"
        address = str(self.folder / name)
        log = self.folder / f"{name}.log"
        self._connection.send((address, str(log), connector, llm))
        engine = Engine(name, self._connection.recv(), log, address)
        self.engines.append(engine)
        return engine

    def close(self) -> None:
        """End every engine and the host."""
        for engine in self.engines:
            if engine.alive():
                engine.stop()
        self._process.kill()
        self._process.wait()
        self._log.close()

    @functools.cached_property
    def _connection(self) -> Connection:
        """The connection to the host, which takes many seconds to import vLLM."""
        deadline = time.monotonic() + 240
        while self._process.poll() is None and time.monotonic() < deadline:
            try:
                return Client(str(self.folder / "host"), "AF_UNIX")
            except OSError:
                time.sleep(0.1)
        raise EngineDiedError((self.folder / "host.log").read_text(errors="replace")[-4000:])
