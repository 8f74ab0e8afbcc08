"""``pdcluster-operator`` that dies as soon as one write of a child or of a status was answered."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import aiohttp

from pdcluster_operator.cli.operator import main

READS = ("GET", "HEAD")
OF_THE_PROCESS = ("/leases", "/events")
"""What an operator must write before it can work, and what it writes beside its work."""


def die_after_a_write() -> None:
    """Let every session of this process kill it, as the kernel would, after one write."""
    ask = aiohttp.ClientSession._request

    async def once(self: aiohttp.ClientSession, method: str, url: Any, **more: Any) -> Any:
        answer = await ask(self, method, url, **more)
        if method.upper() not in READS and answer.status < 300 and _is_of_a_cluster(answer.url):
            print(f"dies after {method} {answer.url.path}", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        return answer

    aiohttp.ClientSession._request = once  # type: ignore[method-assign]


def _is_of_a_cluster(url: Any) -> bool:
    of_objects = url.path.startswith(("/api/", "/apis/")) and "dryRun" not in url.query
    return of_objects and not any(f"{kind}/" in f"{url.path}/" for kind in OF_THE_PROCESS)


if __name__ == "__main__":
    die_after_a_write()
    main()
