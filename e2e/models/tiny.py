"""Tiny random models: engines that load in seconds and whose greedy output depends on all KV.

Each model is made once from a fixed seed and kept in the user's cache folder. Its name holds the
recipe's version, so raise VERSION when you change a recipe.

The tokenizer has one token for each byte and needs no network. Only printable ASCII can be sampled,
because the other rows of the output layer are zero. So generated text is lossless and readable.
"""

from __future__ import annotations

import argparse
import os
import shutil
import string
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

VERSION = 3
CHAT = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "assistant: "
)


@dataclass(frozen=True)
class Recipe:
    """One model: a transformers configuration class, what differs from BASE, and a seed.

    ``kv_scale``: keep KV in fp8, with scales in the checkpoint that grow from this one.
    """

    config: str
    seed: int = 0
    overrides: dict[str, Any] = field(default_factory=dict)
    kv_scale: float | None = None


BASE: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}

GAINS = {"q_proj": 3.0, "k_proj": 3.0, "down_proj": 0.5}

# As llm-compressor writes it; the weights themselves are not quantised.
FP8_KV = {
    "quant_method": "compressed-tensors",
    "format": "dense",
    "config_groups": {},
    "ignore": [],
    "quantization_status": "compressed",
    "kv_cache_scheme": {
        "num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True,
    },
}  # fmt: skip

