"""The pods of a multi-node engine live and die as one."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from launched import Launched, http, wait_for

from loopback import free_port
from pdcluster_connector.launcher import multi_node
from pdcluster_connector.launcher.arguments import engine_command
from pdcluster_connector.launcher.engine.readiness import Readiness
from pdcluster_connector.launcher.interface import LauncherServer
from pdcluster_connector.launcher.links.link_table import LinkTable
from pdcluster_connector.launcher.multi_node import SILENCE, Followers, Leader
from pdcluster_connector.protocol.engine_id import EngineId

pytestmark = pytest.mark.process

LEADER, FOLLOWER = "127.0.0.1", "127.0.0.2"


@pytest.fixture
def node(launch, model):
    port, api = free_port(), free_port()

    def start(rank: int, behaviour: str = "serve", drain: str = "1") -> Launched:
        host = FOLLOWER if rank else LEADER
        return launch(
            behaviour,
            "--drain-seconds",
            drain,
            host=host,
            port=port,
            vllm=(
                str(model), "--host", host, "--port", str(api), "--nnodes", "2", "--node-rank",
                str(rank), "--master-addr", LEADER, "--tensor-parallel-size", "2",
            ),
        )  # fmt: skip

    return start


def kv_config(engine: Launched) -> dict:
    told = engine.told()["arguments"]
    return json.loads(told[told.index("--kv-transfer-config") + 1])


def test_a_follower_waits_for_its_leader_and_takes_its_identity(node):
    follower = node(1)
    waits = "waiting for the engine's leader"
    wait_for(lambda: waits in (http(f"{follower.url}/readyz")[1] or {"message": ""})["message"])
    leader = node(0)
    engine_id = leader.ready()["engine_id"]
    assert kv_config(follower)["engine_id"] == kv_config(leader)["engine_id"] == engine_id
    assert follower.ready()["engine_id"] == engine_id
    assert "--headless" in follower.told()["arguments"]
    assert "--headless" not in leader.told()["arguments"]
    # The follower's workers report to the leader.
    ours, theirs = follower.told()["environment"], leader.told()["environment"]
    assert ours["PDCLUSTER_CONTROL_URL"] == theirs["PDCLUSTER_CONTROL_URL"] == leader.url
    assert ours["PDCLUSTER_CONTROL_TOKEN"] == theirs["PDCLUSTER_CONTROL_TOKEN"]


def test_a_follower_is_ready_only_with_its_leader(node, tmp_path):
    loading = tmp_path / "loading"
    loading.touch()
    leader, follower = node(0, f"slow:{loading};serve"), node(1)
    follower.told()
    assert http(f"{follower.url}/readyz")[0] == 503
    loading.unlink()
    leader.ready()
    follower.ready()


def test_when_the_follower_restarts_so_does_the_leader(node):
    leader, follower = node(0), node(1)
    leader.ready()
    follower.ready()
    os.kill(follower.told()["pid"], signal.SIGKILL)
    assert follower.end() == 137
    second = node(1)
    states = set()
    wait_for(lambda: states.add(second.state) or leader.process.poll() is not None)
    assert leader.end() == 1
    assert leader.termination == (
        "node 1 of this engine has restarted; all pods of an engine end together"
    )
    # It joins the leader's next start: neither has to restart again, nor seems ready meanwhile.
    assert "Ready" not in states
    again = node(0)
    assert again.ready()["engine_id"] == second.ready()["engine_id"]


def test_when_the_leader_restarts_so_does_the_follower(node):
    leader, follower = node(0), node(1)
    leader.ready()
    first = follower.ready()["engine_id"]
    os.kill(leader.told()["pid"], signal.SIGKILL)
    assert leader.end() == 137
    again = node(0)
    assert follower.end() == 1
    assert follower.termination.startswith("the leader of this engine has restarted as ")
    assert again.ready()["engine_id"] != first


def test_a_follower_of_the_leaders_last_start_is_not_counted(node):
    """It ends by itself; were its next start taken for a restart, both would end by turns."""
    leader = node(0)
    engine_id = leader.ready()["engine_id"]
    address = f"{leader.url}/v1/rendezvous?rank=1&start=old&of=engine/gone"
    assert http(address)[1]["engine_id"] == engine_id
    follower = node(1)
    assert follower.ready()["engine_id"] == engine_id
    time.sleep(2)
    assert leader.ready()["engine_id"] == engine_id


def test_a_follower_that_waits_can_be_stopped(node):
    follower = node(1)
    wait_for(lambda: follower.state == "Starting")
    follower.process.send_signal(signal.SIGTERM)
    assert follower.end() == 143


def alive(engine: Launched) -> bool:
    return Path(f"/proc/{engine.told()['pid']}").exists()


def busy(node, work: str) -> tuple[Launched, Launched]:
    """A leader whose requests last as ``work`` says, and its follower; both ready."""
    leader, follower = node(0, f"busy:{work};serve", "600"), node(1, drain="600")
    leader.ready()
    follower.ready()
    return leader, follower


@pytest.mark.parametrize("first", ["leader", "follower"])
def test_a_follower_lives_until_its_leader_has_drained(node, tmp_path, first):
    """Pods of one engine are told to stop at the same time, and requests may be under way."""
    work = tmp_path / "work"
    work.touch()
    leader, follower = busy(node, str(work))
    for launcher in (leader, follower) if first == "leader" else (follower, leader):
        launcher.process.send_signal(signal.SIGTERM)
        wait_for(lambda: leader.state == "Draining")  # also once its follower says that it leaves
        if launcher is leader and first == "leader":  # the follower may hear of it before its stop
            wait_for(lambda: follower.state == "WarmingUp")
    wait_for(lambda: follower.state == "Draining")
    time.sleep(2)
    assert alive(follower), "the leader's requests need its ranks"
    work.unlink()
    assert leader.end() == 0
    assert follower.end() == 0


async def test_a_follower_that_leaves_waits_through_a_connection_that_breaks(monkeypatch):
    monkeypatch.setattr(multi_node, "ASK_EVERY", 0.01)
    told = {"engine_id": "a.b.c.d.0/1", "token": "t", "ready": True}
    asked = 0

    async def answer(request: web.Request) -> web.Response:
        nonlocal asked
        asked += "leaving" in request.query
        if 1 <= asked <= 6:  # aiohttp itself asks a second time
            request.transport.close()
        elif asked > 6:
            return web.Response(status=409, text="the engine is about to end")
        return web.json_response(told)

    app = web.Application()
    app.router.add_get("/v1/rendezvous", answer)
    async with TestServer(app) as server, aiohttp.ClientSession() as http:
        leader = Leader(http, str(server.make_url("")).rstrip("/"), 1, "s")
        met = await leader.meet(lambda _: None)
        leader.leaving = True
        why = await leader.watch(met, lambda _: None)
    assert "409" in why, "the leader's own word ends the wait"


def test_when_the_follower_is_told_to_stop_the_engine_drains(node, tmp_path):
    work = tmp_path / "work"
    work.touch()
    leader, follower = busy(node, str(work))
    follower.process.send_signal(signal.SIGTERM)
    wait_for(lambda: leader.state == "Draining")
    assert alive(follower)
    work.unlink()
    assert leader.end() == 1
    assert leader.termination == (
        "node 1 of this engine was told to stop; all pods of an engine end together"
    )
    assert follower.end() == 0


def test_a_second_stop_does_not_wait_for_the_leader(node):
    _, follower = busy(node, "600")
    follower.process.send_signal(signal.SIGTERM)
    wait_for(lambda: follower.state == "Draining")
    follower.process.send_signal(signal.SIGTERM)
    assert follower.end() == 137


def test_the_rendezvous_is_for_this_engines_followers(node, launch):
    leader = node(0)
    leader.ready()
    for query in ("", "rank=0&start=a", "rank=2&start=a", "rank=1", "rank=x&start=a"):
        assert http(f"{leader.url}/v1/rendezvous?{query}")[0] == 400, query
    ask = f"{leader.url}/v1/rendezvous?rank=1&start="
    assert http(f"{ask}a")[0] == 200
    status, answer = http(f"{ask}b")
    assert (status, answer["error"]) == (
        409,
        "node 1 of this engine has restarted: the engine ends and starts again",
    )
    assert leader.end() == 1
    single = launch("serve")
    single.ready()
    assert http(f"{single.url}/v1/rendezvous?rank=1&start=a")[0] == 404


@pytest.mark.parametrize("nodes", [1, 3])
async def test_without_tls_whoever_asks_as_a_follower_gets_the_token_and_nobody_else(nodes):
    """Who may ask at all is for the network policies of the operator to say."""
    engine = EngineId("ns.c.decode.r.0", "00000000000000dd")
    command = engine_command(
        ["m", "--kv-transfer-config", '{"kv_role":"kv_consumer"}'],
        engine_id=engine.engine, role="decode",
    )  # fmt: skip
    followers = Followers(nodes) if nodes > 1 else None
    server = LauncherServer(
        Readiness(engine, "decode", command, {}), LinkTable((1, 1)), "the token", lambda: None,
        followers,
    )  # fmt: skip

    async with TestClient(TestServer(server.application())) as client:

        async def ask(path: str) -> tuple[int, bool]:
            answer = await client.get(path)
            return answer.status, "the token" in await answer.text()

        for path in ("readyz", "v1/peers", "v1/links", "v1/changes", "no/such/path"):
            assert not (await ask(f"/{path}"))[1], path
        asked = "/v1/rendezvous?start=a&rank="
        if nodes == 1:
            assert await ask(f"{asked}1") == (404, False)
            return
        for rank in ("", "0", "3", "x"):
            assert await ask(f"{asked}{rank}") == (400, False)
        assert await ask(f"{asked}1") == (200, True)
        assert await ask("/v1/rendezvous?rank=1&start=b&of=another/1") == (200, True)
        assert await ask("/v1/rendezvous?rank=1&start=b") == (409, False), "it has restarted"


def test_losses():
    followers = Followers(3)
    assert followers.heard(1, "a", 0.0) is None
    assert followers.heard(2, "b", 5.0) is None
    assert followers.loss(SILENCE) is None
    assert followers.loss(SILENCE + 1) == "node 1 of this engine has been silent for 20 s"
    followers.heard(1, "a", 10.0)
    assert followers.loss(SILENCE + 1) is None
    followers.heard(2, "c", 10.0)
    assert followers.loss(10.0) == "node 2 of this engine has restarted"
    # What restarted once stays lost, whoever asks.
    followers.heard(2, "c", 11.0)
    assert followers.loss(11.0)
    assert followers.leaving is None
    followers.heard(1, "a", 12.0, leaving=True)
    assert followers.leaving == 1
    assert followers.heard(3, "a", 0.0)
    assert followers.heard(1, "", 0.0)
    assert followers.heard(1, "x" * 65, 0.0)
