"""Derives from a spec the merged settings of a role's engines, their shape, and grace periods.

At admission ``compat`` compares the shapes of both roles, exactly as the handshake compares two
real ones. A value that the spec does not give is None.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

from pdcluster_connector.compat.shape import EngineShape, Memory
from pdcluster_connector.compat.supported import PLAIN, dtype_name, layout_name, token_sliceable
from pdcluster_operator.api.spec import engine_types
from pdcluster_operator.api.spec.engine_types import Switch
from pdcluster_operator.api.spec.flags import Flag, merge_flags, parse_flags
from pdcluster_operator.api.spec.types import Backend, Cluster, Device, KvLayout, Role

MODEL_FOLDER = "/models/model"
CACHE_FOLDER = "/models/cache"
STORAGE_CREDENTIALS = "weights-credentials"
PROVIDER = "FI_PROVIDER"
STORAGE_FOLDER = "/pdcluster-weights"


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine(engine_types.SharedEngine):
    """The settings of one role's engines; None leaves the choice to vLLM.

    Attributes:
        model: what ``vllm serve`` is given: a repository or a folder in the container.
    """

    role: Role
    model: str
    model_revision: str | None
    image: str
    parallelism: engine_types.Parallelism
    startup_timeout_seconds: int

    @property
    def flags(self) -> tuple[Flag, ...]:
        """The flags of ``extra_args``."""
        return parse_flags(self.extra_args)

    def last(self, name: str) -> Flag | None:
        """Return the last flag of a name: the one that vLLM obeys."""
        return next((flag for flag in reversed(self.flags) if flag.name == name), None)


def resolve_engine(cluster: Cluster, role: Role) -> Engine:
    """Merge ``spec.engine`` with the role's own; the role wins field by field."""
    shared, spec = cluster.spec.engine, cluster.spec.role(role)
    own = spec.engine
    names = [field.name for field in fields(engine_types.SharedEngine)]
    merged = {name: getattr(own, name) or getattr(shared, name) for name in names}
    merged["extra_args"] = merge_flags(shared.extra_args, own.extra_args)
    replaced = {var.name for var in own.env}
    merged["env"] = (*(var for var in shared.env if var.name not in replaced), *own.env)
    model, revision = _model(cluster)
    return Engine(
        role=role, model=model, model_revision=revision, parallelism=spec.parallelism, **merged
    )


def provider(cluster: Cluster, engine: Engine) -> list[tuple[str, str]]:
    """Return libfabric's provider for EFA's devices, unless the user names one: (name, value).

    Without it libfabric takes TCP where it finds no such device, and nobody notices.
    """
    transfer = cluster.spec.transfer
    on_efa = transfer.rdma is not None and transfer.rdma.resource == "vpc.amazonaws.com/efa"
    if Backend.LIBFABRIC not in transfer.backends or not on_efa:
        return []
    return [] if any(var.name == PROVIDER for var in engine.env) else [(PROVIDER, "efa")]


def weights_mount(source: engine_types.ModelSource) -> tuple[str, str] | None:
    """Return (folder, volume) of an engine for its weights; None if it needs none."""
    if (storage := source.object_storage) is not None:
        return (STORAGE_FOLDER, STORAGE_CREDENTIALS) if key_file_secret(storage) else None
    return (MODEL_FOLDER, "model") if source.hugging_face is None else (CACHE_FOLDER, "cache")


def downloads_by_job(cluster: Cluster) -> bool:
    """Whether a Job downloads the weights, and engines do not ask the Hub."""
    model = cluster.spec.model
    return (
        model.source.hugging_face is not None
        and model.cache.persistent_volume_claim is not None
        and model.cache.downloaded_by is engine_types.Downloader.JOB
    )


def key_file_secret(storage: engine_types.ObjectStorageSource) -> str:
    """Return the Secret whose key is read as a file; empty where variables hold the keys."""
    ref = storage.credentials_secret_ref
    return ref.name if ref is not None and storage.uri.startswith("gs://") else ""


def _model(cluster: Cluster) -> tuple[str, str | None]:
    source = cluster.spec.model.source
    if source.hugging_face is not None:
        return source.hugging_face.repo, source.hugging_face.revision
    if source.object_storage is not None:
        return source.object_storage.uri.rstrip("/"), None
    folder = source.persistent_volume_claim or source.oci
    if folder is not None and folder.path:
        return f"{MODEL_FOLDER}/{folder.path.strip('/')}", None
    return MODEL_FOLDER, None


