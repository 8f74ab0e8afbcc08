"""Relays TCP to one port until the test cuts it, as a network between engines can be cut.

A silent relay still takes connections and what is sent over them, as a host does whose process is
stopped. Nothing is answered before :meth:`Relay.mend`.
"""

import asyncio
from contextlib import closing, suppress

from pdcluster_connector.sidechannel.loop_thread import LoopThread

_CHUNK = 65_536


class Relay:
    """Relays 127.0.0.1:``port`` to 127.0.0.1:``to``. Thread-safe."""

    def __init__(self, to: int) -> None:
        self.port = 0
        self._to = to
        self._thread = LoopThread("pdcluster-test-relay")
        self._thread.start()
        self._open = asyncio.Event()
        self._open.set()
        self._thread.submit(self._listen()).result(timeout=60)

    def cut(self) -> None:
        """Let nothing through."""
        self._thread.call(self._open.clear)

    def mend(self) -> None:
        """Let through what was held, and all that follows."""
        self._thread.call(self._open.set)

    def close(self) -> None:
        """Close the port and every connection. May be called twice."""
        if self._thread.alive:
            self._thread.call(self._server.close)
            self._thread.stop()

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._relay, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # asyncio's server would log that its task was cancelled at the end.
        with suppress(OSError, asyncio.CancelledError), closing(writer):
            await self._open.wait()
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._to)
            with closing(far_writer):
                pumps = self._pump(reader, far_writer), self._pump(far_reader, writer)
                tasks = [asyncio.create_task(pump) for pump in pumps]
                try:
                    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    for task in tasks:
                        task.cancel()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(_CHUNK):
                await self._open.wait()
                writer.write(data)
                await writer.drain()
