"""The one thread that makes every NIXL call of a worker's receiving side, and its watchdog.

The engine step only puts commands into a queue. While nothing is under way, the thread waits for
that queue. While transfers are under way, it polls them: every 50 microseconds at first, and less
often the longer nothing moves, at least every millisecond. Polling without pauses doubled the time
of an engine step.

The thread itself keeps deadlines and quarantines. While a call of NIXL does not return, no receive
fails and none ends, and a process cannot end such a call. So the watchdog ends the worker, and the
launcher starts the engine anew.
"""

import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Final

from pdcluster_connector.compat.reasons import Reason
from pdcluster_connector.protocol.failure import Failure
from pdcluster_connector.transfer.receives import Receives

LOOKS: Final = 4  # at one call, before it is over its limit


class Watchdog:
    """Notices that the watched thread hangs in one call, which nothing else could notice.

    The clock alone proves nothing: it also goes on while the whole process is stopped (a frozen
    cgroup, a paused machine, SIGSTOP). The watched thread did not run either then. So the watchdog
    also counts how often it has looked: a piece of work is over its limit when so many looks in a
    row have found it.

    Args:
        name: of the watched thread, for the message.
        seconds: how long one piece of work may last.
        since: says when the thread began its present piece of work; None while it waits for work.
        clock: seconds.
        hangs: called once, with a sentence, on the watchdog's own thread.
    """

    def __init__(
        self,
        name: str,
        seconds: float,
        *,
        since: Callable[[], float | None],
        clock: Callable[[], float],
        hangs: Callable[[str], None],
    ) -> None:
        self._name = name
        self._seconds = seconds
        self._clock = clock
        self._hangs = hangs
        self._since = since
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name=f"{name}-watchdog", daemon=True)

    def start(self) -> None:
        """Start to watch."""
        self._thread.start()

    def stop(self) -> None:
        """Watch no more. May be called before :meth:`start`."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(1.0)

    def _watch(self) -> None:
        seen, looks = None, 0
        while not self._ended.wait(self._seconds / LOOKS):
            since = self._since()
            looks = looks + 1 if since == seen else 1
            seen = since
            if since is None or looks < LOOKS:
                continue
            if (lasts := self._clock() - since) > self._seconds:
                self._hangs(
                    f"{self._name} has been in one call for {lasts:.0f} s. Most likely NIXL or its "
                    "transport hangs: look for errors of the network or of its driver"
                )
                return


logger = logging.getLogger(__name__)

SHORTEST_SLEEP = 50e-6
LONGEST_SLEEP = 1e-3
LONGEST_BLOCK = 3600.0
MAX_CRASHES = 20  # in a row, without a turn that went well

Command = Callable[[], None]


class TransferThread:
    """Runs the turns of a worker's receives until it is stopped, and survives what they raise.

    It calls their ``options.fatal`` when nothing can stop the transfers of a thread that ends, and
    when one command or one turn lasts longer than ``options.stall_seconds``.

    Args:
        receives: used on the thread only.
        prepare: called first on the thread; what it raises, :meth:`start` raises.
    """

    def __init__(self, name: str, receives: Receives, prepare: Command) -> None:
        self._receives = receives
        self._prepare = prepare
        self._works_since: float | None = None
        self._watchdog = Watchdog(
            name,
            receives.options.stall_seconds,
            since=lambda: self._works_since,
            clock=receives.clock,
            hangs=receives.options.fatal,
        )
        self._inbox: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._ready: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.dead: Failure | None = None

    def start(self, timeout: float) -> None:
        """Start, and wait until the agent is there."""
        self._thread.start()
        self._ready.result(timeout)
        self._watchdog.start()

    def put(self, command: Command) -> None:
        """Have ``command`` called on the thread. Never blocks, never raises."""
        self._inbox.put(command)

    def stop(self, timeout: float) -> bool:
        """Destroy the agent, fail what is under way, and end; returns whether it ended."""
        if self._thread.ident is None:
            self._end(Failure(Reason.BACKEND_ERROR, "the receiver was closed before it started"))
            return True
        self._inbox.put(None)
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        failure = Failure(Reason.BACKEND_ERROR, "the receiver is closed")
        try:
            self._prepare()
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
        self._watchdog.stop()
        try:
            self._receives.rebuild(failure, final=True)
        except BaseException as error:  # noqa: BLE001
            self._receives.options.fatal(f"the reading agent cannot be destroyed: {error}")
        self.dead = failure
        self.drain()

    def drain(self) -> None:
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
                self._receives.tick()
                moved = self._receives.turn() or commanded
                crashes = 0
            except BaseException as error:
                crashes += 1
                if crashes > MAX_CRASHES:
                    raise
                logger.exception("the transfer thread rebuilds its agent")
                moved = True
                self._receives.rebuild(
                    Failure(Reason.BACKEND_ERROR, f"{type(error).__name__}: {error}")
                )
            sleep = SHORTEST_SLEEP if moved else min(sleep * 1.5, LONGEST_SLEEP)

    def _take(self, sleep: float) -> bool | None:
        """Wait at most until something is due and run commands; None means stop."""
        until_due = self._receives.due - self._receives.clock()
        wait = min(until_due, sleep if self._receives.busy else LONGEST_BLOCK)
        commanded = False
        self._works_since = None
        try:
            command = self._inbox.get(timeout=wait) if wait > 0 else self._inbox.get_nowait()
            self._works_since = self._receives.clock()
            while True:
                if command is None:
                    return None
                commanded = True
                command()
                self._works_since = self._receives.clock()  # many commands are not one long call
                command = self._inbox.get_nowait()
        except queue.Empty:
            self._works_since = self._receives.clock()
            return commanded
