"""What a model's ``config.json`` says of its KV cache, before any engine runs. Pure.

Where it does not say enough, nothing is guessed: the layers are not known then, and the engines
check them when they connect. :class:`UnknownModel` says in one sentence what is missing.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pdcluster_connector.compat import supported
from pdcluster_connector.compat.shape import LayerKind, LayerShape, PartShape
from pdcluster_operator.api.findings import quoted
from pdcluster_operator.api.spec.fields import NAME
from pdcluster_operator.api.spec.pod_templates import as_list, as_mapping

CONFIG = "config.json"
MOST = 1 << 40
"""No field of a real model is larger."""
MOST_LAYERS = 8192
MOST_CHARACTERS = 1 << 18
"""Of a config.json in a ConfigMap. Published ones have some thousand."""
BYTES = {"float32": 4, "fp8_e4m3": 1, "fp8_e5m2": 1}
"""Bytes of an element; 2 for the other types."""
HYBRID_WORDS = ("mamba", "ssm_", "linear_attn", "linear_num")
"""Beginnings of fields that only models with states beside their KV have."""
FULL, WINDOW, STATE = LayerKind.FULL_ATTENTION, LayerKind.SLIDING_WINDOW, LayerKind.MAMBA
KINDS: Mapping[object, LayerKind | None] = {
    "full_attention": FULL, "attention": FULL, "*": FULL, "sliding_attention": WINDOW,
    "linear_attention": STATE, "mamba": STATE, "mamba2": STATE, "M": STATE,
    "moe": None, "mlp": None, "E": None, "-": None,
}  # fmt: skip
"""Words of ``layer_types`` and letters of ``hybrid_override_pattern``; None for one without KV."""
DEFAULTS: Mapping[object, Mapping[str, Any]] = {
    "gemma2": {"sliding_window_pattern": 2},
    "gemma3_text": {
        "sliding_window_pattern": 6, "sliding_window": 4096, "num_attention_heads": 8,
        "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 131_072,
    },
    "gpt_oss": {"sliding_window_pattern": 2},
    "nemotron_h": {"mamba_ssm_cache_dtype": "float32"},
    "qwen3_next": {"full_attention_interval": 4},
    "qwen3_5_text": {"full_attention_interval": 4},
    "qwen3_5_moe_text": {"full_attention_interval": 4},
}  # fmt: skip
"""What a family's ``config.json`` may leave out (transformers 5.19)."""
OPEN = (
    "attention_chunk_size", "attn_type_list", "block_configs", "conv_L_cache",
    "cross_attention_layers", "full_attn_idxs", "global_head_dim", "is_encoder_decoder",
    "layer_group_size", "multi_query", "multi_query_group_num", "n_head_kv",
    "num_attention_groups", "num_global_key_value_heads", "num_kv_heads", "num_kv_shared_layers",
    "swa_num_key_value_heads",
)  # fmt: skip
"""Fields of models whose layers keep KV in ways that are not computed here."""
LATENT = (
    "axk1", "bailing_hybrid", "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite",
    "glm_moe_dsa", "kimi_k2", "kimi_linear", "longcat_flash", "pangu_ultra_moe",
)  # fmt: skip
"""Models of which vLLM 0.32 keeps latent vectors (is_deepseek_mla), not keys and values."""
COMPARED = (
    "deepseek_v2", "deepseek_v3", "deepseek_v32", "gemma3_text", "gpt_oss",
    "granitemoehybrid", "llama", "mistral", "nemotron_h", "qwen2", "qwen3", "qwen3_moe",
    "qwen3_next",
)  # fmt: skip
"""Models whose bytes were compared with those of vLLM's own classes
(``operator/tests/api/test_model_configs_in_vllm.py``)."""
UNSCALED = ("su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling")
"""Kinds of RoPE whose ``factor`` is part of ``max_position_embeddings`` (vLLM 0.32)."""
QUANTIZED_KV = ("kv_cache_scheme", "kv_cache_quant_algo")
"""Fields of a checkpoint that brings a type of its own for the KV cache."""
GATED = "conv.v"
"""A part of the states of a gated delta net only."""
INDEXER = "attention backend=DEEPSEEK_V32_INDEXER"
INDEXER_BLOCK = 128
"""Elements of a scale in the cache of DeepSeek V3.2's indexer; each scale has 4 bytes."""


