"""A ConfigMap with the model's config.json: what is said of it, and what is then refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, strategies as st

from pdcluster_operator.api.findings import Findings, Rule
from pdcluster_operator.api.rules.validate import check_manifest, review
from pdcluster_operator.api.spec.model_config import (
    MOST_CHARACTERS,
    FoundConfig,
    found_in,
    named_config_map,
)
from pdcluster_operator.plan.status.conditions import accepted

MODELS: dict[str, dict[str, Any]] = yaml.safe_load(
    Path(__file__).with_name("model_configs.yaml").read_text()
)
LLAMA = MODELS["Llama-3.1-8B"]["config"]
NAME, KEY = "spec.model.configMapRef.name", "spec.model.configMapRef.key"


def manifest(ref: dict[str, Any] | None = None, tensor: int = 1, **spec: Any) -> dict[str, Any]:
    source = {"persistentVolumeClaim": {"claimName": "models"}}
    role = {"replicas": 1, "parallelism": {"tensor": tensor}}
    named = {"configMapRef": {"name": "llama", **(ref or {})}}
    return {
        "apiVersion": "pdcluster.dev/v1alpha1",
        "kind": "PDCluster",
        "metadata": {"name": "model", "namespace": "team-a"},
        "spec": {"model": {"source": source, **named}, "prefill": role, "decode": role, **spec},
    }


def holding(text: object, key: str = "config.json") -> FoundConfig:
    text = text if isinstance(text, str) else json.dumps(text)
    return found_in({"kind": "ConfigMap", "data": {key: text}}, "config.json")


def judged(found: FoundConfig | None, tensor: int = 1, **spec: Any) -> Findings:
    return check_manifest(manifest(tensor=tensor, **spec), found=found)[1]


FAULTS = {
    "absent": (found_in(None, "config.json"), NAME, "no such ConfigMap in namespace team-a"),
    "unread": (FoundConfig(unread="no answer in 0.8 s"), NAME, "could not be read (no answer in"),
    "no key": (holding(LLAMA, "llama.json"), KEY, "no such key of text; it has llama.json"),
    "empty": (found_in({"data": None}, "config.json"), KEY, "it has none"),
    "no text": (found_in({"binaryData": {"config.json": "eA=="}}, "config.json"), KEY, "has none"),
    "too long": (holding("1" * (MOST_CHARACTERS + 1)), KEY, "has more than 262,144 characters"),
    "no JSON": (
        holding("passw0rd: {"),
        KEY,
        "is no JSON that can be read: Expecting value",
    ),
    "too deep": (holding("[" * 200_000), KEY, "is no JSON that can be read: maximum recursion"),
    "long number": (
        holding('{"a": ' + "9" * 5000 + "}"),
        KEY,
        "is no JSON that can be read: Exceeds",
    ),
    "no object": (holding('["passw0rd"]'), KEY, "holds no JSON object"),
    "no model": (holding("{}"), KEY, "config.json: num_hidden_layers = null is no whole number"),
    "odd model": (holding({**LLAMA, "model_type": "mythical"}), NAME, 'model_type "mythical"'),
    "no type": (holding({**LLAMA, "model_type": None}), NAME, "model_type null"),
    "latents": (
        holding({**LLAMA, "model_type": "minicpm3", "kv_lora_rank": 256}),
        NAME,
        'nothing says how a model_type "minicpm3" uses kv_lora_rank',
    ),
    "open": (holding({**LLAMA, "attention_chunk_size": 8}), NAME, "attention_chunk_size is set"),
    "layers": (holding({**LLAMA, "layer_types": ["odd"] * 32}), NAME, "which layers have a window"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_of_the_config_map_is_one_warning_and_refuses_nothing(fault: str) -> None:
    found, path, words = FAULTS[fault]
    findings = judged(found)
    assert findings.ok
    [said] = [one for one in findings.warnings if one.rule == Rule.MODEL_NOT_CHECKED]
    assert said.path == path
    assert words in said.message
    assert "passw0rd" not in str(findings)
    assert said.remedy.endswith(".")
    verdict = accepted(findings)
    assert (verdict.status, verdict.reason) == ("True", "PartiallyChecked")
    assert str(said) in verdict.message, "who reads the status sees why"
    assert "model.configMapRef)" not in verdict.message, "it is set already"


def test_a_missing_config_map_is_created_by_the_command_that_the_warning_names() -> None:
    [said] = [one for one in judged(FAULTS["absent"][0]).warnings if one.path == NAME]
    command = "kubectl create configmap llama -n team-a --from-file=config.json"
    assert f"`{command}`" in said.remedy
    other = check_manifest(manifest({"key": "a.json"}), found=FoundConfig())[1]
    assert "--from-file=a.json=config.json`" in str(other.warnings)


@pytest.mark.parametrize("name", MODELS)
def test_a_published_model_is_checked_as_a_whole(name: str) -> None:
    findings = judged(holding(MODELS[name]["config"]))
    assert not [one for one in findings.warnings if one.rule == Rule.MODEL_NOT_CHECKED]
    assert findings.ok
    verdict = accepted(findings)
    assert verdict.reason == "ModelChecked"
    assert verdict.message.startswith("The model has ")


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"decode": {"attentionBackend": "FLASHINFER_MLA_SPARSE"}}, "attentionBackend"),
        ({"decode": {"blockSize": 128}}, "blockSize"),
    ],
)
def test_blocks_with_scales_of_their_own_are_judged_as_the_engines_judge_them(
    change: dict[str, Any], path: str
) -> None:
    """DeepSeek V3.2's indexer keeps bytes with scales: equal settings, on any numbers of ranks."""
    both: dict[str, Any] = {"attentionBackend": "FLASHMLA_SPARSE", "blockSize": 64}
    found = holding(MODELS["DeepSeek-V3.2"]["config"])

    def roles(changes: dict[str, Any]) -> Findings:
        spec = {
            role: {"replicas": 1, "parallelism": {"tensor": size}, "engine": changes.get(role, {})}
            for role, size in (("prefill", 8), ("decode", 16))
        }
        return judged(found, engine=both, **spec)

    assert roles({}).ok
    refused = roles(change)
    assert {(one.path, str(one.rule)) for one in refused.errors} >= {
        (f"spec.decode.engine.{path}", "BlockInteriorOpaque")
    }
    unread = judged(found, engine={**both, "kvCacheDtype": "fp8_ds_mla"})
    assert unread.ok
    [said] = [one for one in unread.warnings if one.rule == Rule.MODEL_NOT_CHECKED]
    assert "KV of the type fp8_ds_mla are not computed" in said.message


