"""The logs of this machine's containers, read as Kubernetes' API gives them: with times.

A container writes its log itself, so no line has a time. Each log's size is looked at four times a
second instead. A line has the time of the first look that found it.
"""

import asyncio
import bisect
import os
import re
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO, NamedTuple

LOOK_SECONDS = 0.25
MOST_LOOKS = 4096
"""How many looks are kept of a log. Then every second one is forgotten."""
LONGEST_LINE = 1 << 20
BLOCK = 1 << 16


@dataclass(frozen=True, slots=True)
class Part:
    """The part of a log that somebody asks for.

    Attributes:
        since: leave out what was written before, in seconds since the epoch.
        tail: the last so many lines alone; None for all.
        follow: go on until the log ends.
        timestamps: begin each line with its time.
    """

    since: float = 0.0
    tail: int | None = None
    follow: bool = False
    timestamps: bool = False


class _Look(NamedTuple):
    size: int
    moment: float


class PodLogs:
    """Reads the logs of containers.

    Args:
        current: returns the current log of each pod.
        clock: seconds since the epoch.
    """

    def __init__(
        self, current: Callable[[], Mapping[str, Path]], clock: Callable[[], float] = time.time
    ) -> None:
        self._current = current
        self._clock = clock
        self._looks: dict[int, list[_Look]] = {}

    async def keep(self) -> None:
        """Look until cancelled."""
        while True:
            self.look()
            await asyncio.sleep(LOOK_SECONDS)

    def look(self) -> None:
        """Remember how long each log is now."""
        kept: dict[int, list[_Look]] = {}
        for path in self._current().values():
            for file in (previous(path), path):
                with suppress(OSError):
                    stat = file.stat()
                    kept[stat.st_ino] = self._with_look(stat)
        self._looks = kept

    def _with_look(self, stat: os.stat_result) -> list[_Look]:
        looks = self._looks.get(stat.st_ino, [])
        if looks and looks[-1].size > stat.st_size:  # another file has the number now
            looks = []
        if not looks or looks[-1].size < stat.st_size:
            looks.append(_Look(stat.st_size, self._clock()))
        return looks[1::2] if len(looks) > MOST_LOOKS else looks

    async def lines(self, pod: str, part: Part, *, former: bool = False) -> AsyncIterator[bytes]:
        """Yield the lines of a pod's log.

        Args:
            former: the log of the process before the last restart.

        Raises:
            FileNotFoundError: the pod has no such log.
        """
        if (path := self._current().get(pod)) is None:
            raise FileNotFoundError(pod)
        path = previous(path) if former else path
        with path.open("rb") as file:
            self.look()
            number = os.fstat(file.fileno()).st_ino
            file.seek(max(self._written_by(number, part.since), _beginning(file, part.tail)))
            while True:
                # What comes after this question, and before the read, is read.
                ended = not part.follow or not _is_still(path, number)
                for line in iter(lambda: file.readline(LONGEST_LINE), b""):
                    if not line.endswith(b"\n") and len(line) < LONGEST_LINE and not ended:
                        file.seek(-len(line), os.SEEK_CUR)
                        break
                    yield self._stamped(line, number, file.tell(), part)
                if ended:
                    return
                await asyncio.sleep(LOOK_SECONDS)

    def _stamped(self, line: bytes, number: int, end: int, part: Part) -> bytes:
        whole = line if line.endswith(b"\n") else line + b"\n"
        if not part.timestamps:
            return whole
        looks = self._looks.get(number, [])
        found = bisect.bisect_left(looks, end, key=lambda look: look.size)
        moment = looks[found].moment if found < len(looks) else self._clock()
        text = datetime.fromtimestamp(moment, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        return text.encode() + b" " + whole

    def _written_by(self, number: int, since: float) -> int:
        """Return how long the log was at a time."""
        looks = self._looks.get(number, [])
        found = bisect.bisect_left(looks, since, key=lambda look: look.moment)
        return looks[found - 1].size if found else 0


def previous(log: Path) -> Path:
    """Return where the log of the process before the last restart is."""
    return log.with_suffix(".previous.log")


def _is_still(path: Path, number: int) -> bool:
    try:
        return path.stat().st_ino == number
    except OSError:
        return False


def _beginning(file: BinaryIO, tail: int | None) -> int:
    """Return where the last ``tail`` lines begin."""
    if tail is None:
        return 0
    position = end = file.seek(0, os.SEEK_END)
    left = tail + 1  # the last line ends with a line feed, too
    while position and left:
        start = max(0, position - BLOCK)
        file.seek(start)
        block = file.read(position - start)
        if position == end and not block.endswith(b"\n"):
            left -= 1
        at = len(block)
        while left and (at := block.rfind(b"\n", 0, at)) >= 0:
            left -= 1
            if not left:
                return start + at + 1
        position = start
    return end if tail == 0 else 0


MATTERS = re.compile(
    r"\b(?:ERROR|CRITICAL|FATAL)\b|\b[\w.]*(?:Error|Exception|Fault)\b|\b(?:error|fatal|killed)\b"
)
NO_ERRORS = ("DEBUG ", "INFO ", "WARNING ")
_PREFIX = re.compile(
    r"\x1b\[[0-9;]*[A-Za-z]|^\([\w.\- ]+ pid=\d+\) ?|"
    r"\b(?:ERROR|CRITICAL) \d\d-\d\d \d\d:\d\d:\d\d \[[^\]]*\] ?"
)
_FRAME = re.compile(r"\s|Traceback |$|\^")
LAST_LINES, LINE_LENGTH = 6, 200


def why(log: Path) -> list[str]:
    """Return the last lines of a log that say why its process ended, without frames and prefixes.

    A log without errors has its last lines instead.
    """
    try:
        with log.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - BLOCK))
            text = file.read(BLOCK).decode(errors="replace")
    except OSError:
        return []
    told, errors = [], []
    for line in text.splitlines():
        words = _PREFIX.sub("", _PREFIX.sub("", line)).rstrip()[:LINE_LENGTH]
        if not _FRAME.match(words):
            told.append(words)
            if MATTERS.search(line) and not words.startswith(NO_ERRORS):
                errors.append(words)
    # Each process of an engine repeats the exception of the one below it.
    return (list(dict.fromkeys(errors)) or told)[-LAST_LINES:]