class UnknownModel(Exception):  # noqa: N818 - says what holds
    """The model's sizes cannot be told; the message says why (``what``), and what to do."""

    def __init__(self, what: str, remedy: str = "") -> None:
        super().__init__(f"{what}; {remedy}" if remedy else what)
        self.what = what


@dataclass(frozen=True, slots=True)
class FoundConfig:
    """What was found for a model's config.json.

    Attributes:
        config: what a file of this machine holds; None where a ConfigMap is asked.
        config_map: keys and texts of the ConfigMap that a spec names; None if there is none.
        unread: why the ConfigMap could not be read; empty if it could.
    """

    config: Mapping[str, Any] | None = None
    config_map: Mapping[str, str] | None = None
    unread: str = ""


def named_config_map(manifest: object) -> tuple[str, str]:
    """Return name and key of a manifest's ``spec.model.configMapRef``; empty if there is none."""
    ref = manifest
    for part in ("spec", "model", "configMapRef"):
        ref = as_mapping(as_mapping(ref).get(part))
    name, key = as_mapping(ref).get("name"), as_mapping(ref).get("key")
    usable = isinstance(name, str) and re.fullmatch(NAME.pattern or "", name)
    return (str(name), str(key or CONFIG)) if usable else ("", "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """One model, of which counts are those before tensor parallelism.

    Attributes:
        heads: of the queries; a tensor parallel size divides them.
        kv_heads: heads of the KV cache. 0 for multi-head latent attention (MLA).
        head_dim: elements of a head; of a token's latent vector with MLA.
        depth: its layers, also those without KV.
        longest: tokens of the longest context; 0 if the config does not say.
        dtype: of the weights and the KV cache; empty if the config does not say.
        layers: those with KV or states; None if they cannot be told.
        hybrid: whether some layers keep states beside KV; None if that cannot be told.
        untold: why the layers cannot be told, or only from the usual fields; empty if they can.
    """

    heads: int
    kv_heads: int
    head_dim: int
    depth: int
    longest: int
    dtype: str
    layers: tuple[LayerShape, ...] | None
    hybrid: bool | None
    untold: str = ""

    @property
    def has_gated_states(self) -> bool:
        """Whether some layers keep states of a gated delta net."""
        return any(part.name == GATED for layer in self.layers or () for part in layer.parts)

    def kv_bytes(self, tokens: int) -> int:
        """Return the bytes of a prompt: of a window, its tokens alone; of a state, one."""
        return sum(
            layer.kv_heads
            * layer.token_bytes
            * (1 if layer.kind is STATE else min(tokens, layer.window or tokens))
            for layer in self.layers or ()
        )


def read_model(config: Mapping[str, Any], kv_dtype: str | None = None) -> Model:
    """Read what ``config.json`` holds.

    Args:
        kv_dtype: the element type of the KV cache; None for that of the model.

    Raises:
        UnknownModel: a field is missing, or is no number.
    """
    text = {**config, **as_mapping(config.get("text_config"))}
    given = {name: value for name, value in text.items() if value is not None}
    known = {**DEFAULTS.get(str(given.get("model_type")), {}), **given}
    depth, heads = number(known, "num_hidden_layers"), number(known, "num_attention_heads")
    kv_heads = number(known, "num_key_value_heads", heads)
    hidden = number(known, "hidden_size", heads)
    head_dim = number(known, "head_dim", max(1, hidden // heads))
    kind = known.get("model_type")
    latent = "kv_lora_rank" in known
    untold = [f"{name} is set" for name in OPEN if known.get(name)]
    if kv_dtype in supported.WHOLE:
        untold.append(f"the bytes of a token in KV of the type {kv_dtype} are not computed")
    if latent and kind not in LATENT:
        untold.append(f"nothing says how a model_type {quoted(kind)} uses kv_lora_rank")
    elif latent:
        if BYTES.get(kv_dtype or "") == 1 and known.get("index_head_dim"):
            untold.append(f"its indexer has no known size with KV of the type {kv_dtype}")
        kv_heads = 0
        head_dim = number(known, "kv_lora_rank") + number(known, "qk_rope_head_dim")
    dtype = str(known.get("torch_dtype") or known.get("dtype") or "")
    quantized = as_mapping(known.get("quantization_config"))
    words = _words(known)
    kinds, layers = _kinds(known, depth, words), None
    states = any(name.startswith(HYBRID_WORDS) for name in known) or STATE in (kinds or ())
    states |= any("mamba" in str(word) or "linear" in str(word) for word in words)
    if kinds is None:
        untold.append("its fields do not say which layers have a window or states")
    elif not untold:
        size = BYTES.get(kv_dtype or dtype, 2)
        layer = (kv_heads or 1, head_dim * size * (2 if kv_heads else 1))
        try:
            layers = tuple(_layers(known, kinds, layer, BYTES.get(dtype, 2)))
        except UnknownModel as error:  # a Mamba of another kind, say
            untold.append(error.what.removeprefix("config.json: "))
    if kind not in COMPARED:
        untold.append(f"the sizes of a model_type {quoted(kind)} were not compared with vLLM's")
    return Model(
        heads=heads, kv_heads=kv_heads, head_dim=head_dim, depth=depth,
        dtype="" if any(quantized.get(name) for name in QUANTIZED_KV) else dtype,
        longest=_longest(known), layers=layers,
        hybrid=states or (None if layers is None else False),
        untold=untold[0] if untold else "",
    )  # fmt: skip


def found_in(config_map: Mapping[str, Any] | None, key: str) -> FoundConfig:
    """Return what a live ConfigMap says, None being none: all keys, and the text of ``key``."""
    if config_map is None:
        return FoundConfig()
    texts = as_mapping(config_map.get("data"))
    most = MOST_CHARACTERS + 1  # of which one too many shows that a text is too long
    return FoundConfig(None, {one: str(texts[one])[:most] if one == key else "" for one in texts})


def read_text(text: str) -> dict[str, Any]:
    """Return the object of a config.json. UnknownModel says why not, and nothing of the text."""
    if len(text) > MOST_CHARACTERS:
        raise UnknownModel(f"has more than {MOST_CHARACTERS:,} characters")
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UnknownModel(f"is no JSON that can be read: {error}") from None
    if not isinstance(found, dict):
        raise UnknownModel("holds no JSON object")
    return found


def _words(known: Mapping[str, Any]) -> list[Any]:
    """Return what the config says of each layer; empty if it lists none."""
    listed = known.get("layer_types") or known.get("layers_block_type")
    return list(as_list(listed) or str(known.get("hybrid_override_pattern") or ""))


def _kinds(known: Mapping[str, Any], depth: int, words: list[Any]) -> list[LayerKind | None] | None:
    """Return how each layer keeps its KV; None if that cannot be told."""
    if depth > MOST_LAYERS:
        return None
    window = known.get("sliding_window") and known.get("use_sliding_window", True)
    if words:
        named = all(isinstance(word, str) and word in KINDS for word in words)
        return [KINDS[word] for word in words] if named and len(words) == depth else None
    for field, kind in (("full_attention_interval", STATE), ("sliding_window_pattern", WINDOW)):
        if field in known and (kind is STATE or window):
            every = number(known, field)
            return [kind if (layer + 1) % every else FULL for layer in range(depth)]
    if any(name.startswith(HYBRID_WORDS) for name in known):
        return None
    if window and "max_window_layers" in known:
        return None if known.get("use_sliding_window") else [FULL] * depth
    return [WINDOW if window else FULL] * depth


def _layers(
    known: Mapping[str, Any],
    kinds: list[LayerKind | None],
    layer: tuple[int, int],
    state_bytes: int,
) -> Iterator[LayerShape]:
    """Yield the layers that have KV.

    Args:
        layer: the KV heads of an attention layer, and the bytes of a token of one.
        state_bytes: of an element of the model.
    """
    latent, indexed = "kv_lora_rank" in known, known.get("index_head_dim")
    for index, kind in enumerate(kinds):
        name = f"layers.{index}"
        if kind is STATE:
            size, parts = _state(known, state_bytes)
            yield LayerShape(name, STATE, 0, 1, size, parts=parts)
        elif kind is not None:
            window = number(known, "sliding_window") if kind is WINDOW else None
            yield LayerShape(name, LayerKind.MLA if latent else kind, 0, *layer, window)
            if indexed:
                size = number(known, "index_head_dim")
                size += size // INDEXER_BLOCK * 4
                yield LayerShape(
                    f"{name}.indexer", LayerKind.MLA, 0, 1, size, None, "uint8", whole=INDEXER
                )


def _state(known: Mapping[str, Any], size: int) -> tuple[int, tuple[PartShape, ...]]:
    """Return the bytes of a layer's states, and parts that are cut by head."""
    gated = "linear_num_value_heads" in known
    if gated:
        heads, value = _numbers(known, "linear_num_value_heads", "linear_value_head_dim")
        groups, state = _numbers(known, "linear_num_key_heads", "linear_key_head_dim")
        kernel = number(known, "linear_conv_kernel_dim")
    elif "mamba_num_heads" in known:  # Mamba2, as Nemotron-H names it
        heads, value, groups = _numbers(known, "mamba_num_heads", "mamba_head_dim", "n_groups")
        state, kernel = _numbers(known, "ssm_state_size", "conv_kernel")
    else:  # Mamba2, as Granite and Bamba do
        heads, value, groups = _numbers(known, "mamba_n_heads", "mamba_d_head", "mamba_n_groups")
        state, kernel = _numbers(known, "mamba_d_state", "mamba_d_conv")
    dtype = str(known.get("mamba_ssm_dtype") or known.get("mamba_ssm_cache_dtype") or "")
    head = value * state * (BYTES.get(dtype, 2) if dtype else size)
    conv = (kernel - 1) * (heads * value + 2 * groups * state) * size
    of_values = (PartShape(GATED, heads, (kernel - 1) * value * size, "model"),) if gated else ()
    return conv + heads * head, (*of_values, PartShape("ssm", heads, head, dtype or "model"))


def _longest(known: Mapping[str, Any]) -> int:
    """Return the longest context that vLLM admits; 0 if the config does not say."""
    longest = max(number(known, "max_position_embeddings", 0), number(known, "model_max_length", 0))
    ropes = [as_mapping(known.get(name)) for name in ("rope_scaling", "rope_parameters")]
    ropes += [as_mapping(rope) for one in ropes for rope in one.values()]
    factors = [
        factor
        for rope in ropes
        if rope.get("rope_type", rope.get("type")) not in UNSCALED
        and isinstance(factor := rope.get("factor"), int | float)
        and factor < MOST  # neither Infinity nor NaN
    ]
    scaled = not str(known.get("model_type")).startswith("gemma3")
    return int(longest * max([1.0, *factors])) if scaled else longest


def _numbers(known: Mapping[str, Any], *names: str) -> tuple[int, ...]:
    return tuple(number(known, name) for name in names)


def number(config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """Return a field that counts something; raises :class:`UnknownModel` for any other value."""
    value = config.get(name)
    if value is None and default is not None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < MOST:
        raise UnknownModel(
            f"config.json: {name} = {quoted(value)} is no whole number above 0",
            "name a folder with the config.json of a language model, as Hugging Face has it",
        )
    return value
