"""Runs an engine as PID 1 of its container, and holds what else pods run beside vLLM.

When an engine starts, drains and ends: ``supervisor.py``. What prevents its start:
``before_start.py``. What is answered over HTTP: ``interface.py``. What is changed in vLLM's own
processes: ``inside_vllm.py``. What a router's pod runs: ``router_gate.py``.
What a download Job runs: ``hub_download.py``.
"""

import contextlib
import sys


def say(message: str) -> None:
    """Print one line on stderr, marked as the launcher's. A closed terminal is not an error."""
    with contextlib.suppress(OSError, ValueError):
        print(f"pdcluster: {message}", file=sys.stderr, flush=True)
