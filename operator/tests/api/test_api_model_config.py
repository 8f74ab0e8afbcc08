"""What rules know of a model from its config.json, and what they then refuse."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given, strategies as st

from pdcluster_operator.api.findings import Findings
from pdcluster_operator.api.rules.validate import check_manifest
from pdcluster_operator.api.spec.model_config import UnknownModel, read_model

MODELS: dict[str, dict[str, Any]] = yaml.safe_load(
    Path(__file__).with_name("model_configs.yaml").read_text()
)
LLAMA = MODELS["Llama-3.1-8B"]["config"]


@pytest.mark.parametrize("name", MODELS)
def test_a_published_model_keeps_what_it_is_known_to_keep(name: str) -> None:
    expected = MODELS[name]
    model = read_model(expected["config"])
    assert model.layers is not None
    assert Counter(layer.kind.value for layer in model.layers) == expected["layers"]
    assert (model.kv_bytes(1), model.kv_bytes(8192)) == (expected["one"], expected["prompt"])
    assert model.longest == expected["longest"]
    assert model.hybrid == ("mamba" in expected["layers"])


FIELDS = sorted({field for model in MODELS.values() for field in model["config"]})
ODD = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from([*FIELDS, "factor", "type"]), inner, max_size=3)
    ),
)


@given(st.sampled_from(sorted(MODELS)), st.dictionaries(st.sampled_from(FIELDS), ODD, max_size=3))
@example("Llama-3.1-8B", {"rope_scaling": {"type": "linear", "factor": float("inf")}})
@example("Llama-3.1-8B", {"rope_scaling": {"type": "linear", "factor": float("nan")}})
@example("Llama-3.1-8B", {"model_type": ["llama"]})
def test_any_object_is_a_model_or_says_why_not(name: str, odd: dict[str, Any]) -> None:
    with suppress(UnknownModel):
        model = read_model({**MODELS[name]["config"], **odd})
        model.kv_bytes(1000)


def test_the_cache_may_have_another_type_than_the_weights() -> None:
    assert read_model(LLAMA, "fp8_e4m3").kv_bytes(1) == 65536
    assert read_model(LLAMA, "float32").kv_bytes(1) == 262144
    states = MODELS["Granite-4.0-H-Small"]["config"]
    assert read_model(states, "fp8_e4m3").kv_bytes(1) == 77338624 - 4 * 2048


@pytest.mark.parametrize("field", ["kv_cache_scheme", "kv_cache_quant_algo"])
def test_a_checkpoint_with_a_type_of_its_own_leaves_it_to_the_engines(field: str) -> None:
    config = {**LLAMA, "quantization_config": {field: "FP8"}}
    assert "kv_dtype" in found(config).unchecked
    assert "kv_dtype" not in found({**LLAMA, "quantization_config": {field: None}}).unchecked


def manifest(**spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "pdcluster.dev/v1alpha1",
        "kind": "PDCluster",
        "metadata": {"name": "model"},
        "spec": {
            "model": {"source": {"persistentVolumeClaim": {"claimName": "models"}}},
            "prefill": {"replicas": 1},
            "decode": {"replicas": 1},
            **spec,
        },
    }


def found(config: dict[str, Any], **spec: Any) -> Findings:
    return check_manifest(manifest(**spec), model=read_model(config))[1]


def told(config: dict[str, Any], **spec: Any) -> list[tuple[str, str]]:
    return [(error.path, error.rule) for error in found(config, **spec).errors]


def sizes(prefill: int, decode: int, **more: int) -> dict[str, Any]:
    return {
        "prefill": {"replicas": 1, "parallelism": {"tensor": prefill, **more}},
        "decode": {"replicas": 1, "parallelism": {"tensor": decode, **more}},
    }


HEADS = ("spec.prefill.parallelism.tensor", "LayoutUnsupported")
ANYWHERE = ("spec", "LayerMismatch")


@pytest.mark.parametrize(
    ("name", "spec", "errors"),
    [
        ("Llama-3.1-8B", sizes(4, 16), []),
        ("Llama-3.1-8B", sizes(3, 1), [HEADS, HEADS]),  # KV heads, and those of the queries
        ("Qwen2.5-7B", sizes(8, 1), [HEADS]),  # 28 heads of queries, 4 of KV
        ("Qwen2.5-7B", sizes(7, 1), [HEADS]),
        ("DeepSeek-V3", sizes(16, 8), []),
        ("DeepSeek-V3.2", sizes(8, 8), []),
        ("DeepSeek-V3.2", sizes(8, 16), []),  # each rank holds all of its indexer's bytes
        ("GPT-OSS-120B", sizes(2, 1), []),
        ("Nemotron-H-8B", sizes(8, 2), []),
        ("Qwen3-Next-80B-A3B", sizes(2, 2), []),
        ("Qwen3-Next-80B-A3B", sizes(2, 4), []),  # its states are cut by head
        ("Qwen3-Next-80B-A3B", sizes(1, 16), []),  # 16 heads of keys, 32 of values
        ("Llama-3.1-8B", sizes(1, 1, pipeline=32), []),
        (
            "Llama-3.1-8B",
            sizes(1, 1, pipeline=33),
            [
                ("spec.prefill.parallelism.pipeline", "OutOfRange"),
                ("spec.decode.parallelism.pipeline", "OutOfRange"),
            ],
        ),
        ("Llama-3.1-8B", {"engine": {"maxModelLen": 131072}}, []),
        (
            "Llama-3.1-8B",
            {"engine": {"maxModelLen": 131073}},
            [("spec.engine.maxModelLen", "OutOfRange")],
        ),
        (
            "Llama-3.1-8B",
            {"decode": {"replicas": 1, "engine": {"maxModelLen": 200000}}},
            [("spec.decode.engine.maxModelLen", "OutOfRange")],
        ),
        (
            "Llama-3.1-8B",
            {
                "engine": {
                    "maxModelLen": 200000,
                    "env": [{"name": "VLLM_ALLOW_LONG_MAX_MODEL_LEN", "value": "1"}],
                }
            },
            [],
        ),
        # Another config than this one counts.
        ("Llama-3.1-8B", {**sizes(3, 3), "engine": {"extraArgs": ["--hf-overrides", "{}"]}}, []),
    ],
)
def test_what_a_model_rules_out(
    name: str, spec: dict[str, Any], errors: list[tuple[str, str]]
) -> None:
    assert told(MODELS[name]["config"], **spec) == errors
    assert check_manifest(manifest(**spec))[1].ok, "nobody can know it without the model"


def test_blocks_of_two_sizes_are_refused_as_admission_does_which_sees_no_model() -> None:
    spec: dict[str, Any] = {
        "engine": {"attentionBackend": "FLASH_ATTN"},
        "prefill": {"replicas": 1, "engine": {"blockSize": 16}},
        "decode": {"replicas": 1, "engine": {"blockSize": 32}},
    }
    refusal = [("spec.decode.engine.blockSize", "PrefixCachingHeterogeneousBlocks")]
    assert told(LLAMA, **spec) == refusal
    assert told(MODELS["Granite-4.0-H-Small"]["config"], **spec) == refusal
    [error] = check_manifest(manifest(**spec))[1].errors
    assert (error.path, error.rule) == refusal[0], "without the model it may have states"


@pytest.mark.parametrize(
    ("change", "hybrid"),
    [
        ({}, False),
        ({"layer_types": ["conv", "full_attention"] * 16, "conv_L_cache": 3}, None),
        ({"full_attn_idxs": [2, 5]}, None),
        ({"layer_group_size": 5}, None),
        ({"attn_type_list": [0, 1] * 16}, None),
        ({"layer_types": ["linear_attention", "odd"] * 16}, True),
    ],
)
def test_no_model_is_said_to_have_no_states_if_its_layers_are_open(
    change: dict[str, Any], hybrid: bool | None
) -> None:
    assert read_model({**LLAMA, **change}).hybrid is hybrid


@pytest.mark.parametrize(
    ("change", "kv_dtype"),
    [
        ({"multi_query_group_num": 2}, None),
        ({"num_attention_groups": 1}, None),
        ({"num_kv_heads": 8}, None),
        ({"n_head_kv": 8}, None),
        ({"model_type": "minicpm3", "kv_lora_rank": 256, "qk_rope_head_dim": 32}, None),
        (MODELS["DeepSeek-V3.2"]["config"], "fp8_e4m3"),
    ],
)
def test_sizes_that_vllm_computes_otherwise_are_not_stated(
    change: dict[str, Any], kv_dtype: str | None
) -> None:
    assert read_model({**LLAMA, **change}, kv_dtype).layers is None


def test_what_the_config_tells_is_not_left_to_the_engines() -> None:
    assert {"layers", "kv_dtype"} & set(check_manifest(manifest())[1].unchecked)
    assert not {"layers", "kv_dtype"} & set(found(LLAMA).unchecked)
    open_layers = found({**LLAMA, "attention_chunk_size": 8192})
    assert open_layers.ok
    assert "layers" in open_layers.unchecked


@pytest.mark.parametrize(
    "change",
    [
        {"layer_types": ["full_attention"]},
        {"layer_types": ["full_attention"] * 31 + ["odd"]},
        {"layer_types": ["full_attention"] * 31 + [{}]},
        {"mamba_d_state": 128},
        {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 28},
        {"num_kv_shared_layers": 2},
        {"layer_types": ["mamba", "attention"] * 16, "mamba_d_state": 16},
        {"num_hidden_layers": 1 << 20},
    ],
)
def test_nothing_is_guessed_of_layers_that_are_not_known(change: dict[str, Any]) -> None:
    model = read_model({**LLAMA, **change})
    assert model.layers is None
    assert model.heads == 32


@pytest.mark.parametrize(
    ("change", "longest"),
    [
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, 4 * 131072),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, 131072),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": None}}, 131072),
        ({"rope_scaling": None, "model_max_length": 200000}, 200000),
        ({"max_position_embeddings": None, "rope_scaling": None}, 0),
    ],
)
def test_the_longest_context(change: dict[str, Any], longest: int) -> None:
    assert read_model({**LLAMA, **change}).longest == longest


@pytest.mark.parametrize("value", [None, 0, -1, 2.5, "32", True, 1 << 41])
def test_a_config_without_a_number_is_no_model(value: object) -> None:
    with pytest.raises(UnknownModel, match=r"config\.json: num_hidden_layers = "):
        read_model({**LLAMA, "num_hidden_layers": value})
