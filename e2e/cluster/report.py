"""Output for the person at the terminal: progress on standard error, and one sentence per error."""

from __future__ import annotations

import sys
import time


class ClusterError(Exception):
    """There is no cluster. The message says why and what to do, and is shown unchanged."""


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class Progress:
    """One line. A terminal shows it rewritten in place; a log shows it again now and then."""

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
