"""The tests' own handle of an engine: whether it lives is answered at any moment of its end."""

from __future__ import annotations

import subprocess
import threading
from pathlib import Path

from fork_host import Engine


def test_engine_that_ends_while_one_looks_is_dead_and_no_error():
    for _ in range(100):
        process = subprocess.Popen(["sleep", "0.005"])
        reaper = threading.Thread(target=process.wait)
        reaper.start()
        engine = Engine("engine", process.pid, Path("none"), "none")
        while engine.alive():
            pass
        reaper.join()
