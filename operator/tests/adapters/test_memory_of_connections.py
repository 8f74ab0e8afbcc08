"""A connection that waits for news of a launcher takes little memory."""

from __future__ import annotations

import asyncio
import random
import ssl
import tracemalloc
from asyncio import sslproto

import pytest

from pdcluster_operator.adapters import engines_http, operator_process
from pdcluster_operator.adapters.engines_http import (
    BUFFER_BYTES,
    SharedBuffer,
    use_small_buffers,
)

LARGE = 1_000_000


def context(purpose: int) -> ssl.SSLContext:
    """TLS without certificates: what is sent is not looked at here."""
    made = ssl.SSLContext(purpose)
    made.check_hostname = False
    made.verify_mode = ssl.CERT_NONE
    made.maximum_version = ssl.TLSVersion.TLSv1_2
    made.set_ciphers("AECDH:@SECLEVEL=0")
    return made


async def bytes_of_buffers(connections: int) -> float:
    """Hold TLS connections; return what asyncio's TLS has allocated for each end of one."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await reader.readexactly(LARGE))
        await writer.drain()
        await reader.read()  # until the other end closes
        writer.close()

    server = await asyncio.start_server(
        answer, "127.0.0.1", 0, ssl=context(ssl.PROTOCOL_TLS_SERVER), limit=LARGE
    )
    port = server.sockets[0].getsockname()[1]
    tracemalloc.start(1)
    held = [
        await asyncio.open_connection(
            "127.0.0.1", port, ssl=context(ssl.PROTOCOL_TLS_CLIENT), limit=LARGE
        )
        for _ in range(connections)
    ]
    try:
        sent = [random.Random(number).randbytes(LARGE) for number in range(connections)]
        for (_, writer), message in zip(held, sent, strict=True):
            writer.write(message)
        came = await asyncio.gather(*(reader.readexactly(LARGE) for reader, _ in held))
        assert came == sent, "long messages arrive, too, side by side"
        only = [tracemalloc.Filter(True, one.__file__) for one in (sslproto, engines_http)]
        found = tracemalloc.take_snapshot().filter_traces(only).statistics("filename")
        return sum(one.size for one in found) / connections / 2
    finally:
        tracemalloc.stop()
        for _, writer in held:
            writer.close()
        server.close()


async def test_a_tls_connection_has_a_small_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = SharedBuffer.__bases__[0]
    monkeypatch.setattr(sslproto, "SSLProtocol", usual)  # another test may have replaced it
    assert await bytes_of_buffers(4) >= usual.max_size, "or Python has become better than we are"
    use_small_buffers()
    assert await bytes_of_buffers(8) < BUFFER_BYTES / 2


async def test_the_operator_uses_small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    class AskedError(Exception):
        pass

    def ask() -> None:
        raise AskedError

    monkeypatch.setattr(operator_process.engines_http, "use_small_buffers", ask)
    with pytest.raises(AskedError):
        await operator_process.OperatorProcess(operator_process.OperatorOptions()).start()
