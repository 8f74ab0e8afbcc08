"""The middleware that asks for the API key where vLLM's own does not."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pdcluster_connector.protocol import api_key
from pdcluster_connector.vllm.api_guard import RequireKey

KEY = "sk-the-right-one"


async def application(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b""})


def answered(
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    *headers: tuple[bytes, bytes],
    method: str = "POST",
    kind: str = "http",
    root: str = "",
) -> Any:
    monkeypatch.setenv(api_key.VARIABLE, KEY)
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        return {"type": "websocket.connect"}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": kind, "path": path, "method": method, "headers": list(headers), "root_path": root
    }  # fmt: skip
    asyncio.run(RequireKey(application)(scope, receive, send))
    return sent[0].get("status", sent[0].get("code"))


def bearer(key: str, scheme: str = "Bearer") -> tuple[bytes, bytes]:
    return b"authorization", f"{scheme} {key}".encode()


@pytest.mark.parametrize(
    "path",
    ["/v1/completions", "/invocations", "/tokenize", "/score", "/pause", "/", "/health/../v1/x",
     "/metricsx", "/v1/health"],
)  # fmt: skip
def test_every_other_path_needs_the_key(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    for method in ("GET", "POST", "DELETE"):
        assert answered(monkeypatch, path, method=method) == 401
        assert answered(monkeypatch, path, bearer("wrong"), method=method) == 401
        assert answered(monkeypatch, path, bearer(KEY), method=method) == 200


def test_probes_and_prometheus_need_none_but_may_only_read(monkeypatch: pytest.MonkeyPatch) -> None:
    for path in ("/health", "/metrics", "/metrics/"):
        assert answered(monkeypatch, path, method="GET") == 200
        assert answered(monkeypatch, path, method="POST") == 401
    assert answered(monkeypatch, "/api/health", method="GET", root="/api") == 200


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ([bearer(KEY, "bearer")], 200),
        ([bearer(KEY, "Basic")], 401),
        ([bearer(f"{KEY}x")], 401),
        ([bearer(KEY[:-1])], 401),
        ([(b"authorization", KEY.encode())], 401),
        ([bearer(KEY), bearer("other")], 401),
        ([(b"authorization", b"Bearer \xff\xfe")], 401),
    ],
)
def test_headers(monkeypatch: pytest.MonkeyPatch, headers: list[Any], status: int) -> None:
    assert answered(monkeypatch, "/v1/models", *headers) == status


def test_a_websocket_without_the_key_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert answered(monkeypatch, "/v1/realtime", kind="websocket") == 1008
    assert answered(monkeypatch, "/v1/realtime", bearer(KEY), kind="websocket") == 200


def test_what_is_no_request_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert answered(monkeypatch, "", kind="lifespan") == 200


def test_without_a_key_the_server_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(api_key.VARIABLE, raising=False)
    with pytest.raises(RuntimeError, match=api_key.VARIABLE):
        RequireKey(application)


@pytest.mark.parametrize("key", ["sk-1", "a" * 200, "+/=._~-"])
def test_usual_keys_are_fine(key: str) -> None:
    assert api_key.problem(key) is None
