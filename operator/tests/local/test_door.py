"""The door of ``pdcluster up``: real HTTPS, by the client that every command uses."""

from __future__ import annotations

import contextlib
import stat
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
import yaml

from pdcluster_operator.adapters.api_server.client import KubeClient, NotFound
from pdcluster_operator.adapters.api_server.kinds import EVENT, PDCLUSTER, POD, SECRET
from pdcluster_operator.adapters.api_server.kubeconfig import (
    find_configuration,
    namespace_of_context,
)
from pdcluster_operator.local.api_server import LocalApi
from pdcluster_operator.local.cluster import LocalCluster
from pdcluster_operator.local.door import Door
from pdcluster_operator.plan.types import ConnectorBundle, Event
from pdcluster_operator.runtime.interfaces import ApiError


def named(kind: str, name: str, version: str = "v1", **labels: str) -> dict:
    metadata = {"name": name, "namespace": "ns", "labels": labels}
    return {"apiVersion": version, "kind": kind, "metadata": metadata, "spec": {}}


@pytest.fixture
def api() -> LocalApi:
    api = LocalApi()
    api.apply(named("PDCluster", "tiny", PDCLUSTER.api_version))
    api.apply(named("Pod", "one", role="prefill"))
    api.apply(named("Pod", "two", role="decode"))
    api.apply(named("Secret", "key"))
    return api


@contextlib.asynccontextmanager
async def opened(
    folder: Path, api: LocalApi, logs: dict[str, Path] | None = None
) -> AsyncIterator[tuple[KubeClient, Door]]:
    async with Door(api, lambda: logs or {}, folder, "ns") as door:
        configuration = await find_configuration(str(door.kubeconfig))
        async with KubeClient(configuration) as client:
            yield client, door


async def test_objects_are_read_as_from_an_api_server(tmp_path: Path, api: LocalApi) -> None:
    async with opened(tmp_path, api) as (client, door):
        assert namespace_of_context(None, str(door.kubeconfig)) == "ns"
        one = await client.read(PDCLUSTER.path("ns", "tiny"))
        assert one == api.get("PDCluster", "ns", "tiny")
        assert await client.read(PDCLUSTER.path("ns", "other")) is None
        assert await client.read(PDCLUSTER.path("other", "tiny")) is None
        listed = await client.call("GET", POD.path("ns"))
        assert (listed["apiVersion"], listed["kind"]) == ("v1", "PodList")
        assert [one["metadata"]["name"] for one in listed["items"]] == ["one", "two"]
        assert (await client.call("GET", POD.path("other")))["items"] == []
        assert len((await client.call("GET", POD.path()))["items"]) == 2


@pytest.mark.parametrize(
    ("query", "names"),
    [
        ({"labelSelector": "role=decode"}, ["two"]),
        ({"labelSelector": "role"}, ["one", "two"]),
        ({"labelSelector": "role,role==prefill"}, ["one"]),
        ({"labelSelector": "other"}, []),
        ({"fieldSelector": "metadata.name=one"}, ["one"]),
        ({"fieldSelector": "metadata.name.other=one"}, []),
    ],
)
async def test_selectors(
    tmp_path: Path, api: LocalApi, query: dict[str, str], names: list[str]
) -> None:
    async with opened(tmp_path, api) as (client, _):
        found = await client.call("GET", POD.path("ns"), query=query)
    assert [one["metadata"]["name"] for one in found["items"]] == names


async def test_a_selector_of_another_form_is_refused(tmp_path: Path, api: LocalApi) -> None:
    async with opened(tmp_path, api) as (client, _):
        for query in ({"labelSelector": "role in (a)"}, {"fieldSelector": "x"}):
            with pytest.raises(ApiError) as refused:
                await client.call("GET", POD.path("ns"), query=query)
            assert refused.value.reason == "BadRequest"


async def test_secrets_are_not_served(tmp_path: Path, api: LocalApi) -> None:
    async with opened(tmp_path, api) as (client, _):
        with pytest.raises(NotFound):
            await client.call("GET", SECRET.path("ns", "key"))
        with pytest.raises(NotFound):
            await client.call("GET", SECRET.path("ns"))


async def test_nothing_is_written(tmp_path: Path, api: LocalApi) -> None:
    before = api.list("Pod")
    async with opened(tmp_path, api) as (client, _):
        for method in ("POST", "PUT", "PATCH", "DELETE"):
            with pytest.raises(ApiError) as refused:
                await client.call(method, POD.path("ns", "one"), body={})
            assert refused.value.reason == "MethodNotAllowed"
    assert api.list("Pod") == before


