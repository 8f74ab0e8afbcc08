"""What a machine's environment may change of the calls to the API server: proxies, nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from urllib.request import getproxies

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from pdcluster_operator.adapters.api_server.client import KubeClient
from pdcluster_operator.adapters.api_server.kubeconfig import find_configuration


async def authorization_of_a_call(folder: Path) -> tuple[str, str]:
    """Return the Authorization header and the path that a server saw."""

    async def answer(request: web.Request) -> web.Response:
        return web.json_response({"seen": [request.headers.get("Authorization"), str(request.url)]})

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    async with TestServer(app) as server:
        address = str(server.make_url("")).rstrip("/")
        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "it",
            "clusters": [{"name": "it", "cluster": {"server": address}}],
            "users": [{"name": "it", "user": {"token": "the-token"}}],
            "contexts": [{"name": "it", "context": {"cluster": "it", "user": "it"}}],
        }
        path = folder / "config"
        path.write_text(json.dumps(document))
        async with KubeClient(await find_configuration(str(path))) as client:
            header, url = (await client.call("GET", "/version"))["seen"]
            return header, url


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in getproxies():
        for spelled in (f"{name}_proxy", f"{name}_PROXY".upper()):
            monkeypatch.delenv(spelled, raising=False)
    assert not getproxies()
    return monkeypatch


async def test_a_password_for_other_hosts_is_not_sent(
    tmp_path: Path, environment: pytest.MonkeyPatch
) -> None:
    """It cost two threads a request, and a request beside a token failed."""
    netrc = tmp_path / "netrc"
    netrc.write_text("default login somebody password secret\n")
    netrc.chmod(0o600)
    environment.setenv("NETRC", str(netrc))
    header, _ = await authorization_of_a_call(tmp_path)
    assert header == "Bearer the-token"


async def test_a_proxy_of_the_environment_is_used(
    tmp_path: Path, environment: pytest.MonkeyPatch
) -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.json_response({"seen": ["by the proxy", str(request.url)]})

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    async with TestServer(app) as proxy:
        environment.setenv("HTTP_PROXY", str(proxy.make_url("")))
        environment.setenv("NO_PROXY", "elsewhere.example")
        header, url = await authorization_of_a_call(tmp_path)
    assert header == "by the proxy"
    assert url.endswith("/version")
