"""The receiving side of one worker: what the engine step calls, and the one thread that does it.

``receive``, ``pass_on`` and ``results`` only put into a queue or take from one: they never block
and never raise. The transfer thread does everything else. It makes every NIXL call of the receiving
side. While nothing is under way, it waits for that queue. While transfers are under way, it polls
them: every 50 microseconds at first, and less often the longer nothing moves, at least every
millisecond. Polling without pauses doubled the time of an engine step.

The thread itself keeps deadlines and quarantines. While a call of NIXL does not return, no receive
fails and none ends, and a process cannot end such a call. So a watchdog ends the worker, and the
launcher starts the engine anew.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial

from pdcluster_connector.compat.reasons import Reason
from pdcluster_connector.compat.shape import GroupShape
from pdcluster_connector.nixl_io.interface import AgentInterface
from pdcluster_connector.nixl_io.probe_memory import HostMemory, ProbeMemory
from pdcluster_connector.nixl_io.reading_agent import ProbeResult
from pdcluster_connector.plan.geometry import MemoryRange, Shard
from pdcluster_connector.protocol import messages, receive_order
from pdcluster_connector.protocol.failure import Failure
from pdcluster_connector.sidechannel.peers import PeerBook
from pdcluster_connector.transfer.connections import Connections
from pdcluster_connector.transfer.measures import ReceiveResults
from pdcluster_connector.transfer.options import ReceiverOptions
from pdcluster_connector.transfer.receive_executor import ReceiveExecutor
from pdcluster_connector.transfer.receive_machine import Event

logger = logging.getLogger(__name__)

START_SECONDS = 120.0
STOP_SECONDS = 30.0
SHORTEST_SLEEP = 50e-6
LONGEST_SLEEP = 1e-3
LONGEST_BLOCK = 3600.0
MAX_CRASHES = 20  # in a row, without a turn that went well
LOOKS = 4  # of the watchdog at one call, before it is over its limit


class Receiver:
    """Reads KV for one decode worker. Its thread survives what commands and turns raise.

    It calls ``options.fatal`` when nothing can stop the transfers of a thread that ends, and when
    one command or one turn lasts longer than ``options.stall_seconds``.

    Args:
        shard: this rank's KV cache.
        groups: this engine's KV cache groups.
        memory: what NIXL has to register so that all of ``shard`` can be written.
        make_agent: makes a NIXL agent; called on the transfer thread, and again whenever
            the agent had to be destroyed.
        peers: where handshakes come from; its ``on_gone`` becomes ours.
        options: limits.
        clock: of the requests' deadlines.
        prepare_thread: called first on the transfer thread (CUDA: select the device).
        probe_memory: what probes are read into: where this engine's KV lives.
    """

    def __init__(
        self,
        *,
        shard: Shard,
        groups: Sequence[GroupShape],
        memory: Sequence[MemoryRange],
        make_agent: Callable[[], AgentInterface],
        peers: PeerBook,
        options: ReceiverOptions | None = None,
        clock: Callable[[], float] = time.monotonic,
        prepare_thread: Callable[[], None] = lambda: None,
        probe_memory: ProbeMemory | None = None,
    ) -> None:
        options, buffers = options or ReceiverOptions(), probe_memory or HostMemory()
        self._inbox: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._connections = Connections(options, clock, shard, memory, make_agent, peers, buffers)
        self._executor = ReceiveExecutor(options, clock, groups, self._connections, self._inbox.put)
        self._prepare_thread = prepare_thread
        name = f"pdcluster-transfer-{shard.rank[0]}-{shard.rank[1]}"
        self._works_since: float | None = None  # None while it waits for work
        self._ended = threading.Event()
        self._dead: Failure | None = None
        self._ready: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._watchdog = threading.Thread(target=self._watch, name=f"{name}-watchdog", daemon=True)
        peers.on_gone = lambda *gone: self._inbox.put(partial(self._executor.gone, *gone))

    def start(self) -> None:
        """Start the transfer thread and register the memory.

        Raises:
            NixlError: NIXL is not installed, or refuses the memory.
        """
        self._thread.start()
        self._ready.result(START_SECONDS)
        self._watchdog.start()

    def receive(
        self,
        orders: Iterable[receive_order.ReceiveOrder],
        since: float,
        events: Iterable[tuple[str, Event]] = (),
    ) -> None:
        """Start receives; :meth:`results` reports each request once. If this raises, none starts.

        ``since``: when the ``seconds`` of the orders began. ``events``: see :meth:`pass_on`.
        """
        if batch := tuple((order, since + order.seconds) for order in orders):
            self._inbox.put(partial(self._executor.receive, batch, tuple(events)))

    def pass_on(self, events: Iterable[tuple[str, Event]]) -> None:
        """Pass events to receives, by request id: their leases' state, or that they are given up.

        What is given up is still reported once, when no transfer of it can write.
        """
        if batch := tuple(events):
            self._inbox.put(partial(self._executor.pass_on, batch))

    def wait(self, seconds: float) -> None:
        """Wait at most ``seconds`` until :meth:`results` has one."""
        self._executor.has_ended.clear()
        if not self._executor.ended:
            self._executor.has_ended.wait(seconds)

    def results(self, results: ReceiveResults | None = None) -> ReceiveResults:
        """Return what has ended since the last call, added to ``results``."""
        if self._dead is not None:
            self._drain()
        results = ReceiveResults() if results is None else results
        while self._executor.ended:
            job = self._executor.ended[0]
            results.add(job.machine, job.nbytes, job.request.ticket.engine_id)
            self._executor.ended.popleft()
        return results

    def probe(self, peer: messages.EngineMetadata, *, check: bool = False) -> Future[ProbeResult]:
        """Read the peer's probe regions; the future never raises, failures are in the result.

        ``check``: read only as much as shows that data still comes through, and nothing from
        shards whose KV has just landed.
        """
        future: Future[ProbeResult] = Future()
        probing = self._connections.probing
        ask = partial(probing.begin, check=True) if check else probing.probe
        self._inbox.put(lambda: ask(peer, future))
        if self._dead is not None:
            self._drain()
        return future

    def close(self) -> bool:
        """Destroy the agent and fail what is under way; returns whether the thread ended."""
        if self._thread.ident is None:
            self._end(Failure(Reason.BACKEND_ERROR, "the receiver was closed before it started"))
            return True
        self._inbox.put(None)
        self._thread.join(STOP_SECONDS)
        return not self._thread.is_alive()

    # The transfer thread.

    def _run(self) -> None:
        failure = Failure(Reason.BACKEND_ERROR, "the receiver is closed")
        try:
            self._prepare_thread()
            _ = self._connections.agent
        except BaseException as error:  # noqa: BLE001 - start() raises it
            self._end(Failure(Reason.BACKEND_ERROR, f"no reading agent: {error}"))
            self._ready.set_exception(error)
            return
        self._ready.set_result(None)
        try:
            self._loop()
        except BaseException as error:
            logger.exception("the transfer thread ends")
            failure = Failure(
                Reason.BACKEND_ERROR, f"the transfer thread died: {type(error).__name__}: {error}"
            )
        self._end(failure)

    def _end(self, failure: Failure) -> None:
        self._ended.set()
        if self._watchdog.is_alive():
            self._watchdog.join(1.0)
        try:
            self._executor.rebuild(failure, final=True)
        except BaseException as error:  # noqa: BLE001
            self._executor.options.fatal(f"the reading agent cannot be destroyed: {error}")
        self._dead = failure
        self._drain()

    def _drain(self) -> None:
        """Run the commands that came after the thread's end. They are refused."""
        with suppress(queue.Empty):
            while True:
                command = self._inbox.get_nowait()
                try:
                    if command is not None:
                        command()
                except Exception:
                    logger.exception("a command of a dead transfer thread failed")

    def _loop(self) -> None:
        sleep, crashes = SHORTEST_SLEEP, 0
        while True:
            try:
                commanded = self._take(sleep)
                if commanded is None:
                    return
                self._executor.tick()
                moved = self._executor.turn() or commanded
                crashes = 0
            except BaseException as error:
                crashes += 1
                if crashes > MAX_CRASHES:
                    raise
                logger.exception("the transfer thread rebuilds its agent")
                moved = True
                failure = Failure(Reason.BACKEND_ERROR, f"{type(error).__name__}: {error}")
                self._executor.rebuild(failure)
            sleep = SHORTEST_SLEEP if moved else min(sleep * 1.5, LONGEST_SLEEP)

    def _take(self, sleep: float) -> bool | None:
        """Wait at most until something is due and run commands; None means stop."""
        until_due = self._executor.due - self._executor.clock()
        wait = min(until_due, sleep if self._executor.busy else LONGEST_BLOCK)
        commanded = False
        self._works_since = None
        try:
            command = self._inbox.get(timeout=wait) if wait > 0 else self._inbox.get_nowait()
            self._works_since = self._executor.clock()
            while True:
                if command is None:
                    return None
                commanded = True
                command()
                self._works_since = self._executor.clock()  # many commands are not one long call
                command = self._inbox.get_nowait()
        except queue.Empty:
            self._works_since = self._executor.clock()
            return commanded

    def _watch(self) -> None:
        """Notice that the thread hangs in one call, which nothing else could notice.

        The clock alone proves nothing: it also goes on while the whole process is stopped (a frozen
        cgroup, a paused machine, SIGSTOP). So the watchdog also counts how often it has looked: a
        piece of work is over its limit when so many looks in a row have found it.
        """
        seconds, seen, looks = self._executor.options.stall_seconds, None, 0
        while not self._ended.wait(seconds / LOOKS):
            since = self._works_since
            looks = looks + 1 if since == seen else 1
            seen = since
            if since is None or looks < LOOKS:
                continue
            if (lasts := self._executor.clock() - since) > seconds:
                self._executor.options.fatal(
                    f"{self._thread.name} has been in one call for {lasts:.0f} s. Most likely NIXL"
                    " or its transport hangs: look for errors of the network or of its driver"
                )
                return