def workers_per_pod(engine: Engine) -> int:
    """GPUs (or CPU workers) of one pod."""
    return engine.parallelism.workers // engine.parallelism.nodes


def offloaded_mebibytes(engine: Engine) -> int:
    """Host memory of each pod that ``engine.kvOffload`` takes; 0 without it."""
    size = re.fullmatch(
        r"(\d+)(Mi|Gi|Ti)?", engine.kv_offload.cpu_memory if engine.kv_offload else ""
    )
    return int(size[1]) * {"Mi": 1, "Gi": 1 << 10, "Ti": 1 << 20}.get(size[2], 0) if size else 0


DRAIN_DEADLINE_SECONDS = 30
STOP_SECONDS = 20
STOP_MARGIN_SECONDS = 10
ROUTER_LINGER_SECONDS = 20
"""Seconds after SIGTERM in which a router still accepts connections.

A Service sends new ones for a moment longer. While no other router is ready, it sends all of them.
A new router on the same node is ready after a few seconds.
"""


def drain_seconds(cluster: Cluster) -> int:
    """Return how long requests, and then leases and quarantined receives, may last after SIGTERM.

    A prompt that is being computed gets its lease only at its end.
    """
    leases = max(cluster.spec.transfer.lease_seconds, DRAIN_DEADLINE_SECONDS)
    return cluster.spec.request_timeout_seconds + leases


def grace_period(cluster: Cluster) -> int:
    """Seconds from SIGTERM to SIGKILL: the launcher drains, then stops the engine."""
    return drain_seconds(cluster) + STOP_SECONDS + STOP_MARGIN_SECONDS


def router_grace_period(cluster: Cluster) -> int:
    """Seconds from a router's deletion to SIGKILL: new connections, then requests under way."""
    return ROUTER_LINGER_SECONDS + cluster.spec.request_timeout_seconds + STOP_MARGIN_SECONDS


def engine_places(cluster: Cluster) -> Iterator[tuple[str, engine_types.EngineOverride]]:
    """Yield all engine settings of a spec, each with its path."""
    yield "spec.engine", cluster.spec.engine
    for role in Role:
        yield f"spec.{role}.engine", cluster.spec.role(role).engine


def flag_path(cluster: Cluster, role: Role, name: str) -> str:
    """Return the path of the extraArgs that give a role's engines the flag ``name``."""
    own = parse_flags(cluster.spec.role(role).engine.extra_args)
    place = f"spec.{role}.engine" if name in {flag.name for flag in own} else "spec.engine"
    return f"{place}.extraArgs"


# Flags that change the KV of a prompt. Draft models are compared by ``EngineShape.draft``.
MODEL_FLAGS = (
    "--model", "--revision", "--hf-overrides", "--quantization", "--rope-scaling", "--rope-theta",
    "--hf-config-path", "--lora-modules",
)  # fmt: skip
CONTEXT_FLAGS = ("--decode-context-parallel-size", "--prefill-context-parallel-size")
DRAFT_FLAGS = ("--speculative-config", "--spec-model", "--spec-method")
# Methods of speculative decoding whose draft model has KV (vLLM 0.32 config/speculative.py).
DRAFTS_WITH_KV = ("draft_model", "eagle", "eagle3", "mtp", "dflash", "dspark")
# Those without; of a custom class nobody knows.
DRAFTS_WITHOUT_KV = (
    "ngram", "[ngram]", "ngram_gpu", "suffix", "medusa", "mlp_speculator", "custom_class",
)  # fmt: skip
# Flags that decide which tokens a prompt becomes.
PROMPT_FLAGS = (
    "--tokenizer", "--tokenizer-mode", "--tokenizer-revision", "--chat-template",
    "--chat-template-content-format", "--default-chat-template-kwargs", "--mm-processor-kwargs",
)  # fmt: skip
# Flags that rules look for, each by its whole name.
READ_FLAGS = frozenset({
    *MODEL_FLAGS, *CONTEXT_FLAGS, *DRAFT_FLAGS, "--attention-backend", "--block-size", "--dtype",
    "--enable-prefix-caching", "--enforce-eager", "--kv-cache-dtype", "--max-model-len",
    "--mm-processor-cache-gb", "--language-model-only", *PROMPT_FLAGS,
})  # fmt: skip
LAYOUT_VARIABLE = "VLLM_KV_CACHE_LAYOUT"
# Flags that only a model with Mamba layers has a use for.
HYBRID_FLAGS = ("--mamba-", "--enable-mamba-")


