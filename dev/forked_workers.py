"""pytest in several processes, which are forked when one process has collected the tests.

`python dev/forked_workers.py 8 …` runs what `python -m pytest …` runs, in eight processes. With
`python -m pytest -n 8 …`, each of them would import and collect all tests for itself, which takes
three CPU seconds.
"""

from __future__ import annotations

import gc
import os
import sys
import traceback
from collections import deque
from contextlib import suppress
from itertools import groupby
from multiprocessing.connection import Connection, Pipe
from selectors import EVENT_READ, DefaultSelector
from typing import Any

import pytest
from _pytest.runner import runtestprotocol

# Most of what these tests take is a wait: for processes that they start, or for deadlines.
PROCESSES = (
    "connector/tests/launcher/",
    "connector/tests/testing/",
    "operator/tests/cli/",
    "operator/tests/local/",
)
DEADLINES = ("connector/tests/sidechannel/", "connector/tests/transfer/")
# After so many silent seconds, look for a worker that ended while its children keep its pipe open.
LOOK = 5.0


def in_order(items: list[pytest.Item]) -> deque[list[int]]:
    """Return the numbers of the tests: of those that wait first, of those that compute last.

    Tests of a file stay together, because they may share a process or a cluster. But tests with
    long deadlines, which stand side by side in few files, are dealt out one by one.
    """

    def together(number: int) -> tuple[str, int]:
        file, _, _ = items[number].nodeid.partition("::")
        return file, number if file.startswith(DEADLINES) else 0

    def rank(part: list[int]) -> int:
        first = items[part[0]].nodeid
        return 0 if first.startswith(PROCESSES) else 1 if first.startswith(DEADLINES) else 2

    parts = [list(numbers) for _, numbers in groupby(range(len(items)), together)]
    return deque(sorted(parts, key=rank))


class Worker:
    """A forked process, as the first process sees it.

    It holds two tests until the last one: what both need is not torn down in between.
    """

    def __init__(self, pid: int, connection: Connection, waits: bool) -> None:
        self.pid, self.connection, self.waits = pid, connection, waits
        self.held: deque[int] = deque()  # the first one runs
        self.kept: deque[int] = deque()  # of the same file, and not sent yet

    def begin(self, parts: deque[list[int]]) -> None:
        """Give it its first two tests."""
        self.give(parts)
        self.give(parts)

    def give(self, parts: deque[list[int]]) -> None:
        """Give it the next test, if there is one. After the last one it ends."""
        if not self.kept and parts:
            self.kept.extend(parts.popleft() if self.waits else parts.pop())
        number = self.kept.popleft() if self.kept else None
        if number is not None:
            self.held.append(number)
        with suppress(ConnectionError):  # it has crashed, which is seen when its answer is read
            self.connection.send(number)


