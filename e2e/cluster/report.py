"""What the person at the terminal sees: progress on standard error, one sentence for a failure."""

from __future__ import annotations

import sys
import time


class ClusterError(Exception):
    """The cluster cannot be had; the text says why and what to do, and is shown as it is."""


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class Progress:
    """One line that is rewritten on a terminal, and repeated now and then in a log."""

    def __init__(self, what: str, log_interval: float = 30.0) -> None:
        self._what = what
        self._terminal = sys.stderr.isatty()
        self._interval = 0.2 if self._terminal else log_interval
        self._started = self._shown = time.monotonic()

    def show(self, state: str) -> None:
        now = time.monotonic()
        if now - self._shown >= self._interval:
            self._shown = now
            self._write(f"  {self._what}: {state}, {now - self._started:.0f} s", last=False)

    def done(self) -> None:
        took = time.monotonic() - self._started
        self._write(f"  {self._what}: {took:.0f} s", last=True)

    def _write(self, line: str, *, last: bool) -> None:
        if self._terminal:
            sys.stderr.write(f"\r\x1b[K{line}" + ("\n" if last else ""))
            sys.stderr.flush()
        else:
            say(line)
