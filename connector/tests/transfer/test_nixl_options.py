"""What is set of NIXL and UCX when an agent is made, and what its user has set."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from nixl_prefill import Agents, PrefillProcess, patient
from transfer_rig import Decode, FakePeers, eventually

import machine
from pdcluster_connector.nixl_io import nixl_agent
from pdcluster_connector.nixl_io.interface import NixlError, NixlErrorKind
from pdcluster_connector.nixl_io.nixl_agent import NixlAgent

pytestmark = pytest.mark.nixl

LIMIT = "UCX_RCACHE_MAX_UNRELEASED"
ALLOC = "UCX_POSIX_ALLOC"
GET = "UCX_CUDA_IPC_ENABLE_GET_ZCOPY"
LEAST_SHM = "UCX_POSIX_SHM_MIN_SIZE"
# Five workers of UCX find room for none, for some and for all; UCX leaves 16 MiB alone.
SHORT = """
import os
from pdcluster_connector.nixl_io.nixl_agent import NixlAgent

for left in (2, 15, 16, 17, 20, 24, 28, 32, 36, 44):
    with open("/dev/shm/filler", "wb") as filler:
        shm = os.statvfs("/dev/shm")
        os.posix_fallocate(filler.fileno(), 0, shm.f_bavail * shm.f_frsize - (left << 20))
        agent = NixlAgent(f"a{left}", num_threads=4)
        assert agent.metadata()
        agent.close()
    os.unlink("/dev/shm/filler")
    print("made beside", left)
