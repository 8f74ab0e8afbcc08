"""Which parts `make gpu` runs."""

from __future__ import annotations

import pytest

from gpu import __main__ as command
from gpu.hand_over import GROUPS, SIZES


def test_without_vllm_one_line_says_what_was_left_out(monkeypatch, capsys) -> None:
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    assert command._stage_2(["vllm", "vllm-triton"], "cuda:0", small=True) == 0
    said = "Stage 2 (vllm, vllm-triton) needs vLLM, which is not installed here."
    assert capsys.readouterr().out.strip() == said


def test_each_failed_part_counts(monkeypatch) -> None:
    seen = []

    def ran(part: str, device: str, environment: dict[str, str], **options: object) -> int:
        seen.append((part, device, options["folder"]))
        return int(part == "b")

    monkeypatch.setattr(command, "find_spec", lambda name: name)
    monkeypatch.setattr(command, "_run", ran)
    assert command._stage_2(["a", "b"], "cpu", small=False) == 1
    (first, second) = seen
    assert (first[:2], second[:2]) == (("a", "cpu"), ("b", "cpu"))
    assert first[2] == second[2] != "", "they share the model"


@pytest.mark.parametrize("device", GROUPS)
def test_prompts_are_whole_blocks_and_one_token(device: str) -> None:
    """See the docstring of gpu.hand_over: else tokens could differ without a fault."""
    for small in (False, True):
        size = SIZES[device, small]
        assert all(length % 32 == 1 for length in size.lengths)
        assert size.longest >= max(size.lengths) + 16
