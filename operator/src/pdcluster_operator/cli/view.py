"""Shows the progress of a cluster: a live table in a terminal, otherwise lines."""

from __future__ import annotations

import time
from collections.abc import Container
from types import TracebackType
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

from pdcluster_operator.cli.snapshot import PodLine, Snapshot
from pdcluster_operator.cli.tables import pods_table, waiting_for

SPINNER_WIDTH = 2
QUIET_SECONDS = 15.0
"""After this time without a change, the plain view repeats what the cluster waits for."""


class View:
    """Shows snapshots. Use as a context manager; ``say`` prints a line that stays."""

    def __init__(self, console: Console, *, plain: bool) -> None:
        self._console = console
        self._live = (
            None
            if plain or not console.is_terminal
            else Live(console=console, transient=True, auto_refresh=True, refresh_per_second=4)
        )
        self._began = self._spoken = time.monotonic()
        self._last: dict[str, str] = {}

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.finish()

    def finish(self) -> None:
        """Remove the live table. Later lines are printed below the earlier ones."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def say(self, text: str) -> None:
        """One line that stays, with the seconds since the start."""
        self._spoken = time.monotonic()
        stamp = Text(f"[{self._spoken - self._began:6.1f} s] ", style="dim")
        self._console.print(stamp.append(Text(text, style="not dim")), soft_wrap=True)

    def show(self, snapshot: Snapshot) -> None:
        """Show a snapshot. Changes of pods are printed as lines; a live table shows everything."""
        for pod in snapshot.pods:
            self._tell(pod)
        waiting = waiting_for(snapshot)
        if self._live is not None:
            elapsed = time.monotonic() - self._began
            line = Text(f"{elapsed:.0f} s, waiting for {waiting}", style="dim")
            first, *more = line.wrap(self._console, max(1, self._console.width - SPINNER_WIDTH))
            pods = pods_table(snapshot.pods)
            self._live.update(Group(pods, Spinner("dots", first), *more))
        elif not snapshot.ready and time.monotonic() - self._spoken > QUIET_SECONDS:
            self.say(f"waiting for {waiting}")

    def show_conditions(self, snapshot: Snapshot, types: Container[str] | None = None) -> None:
        """Print conditions whose status or reason changed since the last call."""
        for condition in snapshot.conditions:
            subject = f"condition {condition.type}"
            state = f"{condition.status} {condition.reason}"
            if (types is None or condition.type in types) and self._last.get(subject) != state:
                self._last[subject] = state
                detail = f" - {condition.message}" if condition.message else ""
                self.say(f"{condition.type}: {state}{detail}")

    def know_conditions(self, snapshot: Snapshot) -> None:
        """Remember that these conditions were shown: another output has printed them."""
        for condition in snapshot.conditions:
            self._last[f"condition {condition.type}"] = f"{condition.status} {condition.reason}"

    def _tell(self, pod: PodLine) -> None:
        # A live table shows messages as they change; lines are for changes of state.
        detail = f" - {pod.doing}" if pod.doing else ""
        key = pod.state if self._live is not None else f"{pod.state}{detail}"
        if self._last.get(pod.name) != key:
            self._last[pod.name] = key
            self.say(f"{pod.name}: {pod.state}{detail}")
