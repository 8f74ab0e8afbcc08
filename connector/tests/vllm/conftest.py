"""The fork host, and engines that end with their module."""

from __future__ import annotations

import functools
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fork_host import Engine, ForkHost

import machine


@functools.cache
def host() -> ForkHost:
    """Start one process for the whole session that has imported vLLM."""
    folder = Path(tempfile.mkdtemp(prefix="pdc-"))  # short: it holds Unix sockets
    return ForkHost(folder, hides_avx512="fp8" in machine.without())


def end_host() -> None:
    if host.cache_info().currsize:
        host().close()
        shutil.rmtree(host().folder, ignore_errors=True)


def pytest_configure(config: pytest.Config) -> None:
    """The fork host asks vLLM whether this processor can have an fp8 KV cache."""
    machine.PROBES["fp8"] = lambda: host().refusal_of_fp8
    config.add_cleanup(end_host)


@pytest.fixture(scope="session")
def fork_host() -> ForkHost:
    """The process that has imported vLLM. It ends with the session."""
    return host()


@pytest.fixture(scope="module")
def engines(fork_host: ForkHost) -> Iterator[Callable[..., Engine]]:
    """Engines that end with the module."""
    made: list[Engine] = []

    def make(*args: Any, **kwargs: Any) -> Engine:
        made.append(fork_host.engine(*args, **kwargs))
        return made[-1]

    yield make
    for engine in made:
        if engine.alive():
            engine.stop()


@pytest.fixture
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker side believes itself the only rank: vLLM's groups are made by its executors."""
    one = SimpleNamespace(rank_in_group=0, world_size=1)
    for group in ("get_pp_group", "get_tp_group"):
        monkeypatch.setattr(f"pdcluster_connector.vllm.worker_side.worker.{group}", lambda: one)
