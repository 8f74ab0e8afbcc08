"""What `make gpu` does with vLLM, on a CPU: without the stock connector's engines."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from gpu.attention import attention
from gpu.hand_over import GROUPS, SIZES, Bench

pytestmark = pytest.mark.engine


def test_real_engines_hand_over_and_the_tokens_are_equal(tmp_path: Path, capsys) -> None:
    group = dataclasses.replace(GROUPS["cpu"]["vllm"], connectors=("ours",))
    size = SIZES["cpu", True]
    bench = Bench(group, "cpu", size, tmp_path)
    assert bench.run(), capsys.readouterr().out
    alone, ours = bench.ways
    assert (ours.equal, ours.different) == (len(size.lengths) * (size.repeats + 1), 0)
    assert {path and path["outcome"] for path in ours.paths} == {"transferred"}
    assert all(path and path["bytes"] > 0 for path in ours.paths)
    assert alone.first.keys() == ours.first.keys() == set(size.lengths)
    page = capsys.readouterr().out
    assert "| ours | 257 |" in page
    assert "pdcluster_kv_received_bytes_total" in page


@pytest.mark.soak
def test_layouts_are_compared_by_what_engines_alone_compute(tmp_path: Path, capsys) -> None:
    assert attention("cpu", tmp_path, small=True), capsys.readouterr().out
    page = capsys.readouterr().out
    assert re.search(r"\| LBHNC \|( \d+\.\d\d ms: 1\.00 \[1\.00, 1\.00\] \|){2}", page)
