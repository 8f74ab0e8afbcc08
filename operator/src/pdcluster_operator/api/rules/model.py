"""Rules that need the model's ``config.json``: how engines split it, and the longest request."""

from collections.abc import Iterator

from pdcluster_connector.compat.reasons import Reason
from pdcluster_operator.api.findings import FieldError, Rule
from pdcluster_operator.api.spec.model_config import Model
from pdcluster_operator.api.spec.resolve import Engine, resolve_engine
from pdcluster_operator.api.spec.types import Cluster, Role

REPLACED = ("--model", "--hf-overrides", "--hf-config-path")
"""Flags that give vLLM another config than the one of the model's folder."""
LONGER = "VLLM_ALLOW_LONG_MAX_MODEL_LEN"


def is_replaced(engine: Engine) -> bool:
    """Whether flags give the engines another config."""
    return any(flag.head in REPLACED for flag in engine.flags)


def model_errors(cluster: Cluster, model: Model) -> Iterator[FieldError]:
    """Yield what vLLM refuses after it has read the config: half a minute after the start."""
    for role in Role:
        engine, parallel = resolve_engine(cluster, role), cluster.spec.role(role).parallelism
        if is_replaced(engine):
            continue
        path = f"spec.{role}.parallelism"
        if model.heads % parallel.tensor:
            yield FieldError(
                f"{path}.tensor",
                str(parallel.tensor),
                Reason.LAYOUT_UNSUPPORTED,
                f"the model's {model.heads} attention heads cannot be spread evenly over "
                f"{parallel.tensor} ranks",
                f"Choose a tensor parallel size that divides {model.heads}.",
            )
        if parallel.pipeline > model.depth:
            yield FieldError(
                f"{path}.pipeline",
                str(parallel.pipeline),
                Rule.OUT_OF_RANGE,
                f"the model has {model.depth} layers, and each stage needs one",
                f"Use at most {model.depth} stages.",
            )
        yield from _too_long(cluster, role, engine, model)


def _too_long(cluster: Cluster, role: Role, engine: Engine, model: Model) -> Iterator[FieldError]:
    wanted = engine.max_model_len or 0
    if not model.longest < wanted or not model.longest:
        return
    if any(one.name == LONGER and (one.value or "").lower() in {"1", "true"} for one in engine.env):
        return
    own = cluster.spec.role(role).engine.max_model_len is not None
    yield FieldError(
        f"spec.{role}.engine.maxModelLen" if own else "spec.engine.maxModelLen",
        str(wanted),
        Rule.OUT_OF_RANGE,
        f"the model's config.json allows {model.longest:,} tokens, and vLLM does not start with "
        "more",
        f"Set at most {model.longest}, or {LONGER}=1 in env if the model is known to take more.",
    )
