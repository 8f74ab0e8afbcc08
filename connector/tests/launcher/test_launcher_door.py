"""An engine that is told to end turns new requests away, and finishes those that it has."""

from __future__ import annotations

import asyncio
import json

import pytest

from pdcluster_connector.launcher import inside_vllm
from pdcluster_connector.launcher.inside_vllm import DOOR_VARIABLE, Door, DoorFile


@pytest.fixture
def file(monkeypatch, tmp_path):
    monkeypatch.setattr(inside_vllm.tempfile, "gettempdir", lambda: str(tmp_path))
    return DoorFile()


async def served(scope, _receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": []})


def answer(middleware, **scope):
    """Return the status and the body of the answer."""
    sent = []

    async def send(message):
        sent.append(message)

    request = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
    asyncio.run(middleware({**request, **scope}, None, send))
    body = b"".join(message.get("body", b"") for message in sent)
    return sent[0]["status"], json.loads(body or b"null")


def test_after_the_door_is_closed_new_requests_get_a_503(file, monkeypatch):
    monkeypatch.setenv(DOOR_VARIABLE, str(file.path))
    middleware = Door(served)
    assert answer(middleware)[0] == 200
    file.close()
    file.close()
    status, said = answer(middleware)
    assert status == 503
    assert said["error"]["code"] == 503
    assert "another engine" in said["error"]["message"]
    # The launcher and the kubelet ask on.
    assert answer(middleware, method="GET")[0] == 200
    assert answer(middleware, type="websocket")[0] == 200


def asked_by(agent):
    headers = [(b"user-agent", agent.encode())] if agent else []
    return {"method": "GET", "path": "/health", "headers": headers}


def test_routers_leave_an_engine_without_links_out_and_nobody_restarts_it(
    file, monkeypatch, capsys
):
    monkeypatch.setenv(DOOR_VARIABLE, str(file.path))
    middleware, router = Door(served), asked_by("")
    assert answer(middleware, **router)[0] == 200
    for _ in range(2):
        file.leave_out("PeerRestarted")
    assert capsys.readouterr().err.count("PeerRestarted") == 1
    status, said = answer(middleware, **router)
    assert (status, said["error"]["code"]) == (503, 503)
    assert answer(middleware, **asked_by("reqwest/0.12"))[0] == 503
    # Neither the kubelet's probes nor the launcher may take the engine for dead.
    for agent in ("kube-probe/1.37", inside_vllm.LAUNCHER_AGENT):
        assert answer(middleware, **asked_by(agent))[0] == 200
    # Who sends a request all the same is served: its failure says why.
    assert answer(middleware)[0] == 200
    assert answer(middleware, method="GET", path="/metrics")[0] == 200
    file.leave_out("")
    assert answer(middleware, **router)[0] == 200


def test_an_engine_that_no_launcher_started_has_no_door(monkeypatch):
    monkeypatch.delenv(DOOR_VARIABLE, raising=False)
    assert answer(Door(served))[0] == 200
    assert answer(Door(served), **asked_by(""))[0] == 200


def test_the_launcher_leaves_no_file_behind(file, tmp_path):
    assert list(tmp_path.iterdir()) == []
    file.clean_up()
    file.close()
    assert list(tmp_path.iterdir()) == [file.path]
    file.leave_out("PeerRestarted")
    assert sorted(tmp_path.iterdir()) == [file.path, file.no_link]
    file.clean_up()
    assert list(tmp_path.iterdir()) == []


def test_without_a_place_to_write_to_the_engine_serves_on(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(inside_vllm.tempfile, "gettempdir", lambda: str(tmp_path / "missing"))
    DoorFile().leave_out("PeerRestarted")
    DoorFile().close()
    assert "cannot be turned away" in capsys.readouterr().err
