"""The model digest: content decides, not paths, and a fine-tune is another model."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path
from types import SimpleNamespace

import pytest

from pdcluster_connector.vllm.worker_side.fingerprint import (
    PIECE_BYTES,
    context_variant,
    digest_of_draft,
    digest_of_engine,
    model_digest,
)

CONFIG = {"model_type": "llama", "hidden_size": 256, "num_hidden_layers": 2}


def write_weights(folder: Path, fill: int = 7, tensors: int = 3, size: int = 300_000) -> Path:
    """A safetensors file of ``tensors`` byte tensors; tensor i is filled with ``fill + i``."""
    folder.mkdir(parents=True, exist_ok=True)
    header = {
        f"layers.{i}": {"dtype": "U8", "shape": [size], "data_offsets": [i * size, (i + 1) * size]}
        for i in range(tensors)
    }
    text = json.dumps(header).encode()
    data = b"".join(bytes([fill + i]) * size for i in range(tensors))
    path = folder / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def test_same_weights_at_two_paths_are_one_model(tmp_path: Path) -> None:
    write_weights(tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b" / "deeper")
    (tmp_path / "b" / "deeper" / "model.safetensors").rename(
        tmp_path / "b" / "deeper" / "renamed.safetensors"
    )
    first = model_digest({**CONFIG, "_name_or_path": "a"}, tmp_path / "a")
    second = model_digest(
        {**CONFIG, "_name_or_path": "b", "transformers_version": "9"}, tmp_path / "b" / "deeper"
    )
    assert first == second


@pytest.mark.parametrize("tensor", [0, 1, 2])
def test_a_fine_tune_of_any_tensor_is_another_model(tmp_path: Path, tensor: int) -> None:
    write_weights(tmp_path / "a")
    path = write_weights(tmp_path / "b")
    raw = bytearray(path.read_bytes())
    start = len(raw) - (3 - tensor) * 300_000
    raw[start : start + 300_000] = bytes([99]) * 300_000
    path.write_bytes(bytes(raw))
    assert model_digest(CONFIG, tmp_path / "a") != model_digest(CONFIG, tmp_path / "b")


def test_the_same_tensors_under_other_names_are_another_model(tmp_path: Path) -> None:
    write_weights(tmp_path / "a")
    path = write_weights(tmp_path / "b")
    raw = path.read_bytes()
    path.write_bytes(raw.replace(b"layers.0", b"layers.x").replace(b"layers.1", b"layers.0"))
    assert model_digest(CONFIG, tmp_path / "a") != model_digest(CONFIG, tmp_path / "b")


def test_the_names_of_files_are_no_part_of_the_model(tmp_path: Path) -> None:
    for folder, names in (("a", ("1", "2")), ("b", ("2", "1"))):
        for fill, name in enumerate(names):
            path = write_weights(tmp_path / folder, fill=10 * fill)
            path.rename(path.with_stem(f"part-{name}"))
    assert model_digest(CONFIG, tmp_path / "a") == model_digest(CONFIG, tmp_path / "b")


def test_config_shape_and_variant_count(tmp_path: Path) -> None:
    write_weights(tmp_path)
    base = model_digest(CONFIG, tmp_path)
    assert model_digest({**CONFIG, "rope_theta": 1e6}, tmp_path) != base
    assert model_digest(CONFIG, tmp_path, "fp8") != base
    assert model_digest(CONFIG, None) != base
    nested = {**CONFIG, "text_config": {"dtype": "float32", "hidden_size": 8}}
    other = {**CONFIG, "text_config": {"dtype": "bfloat16", "hidden_size": 8}}
    assert model_digest(nested, None) == model_digest(other, None)


def engine(folder: Path) -> SimpleNamespace:
    """vLLM's ModelConfig, as far as it is read."""
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return SimpleNamespace(
        model=str(folder), revision=None, hf_config=None, hf_overrides={}, quantization=None,
        max_model_len=512,
    )  # fmt: skip


def speculation(folder: Path, method: str = "eagle3", *, kv: bool = True, parallel: bool = False):
    return SimpleNamespace(
        method=method, parallel_drafting=parallel, draft_model_config=engine(folder),
        uses_draft_kv_cache=lambda: kv,
    )  # fmt: skip