"""


@pytest.mark.parametrize(
    ("variable", "set_by_user", "expected"),
    [
        (LIMIT, None, "1024"),
        (LIMIT, "7", "7"),
        (ALLOC, None, "md"),
        (ALLOC, "mmap", "mmap"),
        (GET, None, "y"),
        (GET, "n", "n"),
    ],
)
def test_ucx_is_told_before_nixl_is_loaded(
    monkeypatch: pytest.MonkeyPatch, variable: str, set_by_user: str | None, expected: str
) -> None:
    monkeypatch.delenv(variable, raising=False)
    if set_by_user is not None:
        monkeypatch.setenv(variable, set_by_user)
    found = []

    def load(**_: bool) -> None:
        found.append(os.environ.get(variable))
        raise NixlError(NixlErrorKind.INVALID, "only looked at")

    monkeypatch.setattr(nixl_agent, "_load_nixl", load)
    with pytest.raises(NixlError):
        NixlAgent("a")
    assert found == [expected]


@pytest.mark.parametrize(("rocm", "first"), [(False, "nixl"), (True, "nixl_rocm")])
def test_the_wheel_of_the_platform_is_taken_first(
    monkeypatch: pytest.MonkeyPatch, rocm: bool, first: str
) -> None:
    asked: list[str] = []

    def load(name: str) -> object:
        asked.append(name)
        if len(asked) == 1:
            raise ImportError("not here")
        return name

    monkeypatch.setattr(nixl_agent.importlib, "import_module", load)
    nixl_agent._load_nixl(rocm=rocm)
    assert asked[0] == f"{first}._api"
    assert sorted(asked) == ["nixl._api", "nixl_rocm._api"]


@pytest.mark.parametrize(("asked", "expected"), [(None, "256"), ("1024", "1024")])
def test_a_transfer_has_work_for_each_of_nixl_s_threads(
    monkeypatch: pytest.MonkeyPatch, asked: str | None, expected: str
) -> None:
    api, seen = nixl_agent._load_nixl(), []
    create = api.nixl_agent.create_backend

    def note(agent: Any, backend: str, options: dict[str, str]) -> Any:
        seen.append(options)
        return create(agent, backend, options)

    monkeypatch.setattr(api.nixl_agent, "create_backend", note)
    options = [("UCX", "split_batch_size", asked)] if asked else []
    NixlAgent("a", num_threads=4, backend_options=options).close()
    assert [one["split_batch_size"] for one in seen] == [expected]


def test_threads_and_options_reach_the_backend() -> None:
    agents, threads = [], []
    for number in (0, 0, 3):  # UCX starts a thread of its own with the first
        before = len(os.listdir("/proc/self/task"))
        options = [("UCX", "num_workers", "2")] if number else []
        agents.append(NixlAgent(f"a{number}", num_threads=number, backend_options=options))
        threads.append(len(os.listdir("/proc/self/task")) - before)
    assert threads[2] - threads[1] == 3
    for agent in agents:
        agent.close()
    with pytest.raises(NixlError):
        NixlAgent("three", backend_options=[("UCX", "num_workers", "many")])


@pytest.mark.parametrize(
    ("backend", "serves_gpu", "microseconds"),
    [("UCX", False, 10_000), ("UCX", True, 1_000), ("LIBFABRIC", False, 100)],
)
def test_nixl_is_told_how_long_its_progress_thread_may_wait(
    monkeypatch: pytest.MonkeyPatch, backend: str, serves_gpu: bool, microseconds: int
) -> None:
    bindings, told = nixl_agent._load_nixl().nixlBind, []

    class Noted(bindings.nixlAgentConfig):  # type: ignore[misc]
        def __setattr__(self, name: str, value: Any) -> None:
            if name == "pthrDelay":
                told.append(value)
            super().__setattr__(name, value)

    monkeypatch.setattr(bindings, "nixlAgentConfig", Noted)
    with suppress(NixlError):  # not every machine has a libfabric
        NixlAgent("a", backends=[backend], serves_gpu=serves_gpu).close()
    assert told == [microseconds]


def test_the_threads_of_an_idle_agent_wake_a_hundred_times_a_second_at_most() -> None:
    """NIXL rounds up to whole milliseconds, so with 100 µs they woke a thousand times."""
    others = set(os.listdir("/proc/self/task"))
    agent = NixlAgent("a")
    own = set(os.listdir("/proc/self/task")) - others

    def wakes() -> int:
        status = [Path(f"/proc/self/task/{thread}/status").read_text() for thread in own]
        return sum(int(text.split("\nvoluntary_ctxt_switches:")[1].split()[0]) for text in status)

    eventually(lambda: wakes() > 5)  # it has started
    before, began = wakes(), time.monotonic()
    eventually(lambda: wakes() >= before + 20)
    assert time.monotonic() - began > 0.15
    agent.close()


@pytest.mark.needs("shm")
def test_an_agent_is_made_however_little_shared_memory_is_left() -> None:
    mounted = 'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "$@"'
    words = ("sh", "-c", mounted, "sh", sys.executable, "-X", "faulthandler", "-c", SHORT)
    done = subprocess.run(
        [*machine.unshared("--mount"), *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("made beside") == 10
    assert "uses no /dev/shm" in done.stderr


def test_a_backend_that_fails_is_tried_without_shared_memory(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv(LEAST_SHM, raising=False)
    api = nixl_agent._load_nixl()
    create, seen = api.nixl_agent.create_backend, []

    def fails_first(agent: Any, backend: str, options: dict[str, str]) -> Any:
        seen.append(os.environ.get(LEAST_SHM))
        if seen[-1] != "inf":
            raise api.nixlBind.nixlBackendError("no room")
        return create(agent, backend, options)

    monkeypatch.setattr(api.nixl_agent, "create_backend", fails_first)
    NixlAgent("a").close()
    assert seen == [None, "inf"]
    assert LEAST_SHM not in os.environ
    (said,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert "uses no /dev/shm; with it: nixl: nixlBackendError: no room" in said
    monkeypatch.setenv(LEAST_SHM, "1m")  # its user's own choice
    with pytest.raises(NixlError):
        NixlAgent("b")
    assert seen[2:] == ["1m"]


def test_large_reads_that_threads_share_are_right_to_the_byte() -> None:
    """1,024 descriptors are what NIXL's own setting begins to spread over its threads."""
    cache = {"kv_heads": 2, "layers": 4, "num_blocks": 520, "block_tokens": 16, "token_bytes": 64}
    prefill = PrefillProcess({"prefill/1": 2}, cache)
    peers = FakePeers()
    peers.table.update(prefill.metadata)

    class Threads(Agents):
        def agent(self, name: str) -> NixlAgent:
            return NixlAgent(name, num_threads=4)

    options = patient(descriptors_per_transfer=2048)
    decode = Decode(Threads(), peers, options=options, **cache)  # type: ignore[arg-type]
    blocks = np.random.default_rng(1).permutation(np.arange(1, 520))[:512].tolist()
    ticket = prefill.ticket("prefill/1", 9, blocks, 512 * 16)
    decode.receive(decode.request("r", ticket, blocks[::-1]))
    results = decode.wait("r")
    assert results.failed == {}
    assert results.received["r"].nbytes == 2 * 4 * 512 * 16 * 64
    assert decode.cache.wrong_tokens(9, blocks[::-1], 0, 512 * 16) == []
    assert decode.receiver.close()
    prefill.end()
