"""spec.autoscaling with real engines: what they measure brings an engine, and lets it go again."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from kv_load import text
from local_run import LocalRun, condition, manifest

pytestmark = [pytest.mark.local, pytest.mark.soak, pytest.mark.timeout(2400)]

CLIENTS = 8
# No engine on a CPU is as fast as this, so a second one is needed however fast the machine is.
SCALING = {
    "itlMs": 1,
    "prefill": {"max": 2},
    "decode": {"max": 2},
    "mode": "Apply",
}


def test_a_slow_decode_engine_gets_another_that_goes_when_the_load_is_gone(tmp_path: Path) -> None:
    with LocalRun(manifest(autoscaling=SCALING), tmp_path) as run:
        run.wait_ready()
        ended, failed, seen = threading.Event(), [], []

        def ask(client: int) -> None:
            number = 0
            while not ended.is_set():
                number += 1
                reply = run.complete(text(40, 1000 * client + number), tokens=64)
                if reply.status != 200:
                    failed.append(reply.text)

        def engines() -> dict[str, int]:
            status = run.status()
            found = status.get("scaling")
            if found and (not seen or seen[-1] != found):
                seen.append(found)
            states = [(one["role"], one["state"]) for one in status.get("engines", ())]
            return {role: states.count((role, "Ready")) for role in ("prefill", "decode")}

        with ThreadPoolExecutor(CLIENTS) as clients:
            asking = [clients.submit(ask, client) for client in range(CLIENTS)]
            try:
                run.wait("a second decode engine", lambda: engines()["decode"] == 2, 900)
            finally:
                ended.set()
        for one in asking:
            one.result()
        print(*seen, sep="\n")
        assert engines() == {"prefill": 1, "decode": 2}, "only decode was the limit"
        assert seen[-1]["limit"] == "Decode"
        assert seen[-1]["measured"]["itlMs"] > 1
        assert seen[-1]["measured"]["prefillTokensPerSecond"] > 0
        assert seen[-1]["measured"]["linkMBps"] > 0
        assert failed == []
        run.wait("one decode engine", lambda: engines() == {"prefill": 1, "decode": 1}, 1200)
        run.wait("targets that are met", lambda: met(run)["status"] == "True", 300)
        run.wait_ready()


def met(run: LocalRun) -> Any:
    return condition(run.status(), "ScalingTargetsMet")
