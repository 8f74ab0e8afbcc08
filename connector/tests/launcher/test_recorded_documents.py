"""A launcher's documents stay compatible with the version before.

``recorded_documents.json`` holds documents as version 0.1.0 wrote them, when each of them was built
and read by hand. A test that must change it breaks the other version.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer

from launcher_answers import decode_engine, decode_links
from pdcluster_connector.launcher.arguments import engine_command
from pdcluster_connector.launcher.engine.prompt_window import PromptWindow
from pdcluster_connector.launcher.engine.readiness import Progress, Readiness
from pdcluster_connector.launcher.interface import LauncherServer
from pdcluster_connector.launcher.links.link_table import LinkTable
from pdcluster_connector.protocol import launcher_documents as documents
from pdcluster_connector.protocol.engine_id import EngineId
from pdcluster_connector.protocol.launcher_documents import CanaryReport, CanaryState, EngineState
from pdcluster_connector.protocol.messages import Malformed

RECORDED: dict[str, Any] = json.loads(
    (Path(__file__).parent / "recorded_documents.json").read_text()
)
READERS: dict[str, Callable[[bytes], Any]] = {
    "PUT /v1/peers": documents.decode_peers,
    "GET /v1/peers": documents.decode_peers,
    "POST /v1/reports": documents.decode_report,
    "GET /readyz": decode_engine,
    "GET /v1/links": decode_links,
    "GET /v1/changes": documents.decode_changes,
}


@pytest.mark.parametrize("name", RECORDED)
def test_each_recorded_document_is_read_and_written_again_as_it_was(name: str) -> None:
    recorded = RECORDED[name]
    read = READERS[" ".join(name.split()[:2])](json.dumps(recorded).encode())
    assert not isinstance(read, Malformed)
    assert json.loads(documents.encode_json(read)) == recorded


def readiness(role: str, *more: str) -> Readiness:
    identity = EngineId(f"ns.c.{role}.r.0", "0123456789abcdef")
    config = json.dumps({"kv_role": "kv_consumer" if role == "decode" else "kv_producer"})
    arguments = ["m", "--kv-transfer-config", config, *more]
    command = engine_command(arguments, engine_id=identity.engine, role=role)
    return Readiness(identity, role, command, {"pdcluster": "0.1.0", "vllm": "0.32.0"})


async def test_a_decode_launcher_answers_as_it_was_recorded() -> None:
    table, window, ready = LinkTable((1, 1)), PromptWindow(), readiness("decode")
    server = LauncherServer(ready, table, "secret", lambda: None, prompts=window)
    async with TestClient(TestServer(server.application())) as client:

        async def answers(path: str, name: str = "") -> None:
            told = await (await client.get(path)).json()
            expected = dict(RECORDED[f"GET {path.partition('?')[0]}{name}"])
            if "revision" in told:  # any text: it only has to differ from the one before
                told["revision"] = expected["revision"]
            assert told == expected

        await answers("/readyz", " of an engine that starts")
        await answers("/v1/links", " before anything is known")
        await client.put("/v1/peers", json=RECORDED["GET /v1/peers"])
        token = {"Authorization": "Bearer secret"}
        report = RECORDED["POST /v1/reports"]
        assert (await client.post("/v1/reports", json=report, headers=token)).status == 204
        now = time.monotonic()
        rows = table.rows(now)
        table.set_canary(rows[0], CanaryReport(CanaryState.PASSED, 4096), now)
        failed = CanaryReport(CanaryState.FAILED, message="no answer within 120 s")
        table.set_canary(rows[2], failed, now)
        window.add({("remote", ""): 0}, now - 10)
        window.add({("remote", ""): 70, ("local", "LeaseExpired"): 30}, now)
        ready.healthy()
        ready.routed = True
        await answers("/v1/peers")
        await answers("/v1/links")
        await answers("/v1/changes")
        revision = (await (await client.get("/v1/changes")).json())["revision"]
        await answers(f"/v1/changes?seen={revision}", " without a change")


async def test_a_prefill_launcher_answers_as_it_was_recorded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ready = readiness("prefill", "--data-parallel-size", "4")
    ready._progress = Progress(EngineState.FAILED, "the engine ended with code 1")
    server = LauncherServer(ready, LinkTable((1, 1)), "secret", lambda: None)
    async with TestClient(TestServer(server.application())) as client:
        links = await (await client.get("/v1/links")).json()
        assert links == RECORDED["GET /v1/links of a prefill engine"]
        monkeypatch.setattr(server, "tls", SimpleNamespace(expires=1_800_000_000.0))
        state = await (await client.get("/readyz")).json()
        assert state == RECORDED["GET /readyz of an engine that failed"]
