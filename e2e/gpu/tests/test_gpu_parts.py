"""Which parts `make gpu` runs."""

from __future__ import annotations

import os

import pytest

from gpu import PREFILL_DEVICE, __main__ as command, hand_over
from gpu.hand_over import GROUPS, SIZES, Bench


def test_without_vllm_one_line_says_what_was_left_out(monkeypatch, capsys) -> None:
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    assert command._stage_2(["vllm", "vllm-triton"], "cuda:0", small=True) == []
    said = "Stage 2 (vllm, vllm-triton) needs vLLM, which is not installed here."
    assert capsys.readouterr().out.strip() == said


def test_each_failed_part_counts(monkeypatch) -> None:
    seen = []

    def ran(part: str, device: str, environment: dict[str, str], **options: object) -> bool:
        seen.append((part, device, options["folder"]))
        return part == "b"

    monkeypatch.setattr(command, "find_spec", lambda name: name)
    monkeypatch.setattr(command, "_run", ran)
    assert command._stage_2(["a", "b"], "cpu", small=False) == [False, True]
    (first, second) = seen
    assert (first[:2], second[:2]) == (("a", "cpu"), ("b", "cpu"))
    assert first[2] == second[2] != "", "they share the model"


def test_rdma_is_tried_where_there_is_a_device(monkeypatch, tmp_path, capsys) -> None:
    seen = []

    def ran(part: str, device: str, environment: dict[str, str], **_: object) -> bool:
        seen.append((part, environment.get("UCX_TLS")))
        return False

    monkeypatch.setattr(command, "NICS", tmp_path)
    monkeypatch.setattr(command, "_run", ran)
    parts = ["probe", "idle", "pauses"]
    assert command._stage_1(parts, "cuda:0", None, small=True) == [False] * 5
    ipc = [(part, None) for part in parts]
    staging = [(part, "tcp,cuda_copy") for part in ("probe", "pauses")]
    assert seen == ipc + staging
    assert f"RDMA is left out: {tmp_path} has no device." in capsys.readouterr().out
    (tmp_path / "mlx5_0").touch()
    assert command._stage_1(["probe"], "cuda:0", "RDMA", small=True) == [False]
    assert seen[len(ipc + staging) :] == [("probe", "rc,ud,cuda_copy")]


@pytest.mark.nixl  # it loads torch
def test_a_run_of_nothing_is_no_success(monkeypatch, tmp_path, capsys) -> None:
    monkeypatch.setattr(command, "NICS", tmp_path)
    monkeypatch.setattr(command, "find_spec", lambda name: name)
    options = ["gpu", "--device", "cpu", "--parts", "probe, fence", "--transport", "RDMA"]
    monkeypatch.setattr("sys.argv", options)
    assert command.main() == 2
    assert capsys.readouterr().out.endswith("\nNothing was run.\n")
    monkeypatch.setattr("sys.argv", [*options[:-1], "tcp"])
    with pytest.raises(SystemExit):
        command.main()
    assert "on cpu these are tried: shared memory, TCP, RDMA" in capsys.readouterr().err


@pytest.mark.nixl  # it loads torch
def test_another_gpu_for_prefill_has_to_be_there(monkeypatch, capsys) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv(PREFILL_DEVICE, "")
    command._put_prefill_on("cuda:1", "cuda", command._parser())
    assert os.environ[PREFILL_DEVICE] == "cuda:1"
    with pytest.raises(SystemExit):
        command._put_prefill_on("cuda:2", "cuda", command._parser())
    assert "there is no cuda:2 here, only cuda:0, cuda:1" in capsys.readouterr().err


def test_engines_get_their_role_s_layout_blocks_and_gpu(monkeypatch, tmp_path) -> None:
    made = {}

    def engine(name: str, folder: object, environment: dict, options: dict) -> None:
        made[name] = (
            environment["VLLM_KV_CACHE_LAYOUT"],
            options["block_size"],
            environment.get("CUDA_VISIBLE_DEVICES"),
            options["enforce_eager"],
            options["kv_cache_dtype"],
        )

    monkeypatch.setattr(hand_over, "Engine", engine)
    monkeypatch.setattr(hand_over, "make_model", lambda folder, size: folder)
    monkeypatch.setenv(PREFILL_DEVICE, "cuda:1")
    for part in ("vllm-mixed", "vllm-graphs", "vllm-fp8-heads"):
        bench = Bench(GROUPS["cuda"][part], "cuda", SIZES["cuda", True], tmp_path)
        for role in ("prefill", "decode"):
            bench.engine(f"{part} {role}", None, {})
    assert made == {
        "vllm-mixed prefill": ("LBHNC", 16, "1", True, "auto"),
        "vllm-mixed decode": ("BHLNC", 32, None, True, "auto"),
        "vllm-graphs prefill": ("LBHNC", 16, "1", False, "auto"),
        "vllm-graphs decode": ("LBHNC", 16, None, False, "auto"),
        "vllm-fp8-heads prefill": ("LBHNC", 16, "1", True, "fp8_per_token_head"),
        "vllm-fp8-heads decode": ("LBHNC", 16, None, True, "fp8_per_token_head"),
    }


@pytest.mark.parametrize("device", GROUPS)
def test_prompts_are_whole_blocks_and_one_token(device: str) -> None:
    """See the docstring of gpu.hand_over: else tokens could differ without a fault."""
    for small in (False, True):
        size = SIZES[device, small]
        assert all(length % 32 == 1 for length in size.lengths)
        assert size.longest >= max(size.lengths) + 16
