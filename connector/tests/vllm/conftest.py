"""The fork host, and engines that end with their module."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fork_host import Engine, ForkHost


@pytest.fixture(scope="session")
def fork_host() -> Iterator[ForkHost]:
    """One process for the whole session that has imported vLLM."""
    folder = Path(tempfile.mkdtemp(prefix="pdc-"))  # short: it holds Unix sockets
    host = ForkHost(folder)
    yield host
    host.close()
    shutil.rmtree(folder, ignore_errors=True)


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
