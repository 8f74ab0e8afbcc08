from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from fake_engine import fake_connector
from lean_router import lean_environment
from manifests import tiny
from pods import alive, carrying, until

from loopback import free_network, free_port
from pdcluster_operator.api.object_names import is_connector_name
from pdcluster_operator.cli.once import ask, describe_path
from pdcluster_operator.local.cluster import LocalCluster
from pdcluster_operator.runtime.interfaces import Key

pytestmark = pytest.mark.process

OWNED = ("StatefulSet", "Deployment", "Service", "Pod")
CHILDREN = (*OWNED, "ConfigMap")


@pytest.fixture(autouse=True)
def lean_router(monkeypatch: pytest.MonkeyPatch) -> None:
    """Routers that start at once."""
    monkeypatch.setattr("pdcluster_operator.local.cluster.container_environment", lean_environment)


@contextlib.asynccontextmanager
async def local_cluster(folder: Path) -> AsyncIterator[LocalCluster]:
    first = f"{free_network()}.2"
    cluster = LocalCluster(folder / "run", fake_connector(), print, first_address=first)
    async with cluster:
        yield cluster
    assert carrying(f"mark-{folder}") == []


def condition(cluster: LocalCluster, key: Key, kind: str) -> dict:
    found = (cluster.cluster(key).get("status") or {}).get("conditions") or []
    return next((c for c in found if c["type"] == kind), {})


def running(folder: Path, *words: str) -> list[int]:
    """Pids of this test's processes that have all of these words in their command line."""

    def line(pid: int) -> str:
        try:
            return Path(f"/proc/{pid}/cmdline").read_bytes().decode()
        except OSError:  # ended since it was listed
            return ""

    return [pid for pid in carrying(f"mark-{folder}") if all(word in line(pid) for word in words)]


async def until_ready(cluster: LocalCluster, key: Key) -> None:
    try:
        await until(lambda: condition(cluster, key, "Ready").get("status") == "True")
    except TimeoutError:
        raise AssertionError(f"never Ready: {cluster.cluster(key).get('status')}") from None


async def test_from_a_manifest_to_tokens_through_the_real_router(tmp_path: Path) -> None:
    async with local_cluster(tmp_path) as cluster:
        key = cluster.apply(tiny(tmp_path))
        await until_ready(cluster, key)
        status = cluster.cluster(key)["status"]
        assert (status["prefill"], status["decode"], status["links"]) == ("1/1", "1/1", "1/1")
        url = "http://" + cluster.resolve("tiny-router.default.svc") + ":8000"
        decode = [
            f"http://{pod['status']['podIP']}:8000"
            for pod in cluster.api.list("Pod")
            if pod["metadata"]["labels"].get("pdcluster.dev/role") == "decode"
        ]
        answer = await ask(url, "tiny", "Once upon a time", 3, decode)
        assert answer.moved
        assert answer.received == 8192
        assert "8,192 bytes" in describe_path(answer)


async def test_at_rest_nothing_is_written(tmp_path: Path) -> None:
    async with local_cluster(tmp_path) as cluster:
        key = cluster.apply(tiny(tmp_path))
        await until_ready(cluster, key)
        events: list[tuple[str, str]] = []
        cluster.api.watch(lambda event, m: events.append((event, m["kind"])))
        for _ in range(20):  # it comes to rest a while after it is Ready
            events.clear()
            cluster.loop.queue.add(key)
            await asyncio.sleep(3)
            if not events:
                break
        assert events == []


async def test_deleting_the_cluster_removes_all_it_owned(tmp_path: Path) -> None:
    async with local_cluster(tmp_path) as cluster:
        key = cluster.apply(tiny(tmp_path))
        await until_ready(cluster, key)
        cluster.api.delete("PDCluster", key.namespace, key.name)
        await until(lambda: not any(cluster.api.list(kind) for kind in OWNED))
        [left] = cluster.api.list("ConfigMap")
        assert is_connector_name(left["metadata"]["name"]), "the connector is for the next one"
        assert carrying(f"mark-{tmp_path}") == []


async def test_a_killed_engine_comes_back_as_another_and_decode_is_told(tmp_path: Path) -> None:
    async with local_cluster(tmp_path) as cluster:
        key = cluster.apply(tiny(tmp_path))
        await until_ready(cluster, key)
        told = tmp_path / "fake/peers.json"
        before = json.loads(told.read_text())["peers"][0]
        reports = cluster.loop.monitor.engines(key)
        [prefill] = [engine for engine in reports if ".prefill." in engine]
        first = running(tmp_path, prefill)
        assert len(first) == 1
        os.kill(first[0], 9)
        await until(lambda: not any(alive(pid) for pid in first))
        await until(lambda: condition(cluster, key, "Ready")["status"] != "True")
        await until_ready(cluster, key)
        await until(lambda: json.loads(told.read_text())["peers"][0] != before)
        after = json.loads(told.read_text())["peers"][0]
        assert after["engine"] == before["engine"] == prefill
        assert after["side_channel"] == before["side_channel"]
        assert after["engine_id"] != before["engine_id"]


