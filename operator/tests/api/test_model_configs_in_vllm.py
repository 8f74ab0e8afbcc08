"""The models of ``model_configs.yaml`` as transformers and vLLM read them: the same bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from vllm_child import ask

from pdcluster_operator.api.spec.model_config import COMPARED, LATENT, read_model

CHILD = """
import json, math, sys
from types import SimpleNamespace as Some
sys.path[:0] = json.loads(sys.argv[1])
from pdcluster_connector.launcher.vllm_shim import answer_for_vllm
answer_for_vllm()
import torch, vllm.config
from transformers import AutoConfig
from vllm.model_executor.models.config import NemotronHForCausalLMConfig as nemotron
from vllm.model_executor.models.granitemoehybrid import GraniteMoeHybridForCausalLM
from vllm.model_executor.models.nemotron_h import NemotronHForCausalLM
from vllm.model_executor.models.qwen3_next import Qwen3NextForCausalLM
from vllm.transformers_utils.config import _CONFIG_REGISTRY
from vllm.transformers_utils.model_arch_config_convertor import ModelArchConfigConvertorBase
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec

STATES = {"granitemoehybrid": GraniteMoeHybridForCausalLM, "nemotron_h": NemotronHForCausalLM,
          "qwen3_next": Qwen3NextForCausalLM}
BLOCK, KIND = 16, torch.bfloat16

def states(kind, config, text):
    cache = Some(mamba_cache_dtype="auto", mamba_ssm_cache_dtype="auto", use_replayssm=False)
    if kind == "nemotron_h":
        nemotron.update_mamba_ssm_cache_dtype(cache_config=cache, hf_config=config)
    given = Some(cache_config=cache, parallel_config=Some(tensor_parallel_size=1),
                 model_config=Some(hf_config=config, hf_text_config=text, dtype=KIND),
                 speculative_config=None, num_speculative_tokens=0)
    shapes = STATES[kind].get_mamba_state_shape_from_config(given)
    dtypes = STATES[kind].get_mamba_state_dtype_from_config(given)
    return sum(math.prod(s) * d.itemsize for s, d in zip(shapes, dtypes))

answer = {}
for name, fields in json.load(sys.stdin).items():
    kind = fields.pop("model_type")
    known = _CONFIG_REGISTRY[kind] if kind in _CONFIG_REGISTRY else None
    config = known(**fields) if known else AutoConfig.for_model(kind, **fields)
    text = config.get_text_config()
    read = ModelArchConfigConvertorBase(config, text)
    heads, size = read.get_total_num_kv_heads(), read.get_head_size()
    if read.is_deepseek_mla():
        spec = MLAAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=size, dtype=KIND)
    else:
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=heads, head_size=size, dtype=KIND)
    of_token = spec.page_size_bytes // BLOCK
    if head := getattr(text, "index_head_dim", None):  # DeepseekV32IndexerCache
        of_token += head + head // 128 * 4
    window = getattr(text, "sliding_window", None)
    alike = ["sliding_attention" if window else "full_attention"] * read.get_num_hidden_layers()
    kinds = getattr(text, "layer_types", None) or alike
    def kept(tokens):
        of = {"full_attention": of_token * tokens, "mlp": 0, "moe": 0,
              "sliding_attention": of_token * min(tokens, window or tokens)}
        if kind in STATES:
            of["linear_attention"] = of["mamba"] = states(kind, config, text)
        return sum(of[each] for each in kinds)
    longest = read.derive_max_model_len_and_key()[0]
    answer[name] = [kept(1), kept(8192), read.get_total_num_attention_heads(), len(kinds), longest]
print("ANSWER" + json.dumps(answer))
"""


@pytest.mark.vllm
def test_vllm_keeps_what_is_computed_from_the_config() -> None:
    text = Path(__file__).with_name("model_configs.yaml").read_text()
    configs = {name: one["config"] for name, one in yaml.safe_load(text).items()}
    models = {name: read_model(config) for name, config in configs.items()}
    assert ask(CHILD, configs) == {
        name: [one.kv_bytes(1), one.kv_bytes(8192), one.heads, one.depth, one.longest]
        for name, one in models.items()
    }


LATENT_CHILD = """
import json, sys
from types import CodeType, SimpleNamespace as Some
sys.path[:0] = json.loads(sys.argv[1])
from pdcluster_connector.launcher.vllm_shim import answer_for_vllm
answer_for_vllm()
import vllm.config
from vllm.transformers_utils.model_arch_config_convertor import ModelArchConfigConvertorBase as read

def words(value):
    if isinstance(value, str):
        yield value
    elif isinstance(value, CodeType):
        yield from (one for part in value.co_consts for one in words(part))
    elif isinstance(value, (tuple, frozenset)):
        yield from (one for part in value for one in words(part))

def keeps_latents(kind):
    text = Some(model_type=kind, kv_lora_rank=512, qk_rope_head_dim=64, architectures=[])
    return bool(read(text, text).is_deepseek_mla())

asked = json.load(sys.stdin)
named = set(words(read.is_deepseek_mla.__code__)) - {"eagle"}
print("ANSWER" + json.dumps([[one for one in asked if not keeps_latents(one)],
                             sorted(one for one in named if keeps_latents(one))]))
"""
LEFT_TO_THE_ENGINES = {
    "deepseek_v4", "deepseek_v41", "dots3_note", "glm5_next", "glm5_next_text", "hy_v4",
    "k3_dspark",
}  # fmt: skip
"""vLLM keeps latents of them, and their layers are not computed from the config."""


@pytest.mark.vllm
def test_models_with_latent_vectors_are_those_of_vllm() -> None:
    wrong, latent = ask(LATENT_CHILD, [*LATENT])
    assert wrong == [], "vLLM keeps keys and values of these"
    drafts = {one for one in latent if one.endswith("_mtp")}  # no model is served as one
    assert set(latent) - drafts == {*LATENT, *LEFT_TO_THE_ENGINES}


def test_models_that_count_as_compared_are_those_of_the_list() -> None:
    text = Path(__file__).with_name("model_configs.yaml").read_text()
    configs = [one["config"] for one in yaml.safe_load(text).values()]
    types = {(one | one.get("text_config", {}))["model_type"] for one in configs}
    assert types == {*COMPARED}
