"""One vLLM engine in a process of its own, which takes requests over a pipe.

The process steps the engine also when it has no request, as a server does. Its output goes to a
file, because vLLM, NIXL and UCX write a lot of it.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import re
import sys
import time
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

READY_SECONDS = 240.0
ANSWER_SECONDS = 120.0
PREFIX = re.compile(r"^\[[0-9.]+\] +\[[^]]*\] *")  # UCX's time and process


@dataclass
class Answer:
    """One request's end; times are of this machine's monotonic clock, in seconds.

    ``params`` is what the connector returned for the request, ``reason`` is vLLM's finish reason.
    """

    tokens: list[int]
    first: float
    end: float
    params: dict[str, Any] | None
    reason: str | None


class Engine:
    """An engine in a process of its own.

    Args:
        name: of the engine in messages, in request ids and of its log file.
        folder: where the log file lies.
        environment: variables that are set before vLLM is imported.
        options: arguments of ``vllm.LLM``.
    """

    def __init__(
        self, name: str, folder: Path, environment: dict[str, str], options: dict[str, Any]
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self.name = name
        self._log = folder / f"{name}.log"
        self._pipe, theirs = context.Pipe()
        arguments = (theirs, str(self._log), environment, options)
        self._process = context.Process(target=_serve, args=arguments, daemon=True)
        self._process.start()
        theirs.close()
        self._number = 0
        self._answers: dict[str, Answer] = {}

    def ready(self) -> dict[str, Any]:
        """Wait until the engine has started; return what it chose.

        Raises:
            RuntimeError: it did not start; the end of its log is in the message.
        """
        about: dict[str, Any] = self._receive(READY_SECONDS)[1]
        return about

    def submit(self, prompt: list[int], count: int, params: dict[str, Any] | None = None) -> str:
        """Send a request for ``count`` tokens; return its id."""
        self._number += 1
        request = f"{self.name}-{self._number}"
        self._pipe.send((request, prompt, count, params))
        return request

    def answer(self, request: str) -> Answer:
        """Wait for a request's end."""
        while request not in self._answers:
            _, name, *rest = self._receive(ANSWER_SECONDS)
            self._answers[name] = Answer(*rest)
        return self._answers.pop(request)

    def run(self, prompt: list[int], count: int, params: dict[str, Any] | None = None) -> Answer:
        """Send a request and wait for its end."""
        return self.answer(self.submit(prompt, count, params))

    def metrics(self) -> dict[str, float]:
        """Return the samples of the connector's metrics that are not zero."""
        self._pipe.send(("metrics",))
        samples: dict[str, float] = self._receive(ANSWER_SECONDS)[1]
        return samples

    def stop(self) -> None:
        """End the process."""
        self._pipe.close()
        self._process.join(5)
        self._process.kill()
        self._process.join()

    def log_lines(self, *words: str, most: int = 12) -> list[str]:
        """Return the last lines of the log that have one of the words in them, each once."""
        lines = self._log.read_text(errors="replace").splitlines()
        found = [
            PREFIX.sub("", line)[:300] for line in lines if any(word in line for word in words)
        ]
        return list(dict.fromkeys(found))[-most:]

    def _receive(self, seconds: float) -> Any:
        if not self._pipe.poll(seconds):
            raise RuntimeError(f"{self.name} did not answer for {seconds:.0f} s: {self._tail()}")
        try:
            message = self._pipe.recv()
        except EOFError:
            raise RuntimeError(f"{self.name} ended: {self._tail()}") from None
        if message[0] == "failed":
            raise RuntimeError(f"{self.name}: {message[1]}\n{self._tail()}")
        return message

    def _tail(self) -> str:
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-40:])


def _serve(
    pipe: Connection, log: str, environment: dict[str, str], options: dict[str, Any]
) -> None:
    """Run in the engine's process: make the engine and step it until the pipe is closed."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ.update(environment)
    try:
        registered = _note_registrations()
        from vllm import LLM

        engine = LLM(**options).llm_engine
        pipe.send(("ready", {**_about(engine), "registered": registered}))
        _steps(pipe, engine)
    except EOFError:
        pass
    except BaseException as error:  # noqa: BLE001  the other process prints it
        traceback.print_exc()
        pipe.send(("failed", f"{type(error).__name__}: {error}"))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _note_registrations() -> list[str]:
    """Return a list that grows by one line with each piece of memory that NIXL registers."""
    lines: list[str] = []
    for name in ("nixl_cu13._api", "nixl_cu12._api"):
        try:
            agent = importlib.import_module(name).nixl_agent
        except ImportError:
            continue

        def noted(self: Any, given: Any, kind: Any = None, real: Any = agent.get_reg_descs) -> Any:
            if isinstance(given, list) and given and isinstance(given[0], tuple):
                size = sum(row[1] for row in given) / 2**20
                lines.append(f"{kind}: {size:.1f} MiB in {len(given)}")
            return real(self, given, kind)

        agent.get_reg_descs = noted
    return lines


def _about(engine: Any) -> dict[str, Any]:
    config = engine.vllm_config
    core = engine.engine_core.engine_core
    runner = getattr(core.model_executor.driver_worker.worker, "model_runner", None)
    layers = config.compilation_config.static_forward_context.values()
    return {
        "runner": f"{type(runner).__module__}.{type(runner).__name__}",
        "layout": str(config.cache_config.kv_cache_layout),
        "async scheduling": config.scheduler_config.async_scheduling,
        "blocks": config.cache_config.num_gpu_blocks,
        "attention": sorted(
            {layer.attn_backend.get_name() for layer in layers if hasattr(layer, "attn_backend")}
        ),
    }


def _steps(pipe: Connection, engine: Any) -> None:
    from vllm import SamplingParams

    first: dict[str, float] = {}
    while True:
        while pipe.poll(0 if engine.has_unfinished_requests() else 0.001):
            name, *arguments = pipe.recv()
            if name == "metrics":
                pipe.send(("metrics", _metrics()))
                continue
            prompt, count, params = arguments
            sampling = SamplingParams(
                temperature=0.0,
                max_tokens=count,
                ignore_eos=True,
                detokenize=False,
                extra_args=None if params is None else {"kv_transfer_params": params},
            )
            engine.add_request(name, {"prompt_token_ids": prompt}, sampling)
        for output in engine.step():
            now = time.monotonic()
            if output.outputs[0].token_ids:
                first.setdefault(output.request_id, now)
            if output.finished:
                began = first.pop(output.request_id, now)
                tokens = list(output.outputs[0].token_ids)
                reason = output.outputs[0].finish_reason
                answer = (tokens, began, now, output.kv_transfer_params, reason)
                pipe.send(("answer", output.request_id, *answer))


def _metrics() -> dict[str, float]:
    from prometheus_client import REGISTRY

    samples = [
        sample
        for family in REGISTRY.collect()
        if family.name.startswith("pdcluster_")
        for sample in family.samples
        if sample.value and not sample.name.endswith(("_bucket", "_created"))
    ]
    return {
        sample.name + "".join(f" {k}={v}" for k, v in sample.labels.items() if k != "model_name"):
        sample.value
        for sample in samples
    }  # fmt: skip
