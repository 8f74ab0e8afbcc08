"""Which KV heads of a layer this rank holds.

vLLM gives rank r of t the heads from ``r * total // t`` on. If there are more ranks than heads, it
replicates heads. A layer does not say how many heads it has in total, only how many are here. Some
models have layers with another number of heads than they state: MiMo-V2 and Gemma 4 in their
windows, and draft models. With one head here, the total could then be that of either.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from typing import Any

from pdcluster_connector.compat.shape import LayerKind
from pdcluster_connector.plan.topology import head_interval

# The fields of Hugging Face configurations that vLLM's models read such a number from.
COUNTS = re.compile(r"kv_(n_)?heads|key_value_heads|n_head_kv|attention_groups|query_group")
# Nemotron-NAS says for each layer how many query heads share a KV head.
GROUP = re.compile(r"^n_heads_in_group$")
DEEPEST = 8


def heads_of(
    spec: Any, kind: LayerKind, vllm_config: Any, rank: int
) -> tuple[int, int, int] | None:
    """(heads of the layer, first head here, one past the last here); None if not known.

    MLA's latent counts as one head that every rank holds. If several stated totals fit, the layer
    counts as having as many heads as their least common multiple. The real total divides it, so
    ranks that hold the same of these heads hold the same real one. If the totals of two engines
    differ, they are refused.
    """
    tensor = vllm_config.parallel_config.tensor_parallel_size
    local = getattr(spec, "num_kv_heads", None)
    if kind is LayerKind.MLA:
        return (1, 0, 1) if local == 1 else None
    if kind is LayerKind.MAMBA or local is None:
        return None
    fitting = [total for total in stated_totals(vllm_config) if _fits(total, tensor, local)]
    total = math.lcm(*fitting) if fitting else local * tensor
    return total, *head_interval(total, tensor, rank)


def stated_totals(vllm_config: Any) -> frozenset[int]:
    """Return each number of KV heads that the model states, and its draft model."""
    draft = getattr(getattr(vllm_config, "speculative_config", None), "draft_model_config", None)
    found: set[int] = set()
    for model in (vllm_config.model_config, draft):
        if model is not None:
            config = getattr(model, "hf_text_config", None)
            fields = config.to_dict() if hasattr(config, "to_dict") else {}
            layers = getattr(getattr(model, "model_arch_config", None), "per_layer_overrides", None)
            found.update(_integers(model.get_total_num_kv_heads()))
            found.update(_numbers([fields, layers], COUNTS))
            sharing = [number for number in _numbers(fields, GROUP) if number > 0]
            queries = list(_integers(fields.get("num_attention_heads")))
            found.update(heads // one for heads in queries for one in sharing)
    return frozenset(total for total in found if total > 0)


def _fits(total: int, tensor: int, local: int) -> bool:
    """Whether vLLM gives each of ``tensor`` ranks ``local`` heads of this many."""
    return local == max(1, total // tensor) and (total % tensor == 0 or tensor % total == 0)


def _numbers(value: Any, names: re.Pattern[str], depth: int = 0) -> Iterator[int]:
    """Yield the integers at any depth under names that match."""
    if isinstance(value, list | tuple):
        for inner in value:
            yield from _numbers(inner, names, depth)
        return
    if is_dataclass(value):  # as a remote configuration has for each layer
        value = vars(value)
    if not isinstance(value, Mapping) or depth > DEEPEST:
        return
    for name, inner in value.items():
        if names.search(str(name)):
            yield from _integers(inner)
        yield from _numbers(inner, names, depth + 1)


def _integers(value: Any) -> Iterator[int]:
    """Yield an integer, or those of a list."""
    for one in value if isinstance(value, list | tuple) else (value,):
        if isinstance(one, int) and not isinstance(one, bool):
            yield one
