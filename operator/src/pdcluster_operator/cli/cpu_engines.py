"""What engines on the CPUs of one machine cannot do without, where a manifest leaves it out. Pure.

Alone on a machine, vLLM takes all of its cores and nine tenths of its memory, and compiles the
model for minutes. Engines that share the machine then do not start.
"""

from collections.abc import Mapping
from typing import Any

from pdcluster_operator.api.spec.model_config import Model
from pdcluster_operator.api.spec.pod_templates import as_mapping
from pdcluster_operator.api.spec.resolve import Engine, resolve_engine
from pdcluster_operator.api.spec.types import Cluster, Device, Role

MIB = 1 << 20
LEAST_KV, MOST_KV = 128 * MIB, 4096 * MIB
SHARE = 8
"""An engine's KV cache takes this part of its share of the memory that is free."""
THREADS = {"VLLM_CPU_OMP_THREADS_BIND", "OMP_NUM_THREADS"}
KV_SPACE = "VLLM_CPU_KVCACHE_SPACE"
SIZES = ("--kv-cache-memory-bytes", "--gpu-memory-utilization")
COMPILED = ("--enforce-eager", "--compilation-config", "--optimization-level")


def complete(
    document: Mapping[str, Any],
    cluster: Cluster,
    model: Model | None,
    *,
    free: int,
    cores: int,
) -> tuple[dict[str, Any], list[str]]:
    """Return a valid manifest with what its engines need, and what was added.

    Args:
        model: what its config.json says; None if nobody has it.
        free: bytes of memory.
        cores: that this process may use.
    """
    if cluster.spec.transfer.device is not Device.CPU:
        return dict(document), []
    engines = {role: resolve_engine(cluster, role) for role in Role}
    counts = {role: cluster.spec.role(role).replicas for role in Role}
    workers = sum(counts[role] * engines[role].parallelism.workers for role in Role)
    room = max(LEAST_KV, min(MOST_KV, free // (SHARE * max(1, sum(counts.values())))))
    spec, added = dict(as_mapping(document.get("spec"))), []
    for role, engine in engines.items():
        threads = max(1, cores // max(1, workers))
        flags, variables = _lacking(engine, model, room // MIB * MIB, threads)
        own = as_mapping(spec.get(role.value))
        shared = as_mapping(own.get("engine"))
        given = {
            "extraArgs": [*(shared.get("extraArgs") or ()), *flags],
            "env": [
                *(shared.get("env") or ()),
                *({"name": name, "value": value} for name, value in variables.items()),
            ],
        }
        spec[role.value] = {**own, "engine": {**shared, **given}}
        if words := [*flags, *(f"{name}={value}" for name, value in variables.items())]:
            added.append(f"{role}: {' '.join(words)}")
    return {**document, "spec": spec}, added


def _lacking(
    engine: Engine, model: Model | None, room: int, threads: int
) -> tuple[list[str], dict[str, str]]:
    """Return the flags and variables that one role's engines are started with.

    Args:
        room: bytes of its KV cache.
    """
    flags: list[str] = []
    variables = {one.name for one in engine.env}
    if not any(map(engine.last, SIZES)) and KV_SPACE not in variables:
        flags += ["--kv-cache-memory-bytes", str(room)]
        if not engine.max_model_len and not engine.last("--max-model-len"):
            flags += ["--max-model-len", "auto"]  # the model's own, or less if it has no room
    # bfloat16 ends engines with SIGILL on CPUs that claim to have it. A gated delta net needs it.
    if not engine.last("--dtype") and not (model and model.has_gated_states):
        flags += ["--dtype", "float32"]
        if model and not model.kv_heads and not _has_backend(engine):
            flags += ["--attention-backend", "CPU_MLA"]  # the other one takes bfloat16 alone
    if engine.parallelism.pipeline == 1 and not any(map(engine.last, COMPILED)):
        flags.append("--enforce-eager")
    if variables & THREADS:
        return flags, {}
    return flags, {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(threads)}


def _has_backend(engine: Engine) -> bool:
    return bool(engine.attention_backend or engine.last("--attention-backend"))
