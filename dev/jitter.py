"""A pytest plugin that stalls threads, event loops and processes at random, to find races.

    make repeat JITTER=1
    PYTHONPATH=dev:$PYTHONPATH PDCLUSTER_JITTER=1 python -m pytest -p jitter FILE...

A busy machine stops a thread anywhere, for as long as it likes. This plugin does the same on an
idle machine, so a test that relies on an order which nothing enforces fails soon:

* in the process of the tests, now and then before an event loop's next round, before a thread
  begins, and after a wait, a sleep, an accepted connection or the start of a process;
* in the test itself, at any line: a signal stops the main thread;
* in a process that a test started, at any instruction: SIGSTOP, and SIGCONT later.

A stall takes 20 to 500 ms, one of twenty 2 s. ``PDCLUSTER_JITTER`` is the seed: the same seed and
test give each thread the same chances and lengths, which is most of what made a test fail. `make
repeat` gives each run a seed of its own and prints it.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import threading
import time
from asyncio import base_events
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import psutil
import pytest

VARIABLE = "PDCLUSTER_JITTER"
CHANCE = 0.03  # of a stall, at each place
SHARE = 0.2  # of a thread's time that stalls may take; more would only be slow
STOP_EVERY = 0.7  # seconds between two stops of the main thread or of a process, on average
MAIN_STOP = signal.SIGRTMIN + 5

# The functions themselves, before the plugin makes them stall.
sleep, kill = time.sleep, os.kill


class Dice:
    """Decides when a thread stalls and for how long, from the seed, the test and the thread."""

    def __init__(self) -> None:
        self.begin("")

    def begin(self, test: str) -> None:
        self.in_test = False
        self._test, self._threads, self._since = test, threading.local(), time.monotonic()

    def draw(self) -> random.Random:
        """The calling thread's own numbers."""
        if not hasattr(self._threads, "numbers"):
            name = threading.current_thread().name
            self._threads.numbers = random.Random(f"{os.environ[VARIABLE]} {self._test} {name}")
            self._threads.stalled = 0.0
        return self._threads.numbers

    def seconds(self) -> float:
        numbers = self.draw()
        return 2.0 if numbers.random() < 0.05 else numbers.uniform(0.02, 0.5)

    def stall(self) -> None:
        """Stall the calling thread, by chance."""
        if self.draw().random() >= CHANCE:
            return
        seconds = self.seconds()
        if self._threads.stalled < SHARE * (time.monotonic() - self._since) + 1.0:
            self._threads.stalled += seconds
            sleep(seconds)


DICE = Dice()
STOPPED: set[int] = set()  # by a test, which wants them to stay so


def _stalls(owner: Any, name: str, *, before: bool = False) -> None:
    """Let a function stall now and then, before it runs or after it."""
    function: Callable[..., Any] = getattr(owner, name)

    @wraps(function)
    def stalling(*arguments: Any, **named: Any) -> Any:
        if before:
            DICE.stall()
            return function(*arguments, **named)
        try:
            return function(*arguments, **named)
        finally:
            DICE.stall()

    setattr(owner, name, stalling)


def _stop_now_and_then() -> None:
    """Stop the main thread, or a process that it started, again and again."""
    numbers = random.Random(f"{os.environ[VARIABLE]} stops")
    while True:
        sleep(numbers.expovariate(1 / STOP_EVERY))
        signal.pthread_kill(threading.main_thread().ident or 0, MAIN_STOP)
        if found := [one.pid for one in psutil.Process().children(recursive=True)]:
            with contextlib.suppress(ProcessLookupError):
                _stop(numbers.choice(found), DICE.seconds())


def _stop(process: int, seconds: float) -> None:
    kill(process, signal.SIGSTOP)
    try:
        sleep(seconds)
    finally:
        if process not in STOPPED:
            kill(process, signal.SIGCONT)


def _noting_stops(process: int, number: int) -> None:
    """Send a signal as ``os.kill`` does."""
    if number == signal.SIGSTOP:
        STOPPED.add(process)
    if number == signal.SIGCONT:
        STOPPED.discard(process)
    kill(process, number)


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("numprocesses", None):
        return  # the workers run the tests
    _stalls(base_events.BaseEventLoop, "_run_once", before=True)
    _stalls(threading.Thread, "run", before=True)
    _stalls(threading.Condition, "wait")
    _stalls(socket.socket, "accept")
    _stalls(subprocess.Popen, "__init__")
    _stalls(time, "sleep")
    os.kill = _noting_stops
    signal.signal(MAIN_STOP, lambda *_: sleep(DICE.seconds() if DICE.in_test else 0))
    threading.Thread(target=_stop_now_and_then, name="jitter", daemon=True).start()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    # Only here: pytest shows a fault with ast.parse, and a signal there is an error in Python 3.11.
    DICE.in_test = True
    try:
        return (yield)
    finally:
        DICE.in_test = False


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    DICE.begin(item.nodeid)
    return (yield)