class Forks:
    """A plugin for pytest that runs tests in workers and reports as if they had run here."""

    def __init__(self, workers: int) -> None:
        self.count = workers
        self.number = 0  # of the next worker
        self.running = DefaultSelector()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        """Take the place of pytest's own loop, which still says why nothing is run."""
        if session.testsfailed or session.config.option.collectonly:
            return None
        session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
        parts = in_order(session.items)
        try:
            # Three of four begin with tests that wait, while the others keep the cores busy.
            for number in range(min(self.count, len(parts))):
                self.fork(session, number % 4 != 3)
            for worker in self.workers():
                worker.begin(parts)
            self.watch(session, parts)
        finally:
            for worker in self.workers():
                self.end(worker)
        return True

    def workers(self) -> list[Worker]:
        """Return those that have not ended."""
        return [key.data for key in self.running.get_map().values()]

    def fork(self, session: pytest.Session, waits: bool) -> Worker:
        """Return a new worker. In the worker itself, run tests and end."""
        ours, theirs = Pipe()
        self.number += 1
        sys.stdout.flush()
        sys.stderr.flush()
        if pid := os.fork():
            theirs.close()
            worker = Worker(pid, ours, waits)
            self.running.register(ours, EVENT_READ, worker)
            return worker
        for connection in (ours, *(worker.connection for worker in self.workers())):
            connection.close()
        status = 1
        try:
            work(session, theirs, self.number)
            status = 0
        finally:
            if status:
                traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)

    def end(self, worker: Worker) -> int:
        """Wait until a worker has ended; return its exit code."""
        self.running.unregister(worker.connection)
        worker.connection.close()
        return os.waitstatus_to_exitcode(os.waitpid(worker.pid, 0)[1])

    def watch(self, session: pytest.Session, parts: deque[list[int]]) -> None:
        """Report of tests, and give out others, until there are no more."""
        while self.workers():
            ready = [key.data for key, _ in self.running.select(LOOK)]
            for worker in ready or [worker for worker in self.workers() if gone(worker.pid)]:
                try:
                    reports = worker.connection.recv() if ready else None
                except (EOFError, ConnectionError):
                    reports = None
                if reports is None:
                    self.replace(session, worker, parts)
                    continue
                worker.held.popleft()
                if worker.held:
                    worker.give(parts)
                else:
                    self.end(worker)
                hook = session.config.hook
                for data in reports:
                    report = hook.pytest_report_from_serializable(config=session.config, data=data)
                    hook.pytest_runtest_logreport(report=report)
            if session.shouldfail:
                raise session.Failed(session.shouldfail)
            if session.shouldstop:
                raise session.Interrupted(session.shouldstop)

    def replace(self, session: pytest.Session, ended: Worker, parts: deque[list[int]]) -> None:
        """Report a failure of the test in which a worker ended; a new one gets its other tests."""
        item = session.items[ended.held.popleft()]
        why = f"the process that ran this test ended with {self.end(ended)}"
        failed = pytest.TestReport(item.nodeid, item.location, {}, "failed", why, "call")
        session.config.hook.pytest_runtest_logreport(report=failed)
        left = deque([*ended.held, *ended.kept])
        if left or parts:
            worker = self.fork(session, ended.waits)
            worker.kept = left
            worker.begin(parts)


def gone(pid: int) -> bool:
    """Return whether a child of this process has ended; somebody still has to wait for it."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def work(session: pytest.Session, connection: Connection, number: int) -> None:
    """Run the tests whose numbers come, and send their reports, until None comes."""
    config = session.config
    # Output is captured in files, and tests have folders: each worker needs its own.
    capture: Any = config.pluginmanager.getplugin("capturemanager")
    capture.stop_global_capturing()
    capture.start_global_capturing()
    capture.suspend_global_capture()
    folders: Any = config._tmp_path_factory  # type: ignore[attr-defined]
    folders._basetemp = folders.getbasetemp() / f"worker-{number}"
    folders._basetemp.mkdir()
    protocol = Protocol()
    config.pluginmanager.register(protocol)
    # Python looks for cycles after each 700 objects that stay, which takes a twentieth of all.
    gc.set_threshold(50_000, 20)
    try:
        running = connection.recv()
        while running is not None:
            following = connection.recv()
            nextitem = None if following is None else session.items[following]
            config.hook.pytest_runtest_protocol(item=session.items[running], nextitem=nextitem)
            connection.send(protocol.reports)
            running = following
    except (EOFError, ConnectionError):  # the first process stops early, as with --exitfirst
        session._setupstate.teardown_exact(None)
    finally:
        capture.stop_global_capturing()


class Protocol:
    """A plugin for pytest in a worker, where nobody but the first process hears of reports."""

    def __init__(self) -> None:
        self.reports: list[Any] = []

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool:
        """Run a test and keep its reports. If it passes, that of its call is enough."""
        config = item.config
        self.reports = [
            config.hook.pytest_report_to_serializable(config=config, report=report)
            for report in runtestprotocol(item, log=False, nextitem=nextitem)
            if report.when == "call" or not report.passed or config.option.durations
        ]
        return True


if __name__ == "__main__":
    sys.path[0] = os.getcwd()  # as `python -m pytest` does
    del __file__  # or each process that multiprocessing starts imports this file, and so pytest
    sys.exit(pytest.main(sys.argv[2:], plugins=[Forks(int(sys.argv[1]))]))
