"""Reaches one port of a pod from this machine, through the API server.

As with ``kubectl port-forward``, the kubelet connects inside of the pod. So no NetworkPolicy is in
the way, and the API key of a request arrives. Kubernetes' proxy of pods and Services is no
substitute: the API server removes ``Authorization`` from what it passes on, and NetworkPolicies let
only routers reach engines.

The protocol is ``v4.channel.k8s.io`` over a WebSocket. Each message begins with the number of a
channel: 0 holds data and 1 an error. The first message of each holds the port.
"""

import asyncio
from typing import Self
from urllib.parse import quote

import aiohttp
from yarl import URL

from pdcluster_operator.adapters.api_server.client import KubeClient

PROTOCOL = "v4.channel.k8s.io"
DATA, ERROR = 0, 1
PORT_BYTES = 2
PIECE = 64 * 1024
LOOPBACK = "127.0.0.1"
CONNECT_SECONDS = 15.0
CLOSE_SECONDS = 1.0
MOST_PROBLEM = 300


class PortForward:
    """Listens on a loopback port; each connection becomes one to the pod. An async context manager.

    Attributes:
        url: where it listens.
        problem: why the last connection did not reach the pod, in one sentence; empty if none.
    """

    def __init__(self, client: KubeClient, namespace: str, pod: str, port: int) -> None:
        self._client, self._port = client, port
        self._pod = f"{namespace}/{pod}"
        self._path = f"/api/v1/namespaces/{quote(namespace)}/pods/{quote(pod)}/portforward"
        self._carried: set[asyncio.Task[None]] = set()
        self.url = self.problem = ""

    async def __aenter__(self) -> Self:
        self._http = await self._client.session(aiohttp.ClientResponse)
        self._server = await asyncio.start_server(self._begin, LOOPBACK, 0)
        self.url = f"http://{LOOPBACK}:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in self._carried:
            task.cancel()
        await asyncio.gather(*self._carried, return_exceptions=True)
        await self._http.close()

    def _begin(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._accept(reader, writer))
        self._carried.add(task)
        task.add_done_callback(self._carried.discard)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                socket = await self._connect()
            async with socket:
                await self._carry(socket, reader, writer)
        except aiohttp.WSServerHandshakeError as error:
            self.problem = self._refusal(error.status)
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            said = str(error) or "no answer"
            self.problem = f"port {self._port} of pod {self._pod}: {said}"
        finally:
            writer.close()

    async def _connect(self) -> aiohttp.ClientWebSocketResponse:
        configuration = self._client.configuration
        return await self._http.ws_connect(
            URL(f"{configuration.host}{self._path}?ports={self._port}", encoded=True),
            protocols=(PROTOCOL,),
            max_msg_size=0,
            timeout=aiohttp.ClientWSTimeout(ws_close=CLOSE_SECONDS),
            proxy=configuration.proxy or None,
            proxy_headers=configuration.proxy_headers or None,
            server_hostname=configuration.tls_server_name or None,
        )

    async def _carry(
        self,
        socket: aiohttp.ClientWebSocketResponse,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        """Pass bytes on in both directions until either side closes."""
        sending = asyncio.create_task(_send(reader, socket))
        began: set[int] = set()
        try:
            async for message in socket:
                if message.type is not aiohttp.WSMsgType.BINARY or not message.data:
                    continue
                channel, data = message.data[0], message.data[1:]
                if channel not in began:  # the port's number
                    began.add(channel)
                    data = data[PORT_BYTES:]
                if channel == ERROR and data:
                    said = data.decode(errors="replace").strip()[:MOST_PROBLEM]
                    self.problem = f"port {self._port} of pod {self._pod}: {said}"
                elif channel == DATA and data:
                    writer.write(data)
                    await writer.drain()
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)

    def _refusal(self, status: int) -> str:
        if status in (401, 403):
            return (
                f"this account may not reach pods of namespace {self._pod.partition('/')[0]}: "
                "give it the verbs get and create on pods/portforward"
            )
        return f"the API server answers {status} to a port-forward to pod {self._pod}"


async def _send(reader: asyncio.StreamReader, socket: aiohttp.ClientWebSocketResponse) -> None:
    while data := await reader.read(PIECE):
        await socket.send_bytes(bytes((DATA,)) + data)
    await socket.close()
