"""The connector's log goes where vLLM's goes."""

from __future__ import annotations

import logging


def share_handlers() -> None:
    """Log to vLLM's handlers, because they know its processes, ranks and formats."""
    theirs, ours = logging.getLogger("vllm"), logging.getLogger("pdcluster_connector")
    if not ours.handlers:
        for handler in theirs.handlers:
            ours.addHandler(handler)
        ours.setLevel(theirs.level)
