"""``make gpu`` on a machine without a GPU: the same page, with KV in host memory."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from gpu import PREFILL_DEVICE, rig
from pdcluster_connector.nixl_io import nixl_agent

ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.nixl


def page(*options: str, **variables: str) -> tuple[int, str]:
    folders = ("connector/src", "e2e", "connector/tests/transfer")
    environment = (
        os.environ | {"PYTHONPATH": ":".join(str(ROOT / one) for one in folders)} | variables
    )
    done = subprocess.run(
        [sys.executable, "-m", "gpu", "--device", "cpu", "--small", *options],
        env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    print(done.stdout, done.stderr)
    return done.returncode, done.stdout


def test_the_page_holds_the_bytes_the_rates_and_what_was_refused() -> None:
    code, text = page(
        "--parts",
        "oracle,probe,fence,idle,speed,pauses",
        "--transport",
        "shared memory",
        "--prefill-device",
        "cpu",
    )
    assert code == 0
    for layout in ("LBHNC", "BHLNC"):
        for sizes in ("1 → 1", "2 → 1"):
            assert f"| {layout} | {sizes} | 7 | 0 | 0 |" in text
    assert re.search(r"probe of 8 MiB: \d+\.\d\d GB/s .* prefill DRAM, decode DRAM", text)
    assert "fence: 3 of 3 tickets of leases that had ended were refused" in text
    assert text.count("| raw NIXL |") == text.count("| receiver |") == 4
    assert text.count("; judged: probe ") == 4
    assert re.search(r"\| 0\.1 ms, 10 ms \|( \d+\.\d\d ms: \d+\.\d\d \[.*?\] \|){5}", text)
    assert text.rstrip().endswith("All that was run was right.")


def test_a_part_that_fails_fails_the_page_and_the_others_are_shown() -> None:
    options = ("--parts", "probe,fence", "--transport", "shared memory")
    code, text = page(*options, UCX_TLS="no-such-transport")
    assert code == 1
    assert "(probe: FAILED" in text
    assert "(fence: FAILED" in text


def test_a_pause_that_is_set_is_what_nixl_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rig, "NixlAgent", lambda *_, **__: nixl_agent.progress_delay(["UCX"]))
    assert rig.Agents(pause=7).agent("a") == 7
    assert rig.Agents().agent("a") == 10_000


def test_prefill_serves_from_the_device_that_it_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    class SelectedError(Exception):
        pass

    def select(device: str) -> None:
        raise SelectedError(device)

    monkeypatch.setattr(rig, "select", select)
    monkeypatch.setenv(PREFILL_DEVICE, "cuda:1")
    with pytest.raises(SelectedError, match="cuda:1"):
        rig._serve(None, 1, {"device": "cuda:0"}, rig.Agents())  # type: ignore[arg-type]
