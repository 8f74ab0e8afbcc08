"""The words after ``vllm serve``: what an engine's spec means as arguments of vLLM.

``spec.transfer`` becomes the JSON of ``--kv-transfer-config``, which vLLM hands to the connector.
"""

import json

from pdcluster_operator.api import object_names
from pdcluster_operator.api.spec import engine_types, resolve, types
from pdcluster_operator.plan.builders import secrets

KV_ROLES = {types.Role.PREFILL: "kv_producer", types.Role.DECODE: "kv_consumer"}
BUFFER_DEVICES = {types.Device.CUDA: "cuda", types.Device.CPU: "cpu"}
NODE_RANK_VARIABLE = "PDCLUSTER_NODE_RANK"


def vllm_args(
    cluster: types.Cluster, engine: resolve.Engine, name: object_names.EngineName, pairing_key: str
) -> list[str]:
    """Return the words after ``vllm serve``; the model comes first."""
    words = [
        engine.model,
        "--served-model-name", cluster.served_name,
        "--host", "0.0.0.0",  # noqa: S104 (a pod's own network)
        "--port", str(object_names.HTTP_PORT),
        *_parallel(engine, name),
        *_cache(engine),
    ]  # fmt: skip
    if engine.model_revision:
        words += ["--revision", engine.model_revision]
    if engine.max_model_len is not None:
        words += ["--max-model-len", str(engine.max_model_len)]
    if engine.attention_backend is not None:
        words += ["--attention-backend", engine.attention_backend]
    if cluster.spec.router.api_key_secret_ref is not None:
        words += ["--middleware", secrets.ENGINE_MIDDLEWARE]
    words += ["--kv-transfer-config", kv_transfer_config(cluster, engine.role, pairing_key)]
    return [*words, *engine.extra_args]


def _parallel(engine: resolve.Engine, name: object_names.EngineName) -> list[str]:
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
            "--master-port", str(object_names.MASTER_PORT),
        ]  # fmt: skip
    return words


def _cache(engine: resolve.Engine) -> list[str]:
    words = []
    if engine.block_size is not None:
        words += ["--block-size", str(engine.block_size)]
    on = engine.prefix_caching is engine_types.Switch.ENABLED
    words.append("--enable-prefix-caching" if on else "--no-enable-prefix-caching")
    if engine.kv_cache_dtype is not None:
        words += ["--kv-cache-dtype", engine.kv_cache_dtype]
    return words


def kv_transfer_config(cluster: types.Cluster, role: types.Role, pairing_key: str) -> str:
    """Return the JSON of ``--kv-transfer-config``; the launcher adds ``engine_id``."""
    transfer = cluster.spec.transfer
    policy = "fail" if transfer.load_failure_policy is types.LoadFailurePolicy.FAIL else "recompute"
    threads = {} if transfer.nixl_threads is None else {"num_threads": transfer.nixl_threads}
    tokens = transfer.local_tokens_per_step if role is types.Role.DECODE else None
    pace = {} if tokens is None else {"local_tokens_per_step": tokens}
    document = {
        "kv_connector": "PDClusterConnector",
        "kv_connector_module_path": "pdcluster_connector.vllm.connector",
        "kv_role": KV_ROLES[role],
        "kv_buffer_device": BUFFER_DEVICES[transfer.device],
        "kv_load_failure_policy": policy,
        "kv_connector_extra_config": {
            "side_channel_host": "$(POD_IP)",
            "side_channel_port": object_names.SIDE_CHANNEL_PORT,
            "lease_seconds": transfer.lease_seconds,
            "drain_deadline_seconds": resolve.DRAIN_DEADLINE_SECONDS,
            "backends": list(transfer.backends),
            "show_internal_names": transfer.internal_names is types.Visibility.SHOWN,
            "ticket_key_file": f"{secrets.TICKET_KEY_FOLDER}/{secrets.TICKET_KEY_FILE}",
            "ticket_audience": secrets.ticket_audience(cluster, pairing_key),
            **threads,
            **pace,
            # A pod's address is not loopback, so the connector starts only with one of these two.
            **(
                {"tls": secrets.tls_option(cluster)}
                if secrets.has_certificates(cluster)
                else {"allow_insecure": True}
            ),
        },
    }
    return json.dumps(document, separators=(",", ":"))
