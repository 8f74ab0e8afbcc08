"""The command line of ``vllm serve`` for one engine.

``$(NAME)`` is expanded by the kubelet from the container's environment.
"""

from __future__ import annotations

import json

from pdcluster_operator.api.object_names import (
    HTTP_PORT,
    MASTER_PORT,
    SIDE_CHANNEL_PORT,
    EngineName,
)
from pdcluster_operator.api.spec.enums import Device, LoadFailurePolicy, Role, Switch, Visibility
from pdcluster_operator.api.spec.resolve import DRAIN_DEADLINE_SECONDS, Engine
from pdcluster_operator.api.spec.types import Cluster
from pdcluster_operator.plan.builders.secrets import (
    TICKET_KEY_FILE,
    TICKET_KEY_FOLDER,
    api_key_args,
    has_certificates,
    ticket_audience,
    tls_option,
)

KV_ROLES = {Role.PREFILL: "kv_producer", Role.DECODE: "kv_consumer"}
BUFFER_DEVICES = {Device.CUDA: "cuda", Device.CPU: "cpu"}
NODE_RANK_VARIABLE = "PDCLUSTER_NODE_RANK"


def vllm_args(cluster: Cluster, engine: Engine, name: EngineName, pairing_key: str) -> list[str]:
    """Return the words after ``vllm serve``; the model comes first."""
    words = [
        engine.model,
        "--served-model-name", cluster.served_name,
        "--host", "0.0.0.0",  # noqa: S104 (a pod's own network)
        "--port", str(HTTP_PORT),
        *_parallel(engine, name),
        *_cache(engine),
    ]  # fmt: skip
    if engine.model_revision:
        words += ["--revision", engine.model_revision]
    if engine.max_model_len is not None:
        words += ["--max-model-len", str(engine.max_model_len)]
    if engine.attention_backend is not None:
        words += ["--attention-backend", engine.attention_backend]
    words += api_key_args(cluster)
    words += ["--kv-transfer-config", kv_transfer_config(cluster, engine.role, pairing_key)]
    return [*words, *engine.extra_args]


def _parallel(engine: Engine, name: EngineName) -> list[str]:
    parallel = engine.parallelism
    words = ["--tensor-parallel-size", str(parallel.tensor)]
    if parallel.pipeline > 1:
        words += ["--pipeline-parallel-size", str(parallel.pipeline)]
    if parallel.data > 1:
        # One API server for all ranks: the gauges of several servers cannot be added up.
        words += ["--data-parallel-size", str(parallel.data), "--api-server-count", "1"]
    if parallel.nodes > 1:
        # The launcher adds --headless where the node's rank is not 0.
        words += [
            "--distributed-executor-backend", "mp",
            "--nnodes", str(parallel.nodes),
            "--node-rank", f"$({NODE_RANK_VARIABLE})",
            "--master-addr", name.host(),
            "--master-port", str(MASTER_PORT),
        ]  # fmt: skip
    return words


def _cache(engine: Engine) -> list[str]:
    words = []
    if engine.block_size is not None:
        words += ["--block-size", str(engine.block_size)]
    on = engine.prefix_caching is Switch.ENABLED
    words.append("--enable-prefix-caching" if on else "--no-enable-prefix-caching")
    if engine.kv_cache_dtype is not None:
        words += ["--kv-cache-dtype", engine.kv_cache_dtype]
    return words


def kv_transfer_config(cluster: Cluster, role: Role, pairing_key: str) -> str:
    """Return the JSON of ``--kv-transfer-config``; the launcher adds ``engine_id``."""
    transfer = cluster.spec.transfer
    policy = "fail" if transfer.load_failure_policy is LoadFailurePolicy.FAIL else "recompute"
    threads = {} if transfer.nixl_threads is None else {"num_threads": transfer.nixl_threads}
    tokens = transfer.local_tokens_per_step if role is Role.DECODE else None
    pace = {} if tokens is None else {"local_tokens_per_step": tokens}
    document = {
        "kv_connector": "PDClusterConnector",
        "kv_connector_module_path": "pdcluster_connector.vllm.connector",
        "kv_role": KV_ROLES[role],
        "kv_buffer_device": BUFFER_DEVICES[transfer.device],
        "kv_load_failure_policy": policy,
        "kv_connector_extra_config": {
            "side_channel_host": "$(POD_IP)",
            "side_channel_port": SIDE_CHANNEL_PORT,
            "lease_seconds": transfer.lease_seconds,
            "drain_deadline_seconds": DRAIN_DEADLINE_SECONDS,
            "backends": list(transfer.backends),
            "show_internal_names": transfer.internal_names is Visibility.SHOWN,
            "ticket_key_file": f"{TICKET_KEY_FOLDER}/{TICKET_KEY_FILE}",
            "ticket_audience": ticket_audience(cluster, pairing_key),
            **threads,
            **pace,
            # A pod's address is not loopback, so the connector starts only with one of these two.
            **(
                {"tls": tls_option(cluster)}
                if has_certificates(cluster)
                else {"allow_insecure": True}
            ),
        },
    }
    return json.dumps(document, separators=(",", ":"))
