"""What the connector needs of a vLLM, checked against its sources: findings, as sentences."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from vllm_sources import Sources

import pdcluster_connector

OURS = Path(pdcluster_connector.__file__).parent
BASE = ("vllm.distributed.kv_transfer.kv_connector.v1.base", "KVConnectorBase_V1")
HMA = (BASE[0], "SupportsHMA")
# Whose calls reach our class. Other connectors call parts of their own by the same names.
CALLERS = ("vllm.v1.core", "vllm.v1.engine", "vllm.v1.worker", "vllm.v1.metrics")
CALLING_MODULES = (
    "vllm.distributed.kv_transfer.kv_connector.utils",
    "vllm.distributed.kv_transfer.kv_connector.v1.base",
    "vllm.distributed.kv_transfer.kv_connector.v1.metrics",
    "vllm.distributed.kv_transfer.kv_connector.v1.multi_connector",
)
_OTHERS = ("ec_connector", "aux_output_connector")  # encoder caches, side outputs

# Hooks whose default is right for us, and why. A hook that is neither here nor ours is news.
DEFAULTS = {
    "bind_connector_metadata": "the base keeps it",
    "bind_gpu_block_pool": "vLLM keeps the blocks of a hand-off until we report it as sent",
    "bind_kv_cache_manager": "see bind_gpu_block_pool",
    "clear_connector_metadata": "the base forgets it",
    "finish_forward": "nothing is saved layer by layer",
    "get_block_ids_with_load_errors": "failures go by request id",
    "get_external_cache_hit_sources": "_cache_hit_source says it",
    "get_finished": "get_transfer_results replaces it",
    "get_finished_count": "every rank answers",
    "get_kv_connector_kv_cache_events": "no events",
    "get_mem_pool_context": "any memory can be registered",
    "handle_preemptions": "only for asynchronous saves",
    "has_connector_metadata": "the base knows",
    "has_pending_block_frees": "leases are long: preempt rather than wait",
    "has_pending_push_work": "finished requests with kept blocks keep the engine stepping",
    "register_finished_partial_tail": "no partial tails",
    "requires_kv_delivery": "true for a producer",
    "requires_piecewise_for_cudagraph": "no work within layers",
    "reset_capture_state": "no work within layers",
    "restore_kv_caches": "sleep mode is refused",
    "role": "the base knows",
    "set_host_xfer_buffer_ops": "no host buffers",
    "set_xfer_handshake_metadata": "the pp-aware one replaces it",
    "supports_divergent_local_hybrid_hits": "not claimed",
    "take_events": "no events",
    "unregister_kv_caches": "sleep mode is refused",
}

# Attributes that our code reads of vLLM's objects.
READS = {
    ("vllm.v1.request", "Request"): (
        "request_id", "prompt_token_ids", "prompt_embeds", "mm_features", "lora_request",
        "num_tokens", "num_prompt_tokens", "num_computed_tokens", "status", "kv_transfer_params",
        "skip_reading_prefix_cache", "num_output_tokens", "trace_headers",
    ),
    ("vllm.v1.request", "RequestStatus"): (
        "FINISHED_LENGTH_CAPPED", "FINISHED_STOPPED", "FINISHED_ABORTED", "FINISHED_ERROR",
        "RUNNING",
    ),
    ("vllm.v1.engine", "EngineCoreOutput"): ("request_id", "trace_headers"),
    ("vllm.v1.engine.output_processor", "OutputProcessor"): ("process_outputs",),
    ("vllm.entrypoints.generate.base.serving", "GenerateBaseServing"): ("_raise_if_error",),
    ("vllm.v1.outputs", "KVConnectorOutput"): (
        "finished_recving", "failed_recving", "kv_connector_worker_meta",
    ),
    (BASE[0], "KVConnectorTransferResults"): (
        "finished_sending", "finished_recving", "failed_recving",
    ),
    (BASE[0], "KVConnectorWorkerMetadata"): ("aggregate",),
    ("vllm.v1.core.sched.output", "SchedulerOutput"): (
        "scheduled_new_reqs", "scheduled_cached_reqs", "num_scheduled_tokens",
        "scheduled_spec_decode_tokens", "total_num_scheduled_tokens",
    ),
    ("vllm.v1.core.sched.output", "NewRequestData"): ("req_id", "block_ids"),
    ("vllm.v1.core.sched.output", "CachedRequestData"): (
        "req_ids", "resumed_req_ids", "new_block_ids",
    ),
    (BASE[0], "KVConnectorRole"): ("SCHEDULER", "WORKER"),
    ("vllm.v1.core.kv_cache_manager", "KVCacheBlocks"): ("get_block_ids",),
    ("vllm.v1.kv_cache_interface", "KVCacheConfig"): (
        "num_blocks", "kv_cache_groups", "transfer_group_ids", "transfer_groups",
        "select_transfer_block_ids",
    ),
    ("vllm.v1.kv_cache_interface", "UniformTypeKVCacheSpecs"): ("kv_cache_specs",),
    ("vllm.v1.kv_cache_interface", "KVCacheGroupSpec"): ("layer_names", "kv_cache_spec"),
    ("vllm.v1.kv_cache_interface", "FullAttentionSpec"): ("sliding_window",),
    ("vllm.v1.kv_cache_interface", "AttentionSpec"): (
        "num_kv_heads", "dtype", "num_head_slots", "state_content_bytes",
        "state_content_size_bytes",
    ),
    ("vllm.v1.kv_cache_interface", "KVCacheSpec"): ("block_size", "tokens_per_state"),
    ("vllm.config.kv_transfer", "KVTransferConfig"): (
        "engine_id", "is_kv_producer", "is_kv_consumer", "kv_connector_extra_config",
        "kv_buffer_device",
    ),
    ("vllm.config.parallel", "ParallelConfig"): (
        "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size",
        "data_parallel_index", "decode_context_parallel_size", "prefill_context_parallel_size",
        "distributed_executor_backend", "nnodes",
    ),
    ("vllm.config.cache", "CacheConfig"): ("block_size", "cache_dtype", "enable_prefix_caching"),
    ("vllm.config.model", "ModelConfig"): (
        "model", "revision", "quantization", "hf_config", "hf_overrides", "enable_sleep_mode",
        "enable_cumem_allocator", "use_mla", "get_total_num_kv_heads", "dtype",
        "multimodal_config", "is_encoder_decoder", "model_weights",
    ),
    ("vllm.config.multimodal", "MultiModalConfig"): (
        "mm_processor_cache_gb", "language_model_only", "allow_missing_mm_embeddings",
    ),
    ("vllm.config.speculative", "SpeculativeConfig"): (
        "uses_draft_kv_cache", "method", "parallel_drafting", "draft_model_config",
    ),
    ("vllm.model_executor.layers.attention.attention", "Attention"): ("kv_cache_dtype", "dtype"),
    ("vllm.model_executor.layers.attention.mla_attention", "MLAAttention"): ("kv_cache_dtype",),
    ("vllm.model_executor.layers.mamba.mamba_mixer2", "MambaMixer2"): ("norm",),
    ("vllm.model_executor.layers.mamba.mamba_mixer2", "Mixer2RMSNormGated"): ("n_groups",),
    ("vllm.platforms.interface", "Platform"): ("is_fp8_fnuz", "device_type"),
    ("vllm.config.compilation", "CompilationConfig"): ("static_forward_context",),
}  # fmt: skip

# What must not be there, and what it would break.
ABSENT = {
    ("vllm.config.cache", "CacheConfig"): {
        "calculate_kv_scales": "each engine would find KV scales of its own while it runs",
    },
}


def findings(sources: Sources) -> list[str]:
    """Everything that this version of vLLM lacks or that the connector does not know of it."""
    return [*_imports(sources), *_hooks(sources), *_calls(sources), *_reads(sources)]


def _imports(sources: Sources) -> Iterator[str]:
    for file, module, name in _our_imports():
        if not _defines(sources, module, name):
            yield f"{file} imports {name} from {module}: not there"
    for file, module, name in _our_uses():
        if sources.text(module) is not None and not _defines(sources, module, name):
            yield f"{file} imports {module} and uses {name}: not there"


@cache
def _our_imports() -> tuple[tuple[str, str, str], ...]:
    """(file, module, name) of everything that the connector imports from vLLM."""
    return tuple(
        (file.name, str(node.module), alias.name)
        for file in sorted(OURS.rglob("*.py"))
        for node in _imports_in(ast.parse(file.read_text("utf-8")))
        for alias in node.names
    )


@cache
def _our_uses() -> tuple[tuple[str, str, str], ...]:
    """(file, module, name) of everything that the connector uses as ``module.name``.

    What was imported may also be no module.
    """
    found: list[tuple[str, str, str]] = []
    for file in sorted(OURS.rglob("*.py")):
        tree = ast.parse(file.read_text("utf-8"))
        modules = {
            alias.asname or alias.name: f"{node.module}.{alias.name}"
            for node in _imports_in(tree)
            for alias in node.names
        }
        found += [
            (file.name, modules[node.value.id], node.attr)
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id in modules
        ]
    return tuple(found)


def _imports_in(tree: ast.Module) -> Iterator[ast.ImportFrom]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
            yield node


def _defines(sources: Sources, module: str, name: str) -> bool:
    if sources.text(module) is None:
        return False
    if sources.text(f"{module}.{name}") is not None:
        return True
    for node in sources.nodes(module):
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
            return True
        if isinstance(node, ast.ImportFrom) and name in {a.asname or a.name for a in node.names}:
            return True
        if isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Store):
            return True
    return False


def _class(sources: Sources, module: str, name: str) -> ast.ClassDef | None:
    nodes = sources.nodes(module)
    return next((n for n in nodes if isinstance(n, ast.ClassDef) and n.name == name), None)


def _methods(node: ast.ClassDef) -> dict[str, ast.FunctionDef]:
    return {n.name: n for n in node.body if isinstance(n, ast.FunctionDef)}


def our_hooks() -> dict[str, ast.FunctionDef]:
    """Public methods of the connector's class."""
    tree = ast.parse((OURS / "vllm" / "connector.py").read_text("utf-8"))
    (ours,) = (n for n in tree.body if isinstance(n, ast.ClassDef))
    return {n: m for n, m in _methods(ours).items() if not n.startswith("_")}


