"""A crowd of clients without a certificate that keeps coming back, for tests of servers.

``python e2e/crowd.py PORT KIND COUNT PATH [tls] [many]`` runs one in a process of its own. It
prints a line when all have been there, and ends with its stdin.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
import ssl
import sys
from collections.abc import Callable
from dataclasses import dataclass

KINDS = ("silent", "polite", "slow", "half-tls")
TLS_KINDS = ("one-byte", "hello", "at-once")  # at ports with TLS, there may be these, too
HEAD = b"GET %s HTTP/1.1\r\nHost: x\r\n"
HELLO = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(32)  # how TLS begins
PAUSE = 0.5  # before a client whom the server has closed comes again; "at-once" has none


@dataclass(frozen=True, slots=True)
class Crowd:
    """What each client does.

    Attributes:
        port: of 127.0.0.1.
        kind: says nothing; asks and stays; sends a byte a second; begins with TLS and stops: within
            the ClientHello, after its first byte, or after the whole of it; or so, again and again.
        count: how many at a time.
        path: what polite clients ask for.
        tls: the server speaks TLS.
        many: of 200 addresses, instead of one.
    """

    port: int
    kind: str
    count: int
    path: str
    tls: bool = False
    many: bool = False

    async def run(self, met: Callable[[], None] = lambda: None) -> None:
        """Stay until cancelled; calls ``met`` when all have been there."""
        missing = set(range(self.count))

        def arrived(number: int) -> None:
            if missing and not missing.difference_update((number,)) and not missing:
                met()

        await asyncio.gather(*(self._client(number, arrived) for number in range(self.count)))

    async def _client(self, number: int, arrived: Callable[[int], None]) -> None:
        await asyncio.sleep(number / 5000)
        while True:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                await self._visit(number, arrived)
            await asyncio.sleep(0 if self.kind == "at-once" else PAUSE)

    async def _visit(self, number: int, arrived: Callable[[int], None]) -> None:
        source = f"127.0.3.{number % 200 + 1}" if self.many else "127.0.0.1"
        context = _NOBODY if self.tls and self.kind == "polite" else None
        sock = socket.socket()
        try:
            sock.setsockopt(socket.IPPROTO_IP, _ADDRESS_WITHOUT_PORT, 1)
            sock.setblocking(False)
            sock.bind((source, 0))
            await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", self.port))
            arrived(number)
            name = "x" if context else None
            reader, writer = await asyncio.open_connection(
                sock=sock, ssl=context, server_hostname=name
            )
        except BaseException:
            sock.close()
            raise
        try:
            await self._stay(reader, writer)
        finally:
            writer.transport.abort()

    async def _stay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = HEAD % self.path.encode()
        if self.kind == "half-tls":
            writer.write(HELLO)
        elif self.kind == "one-byte":
            writer.write(HELLO[:1])
        elif self.kind in ("hello", "at-once"):
            writer.write(_WHOLE_HELLO)
        elif self.kind == "polite":
            writer.write(head + b"\r\n")
        elif self.kind == "slow":
            for byte in (HELLO if self.tls else head + b"X: ") + bytes(600):
                writer.write(bytes([byte]))
                await writer.drain()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(1.0):
                        await reader.readexactly(1)
        while await reader.read(4096):
            pass


_ADDRESS_WITHOUT_PORT = 24  # the kernel chooses the port when the other end is known
_NOBODY = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
_NOBODY.check_hostname, _NOBODY.verify_mode = False, ssl.CERT_NONE


def _whole_hello() -> bytes:
    sent = ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        _NOBODY.wrap_bio(ssl.MemoryBIO(), sent).do_handshake()
    return sent.read()


_WHOLE_HELLO = _whole_hello()


async def _main() -> None:
    port, kind, count, path, *more = sys.argv[1:]
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    crowd = Crowd(int(port), kind, int(count), path, "tls" in more, "many" in more)
    there = asyncio.get_running_loop().create_task(crowd.run(lambda: print("there", flush=True)))
    await asyncio.to_thread(sys.stdin.read)
    there.cancel()
    await asyncio.gather(there, return_exceptions=True)


if __name__ == "__main__":
    asyncio.run(_main())