def test_weights_in_two_buckets_are_two_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM downloads only the configuration, so the digest sees no weights."""
    (tmp_path / "config.json").write_text("{}")
    one = engine(tmp_path)
    plain = digest_of_engine(one)
    found = set()
    for bucket in ("s3://models/a", "s3://models/b"):
        one.model_weights = bucket
        found.add(digest_of_engine(one))
        for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
            with monkeypatch.context() as patch:
                patch.setenv(name, "http://minio:9000")
                found.add(digest_of_engine(one))
    one.model_weights = ""
    assert len(found | {plain}) == 7
    assert digest_of_engine(one) == plain


def test_a_draft_model_with_other_weights_is_another_one(tmp_path: Path) -> None:
    write_weights(tmp_path / "a")
    write_weights(tmp_path / "b")
    write_weights(tmp_path / "other", fill=8)
    first = digest_of_draft(speculation(tmp_path / "a"))
    assert first == f"eagle3 {digest_of_engine(engine(tmp_path / 'a'))}"
    assert digest_of_draft(speculation(tmp_path / "b")) == first, "under another path"
    assert digest_of_draft(speculation(tmp_path / "other")) != first
    assert digest_of_draft(speculation(tmp_path / "a", "eagle")) != first
    assert digest_of_draft(speculation(tmp_path / "a", parallel=True)) != first


def test_drafts_without_kv_are_no_part_of_the_shape(tmp_path: Path) -> None:
    write_weights(tmp_path)
    assert digest_of_draft(None) is None
    assert digest_of_draft(speculation(tmp_path, "ngram", kv=False)) is None


LONG_ROPE = {"rope_type": "longrope", "original_max_position_embeddings": 4096}


@pytest.mark.parametrize(
    ("config", "bound"),
    [
        ({"rope_parameters": LONG_ROPE}, 4096),
        ({"text_config": {"rope_scaling": LONG_ROPE}}, 4096),
        ({"rope_scaling": {"type": "su"}, "original_max_position_embeddings": 4096}, 4096),
        ({"model_type": "llama4"}, 32768),
        ({"text_config": {"model_type": "llama4_text"}}, 32768),
    ],
)
def test_an_engine_for_longer_contexts_is_another_model_where_its_kv_differs(
    config: dict[str, object], bound: int
) -> None:
    shorter = context_variant(config, bound // 2)
    assert context_variant(config, bound) == shorter
    assert context_variant(config, bound + 1) != shorter
    assert context_variant(config, 2 * bound) == context_variant(config, bound + 1)


def test_a_long_rope_without_a_known_bound_needs_equal_contexts() -> None:
    config = {"rope_parameters": {"full_attention": {"rope_type": "longrope"}}}
    assert context_variant(config, 1000) != context_variant(config, 1001)


@pytest.mark.parametrize("kind", ["default", "yarn", "llama3", "dynamic"])
def test_other_models_may_have_other_contexts(kind: str) -> None:
    rope = {"rope_type": kind, "original_max_position_embeddings": 4096}
    assert context_variant({"model_type": "llama", "rope_parameters": rope}, 8192) == ""


def write_scales(folder: Path, scales: list[float]) -> Path:
    """A checkpoint of small tensors: one KV scale after each weight."""
    folder.mkdir()
    tensors = [(f"layers.{i}.w", bytes(100_000)) for i in range(len(scales))]
    tensors += [(f"layers.{i}.k_scale", struct.pack("<f", s)) for i, s in enumerate(scales)]
    header, data = {}, b""
    for name, raw in sorted(tensors):
        end = len(data) + len(raw)
        header[name] = {"dtype": "F32", "shape": [len(raw) // 4], "data_offsets": [len(data), end]}
        data += raw
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
    return folder


@pytest.mark.parametrize("changed", [0, 7, 15])
def test_kv_scales_of_the_checkpoint_are_weights(tmp_path: Path, changed: int) -> None:
    scales = [0.25] * 16
    one = model_digest(CONFIG, write_scales(tmp_path / "a", scales))
    assert model_digest(CONFIG, write_scales(tmp_path / "b", scales)) == one
    scales[changed] = 0.5
    assert model_digest(CONFIG, write_scales(tmp_path / "c", scales)) != one


def test_other_formats_are_sampled(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"a" * 1_000_000)
    first = model_digest(CONFIG, tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"b" * 1_000_000)
    assert model_digest(CONFIG, tmp_path) != first


@pytest.mark.parametrize(
    "raw", [b"", b"1234567", struct.pack("<Q", 2**60), b"\x02" + b"\0" * 7 + b"{"]
)
def test_a_broken_file_has_a_digest_too(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(raw)
    assert len(model_digest(CONFIG, tmp_path)) == 32


def test_reading_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_weights(tmp_path, tensors=200, fill=1, size=PIECE_BYTES + 1)
    monkeypatch.setattr("pdcluster_connector.vllm.worker_side.fingerprint.MAX_PIECES", 10)
    limited = model_digest(CONFIG, tmp_path)
    monkeypatch.setattr("pdcluster_connector.vllm.worker_side.fingerprint.MAX_PIECES", 1000)
    assert model_digest(CONFIG, tmp_path) != limited
