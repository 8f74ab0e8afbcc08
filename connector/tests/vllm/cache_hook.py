"""Reads an engine's KV caches as vLLM's attention layers see them, to compare two engines.

Nothing of the connector's own account of its memory (regions, strides) is used: what the hook
returns is indexed through the very tensors that the layers compute with. In a decode engine the
blocks of a receive are copied when the connector reports it, before anything is computed on them.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

# Layer name -> position of a block in the request's list -> its bytes: [heads, bytes] for
# attention, a part of a Mamba layer likewise under a name of its own.
Contents = dict[str, dict[int, np.ndarray]]

KEPT = 4
_received: OrderedDict[str, Contents] = OrderedDict()


def install() -> None:
    """Have every worker side keep a copy of what its last receives brought."""
    from pdcluster_connector.vllm.worker_side.worker import WorkerRole

    start, results = WorkerRole.start, WorkerRole.results

    def remember(self: Any, orders: Any) -> None:
        self.__dict__.setdefault("ordered", {}).update({o.request_id: o for o in orders.receive})
        start(self, orders)

    def copy(self: Any) -> Any:
        found = results(self)
        for request_id in found.finished_recving:
            order = self.__dict__.get("ordered", {}).pop(request_id, None)
            if order is not None and request_id not in found.failed_recving:
                blocks = [(group.blocks, group.first_token) for group in order.blocks]
                found_now = contents(self._vllm_config, self._kv_cache_config, blocks)
                _received[request_id] = found_now
                while len(_received) > KEPT:
                    _received.popitem(last=False)
        return found

    WorkerRole.start, WorkerRole.results = remember, copy  # type: ignore[method-assign]


def received(worker: Any, request_id: str) -> tuple[tuple[int, int], Contents]:
    """(rank, what the request's receive brought); called in each worker."""
    # vLLM adds a suffix of its own to request ids.
    own = next(key for key in _received if key == request_id or key.startswith(f"{request_id}-"))
    return _rank(), _received[own]


def held(worker: Any, blocks: Sequence[Sequence[int]]) -> tuple[tuple[int, int], Contents]:
    """(rank, what ``blocks`` hold now, a list for each KV cache group); called in each worker."""
    runner = worker.model_runner
    lists = [(ids, 0) for ids in blocks]
    return _rank(), contents(runner.vllm_config, runner.kv_cache_config, lists)


def process_group(worker: Any) -> int:
    """Called in each worker: which engine's process it belongs to."""
    return os.getpgrp()


def contents(
    vllm_config: Any, kv_cache_config: Any, lists: Sequence[tuple[Sequence[int], int]]
) -> Contents:
    """What blocks hold. ``lists``: ids (0 or less: nothing) and the first id's first token."""
    layers = vllm_config.compilation_config.static_forward_context
    found: Contents = {}
    for group, (ids, token) in zip(kv_cache_config.transfer_groups, lists, strict=True):
        first = token // group.kv_cache_spec.block_size
        held = {first + i: block for i, block in enumerate(ids) if block > 0}
        for name in group.layer_names:
            if getattr(layers[name], "kv_sharing_target_layer_name", None):
                continue  # vLLM's runner lists such layers, too; another layer has their KV
            cache = layers[name].kv_cache
            if isinstance(cache, list | tuple):
                for part, states in _states(*cache).items():
                    found[f"{name} {part}"] = {
                        position: _bytes(states[block]) for position, block in held.items()
                    }
                continue
            if cache.dim() == 3:  # MLA: one latent, no heads
                cache = cache[:, None]
            ratio = cache.shape[0] // kv_cache_config.num_blocks
            found[name] = {
                position: _bytes(cache[block * ratio : (block + 1) * ratio].transpose(0, 1))
                for position, block in held.items()
            }
    return found


def _states(conv: Any, ssm: Any) -> dict[str, Any]:
    """Mamba2's states ``[slot, head or group, ...]``; conv is (channels of x, B and C, rows)."""
    slots, channels, rows = conv.shape
    _, heads, head_dim, state = ssm.shape
    x = heads * head_dim
    b = (channels - x) // 2
    return {
        "x": conv[:, :x].reshape(slots, heads, head_dim, rows),
        "b": conv[:, x : x + b].reshape(slots, b // state, state, rows),
        "c": conv[:, x + b :].reshape(slots, b // state, state, rows),
        "ssm": ssm,
    }


def _bytes(heads: Any) -> np.ndarray:
    """[heads, bytes] of a tensor whose first axis is heads."""
    copy = heads.clone(memory_format=torch.contiguous_format)  # the cache goes on changing
    return copy.numpy().reshape(len(heads), -1).view(np.uint8)


def _rank() -> tuple[int, int]:
    from vllm.distributed.parallel_state import get_pp_group, get_tp_group

    return get_pp_group().rank_in_group, get_tp_group().rank_in_group
