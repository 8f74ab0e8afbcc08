"""What ``pdcluster up`` adds for engines on CPUs, and what it leaves as the manifest has it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "local"))

from manifests import tiny

from pdcluster_operator.api.rules.validate import check_manifest
from pdcluster_operator.api.spec.model_config import Model, read_model
from pdcluster_operator.api.spec.resolve import resolve_engine
from pdcluster_operator.api.spec.types import Cluster, Role
from pdcluster_operator.cli.cpu_engines import complete

GIB = 1 << 30
SIZE = ["--kv-cache-memory-bytes", str(GIB)]
AUTO, EAGER = ["--max-model-len", "auto"], ["--dtype", "float32", "--enforce-eager"]
THREADS = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "4"}


def completed(
    tmp_path: Path, free: int = 16 * GIB, model: Model | None = None, **spec: Any
) -> tuple[Cluster, list[str]]:
    document = tiny(tmp_path, **{"engine": {}, **spec})
    cluster, findings = check_manifest(document)
    assert findings.ok, findings.errors
    before = str(document)
    document, added = complete(document, cluster, model, free=free, cores=8)
    assert str(tiny(tmp_path, **{"engine": {}, **spec})) == before, "the manifest itself stays"
    cluster, findings = check_manifest(document)
    assert findings.ok, findings.errors
    return cluster, added


def given(cluster: Cluster, role: Role) -> tuple[list[str], dict[str, str | None]]:
    engine = resolve_engine(cluster, role)
    variables = {one.name: one.value for one in engine.env if one.name not in ("PDFAKE", "MARK")}
    return [word for flag in engine.flags for word in flag.words], variables


@pytest.mark.parametrize(
    ("engine", "flags", "variables"),
    [
        ({}, [*SIZE, *AUTO, *EAGER], THREADS),
        ({"maxModelLen": 1024}, [*SIZE, *EAGER], THREADS),
        ({"extraArgs": ["--max-model-len", "2k"]},
         ["--max-model-len", "2k", *SIZE, *EAGER], THREADS),
        ({"extraArgs": ["--kv-cache-memory-bytes", "1G"]},
         ["--kv-cache-memory-bytes", "1G", *EAGER], THREADS),
        ({"extraArgs": ["--gpu-memory-utilization", "0.3"]},
         ["--gpu-memory-utilization", "0.3", *EAGER], THREADS),
        ({"env": [{"name": "VLLM_CPU_KVCACHE_SPACE", "value": "1"}]}, EAGER,
         {"VLLM_CPU_KVCACHE_SPACE": "1", **THREADS}),
        ({"extraArgs": ["--no-enforce-eager"]},
         ["--no-enforce-eager", *SIZE, *AUTO, "--dtype", "float32"], THREADS),
        ({"env": [{"name": "OMP_NUM_THREADS", "value": "2"}]}, [*SIZE, *AUTO, *EAGER],
         {"OMP_NUM_THREADS": "2"}),
    ],
)  # fmt: skip
def test_what_the_manifest_leaves_out_is_added_to_both_roles(
    tmp_path: Path, engine: dict[str, Any], flags: list[str], variables: dict[str, str]
) -> None:
    cluster, added = completed(tmp_path, engine=engine)
    for role in Role:
        assert given(cluster, role) == (flags, variables)
    assert [words.partition(":")[0] for words in added] == ["prefill", "decode"]


def test_a_role_that_has_it_keeps_its_own(tmp_path: Path) -> None:
    own = {"replicas": 1, "engine": {"extraArgs": ["--kv-cache-memory-bytes", "2G"]}}
    cluster, _ = completed(tmp_path, prefill=own)
    assert given(cluster, Role.PREFILL)[0] == ["--kv-cache-memory-bytes", "2G", *EAGER]
    assert given(cluster, Role.DECODE)[0] == [*SIZE, *AUTO, *EAGER]


@pytest.mark.parametrize(
    ("free", "replicas", "size"),
    [(0, 1, 128 << 20), (400 * GIB, 1, 4 * GIB), (16 * GIB, 3, GIB // 2)],
)
def test_engines_share_the_free_memory(tmp_path: Path, free: int, replicas: int, size: int) -> None:
    cluster, _ = completed(tmp_path, free, prefill={"replicas": replicas})
    assert given(cluster, Role.DECODE)[0][1] == str(size)


def test_stages_are_not_eager_and_workers_share_the_cores(tmp_path: Path) -> None:
    wide = {"replicas": 1, "parallelism": {"pipeline": 2, "tensor": 4}}
    cluster, _ = completed(tmp_path, prefill=wide)
    flags, variables = given(cluster, Role.PREFILL)
    assert "--enforce-eager" not in flags
    assert variables["OMP_NUM_THREADS"] == "1"
    assert "--enforce-eager" in given(cluster, Role.DECODE)[0]


def test_nothing_is_added_where_nothing_is_left_out_or_for_gpus(tmp_path: Path) -> None:
    whole = {
        "extraArgs": ["--kv-cache-memory-bytes", "1G", "--enforce-eager", "--dtype", "half"],
        "env": [{"name": "OMP_NUM_THREADS", "value": "1"}],
    }
    assert completed(tmp_path, engine=whole)[1] == []
    on_gpus, added = completed(tmp_path, transfer={"device": "CUDA"})
    assert added == []
    assert given(on_gpus, Role.DECODE) == ([], {})


MAMBA2 = dict.fromkeys(
    ("mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state", "mamba_d_conv"), 4
)
GATED = dict.fromkeys(
    (
        "linear_num_value_heads", "linear_value_head_dim", "linear_num_key_heads",
        "linear_key_head_dim", "linear_conv_kernel_dim",
    ),
    4,
)  # fmt: skip
FLOAT = ["--dtype", "float32"]


@pytest.mark.parametrize(
    ("config", "flags"),
    [
        ({}, FLOAT),
        ({"layer_types": ["mamba", "attention"], **MAMBA2}, FLOAT),
        ({"layer_types": ["linear_attention", "full_attention"], **GATED}, []),
        (
            {"model_type": "deepseek_v3", "kv_lora_rank": 512, "qk_rope_head_dim": 64},
            [*FLOAT, "--attention-backend", "CPU_MLA"],
        ),
    ],
)
def test_each_kind_of_model_has_a_type_that_its_kernels_take(
    tmp_path: Path, config: dict[str, Any], flags: list[str]
) -> None:
    model = read_model({"num_hidden_layers": 2, "num_attention_heads": 8, **config})
    cluster, _ = completed(tmp_path, model=model)
    assert given(cluster, Role.DECODE)[0] == [*SIZE, *AUTO, *flags, "--enforce-eager"]
