"""A port of a pod through a real API server: rights, the way to the kubelet, and API keys."""

from __future__ import annotations

import io
import os
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest
from aiohttp import web
from real_api import RealApi
from test_port_forward import BIG, _echo, forward, serving

from conftest import allow
from pdcluster_operator.adapters.api_server.client import KubeClient
from pdcluster_operator.adapters.api_server.kubeconfig import find_configuration
from pdcluster_operator.adapters.api_server.port_forward import PortForward

pytestmark = pytest.mark.cluster

NODE = "forwards"
PORT = 8000


@asynccontextmanager
async def kubelet(real: RealApi, to: int) -> AsyncIterator[int]:
    """A kubelet's door, which forwards each port to one of this machine.

    ``PDCLUSTER_TEST_KUBELET`` names the port of another one, for instance of a small program around
    Kubernetes' own package.
    """
    if other := os.environ.get("PDCLUSTER_TEST_KUBELET"):
        yield int(other)
        return

    async def answer(request: web.Request) -> web.StreamResponse:
        return await forward(request, int(request.query["port"]), to)

    app = web.Application()
    app.add_routes([web.get("/portForward/{namespace}/one", answer)])
    runner = web.AppRunner(app)
    await runner.setup()
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    keys = real.folder / "keys"
    context.load_cert_chain(keys / "apiserver.crt", keys / "apiserver.key")
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context).start()
    try:
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


def create(real: RealApi, namespace: str, port: int) -> None:
    node = {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": NODE},
        "status": {
            "addresses": [{"type": "InternalIP", "address": "127.0.0.1"}],
            "daemonEndpoints": {"kubeletEndpoint": {"Port": port}},
        },
    }
    assert real.call("POST", "/api/v1/nodes", node)[0] == 201
    spec = {"nodeName": NODE, "containers": [{"name": "engine", "image": "none"}]}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "one"}, "spec": spec}
    assert real.call("POST", f"/api/v1/namespaces/{namespace}/pods", pod)[0] == 201


async def test_a_request_goes_through_the_api_server_with_its_own_key(
    real: RealApi, namespace: str
) -> None:
    configuration = await find_configuration(str(real.folder / "operator.kubeconfig"))
    async with (
        serving(web.post("/", _echo)) as pod,
        kubelet(real, pod) as port,
        KubeClient(configuration) as client,
        PortForward(client, namespace, "one", pod) as forwarded,
        aiohttp.ClientSession() as http,
    ):
        create(real, namespace, port)
        with pytest.raises(aiohttp.ClientError):
            await http.post(forwarded.url, data=b"x")
        assert forwarded.problem == (
            f"this account may not reach pods of namespace {namespace}: give it the verbs get and "
            "create on pods/portforward"
        )
        rule = {"apiGroups": [""], "resources": ["pods/portforward"], "verbs": ["create", "get"]}
        allow(real, namespace, [rule], "forwards")
        sent = {"Authorization": "Bearer api-key"}
        for body in (b"x", b"y" * BIG):
            async with http.post(forwarded.url, data=io.BytesIO(body), headers=sent) as answer:
                assert await answer.read() == body
                assert answer.headers["Key"] == "Bearer api-key"
    real.call("DELETE", f"/api/v1/nodes/{NODE}")
