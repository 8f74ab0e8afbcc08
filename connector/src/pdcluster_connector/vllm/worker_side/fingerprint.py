"""A digest of the model, so that only engines with equal weights exchange KV.

Two fine-tunes of one architecture have equal layouts, names and sizes, but their KV differs. The
same weights under two paths are one model. So the digest is made from content: the model's
configuration, without the fields that only record how the files were written, and a bounded sample
of the weights (sizes, headers and one piece of many tensors).
"""

import hashlib
import json
import os
import struct
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

PIECE_BYTES: Final = 64 * 1024
MAX_PIECES: Final = 1024
_MAX_HEADER_BYTES: Final = 100 * 1024 * 1024
# Fields that a saving tool writes about itself, or that another rule compares (the KV's dtype).
_VOLATILE: Final = frozenset(
    {
        "_name_or_path", "name_or_path", "_commit_hash", "transformers_version", "torch_dtype",
        "dtype", "use_cache", "_attn_implementation_autoset",
    }
)  # fmt: skip
_LONG_ROPES: Final = frozenset({"longrope", "su"})
# vLLM 0.32 scales the attention of these models by temperature in engines that allow more tokens.
_TUNED: Final = ("llama4", 32_768)
# The same bucket of another store holds other weights.
_STORES: Final = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3")
_WEIGHT_PATTERNS: Final = ("*.safetensors", "*.bin", "*.pt", "*.gguf")


def model_digest(config: Mapping[str, Any], folder: Path | None, variant: str = "") -> str:
    """Hex digest (32 characters) of a model.

    Args:
        config: the model's configuration as a mapping of JSON values.
        folder: the folder of its weights. If None (unknown), only the configuration counts.
        variant: anything else that changes what the weights compute, for example a quantization
            that is applied while loading.
    """
    digest = hashlib.blake2b(digest_size=16)
    digest.update(_canonical(config))
    digest.update(variant.encode())
    for part in _weights(folder) if folder is not None else ():
        digest.update(struct.pack("<Q", len(part)))
        digest.update(part)
    return digest.hexdigest()


def digest_of_draft(speculation: Any) -> str | None:
    """Method and digest of the draft model of a ``SpeculativeConfig``; None if it has no KV.

    Source: vLLM 0.32 kv_connector/v1/nixl/metadata.py, whose hash covers the same.
    """
    if speculation is None or not speculation.uses_draft_kv_cache():
        return None
    parallel = "parallel " if speculation.parallel_drafting else ""
    return f"{parallel}{speculation.method} {digest_of_engine(speculation.draft_model_config)}"


def digest_of_engine(model_config: Any) -> str:
    """:func:`model_digest` of vLLM's ``ModelConfig``."""
    folder = _model_folder(str(model_config.model), model_config.revision)
    config: Mapping[str, Any] | None = None
    if folder is not None and (folder / "config.json").is_file():
        config = json.loads((folder / "config.json").read_text("utf-8"))
    if config is None:
        # Only differences from the class's defaults: they change less between versions.
        config = model_config.hf_config.to_diff_dict()
    overrides = getattr(model_config, "hf_overrides", None)
    variant = {
        "quantization": model_config.quantization,
        "overrides": overrides if isinstance(overrides, dict) else repr(type(overrides)),
        "dummy": str(getattr(model_config, "load_format", "")) == "dummy",
    }
    # In object storage: only the configuration was downloaded, and the weights are not compared.
    if weights := getattr(model_config, "model_weights", ""):
        stores = [f"{name}={os.environ[name]}" for name in _STORES if os.environ.get(name)]
        variant["weights"] = " ".join([str(weights), *stores])
    said = {"config": config, "overrides": overrides}
    if context := context_variant(said, int(model_config.max_model_len)):
        variant["context"] = context
    return model_digest(config, folder, json.dumps(variant, sort_keys=True, default=str))