async def test_not_even_a_killed_shim_leaves_an_engine_behind(tmp_path: Path) -> None:
    async with local_cluster(tmp_path) as cluster:
        key = cluster.apply(tiny(tmp_path))
        await until_ready(cluster, key)
        before = carrying(f"mark-{tmp_path}")
        [shim] = running(tmp_path, "shim.py", "decode")
        os.kill(shim, 9)
        await until(lambda: condition(cluster, key, "Ready")["status"] != "True")
        await until_ready(cluster, key)
        assert len(carrying(f"mark-{tmp_path}")) == len(before)
        assert len(set(carrying(f"mark-{tmp_path}")) & set(before)) == len(before) - 3


async def test_an_engine_that_dies_while_loading_says_why_in_its_condition(tmp_path: Path) -> None:
    manifest = tiny(tmp_path)
    (tmp_path / "fake/die").write_text("ValueError: no layer named lm_head")
    async with local_cluster(tmp_path) as cluster:
        key = cluster.apply(manifest)
        await until(lambda: "lm_head" in condition(cluster, key, "PrefillReady").get("message", ""))
        await until(lambda: "lm_head" in condition(cluster, key, "DecodeReady").get("message", ""))
        assert condition(cluster, key, "Ready")["status"] == "False"
        (tmp_path / "fake/die").unlink()
        await until_ready(cluster, key)


async def test_a_missing_model_folder_is_named_in_the_conditions(tmp_path: Path) -> None:
    manifest = tiny(tmp_path)
    manifest["spec"]["model"]["source"]["hostPath"]["path"] = str(tmp_path / "nowhere")
    async with local_cluster(tmp_path) as cluster:
        key = cluster.apply(manifest)
        await until(lambda: "nowhere" in condition(cluster, key, "PrefillReady").get("message", ""))
        message = condition(cluster, key, "PrefillReady")["message"]
        assert "No such file or directory" in message
        assert condition(cluster, key, "PrefillReady")["status"] == "False"


async def test_a_port_that_is_taken_everywhere_is_named_in_the_conditions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = free_port()
    monkeypatch.setattr("pdcluster_operator.local.cluster.POD_PORTS", (port,))
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", port))
        taken.listen(1)
        async with local_cluster(tmp_path) as cluster:
            key = cluster.apply(tiny(tmp_path))
            await until(
                lambda: condition(cluster, key, "DecodeReady").get("reason") == "Unschedulable"
            )
            message = condition(cluster, key, "DecodeReady")["message"]
            assert f"port {port}" in message
            assert f"(pid {os.getpid()})" in message


async def test_a_missing_router_is_named_in_the_conditions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/python3").symlink_to(sys.executable)
    monkeypatch.setattr(
        "pdcluster_operator.local.cluster.container_environment",
        lambda: {"PATH": str(tmp_path / "bin")},
    )
    async with local_cluster(tmp_path) as cluster:
        key = cluster.apply(tiny(tmp_path))
        await until(lambda: condition(cluster, key, "KVPathVerified").get("status") == "True")
        await until(
            lambda: (
                "vllm-router: No such file or directory"
                in condition(cluster, key, "Available").get("message", "")
            )
        )
        assert condition(cluster, key, "Ready")["status"] == "False"


async def test_a_wrong_spec_is_not_accepted_and_starts_nothing(tmp_path: Path) -> None:
    manifest = tiny(tmp_path)
    manifest["spec"]["decode"]["engine"] = {"blockSize": 64}
    async with local_cluster(tmp_path) as cluster:
        key = cluster.apply(manifest)
        await until(lambda: condition(cluster, key, "Accepted").get("status") == "False")
        assert "PrefixCachingHeterogeneousBlocks" in str(condition(cluster, key, "Accepted"))
        assert not any(cluster.api.list(kind) for kind in CHILDREN)


async def test_progress_of_loading_shows_in_the_conditions(tmp_path: Path) -> None:
    manifest = tiny(tmp_path)
    (tmp_path / "fake/slow").touch()
    async with local_cluster(tmp_path) as cluster:
        key = cluster.apply(manifest)
        await until(
            lambda: "shard 1 of 2" in condition(cluster, key, "PrefillReady").get("message", "")
        )
        assert condition(cluster, key, "PrefillReady")["reason"] == "LoadingWeights"
        (tmp_path / "fake/slow").unlink()
        await until_ready(cluster, key)


@pytest.mark.parametrize("change", ["env", "replicas"])
async def test_a_changed_spec_reaches_the_processes(tmp_path: Path, change: str) -> None:
    manifest = tiny(tmp_path)
    async with local_cluster(tmp_path) as cluster:
        key = cluster.apply(manifest)
        await until_ready(cluster, key)
        if change == "env":
            new = {"name": "NEW", "value": f"in-{tmp_path}"}
            manifest["spec"]["decode"]["engine"] = {"env": [new]}
        else:
            manifest["spec"]["decode"]["replicas"] = 2
        cluster.apply(manifest)
        if change == "env":
            await until(lambda: carrying(f"NEW=in-{tmp_path}"))
        else:
            await until(lambda: (cluster.cluster(key)["status"]).get("decode") == "2/2")
        await until_ready(cluster, key)