def _hooks(sources: Sources) -> Iterator[str]:
    base, hma = _class(sources, *BASE), _class(sources, *HMA)
    if base is None or hma is None:
        yield f"{BASE[0]} has no {BASE[1]} or no {HMA[1]}"
        return
    theirs, ours = {**_methods(base), **_methods(hma)}, our_hooks()
    for name, method in theirs.items():
        if name in ours:
            mine, wanted = _parameters(ours[name]), _parameters(method)
            if mine != wanted:
                yield f"{name}({', '.join(wanted)}) is overridden as ({', '.join(mine)})"
        elif _is_abstract(method):
            yield f"{name} is abstract, and not implemented"
        elif not name.startswith("_") and name not in DEFAULTS:
            yield f"{name} is a hook that nobody has looked at"
    for name in ours.keys() - theirs.keys() - OWN:
        if sources.release >= SINCE.get(name, (0, 0)):
            yield f"{name} is implemented, and no hook of this version"


def _is_abstract(method: ast.FunctionDef) -> bool:
    return any(ast.unparse(decorator) == "abstractmethod" for decorator in method.decorator_list)


OWN = frozenset({"count_fault"})
SINCE = {"supports_sleep_mode": (0, 33)}


def _parameters(method: ast.FunctionDef) -> list[str]:
    arguments = method.args
    names = [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    return names + [f"*{a.arg}" for a in (arguments.vararg,) if a] + [
        f"**{a.arg}" for a in (arguments.kwarg,) if a
    ]  # fmt: skip


def _calls(sources: Sources) -> Iterator[str]:
    """Every call of a hook in vLLM binds to our signature."""
    ours, called = our_hooks(), set()
    for module in (*sources.modules(*CALLERS), *CALLING_MODULES):
        text = sources.text(module) or ""
        if not any(hook in text for hook in ours):
            continue  # most modules name no hook, and parsing them all takes seconds
        for node in sources.nodes(module):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            method = ours.get(node.func.attr)
            if method is None or not _is_connector(node.func.value):
                continue
            called.add(node.func.attr)
            if not _binds(node, method):
                yield f"{module} line {node.lineno} calls {ast.unparse(node)[:120]}: does not fit"
    for name in NEEDED - called:
        yield f"nothing in this version calls {name}"


# Without these calls nothing would move.
NEEDED = frozenset(
    {
        "build_connector_meta", "get_num_new_matched_tokens", "get_transfer_results",
        "on_new_request", "register_kv_caches", "request_finished_all_groups",
        "set_xfer_handshake_metadata_pp_aware", "start_load_kv", "update_connector_output",
        "update_state_after_alloc", "build_connector_worker_meta", "get_handshake_metadata",
    }
)  # fmt: skip


def _is_connector(node: ast.expr) -> bool:
    text = ast.unparse(node)
    if any(other in text for other in _OTHERS):
        return False
    return "connector" in text.lower() or text in {"c", "get_kv_transfer_group()"}


def _binds(call: ast.Call, method: ast.FunctionDef) -> bool:
    arguments = method.args
    names = [a.arg for a in arguments.args][1:]
    keywords = {k.arg for k in call.keywords if k.arg}
    if any(isinstance(a, ast.Starred) for a in call.args) or None in {k.arg for k in call.keywords}:
        return True
    if len(call.args) > len(names) and arguments.vararg is None:
        return False
    given = set(names[: len(call.args)]) | keywords
    required = set(names[: len(names) - len(arguments.defaults)])
    return required <= given and (arguments.kwarg is not None or keywords <= set(names))


def _reads(sources: Sources) -> Iterator[str]:
    for (module, name), attributes in READS.items():
        has = _attributes(sources, module, name)
        for attribute in attributes:
            if attribute not in has:
                yield f"{module}.{name} has no {attribute}"
    for (module, name), unwanted in ABSENT.items():
        for attribute in unwanted.keys() & _attributes(sources, module, name):
            yield f"{module}.{name} has {attribute}: {unwanted[attribute]}"


def _attributes(sources: Sources, module: str, name: str) -> set[str]:
    node = _class(sources, module, name)
    if node is None:
        return set()
    found = set()
    for base in node.bases:
        if isinstance(base, ast.Name):
            found |= _attributes(sources, module, base.id)
    for child in ast.walk(node):
        if isinstance(child, ast.FunctionDef):
            found.add(child.name)
        elif isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store):
            found.add(child.id)
        elif isinstance(child, ast.Attribute) and ast.unparse(child.value) == "self":
            found.add(child.attr)
    return found