def context_variant(config: Any, max_model_len: int) -> str:
    """Return what a model computes otherwise in an engine that allows longer contexts.

    With LongRoPE, all keys of such an engine are rotated by other angles, those of short prompts
    too. Empty for models whose KV does not depend on ``max_model_len``.

    Source: vLLM 0.32 model_executor/layers/rotary_embedding/phi3_long_rope_scaled_rope.py
    (use_long_rope), model_executor/models/llama4.py (attn_temperature_tuning).
    """
    parts = list(_mappings(config))
    kinds = {str(part.get(key)) for part in parts for key in ("rope_type", "type")}
    found = []
    if kinds & _LONG_ROPES:
        bounds: set[Any] = {part.get("original_max_position_embeddings") for part in parts} - {None}
        found += [f"{bound}:{max_model_len > int(bound)}" for bound in sorted(bounds)]
        found = found or [str(max_model_len)]  # from where on is not known
    model, bound = _TUNED
    if any(str(part.get("model_type", "")).startswith(model) for part in parts):
        found.append(f"{model}:{max_model_len > bound}")
    return ",".join(found)


def _mappings(value: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the mappings in a configuration, the nested ones too."""
    if isinstance(value, Mapping):
        yield value
        for item in value.values():
            yield from _mappings(item)


def _canonical(value: Mapping[str, Any]) -> bytes:
    def clean(item: Any) -> Any:
        if isinstance(item, Mapping):
            return {str(k): clean(v) for k, v in item.items() if k not in _VOLATILE}
        if isinstance(item, list | tuple):
            return [clean(v) for v in item]
        return item

    return json.dumps(clean(value), sort_keys=True, default=str).encode()


def _weights(folder: Path) -> Iterable[bytes]:
    """Digest samples of all weight files. It does not depend on the folder or on file names."""
    files: list[Path] = []
    for pattern in _WEIGHT_PATTERNS:
        files = sorted(p for p in folder.glob(pattern) if p.is_file())
        if files:
            break
    budget = max(1, MAX_PIECES // max(1, len(files)))
    parts = [_sample(path, budget) for path in files]
    # File names may differ between copies, so the content decides the order.
    return sorted(parts)


def _sample(path: Path, pieces: int) -> bytes:
    size = path.stat().st_size
    summary = hashlib.blake2b(struct.pack("<Q", size), digest_size=32)
    with path.open("rb") as file:
        header, starts = _tensor_middles(file.read(8), file, size)
        summary.update(header)
        if not starts:
            starts = [size * i // 16 for i in range(16)]
        step = max(1, -(-len(starts) // pieces))
        for start in starts[::step]:
            file.seek(start)
            summary.update(file.read(PIECE_BYTES))
    return summary.digest()


def _tensor_middles(prefix: bytes, file: Any, size: int) -> tuple[bytes, list[int]]:
    """A safetensors file's header, and a position inside each of its tensors."""
    if len(prefix) < 8:
        return b"", []
    length = struct.unpack("<Q", prefix)[0]
    if not 2 <= length <= min(_MAX_HEADER_BYTES, size - 8):
        return b"", []
    try:
        header: dict[str, Any] = json.loads(file.read(length))
        header.pop("__metadata__", None)
        starts = []
        for entry in header.values():
            begin, end = (int(edge) for edge in entry["data_offsets"])
            middle = begin + max(0, (end - begin - PIECE_BYTES) // 2)
            starts.append(8 + length + middle)
    except (ValueError, TypeError, KeyError, AttributeError):
        return b"", []
    return json.dumps(header, sort_keys=True).encode(), sorted(starts)


def _model_folder(model: str, revision: str | None) -> Path | None:
    path = Path(model)
    if path.is_dir():
        return path
    if path.is_file():
        return path.parent
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(model, revision=revision, local_files_only=True))
    except Exception:  # noqa: BLE001  any failure means only: the files are not here
        return None