EVERY_OTHER_WINDOW: dict[str, Any] = {
    "sliding_window": 64,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
GRANITE: dict[str, Any] = {
    "layer_types": ["mamba", "mamba", "attention", "mamba"],
    "num_local_experts": 0,
    "num_experts_per_tok": 0,
    "shared_intermediate_size": 512,
    "position_embedding_type": "rope",
    "attention_multiplier": 32**-0.5,
    "mamba_n_heads": 8,
    "mamba_d_head": 64,
    "mamba_d_state": 64,
    "mamba_n_groups": 2,
    "mamba_chunk_size": 64,
}

RECIPES = {
    "llama": Recipe("LlamaConfig"),
    # The same architecture with other weights: a fine-tune, as far as a connector can tell.
    "llama-finetuned": Recipe("LlamaConfig", seed=1),
    # The same weights with KV scales of their own, and with others.
    "llama-fp8-kv": Recipe("LlamaConfig", kv_scale=0.3),
    "llama-fp8-kv-rescaled": Recipe("LlamaConfig", kv_scale=0.7),
    # Dense layers, with a config that names experts. vLLM then runs data-parallel ranks in
    # lockstep, as for every mixture of experts. Its CPU backend cannot spread real expert layers.
    "llama-lockstep": Recipe("LlamaConfig", overrides={"num_experts": 4}),
    # Fewer KV heads than tensor ranks: heads are replicated.
    "llama-mqa": Recipe("LlamaConfig", overrides={"num_key_value_heads": 1}),
    # One KV cache group whose early blocks are given back.
    "mistral-window": Recipe("MistralConfig", overrides={"sliding_window": 128}),
    # Rotary embeddings for long contexts: which ones count depends on --max-model-len.
    "phi3-longrope": Recipe(
        "Phi3Config",
        overrides={
            "original_max_position_embeddings": 512,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": [1.0] * 16,
                "long_factor": [1.0 + number for number in range(16)],
                "original_max_position_embeddings": 512,
            },
        },
    ),
    # Groups with and without a window.
    "gemma3-hybrid": Recipe(
        "Gemma3TextConfig",
        overrides={
            **EVERY_OTHER_WINDOW,
            "query_pre_attn_scalar": 32,
        },
    ),
    # Windows with other heads than full attention, and two layers that read the KV of the first.
    "gemma4-own-heads": Recipe(
        "Gemma4TextConfig",
        overrides={
            **EVERY_OTHER_WINDOW,
            "num_key_value_heads": 8,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 4,
            "global_head_dim": 64,
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 0,
        },
    ),
    # More heads in full attention than the model states: with one a rank, which ones is not known.
    "gemma4-more-heads": Recipe(
        "Gemma4TextConfig",
        overrides={
            **EVERY_OTHER_WINDOW,
            "num_key_value_heads": 1,
            "head_dim": 64,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 2,
            "global_head_dim": 64,
            "num_kv_shared_layers": 0,
            "hidden_size_per_layer_input": 0,
        },
    ),
    # The same, and vLLM keeps no more heads than the model states: layers with a window have two.
    "mimo-own-heads": Recipe(
        "MiMoV2FlashConfig",
        overrides={
            **EVERY_OTHER_WINDOW,
            "sliding_window": 128,
            "mlp_layer_types": ["dense"] * 4,
            "num_key_value_heads": 1,
            "v_head_dim": 32,
            "attention_value_scale": None,
            # vLLM reads these names of the checkpoint that was published.
            "hybrid_layer_pattern": [1, 0, 1, 0],
            "moe_layer_freq": [0] * 4,
            "layernorm_epsilon": 1e-5,
            "add_swa_attention_sink_bias": True,
            "sliding_window_size": 128,
            "swa_num_attention_heads": 8,
            "swa_num_key_value_heads": 2,
            "swa_head_dim": 32,
            "swa_v_head_dim": 32,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
    "gpt-oss": Recipe(
        "GptOssConfig",
        overrides={
            **EVERY_OTHER_WINDOW,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
    # One latent that every tensor rank holds.
    "deepseek-mla": Recipe(
        "DeepseekV2Config",
        overrides={
            "num_key_value_heads": 8,
            "head_dim": 64,
            "kv_lora_rank": 512,
            "q_lora_rank": None,
            "qk_nope_head_dim": 32,
            "qk_rope_head_dim": 64,
            "v_head_dim": 32,
            "first_k_dense_replace": 4,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 128,
        },
    ),
    # Mamba2 states beside attention.
    "granite-hybrid": Recipe("GraniteMoeHybridConfig", overrides=GRANITE),
    # One B/C group, of which every tensor rank has a copy.
    "granite-one-group": Recipe(
        "GraniteMoeHybridConfig", overrides={**GRANITE, "mamba_n_groups": 1}
    ),
}


def default_cache() -> Path:
    """The user's cache folder for models. dev/environment.py says where it is."""
    if own := os.environ.get("PDCLUSTER_CACHE"):
        return Path(own).expanduser() / "models"
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "pdcluster" / "models"


def model_path(name: str, cache: Path | None = None) -> Path:
    """Folder of model ``name``, made on first use. Safe to call from several processes."""
    if name not in RECIPES:
        raise ValueError(f"no model named {name!r}; known: {', '.join(sorted(RECIPES))}")
    folder = (cache or default_cache()) / f"{name}-v{VERSION}"
    if (folder / "config.json").is_file():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=folder.parent))
    try:
        _write(RECIPES[name], draft)
        draft.chmod(0o755)
        for file in draft.iterdir():
            file.chmod(0o644)
        try:
            draft.rename(folder)
        except OSError:
            # Another process has finished first. Its files are the same.
            if not (folder / "config.json").is_file():
                raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return folder


def _write(recipe: Recipe, folder: Path) -> None:
    import torch
    import transformers

    tokenizer = _byte_tokenizer()
    settings = {**BASE, **recipe.overrides}
    config = getattr(transformers, recipe.config)(
        vocab_size=len(tokenizer),
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **settings,
    )
    generator = torch.Generator().manual_seed(recipe.seed)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() < 2:
                continue
            # Unit variance everywhere, with two exceptions: attention is peaked, and the MLPs
            # add less than attention does. So the output depends on single tokens far back,
            # and does not fall into repetition.
            scale = GAINS.get(name.split(".")[-2], 1.0)
            if "embed_tokens" not in name:
                scale /= parameter.shape[1] ** 0.5
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
        printable = {ord(c) for c in string.printable[:95]}
        for token in range(len(tokenizer)):
            text = tokenizer.decode([token])
            if len(text) != 1 or ord(text) not in printable:
                model.get_output_embeddings().weight[token] = 0
    if recipe.kv_scale is not None:
        model.config.quantization_config = FP8_KV
        for i, layer in enumerate(model.model.layers):
            for name, scale in (("k_scale", i + 1), ("v_scale", 1 / (i + 1))):
                value = torch.tensor([recipe.kv_scale * scale])
                layer.self_attn.register_parameter(name, torch.nn.Parameter(value))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _byte_tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<bos>", "<eos>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate(special + alphabet)}
    # A vocabulary that several tensor ranks can share evenly.
    while len(vocabulary) % 64:
        vocabulary[f"<unused{len(vocabulary)}>"] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
    )
    made.chat_template = CHAT
    return made


def main() -> None:
    """Make one model and print its folder."""
    parser = argparse.ArgumentParser(description="Make a tiny random model and print its folder.")
    parser.add_argument("name", choices=sorted(RECIPES), nargs="?", default="llama")
    parser.add_argument("--cache", type=Path, default=None, help="folder to keep models in")
    arguments = parser.parse_args()
    print(model_path(arguments.name, arguments.cache))


if __name__ == "__main__":
    main()
