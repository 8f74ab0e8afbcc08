"""Engines of one process each, forked from one that has imported vLLM: real vLLM and real NIXL.

Those of :func:`forked` are driven by hand, and their model makes no steps. The connector gets, on
the engine's thread, what a step would give it. So a number is the connector's own, and both
connectors are called in the same way.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from loopback import free_port
from models import tiny
from ticket_key import KEY_FILE

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
}
ANSWER_SECONDS = 200.0
LAYERS, BLOCK_TOKENS, BLOCKS = 32, 32, 3000
BLOCK_BYTES = BLOCK_TOKENS * 2 * 32 * 4  # of one layer: K and V of one head of 32 floats
READY = "ready"


def model() -> str:
    """Write the model: many layers, a small KV cache, and nothing to compute."""
    name = f"bench-llama-{LAYERS}"
    shape = {
        "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": LAYERS,
        "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 32,
    }  # fmt: skip
    tiny.RECIPES[name] = tiny.Recipe("LlamaConfig", overrides=shape)
    return str(tiny.model_path(name))


class Worker:
    """The handle of one engine's process.

    It makes something there, whose methods are what :meth:`ask` can have done. Its ``rest`` is
    called while nothing is asked.
    """

    def __init__(self, name: str, folder: Path, make: Callable[[], Any]) -> None:
        self.name = name
        self.log = folder / f"{name}.log"
        self._pipe, theirs = multiprocessing.Pipe()
        self._pid = os.fork()
        if self._pid == 0:
            self._pipe.close()
            _become(theirs, self.log, make)
        theirs.close()

    def ask(self, *message: Any) -> Any:
        """Have the process do something; raises what went wrong there."""
        self.send(*message)
        return self.answer()

    def send(self, *message: Any) -> None:
        """Have the process begin something; :meth:`answer` waits for its end."""
        self._pipe.send(message)

    def answer(self) -> Any:
        """Wait for the next answer."""
        with contextlib.suppress(EOFError):
            if self._pipe.poll(ANSWER_SECONDS):
                right, value = self._pipe.recv()
                if right:
                    return value
                raise SystemExit(f"{self.name}: {value}")
        tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-40:])
        raise SystemExit(f"{self.name} gave no answer:\n{tail}")

    def end(self) -> None:
        """End the process."""
        self._pipe.close()
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline:
            if os.waitpid(self._pid, os.WNOHANG)[0]:
                return
            time.sleep(0.02)
        os.kill(self._pid, 9)
        os.waitpid(self._pid, 0)


def import_vllm() -> None:
    """Import what engines need. The process is one that starts nothing else afterwards."""
    os.environ.update(ENVIRONMENT)
    import vllm.entrypoints.llm
    import vllm.model_executor.models.llama
    import vllm.v1.attention.backends.cpu_attn
    import vllm.v1.engine.llm_engine
    import vllm.v1.worker.cpu_worker  # noqa: F401


@contextlib.contextmanager
def forked(
    folder: Path, kinds: Sequence[str] = ("ours", "stock"), blocks: int = BLOCKS, layout: str = ""
) -> Iterator[dict[str, tuple[Worker, Worker]]]:
    """Start a prefill and a decode engine of each kind, which are driven by hand.

    ``layout``: of their KV caches; what vLLM's attention on a CPU has if empty.
    """
    path = model()
    import_vllm()
    made = {}
    for kind in kinds:
        of_role = {
            role: functools.partial(_driven, kind, role, path, blocks, layout)
            for role in ("prefill", "decode")
        }
        made[kind] = tuple(Worker(f"{kind}-{role}", folder, make) for role, make in of_role.items())
    with ended(*(worker for pair in made.values() for worker in pair)):
        yield made  # type: ignore[misc]


@contextlib.contextmanager
def ended(*workers: Worker) -> Iterator[None]:
    """Wait until they are ready; end them afterwards."""
    try:
        for worker in workers:
            worker.answer()
        yield
    finally:
        for worker in workers:
            worker.end()


def _become(pipe: Connection, log: Path, make: Callable[[], Any]) -> None:
    """Be an engine in a forked process; never return."""
    try:
        os.setpgid(0, 0)
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(free_port())
        _serve(pipe, make())
    except BaseException:  # noqa: BLE001  the log is all that is left
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _serve(pipe: Connection, made: Any) -> None:
    pipe.send((True, READY))
    while True:
        while not pipe.poll(0.005):
            made.rest()
        try:
            command, *arguments = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, getattr(made, command)(*arguments)))
        except Exception as error:  # noqa: BLE001  the other process raises it
            traceback.print_exc()
            pipe.send((False, f"{type(error).__name__}: {error}"))


def _lay_out(layout: str) -> None:
    """Have vLLM lay KV out in an order that attention on a CPU cannot read: none reads it here."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
    from vllm.v1.kv_cache_layout import KVCacheLayout

    CPUAttentionBackend.supported_kv_cache_layouts = lambda: (KVCacheLayout[layout],)
    os.environ["VLLM_KV_CACHE_LAYOUT"] = layout


def _driven(kind: str, role: str, path: str, blocks: int, layout: str) -> Any:
    from vllm import LLM

    from bench_kv import driven, noted

    transfer: dict[str, Any] = {
        "kv_connector": "NixlConnector",
        "kv_role": {"prefill": "kv_producer", "decode": "kv_consumer"}[role],
        "engine_id": f"bench.{kind}.{role}.r.0/00000000000000aa",
        "kv_buffer_device": "cpu",
        "kv_load_failure_policy": "fail",
    }
    if kind == "ours":
        transfer |= {
            "kv_connector": "PDClusterConnector",
            "kv_connector_module_path": "pdcluster_connector.vllm.connector",
            "kv_connector_extra_config": {
                "side_channel_host": "127.0.0.1", "side_channel_port": free_port(),
                "show_internal_names": True, "ticket_key_file": KEY_FILE,
            },
        }  # fmt: skip
    else:
        noted.leave_cores()
        if kind == "calm":
            noted.let_progress_wait()
    if layout:
        _lay_out(layout)
    watch = driven.Watch(kind)
    engine = LLM(
        path, dtype="float32", enforce_eager=True, skip_tokenizer_init=True,
        max_model_len=2048, max_num_batched_tokens=2048, block_size=BLOCK_TOKENS,
        num_gpu_blocks_override=blocks, kv_cache_memory_bytes=blocks * LAYERS * BLOCK_BYTES,
        disable_log_stats=True, kv_transfer_config=transfer,
    ).llm_engine  # fmt: skip
    return driven.Driven(engine, watch)
