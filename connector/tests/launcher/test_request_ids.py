"""Request ids lose the router's addresses on the way in, and nothing else changes."""

from __future__ import annotations

import asyncio
import importlib
import json
import uuid
from typing import Any

import pytest
from hypothesis import given, strategies as st

from pdcluster_connector.launcher import inside_vllm
from pdcluster_connector.launcher.arguments import KV_FAILURES, engine_command
from pdcluster_connector.launcher.inside_vllm import PLAIN_REQUEST_IDS, PlainRequestIds, plain
from pdcluster_connector.vllm.client_errors import KVFailures

UUID = str(uuid.UUID(int=0x1234 << 100))
HEX = uuid.UUID(int=0x1234 << 100).hex


@pytest.mark.parametrize("unique", [UUID, HEX])
@pytest.mark.parametrize("port", ["", ":8000"])
def test_the_routers_addresses_go_and_its_uuid_stays(unique, port):
    """The UUID finds the request in the router's log."""
    hosts = f"a-0.a.ns.svc{port}", f"127.0.0.3{port}"
    sent = f"___prefill_addr_{hosts[0]}___decode_addr_{hosts[1]}_{unique}"
    assert plain(sent.encode()) == unique.encode()


@pytest.mark.parametrize("own", [b"", b"my-request_1", UUID.encode(), b"\xff\xfe"])
def test_other_ids_stay_as_they_are(own):
    assert plain(own) == own


@given(st.binary(), st.binary(), st.sampled_from([b"___prefill_addr_", b"___decode_addr_"]))
def test_no_form_lets_an_address_through(before, after, mark):
    sent = before + mark + b"10.0.0.7:8000" + after
    got = plain(sent)
    assert b"10.0.0.7" not in got
    assert got == plain(sent), "equal in every engine"
    assert b"_addr_" not in got


def call(scope: dict[str, Any]) -> list[Any]:
    seen = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.extend((scope, receive, send))

    asyncio.run(PlainRequestIds(app)(scope, "receive", "send"))
    return seen


def test_only_the_one_header_is_touched_and_bodies_are_not_looked_at():
    sent = b"___prefill_addr_a:1___decode_addr_b:2_" + HEX.encode()
    headers = [(b"host", b"x"), (b"x-request-id", sent), (b"accept", b"text/event-stream")]
    scope = {"type": "http", "headers": headers, "path": "/v1/completions"}
    got, *channels = call(scope)
    assert got == {**scope, "headers": [headers[0], (b"x-request-id", HEX.encode()), headers[2]]}
    assert channels == ["receive", "send"]
    assert scope["headers"] is headers, "the caller's scope is not written to"


@pytest.mark.parametrize("scope", [{"type": "lifespan"}, {"type": "websocket", "headers": []}])
def test_what_is_no_request_passes(scope):
    assert call(scope)[0] is scope


@pytest.mark.parametrize("shown", [True, False, None, "true"])
def test_an_engine_has_the_middleware_unless_names_are_shown(shown):
    extra = {} if shown is None else {"show_internal_names": shown}
    config = {"kv_role": "kv_consumer", "kv_connector_extra_config": extra}
    words = ["m", "--middleware", "mine.Own", "--kv-transfer-config", json.dumps(config)]
    command = engine_command(words, engine_id="a/b", role="decode")
    given = [w for n, w in enumerate(command.arguments) if command.arguments[n - 1] == words[1]]
    always = ["mine.Own", inside_vllm.DOOR, KV_FAILURES]
    assert given == [*always, *([] if shown is True else [PLAIN_REQUEST_IDS])]


@pytest.mark.parametrize(
    ("flag", "found"),
    [
        (PLAIN_REQUEST_IDS, PlainRequestIds),
        (inside_vllm.DOOR, inside_vllm.Door),
        (KV_FAILURES, KVFailures),
    ],
)
def test_vllm_finds_the_class_where_the_flag_points(flag, found):
    module, _, name = flag.rpartition(".")
    assert getattr(importlib.import_module(module), name) is found
