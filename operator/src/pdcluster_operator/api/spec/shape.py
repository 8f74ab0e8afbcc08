"""The shape of a role's engines, as far as the spec gives it.

At admission ``compat`` compares two such shapes, exactly as the handshake compares two real ones.
A value that the spec does not give is None.
"""

from __future__ import annotations

from pdcluster_connector.compat.shape import EngineShape, Memory
from pdcluster_connector.compat.supported import PLAIN, dtype_name, token_sliceable
from pdcluster_operator.api.spec.enums import Device, Switch
from pdcluster_operator.api.spec.resolve import Engine
from pdcluster_operator.api.spec.types import Cluster

# Flags that change the KV of a prompt. Speculation does not: n-grams have no KV, and the handshake
# compares the layers of a draft model.
MODEL_FLAGS = (
    "--model", "--revision", "--hf-overrides", "--quantization", "--rope-scaling", "--rope-theta",
    "--hf-config-path", "--lora-modules",
)  # fmt: skip
CONTEXT_FLAGS = ("--decode-context-parallel-size", "--prefill-context-parallel-size")
# Flags that rules look for, each by its whole name.
READ_FLAGS = frozenset({
    *MODEL_FLAGS, *CONTEXT_FLAGS, "--attention-backend", "--block-size", "--dtype",
    "--enable-prefix-caching", "--enforce-eager", "--kv-cache-dtype", "--max-model-len",
})  # fmt: skip
# Flags that only a model with Mamba layers has a use for.
HYBRID_FLAGS = ("--mamba-", "--enable-mamba-")


def engine_shape(cluster: Cluster, engine: Engine) -> EngineShape:
    """Return the shape of one role's engines; unknown fields are None."""
    parallel = engine.parallelism
    on_cpu = cluster.spec.transfer.device is Device.CPU
    return EngineShape(
        model=_model(engine),
        kv_dtype=_kv_dtype(engine),
        block_size=_block_size(engine),
        prefix_caching=_prefix_caching(engine),
        tensor=parallel.tensor,
        pipeline=parallel.pipeline,
        data=parallel.data,
        context=_context(engine),
        nodes=parallel.nodes,
        memory=Memory.DRAM if on_cpu else Memory.VRAM,
        token_sliceable=token_sliceable(engine.attention_backend),
        hybrid=True if _names_mamba(engine) else None,
    )


def _names_mamba(engine: Engine) -> bool:
    return any(flag.name.startswith(HYBRID_FLAGS) for flag in engine.flags)


def _model(engine: Engine) -> str:
    named = engine.last("--model")
    revision = engine.last("--revision")
    words = [named.value if named else engine.model]
    version = revision.value if revision else engine.model_revision
    if version:
        words.append(f"--revision {version}")
    words += [
        " ".join(flag.words)
        for flag in engine.flags
        if flag.head in MODEL_FLAGS and flag.name not in ("--model", "--revision")
    ]
    return " ".join(words)


def _kv_dtype(engine: Engine) -> str | None:
    flag = engine.last("--kv-cache-dtype")
    named = flag.value if flag else engine.kv_cache_dtype
    if named and named != "auto":
        return dtype_name(named)
    flag = engine.last("--dtype")
    dtype = dtype_name(flag.value) if flag else None
    return dtype if dtype in PLAIN else None


def _block_size(engine: Engine) -> int | None:
    flag = engine.last("--block-size")
    return engine.block_size if flag is None else _whole(flag.value)


def _prefix_caching(engine: Engine) -> bool:
    flag = engine.last("--enable-prefix-caching")
    if flag is not None:
        return not flag.negated
    return engine.prefix_caching is Switch.ENABLED


def _context(engine: Engine) -> int:
    flags = [engine.last(name) for name in CONTEXT_FLAGS]
    return max([1, *(_whole(flag.value) or 1 for flag in flags if flag is not None)])


def _whole(text: str) -> int | None:
    """Read a number as argparse does, ``1_008`` and ``+8`` too; None if it is none."""
    try:
        return int(text[:100])
    except ValueError:
        return None
