"""A process of prefill engines over real NIXL, driven through a pipe by the tests."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

from transfer_rig import Prefill

from pdcluster_connector.nixl_io.nixl_agent import NixlAgent
from pdcluster_connector.protocol.messages import EngineMetadata
from pdcluster_connector.protocol.ticket import Ticket
from pdcluster_connector.transfer.options import ReceiverOptions


class Agents:
    """What ``Prefill`` and ``Decode`` ask of a fabric, over real NIXL.

    ``threads``: of NIXL's own, over which transfers of a few descriptors are spread already.
    """

    def __init__(self, threads: int = 0) -> None:
        self._threads = threads

    def agent(self, name: str) -> NixlAgent:
        options = [("UCX", "split_batch_size", "4")] if self._threads else []
        return NixlAgent(name, num_threads=self._threads, backend_options=options)


def patient(**changes: Any) -> ReceiverOptions:
    """Options of a receiver: no read over real NIXL fails because this machine stands still."""
    return ReceiverOptions(**{"probe_seconds": 60.0, "check_seconds": 60.0, **changes})


def serve(pipe: Connection, engines: dict[str, int], cache: dict[str, Any]) -> None:
    """Serve engines (id -> tensor parallel size) until the pipe closes."""
    running = {
        engine_id: Prefill(Agents(), engine_id, tensor, **cache)  # type: ignore[arg-type]
        for engine_id, tensor in engines.items()
    }
    pipe.send([engine.metadata for engine in running.values()])
    while True:
        try:
            command, engine_id, *args = pipe.recv()
        except EOFError:
            return
        pipe.send(getattr(running[engine_id], command)(*args))


class PrefillProcess:
    """The handle of such a process."""

    def __init__(self, engines: dict[str, int], cache: dict[str, Any]) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, engines, cache), daemon=True)
        self.process.start()
        theirs.close()
        self.metadata: dict[str, EngineMetadata] = {}
        assert self.pipe.poll(200), "the prefill process did not come up"
        for metadata in self.pipe.recv():
            self.metadata[metadata.engine_id] = metadata

    def ticket(self, engine_id: str, seed: int, blocks: Sequence[int], tokens: int) -> Ticket:
        return self._ask("ticket", engine_id, seed, list(blocks), tokens)

    def give_up(self, engine_id: str, seed: int, blocks: Sequence[int], tokens: int) -> None:
        """End request ``seed``'s lease and compute another request in its blocks."""
        self._ask("give_up", engine_id, seed, list(blocks), tokens)

    def _ask(self, *message: Any) -> Any:
        self.pipe.send(message)
        assert self.pipe.poll(120), "the prefill process does not answer"
        return self.pipe.recv()

    def signal(self, number: signal.Signals) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)
        if number is signal.SIGSTOP:  # threads that run go on for a moment: milliseconds were seen
            os.waitid(os.P_PID, self.process.pid, os.WSTOPPED)

    def end(self) -> None:
        self.pipe.close()
        self.process.join(0.5)
        if self.process.is_alive():
            self.process.kill()
        self.process.join(10)
