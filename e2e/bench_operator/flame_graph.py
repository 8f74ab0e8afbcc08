"""A flame graph of the operator's process while it creates PDClusters, as an SVG.

py-spy samples the process from outside. It is no dependency of ours: ``pip install py-spy``.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

RATE = 200
"""Samples a second: one in 5 ms. At this rate py-spy costs the process 1 % of its time."""
MACHINE = re.compile(r"/[^\s<>&;:()]*/(?:site-packages|src|lib/python[\d.]+)/")
"""Where a module lies on this machine."""
COMMAND = re.compile(r"[^<>]*py-spy record[^<>]*")
"""py-spy's title of the picture."""
TITLE = "The operator while it creates PDClusters"


@contextlib.contextmanager
def recorded(process: int, path: Path | None) -> Iterator[None]:
    """Record a process until the block ends; without a path, record nothing.

    Raises:
        FileNotFoundError: py-spy is not on PATH.
    """
    if path is None:
        yield
        return
    if (program := shutil.which("py-spy")) is None:
        raise FileNotFoundError("py-spy is not on PATH: install it with `pip install py-spy`")
    command = (program, "record", f"--pid={process}", f"--rate={RATE}", f"--output={path}")
    with subprocess.Popen([*command, "--nonblocking", "--gil"]) as spy:
        try:
            yield
        finally:
            spy.send_signal(signal.SIGINT)  # it writes what it has
            spy.wait()
    path.write_text(without_machine(path.read_text()))


def without_machine(svg: str) -> str:
    """Return the picture without this machine's folders."""
    return COMMAND.sub(TITLE, MACHINE.sub("", svg))
