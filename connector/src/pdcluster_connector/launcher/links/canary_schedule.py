"""When each link gets a canary. No I/O and no clock of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from pdcluster_connector.launcher.links.link_table import LinkRow
from pdcluster_connector.protocol.launcher_documents import CanaryReport, CanaryState, LinkState

_FIRST_RETRY: Final = 2.0
_LAST_RETRY: Final = 60.0


class CanarySchedule:
    """Which links are due for a canary.

    A new link is due at once. A link that passed is due again after an interval, and one that
    failed after growing pauses. A link that was lost and is established again counts as new. Times
    are seconds of a monotonic clock.
    """

    def __init__(self) -> None:
        self._next: dict[str, float] = {}
        self._pause: dict[str, float] = {}
        self._last: dict[str, tuple[tuple[int, ...], float]] = {}

    def due(self, rows: Sequence[LinkRow], now: float) -> LinkRow | None:
        """Choose the established link that has waited longest, if any is due."""
        known = {row.report.prefill_engine_id for row in rows}
        self._next = {key: at for key, at in self._next.items() if key in known}
        self._pause = {key: pause for key, pause in self._pause.items() if key in known}
        self._last = {key: last for key, last in self._last.items() if key in known}
        waiting = [
            (self._at(row), row)
            for row in rows
            if row.report.state is LinkState.ESTABLISHED and row.peer.api.startswith("http://")
        ]
        at, row = min(waiting, key=lambda item: item[0], default=(0.0, None))
        return row if at <= now else None

    def _at(self, row: LinkRow) -> float:
        planned = self._next.get(row.report.prefill_engine_id, 0.0)
        establishment, ran = self._last.get(row.report.prefill_engine_id, (row.establishment, 0.0))
        # Wait for the first pause in any case. If the canary itself breaks the link, canaries would
        # otherwise follow one another without a pause.
        return planned if establishment == row.establishment else min(planned, ran + _FIRST_RETRY)

    def ran(self, row: LinkRow, result: CanaryReport, interval: float, now: float) -> None:
        """Plan this link's next canary; ``interval`` 0 means no other after a pass."""
        engine_id = row.report.prefill_engine_id
        self._last[engine_id] = row.establishment, now
        if result.state is CanaryState.PASSED:
            self._pause.pop(engine_id, None)
            self._next[engine_id] = now + interval if interval > 0 else float("inf")
            return
        pause = self._pause.get(engine_id, _FIRST_RETRY)
        self._next[engine_id] = now + pause
        self._pause[engine_id] = min(2 * pause, _LAST_RETRY)