def engine_shape(cluster: Cluster, engine: Engine) -> EngineShape:
    """Return the shape of one role's engines; unknown fields are None."""
    parallel = engine.parallelism
    on_cpu = cluster.spec.transfer.device is Device.CPU
    flag, asked = engine.last("--attention-backend"), cluster.spec.transfer.kv_layout
    variables = {one.name: one.value for one in engine.env}
    blocks, caching = engine.last("--block-size"), engine.last("--enable-prefix-caching")
    cached = engine.prefix_caching is Switch.ENABLED if caching is None else not caching.negated
    return EngineShape(
        model=_named_model(engine),
        kv_dtype=_kv_dtype(engine),
        block_size=engine.block_size if blocks is None else _whole(blocks.value),
        prefix_caching=cached,
        tensor=parallel.tensor,
        pipeline=parallel.pipeline,
        data=parallel.data,
        context=_context(engine),
        nodes=parallel.nodes,
        memory=Memory.DRAM if on_cpu else Memory.VRAM,
        token_sliceable=token_sliceable(engine.attention_backend),
        hybrid=any(flag.name.startswith(HYBRID_FLAGS) for flag in engine.flags) or None,
        draft=_draft(engine),
        layout=layout_name(variables.get(LAYOUT_VARIABLE)),
        asked_layout=None if asked is KvLayout.AUTO else asked.value,
        backend=flag.value if flag else engine.attention_backend,
    )


def _named_model(engine: Engine) -> str:
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


def _draft(engine: Engine) -> str | None:
    """Return the draft model with KV that flags name, and its revision."""
    said = speculation(engine)
    model, revision = said.get("model"), said.get("revision")
    if not model or said.get("method", "draft_model") not in DRAFTS_WITH_KV:
        return None
    return f"{model} --revision {revision}" if revision else str(model)


def speculation(engine: Engine) -> dict[str, Any]:
    """Return what flags say about speculative decoding, by vLLM's own keys."""
    whole, *words = DRAFT_FLAGS
    given = {flag.name.partition(".")[2]: flag.value for flag in engine.flags if flag.head == whole}
    # vLLM obeys dotted keys, which are named here, rather than the JSON.
    said = {key: value for key, value in given.items() if key} or _mapping(given.get("", ""))
    return said | {word[7:]: flag.value for word in words if (flag := engine.last(word))}


def drafts_with_kv(engine: Engine) -> bool:
    """Whether flags ask for drafts of layers with KV of their own, as far as they say so."""
    said = speculation(engine)
    model, method = said.get("model"), said.get("method")
    if method is None:
        # vLLM takes a dotted name of Python for a class.
        return isinstance(model, str) and model not in DRAFTS_WITHOUT_KV and (
            "." not in model or "/" in model
        )  # fmt: skip
    return isinstance(method, str) and method not in DRAFTS_WITHOUT_KV


def prompt_setting(engine: Engine, name: str) -> list[tuple[str, object]]:
    """Return what the flag ``name`` and its dotted keys say, or what vLLM takes without it."""
    given = {flag.name: _mapping(flag.value) or flag.value
             for flag in engine.flags if flag.head == name}  # fmt: skip
    return sorted((given or ({name: engine.model} if name == "--tokenizer" else {})).items())


def _mapping(text: str) -> dict[str, Any]:
    try:
        return dict(json.loads(text))
    except (ValueError, TypeError, RecursionError):
        return {}  # vLLM does not start with it


def _kv_dtype(engine: Engine) -> str | None:
    flag = engine.last("--kv-cache-dtype")
    named = flag.value if flag else engine.kv_cache_dtype
    if named and named != "auto":
        return dtype_name(named)
    flag = engine.last("--dtype")
    dtype = dtype_name(flag.value) if flag else None
    return dtype if dtype in PLAIN else None


def _context(engine: Engine) -> int:
    flags = [engine.last(name) for name in CONTEXT_FLAGS]
    return max([1, *(_whole(flag.value) or 1 for flag in flags if flag is not None)])


def _whole(text: str) -> int | None:
    """Read a number as argparse does, ``1_008`` and ``+8`` too; None if it is none."""
    try:
        return int(text[:100])
    except ValueError:
        return None