def test_what_moves_for_a_prompt_is_told_before_a_pod_starts() -> None:
    said = accepted(judged(holding(LLAMA), engine={"blockSize": 32})).message
    assert "131,072 bytes for one token, 131,072,000 for 1,000." in said
    assert "about 1,024 descriptors in blocks of 32 tokens" in said, "32 layers x 32 blocks"
    assert ", 512 in blocks of 64, 32 with spec.transfer.kvLayout BLHNC." in said
    outermost = judged(holding(LLAMA), transfer={"kvLayout": "BLHNC"})
    said = accepted(outermost).message
    assert "63 descriptors in blocks of 16 tokens (as most attention backends have them)." in said
    eight_bits = judged(holding(LLAMA), engine={"kvCacheDtype": "fp8_e4m3"}).model
    assert "65,536 bytes for one token" in eight_bits


@pytest.mark.parametrize(
    ("engine", "device", "said"),
    [
        ({}, "CUDA", "3,843 in 16 (as most attention backends have them), 976 in blocks of 64,"),
        ({"attentionBackend": "FLASH_ATTN_MLA"}, "CUDA", "3,843 in 16, 976 in blocks of 64,"),
        ({"attentionBackend": "TRITON_MLA"}, "CUDA", "3,843 in 16, 976 in blocks of 64,"),
        ({"attentionBackend": "FLASHINFER_MLA"}, "CUDA", "1,952 in 32, 976 in blocks of 64,"),
        ({"attentionBackend": "FLASHMLA"}, "CUDA", "976 in 64, 16 with"),
        ({"attentionBackend": "CUTLASS_MLA"}, "CUDA", "488 in 128, 8 with"),
        ({"extraArgs": ["--attention-backend=FLASHMLA"]}, "CUDA", "976 in 64, 16 with"),
        ({"blockSize": 32}, "CUDA", "1,952 in 32, 976 in blocks of 64,"),
        ({"attentionBackend": "FLASHMLA", "blockSize": 128}, "CUDA", "976 in 64, 16 with"),
        ({}, "CPU", "3,843 in 16, 63 with"),
        ({"attentionBackend": "AMX_MLA"}, "CPU", "488 in 128, 8 with"),
    ],
)
def test_a_deepseek_is_counted_in_the_blocks_that_its_backend_has(
    engine: dict[str, Any], device: str, said: str
) -> None:
    config = holding(MODELS["DeepSeek-V3"]["config"])
    found = judged(config, engine=engine, transfer={"device": device}).model
    short = found.replace(" descriptors in blocks of ", " in ").replace(" tokens", "")
    assert f"about {said}" in short