@pytest.mark.parametrize("sent", [None, "", "Bearer x", "Bearer é", "Basic x", "Bearer \udcff"])
async def test_whoever_lacks_the_token_reads_nothing(
    tmp_path: Path, api: LocalApi, sent: str | None
) -> None:
    async with opened(tmp_path, api) as (_, door):
        server = yaml.safe_load(door.kubeconfig.read_text())["clusters"][0]["cluster"]["server"]
        headers = {} if sent is None else {"Authorization": sent}
        async with aiohttp.ClientSession() as http:
            url = f"{server}{POD.path('ns')}"
            async with http.get(url, headers=headers, ssl=False) as answer:
                assert answer.status == 401
                assert "one" not in await answer.text()


async def test_a_fault_of_ours_is_an_answer_and_no_line_in_the_terminal(
    tmp_path: Path, api: LocalApi, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened(tmp_path, api) as (client, door):
        door._api = None  # type: ignore[assignment]
        with pytest.raises(ApiError, match="AttributeError") as error:
            await client.call("GET", POD.path("ns"))
    assert error.value.reason == "InternalError"
    assert caplog.text == ""


async def test_the_kubeconfig_is_for_this_user_and_goes_with_the_run(
    tmp_path: Path, api: LocalApi
) -> None:
    async with opened(tmp_path, api) as (_, door):
        configuration = await find_configuration(str(door.kubeconfig))
        assert stat.S_IMODE(door.kubeconfig.stat().st_mode) == 0o600
        other = await find_configuration(str(door.kubeconfig))
        other.tls_server_name = "another"
        async with KubeClient(other) as wrong:
            with pytest.raises(ApiError, match="certificate"):
                await wrong.call("GET", POD.path("ns"))
    assert not door.kubeconfig.exists()
    async with KubeClient(configuration) as late:
        with pytest.raises(ApiError):
            await late.call("GET", POD.path("ns"))


async def logged(client: KubeClient, pod: str, **query: str) -> list[str]:
    path = f"{POD.path('ns', pod)}/log"
    return [line.decode() async for line in client.lines(path, query)]


async def test_logs(tmp_path: Path, api: LocalApi) -> None:
    log = tmp_path / "main/container.log"
    log.parent.mkdir()
    log.write_text("first\nsecond\nthird\n")
    run = tmp_path / "run"
    run.mkdir()
    async with opened(run, api, {"one": log}) as (client, _):
        assert await logged(client, "one") == ["first\n", "second\n", "third\n"]
        for tail, lines in ((0, []), (1, ["third\n"]), (2, ["second\n", "third\n"])):
            assert await logged(client, "one", tailLines=str(tail)) == lines
        assert len(await logged(client, "one", tailLines="9")) == 3
        [stamped] = await logged(client, "one", tailLines="1", timestamps="true")
        assert stamped[:2] == "20"
        assert stamped.partition(" ")[2] == "third\n"
        with pytest.raises(ApiError) as refused:
            await logged(client, "two")
        assert refused.value.reason == "BadRequest"
        with pytest.raises(NotFound):
            await logged(client, "three")


async def test_a_followed_log_ends_when_the_process_is_started_again(
    tmp_path: Path, api: LocalApi
) -> None:
    log = tmp_path / "main/container.log"
    log.parent.mkdir()
    log.write_text("first\n")
    run = tmp_path / "run"
    run.mkdir()
    async with opened(run, api, {"one": log}) as (client, _):
        lines = client.lines(f"{POD.path('ns', 'one')}/log", {"follow": "true"})
        assert await anext(lines) == b"first\n"
        with log.open("a") as file:
            file.write("sec")
            file.flush()
            file.write("ond\nlast")
        assert await anext(lines) == b"second\n"
        log.replace(log.with_suffix(".previous.log"))
        log.write_text("again\n")
        assert [line async for line in lines] == [b"last\n"]
        assert await logged(client, "one", previous="true") == ["first\n", "second\n", "last\n"]
        assert await logged(client, "one") == ["again\n"]


async def test_events_are_kept_and_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdcluster_operator.local.cluster.MOST_EVENTS", 3)
    local = LocalCluster(tmp_path, ConnectorBundle("", b""), print)
    cluster = local.api.apply(named("PDCluster", "tiny", PDCLUSTER.api_version))
    events = local.events
    for number in range(5):
        await events.publish(cluster, [Event("Warning", "Why", f"number {number}")])
    kept = local.api.list(EVENT.name)
    assert [one["note"] for one in kept] == ["number 2", "number 3", "number 4"]
    assert all(one["regarding"]["uid"] == cluster["metadata"]["uid"] for one in kept)
    assert local.loop.store.keys() == []
