"""What of a model decides how many GPUs it needs: from its ``config.json``, or from a small table.

Sizes are in bytes, and counts are of the whole model. :class:`UnknownModel` says in one
sentence what is missing.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdcluster_connector.compat.findings import counted
from pdcluster_operator.api.findings import did_you_mean
from pdcluster_operator.api.spec.model_config import (
    Model,
    UnknownModel,
    number,
    read_model,
)
from pdcluster_operator.api.spec.pod_templates import as_mapping

MOST_MIB = 32
WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The sizes of one model.

    Attributes:
        heads: of the queries; a tensor parallel size divides them.
        kv_heads: heads of the KV cache. 0 for multi-head latent attention (MLA).
        head_dim: elements of a head; of a token's latent vector with MLA.
        longest: tokens of the longest context; 0 if the config does not say.
        weights: bytes.
        weights_said: where that number is from.
        active: parameters that one token passes; None if it cannot be told.
        sliding: whether some layers keep only a window. Counting all of the context is then an
            upper bound.
    """

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    longest: int
    weights: int
    weights_said: str
    active: int | None
    sliding: bool = False

    @property
    def kv_formula(self) -> str:
        """The formula of :attr:`kv_bytes`, with its numbers."""
        if not self.kv_heads:
            return f"{self.layers} layers x {self.head_dim} elements (MLA) x 2 bytes"
        heads = f"{self.kv_heads} KV heads x {self.head_dim} elements"
        return f"{self.layers} layers x 2 (K and V) x {heads} x 2 bytes"

    @property
    def kv_bytes(self) -> int:
        """Bytes of KV of a token, in 16 bits."""
        return self.kv_bytes_of_rank(1)

    def kv_bytes_of_rank(self, tensor: int) -> int:
        """Return the bytes of KV of a token on each of ``tensor`` ranks.

        A rank holds at least one head, and with MLA all of the latent vector.
        """
        heads = 2 * max(1, -(-self.kv_heads // tensor)) if self.kv_heads else 1
        return self.layers * heads * self.head_dim * 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A model of the table.

    Attributes:
        revision: the commit of the repository whose config.json these numbers are from.
        config: the fields of that config.json that matter.
        weights, active: where the numbers do not follow from the config (experts).
    """

    repo: str
    revision: str
    config: Mapping[str, Any]
    gated: bool = False
    weights: int | None = None
    active: int | None = None


def _config(layers: int, hidden: int, inner: int, heads: int, kv: int, vocabulary: int,
            longest: int, **more: Any) -> dict[str, Any]:  # fmt: skip
    return {
        "num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": inner,
        "num_attention_heads": heads, "num_key_value_heads": kv, "vocab_size": vocabulary,
        "max_position_embeddings": longest, **more,
    }  # fmt: skip


QWEN2 = {"model_type": "qwen2"}
FAMILIES = {
    "qwen2.5-0.5b": Family(
        repo="Qwen/Qwen2.5-0.5B-Instruct", revision="7ae557604adf67be50417f59c2c2f167def9a775",
        config=_config(24, 896, 4864, 14, 2, 151_936, 32_768, **QWEN2,
                       tie_word_embeddings=True),
    ),
    "qwen2.5-7b": Family(
        repo="Qwen/Qwen2.5-7B-Instruct", revision="a09a35458c702b33eeacc393d103063234e8bc28",
        config=_config(28, 3584, 18_944, 28, 4, 152_064, 32_768, **QWEN2),
    ),
    "qwen2.5-72b": Family(
        repo="Qwen/Qwen2.5-72B-Instruct", revision="495f39366efef23836d0cfae4fbe635880d2be31",
        config=_config(80, 8192, 29_568, 64, 8, 152_064, 32_768, **QWEN2),
    ),
    "llama-3.1-8b": Family(
        repo="meta-llama/Llama-3.1-8B-Instruct", gated=True,
        revision="0e9e39f249a16976918f6564b8830bc894c89659",
        config=_config(32, 4096, 14_336, 32, 8, 128_256, 131_072),
    ),
    "llama-3.3-70b-fp8": Family(
        repo="RedHatAI/Llama-3.3-70B-Instruct-FP8-dynamic",
        revision="ddb4128556dfcff99e0c41aee159ea6c3e655dcd",
        config=_config(80, 8192, 28_672, 64, 8, 128_256, 131_072,
                       quantization_config={"quant_method": "compressed-tensors"}),
        weights=72_700_000_000, active=70_553_706_496,
    ),
    # 671 billion parameters of which a token passes 37, in FP8, and a draft layer
    # (the model's card and model.safetensors.index.json).
    "deepseek-r1": Family(
        repo="deepseek-ai/DeepSeek-R1", revision="56d4cbbb4d29f4355bab4b9a39ccb717a14ad5ad",
        config=_config(61, 7168, 18_432, 128, 128, 129_280, 163_840,
                       model_type="deepseek_v3", kv_lora_rank=512, qk_rope_head_dim=64,
                       n_routed_experts=256),
        weights=688_600_000_000, active=37_000_000_000,
    ),
}  # fmt: skip
"""Each is pinned to the commit that ``examples/`` names; its config.json there is the source."""


def family(name: str) -> Family:
    """Return a model of the table, by its short name or its repository, in any case."""
    folded = {**{one.repo.lower(): one for one in FAMILIES.values()}, **FAMILIES}
    if (found := folded.get(name.lower())) is None:
        near = did_you_mean(name, FAMILIES)
        raise UnknownModel(
            f"--model = {name}: neither a folder nor a model of the table "
            f"({', '.join(FAMILIES)}). {near + ' ' if near else ''}"
            "For any other model, name a folder with its config.json"
        )
    return found


def shape_of_family(one: Family) -> Shape:
    """Return the sizes of a model of the table."""
    return shape(one.config, weights=one.weights, said="the repository's files", active=one.active)


def shape(
    config: Mapping[str, Any], *, weights: int | None, said: str, active: int | None = None
) -> Shape:
    """Read a model's sizes.

    Args:
        config: what config.json holds.
        weights: bytes of the weights' files; None to compute them, which needs a model without
            experts and in 16 bits.
        said: where ``weights`` is from.
        active: parameters that a token passes, if they are known.

    Raises:
        UnknownModel: a field is missing, or the model is of a kind that this does not know.
    """
    config = {**config, **as_mapping(config.get("text_config"))}
    model = read_model(config)
    if model.hybrid:
        raise UnknownModel(
            "config.json: some layers keep states beside KV, and init computes KV only; begin with "
            "examples/hybrid.yaml"
        )
    heads, kv_heads, head_dim = model.heads, model.kv_heads, model.head_dim
    dense = not any("experts" in key and config[key] for key in config) and kv_heads
    counted = None
    if dense:
        hidden = number(config, "hidden_size")
        counted = _parameters(config, hidden, kv_heads * head_dim, heads * head_dim)
    if weights is None:
        if counted is None or config.get("quantization_config"):
            raise UnknownModel(
                "config.json: the bytes of the weights follow from it only for models without "
                "experts and without quantization; name a folder that also holds the weights, or "
                "their model.safetensors.index.json"
            )
        weights, said = counted * 2, f"{counted:,} parameters x 2 bytes"
    return Shape(
        layers=model.depth, heads=heads, kv_heads=kv_heads, head_dim=head_dim,
        longest=number(config, "max_position_embeddings", 0),
        weights=weights, weights_said=said, active=active or counted,
        sliding=bool(config.get("sliding_window") and config.get("use_sliding_window", True)),
    )  # fmt: skip


def _parameters(config: Mapping[str, Any], hidden: int, kv: int, queries: int) -> int | None:
    """Return how many parameters a model of Llama's kind has; None if fields are missing.

    Embeddings, four matrices of attention and three of the feed-forward network, norms; and
    Qwen2's biases of queries, keys and values.
    """
    if not {"vocab_size", "intermediate_size"} <= config.keys():
        return None
    ends = 1 if config.get("tie_word_embeddings") else 2
    biased = config.get("attention_bias") or config.get("model_type") == "qwen2"
    layer = 2 * hidden * (queries + kv) + 3 * hidden * number(config, "intermediate_size")
    layer += 2 * hidden + (queries + 2 * kv if biased else 0)
    embeddings = ends * number(config, "vocab_size") * hidden
    return embeddings + number(config, "num_hidden_layers") * layer + hidden


def read_shape(model: str) -> Shape:
    """Return the sizes of a folder's model, or of one of the table.

    Raises:
        UnknownModel: it is neither, or its config.json does not say enough.
    """
    folder = Path(model)
    if not os.path.isdir(folder):
        return shape_of_family(family(model))
    weights, said = _weights(folder)
    return shape(json_of(folder / "config.json"), weights=weights, said=said)


def _weights(folder: Path) -> tuple[int | None, str]:
    for pattern in WEIGHTS:
        if sizes := [one.stat().st_size for one in folder.glob(pattern)]:
            return sum(sizes), f"{counted(len(sizes), 'file')} {pattern} of the folder"
    if (folder / INDEX).exists():
        total = (json_of(folder / INDEX).get("metadata") or {}).get("total_size")
        if isinstance(total, int) and total > 0:
            return total, f"{INDEX} of the folder"
    return None, ""


def json_of(file: Path) -> dict[str, Any]:
    """Return the object that a file of JSON holds; raises :class:`UnknownModel`."""
    try:
        with file.open("rb") as opened:
            data = opened.read((MOST_MIB << 20) + 1)
        if len(data) > MOST_MIB << 20:
            raise UnknownModel(f"{file} is larger than {MOST_MIB} MiB")
        found = json.loads(data)
    except OSError as error:
        raise UnknownModel(
            f"{file} cannot be read: {error.strerror}; name the folder of a model, as "
            "Hugging Face has it"
        ) from error
    except (ValueError, RecursionError) as error:
        raise UnknownModel(f"{file} is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise UnknownModel(f"{file} holds no JSON object")
    return found


def model_of(document: Any) -> Model | None:
    """Return what the config.json of the manifest's folder says; None if it does not say enough.

    The pre-flight says what is wrong with the folder.
    """
    source = document
    for name in ("spec", "model", "source", "hostPath"):
        source = as_mapping(as_mapping(source).get(name))
    try:
        return read_model(json_of(Path(str(source.get("path")), "config.json")))
    except UnknownModel:
        return None