def test_a_deepseek_whose_roles_have_other_backends_moves_in_the_smaller_blocks() -> None:
    roles = {
        role: {"replicas": 1, "engine": {"attentionBackend": backend}}
        for role, backend in (("prefill", "FLASHMLA"), ("decode", "FLASH_ATTN_MLA"))
    }
    found = judged(holding(MODELS["DeepSeek-V3"]["config"]), **roles)
    assert "about 3,843 descriptors in blocks of 16 tokens, 976 in blocks of 64," in found.model


def test_what_the_model_rules_out_is_refused_with_its_config_map() -> None:
    refused = judged(holding(LLAMA), tensor=3)
    paths = {(one.path, one.rule) for one in refused.errors}
    assert ("spec.prefill.parallelism.tensor", "LayoutUnsupported") in paths
    assert accepted(refused).status == "False"
    assert judged(FoundConfig(), tensor=3).ok, "nobody can know it without the model"
    assert judged(None, tensor=3).ok
    long = judged(holding(LLAMA), engine={"maxModelLen": 131_073})
    assert [one.path for one in long.errors] == ["spec.engine.maxModelLen"]


def test_layers_of_a_model_that_nobody_compared_refuse_nothing() -> None:
    qwen = MODELS["Qwen2.5-7B"]["config"]  # 28 heads of queries, 4 of KV
    assert not judged(holding(qwen), tensor=7).ok
    assert judged(holding({**qwen, "model_type": "mythical"}), tensor=7).ok
    assert not judged(holding({**qwen, "model_type": "mythical"}), tensor=8).ok, "28 heads over 8"


def test_a_config_that_flags_replace_is_not_the_models() -> None:
    findings = judged(holding(LLAMA), tensor=3, engine={"extraArgs": ["--hf-overrides", "{}"]})
    assert findings.ok
    assert "--hf-overrides gives the engines another config" in str(findings.warnings)
    assert accepted(findings).reason == "PartiallyChecked"


def test_without_a_reference_the_status_names_the_field() -> None:
    plain = manifest()
    del plain["spec"]["model"]["configMapRef"]
    said = accepted(check_manifest(plain)[1])
    assert said.reason == "PartiallyChecked"
    assert "the model's layers (model.configMapRef)" in said.message


def test_a_reference_that_cannot_be_read_is_its_own_error_alone() -> None:
    wrong = manifest({"name": "Not A Name"})
    findings = check_manifest(wrong, found=FoundConfig())[1]
    assert [one.path for one in findings.errors] == [NAME]
    assert not [one for one in findings.warnings if one.rule == Rule.MODEL_NOT_CHECKED]


def test_an_update_is_refused_only_for_what_it_adds() -> None:
    found = holding(LLAMA)

    def errors(new: dict[str, Any], old: dict[str, Any] | None) -> set[str]:
        return {one.path for one in review(new, old, host_paths=True, found=found).errors}

    heads = {"spec.prefill.parallelism.tensor", "spec.decode.parallelism.tensor"}
    without = manifest(tensor=3)
    del without["spec"]["model"]["configMapRef"]
    assert errors(manifest(tensor=3), None) == heads
    assert errors(manifest(tensor=3), without) == heads, "it names the model now"
    assert errors(manifest(tensor=3), manifest()) == heads
    again = manifest(tensor=3, requestTimeoutSeconds=60)
    assert errors(again, manifest(tensor=3)) == set(), "it was so before"


def test_what_is_held_of_a_config_map_is_bounded() -> None:
    data = {"config.json": "x" * 900_000, "weights": "y" * 900_000}
    held = found_in({"data": data}, "config.json").config_map
    assert held == {"config.json": "x" * (MOST_CHARACTERS + 1), "weights": ""}


VALUES = st.recursive(
    st.none() | st.integers() | st.text(max_size=5), lambda one: st.lists(one, max_size=2)
)
REFS = st.dictionaries(st.sampled_from(["name", "key", "x"]), VALUES, max_size=3) | VALUES


@given(REFS)
def test_whatever_the_reference_is_a_name_is_one_that_can_be_read(ref: object) -> None:
    name, key = named_config_map({"spec": {"model": {"configMapRef": ref}}})
    assert (name == "") == (key == "")
    assert "/" not in name
    assert ".." not in name
