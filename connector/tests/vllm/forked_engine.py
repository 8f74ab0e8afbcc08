"""The fork host's process and its children: engines that skip vLLM's imports.

``python forked_engine.py FOLDER`` imports everything that an engine needs, then listens on
``FOLDER/host``. Each message asks for one engine; the forked child builds an ``LLM`` and serves
commands on a socket of its own. It steps its engine all the time, as an API server's engine
does: leases end and orders reach workers only in steps. Without a request it steps less often,
because the engines of a test share few cores.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
import time
import traceback
from multiprocessing.connection import Listener
from pathlib import Path
from typing import Any

import cache_hook
import held_receives


def _end_with_parent() -> None:
    """End when the process ends that started this one, however it does."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _hide_avx512() -> None:
    """Answer vLLM as on a processor that has AVX2 only. It chooses its kernels by that."""
    import torch

    for name in ("_is_avx512_supported", "_is_avx512_bf16_supported", "_is_amx_tile_supported"):
        setattr(torch.cpu, name, lambda: False)


def _refusal_of_fp8() -> str:
    """Why vLLM's attention takes no fp8 KV cache on this processor; nothing if it does."""
    import torch
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    try:
        _get_attn_isa(torch.float32, 32, 64, "fp8")
    except NotImplementedError as error:
        return str(error)
    return ""


def _host(folder: Path) -> None:
    _end_with_parent()
    if "HIDES_AVX512" in os.environ:
        _hide_avx512()
    import vllm.entrypoints.llm
    import vllm.model_executor.models.llama
    import vllm.v1.attention.backends.cpu_attn
    import vllm.v1.engine.llm_engine
    import vllm.v1.executor.multiproc_executor
    import vllm.v1.worker.cpu_worker  # noqa: F401

    import pdcluster_connector.launcher.vllm_shim
    import pdcluster_connector.vllm.connector
    import pdcluster_connector.vllm.scheduler_side.scheduler
    import pdcluster_connector.vllm.worker_side.worker  # noqa: F401

    cache_hook.install()
    _pipeline_buffers()
    # vLLM collects garbage at each start. Without this it walks through all that was imported.
    gc.collect()
    gc.freeze()
    # Children end on their own account; nobody here waits for them.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    listener = Listener(str(folder / "host"), "AF_UNIX")
    while True:
        connection = listener.accept()
        while True:
            try:
                asked = connection.recv()
            except EOFError:
                break
            if asked == "refusal_of_fp8":
                connection.send(_refusal_of_fp8())
                continue
            address, log, connector, llm = asked
            pid = os.fork()
            if pid == 0:
                listener.close()
                connection.close()
                _child(address, log, connector, llm)
            connection.send(pid)


def _pipeline_buffers() -> None:
    """Make the buffer between pipeline stages, which vLLM's CPU runner only makes to compile."""
    from vllm.distributed.parallel_state import get_pp_group
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    load = CPUModelRunner.load_model

    def load_model(self: Any, *args: Any, **kwargs: Any) -> None:
        load(self, *args, **kwargs)
        if not get_pp_group().is_first_rank:
            self.intermediate_tensors = self.model.make_empty_intermediate_tensors(
                batch_size=self.max_num_tokens, dtype=self.model_config.dtype, device=self.device
            )

    CPUModelRunner.load_model = load_model


def _child(address: str, log: str, connector: dict[str, Any] | None, llm: dict[str, Any]) -> None:
    status = 1
    try:
        _end_with_parent()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setpgid(0, 0)  # not a session: Linux 6.18 can starve one session beside another for 20 s
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        _serve(address, connector, llm)
        status = 0
    except BaseException:  # noqa: BLE001  the log is all that is left
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _serve(address: str, connector: dict[str, Any] | None, options: dict[str, Any]) -> None:
    import multiprocessing

    from vllm import LLM
    from vllm.v1.executor import multiproc_executor

    # Tensor-parallel workers skip the imports too.
    multiproc_executor.get_mp_context = lambda: multiprocessing.get_context("fork")
    settings: dict[str, Any] = {
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 2048,
        "block_size": 32,
        "num_gpu_blocks_override": 256,
        "max_num_batched_tokens": 512,
        "disable_log_stats": False,
        **options,
    }
    if connector is not None:
        settings["kv_transfer_config"] = connector
    if (data_rank := settings.pop("data_rank", None)) is not None:
        _be_data_rank(data_rank)
    if settings.get("node_rank"):
        _follow(settings)
        return
    os.environ.update(settings.pop("environment", {}))
    commands = Commands(LLM(**settings).llm_engine)
    listener = Listener(address, "AF_UNIX")
    connection = listener.accept()
    while True:
        while connection.poll(0.0005 if commands.engine.has_unfinished_requests() else 0.005):
            command, *args = connection.recv()
            if command == "stop":
                connection.send((True, None))
                commands.engine.engine_core.shutdown()
                return
            try:
                connection.send((True, getattr(commands, command)(*args)))
            except Exception as error:  # noqa: BLE001  the test's side raises it
                connection.send((False, f"{type(error).__name__}: {error}"))
        if not commands.paused:
            commands.step()


def _be_data_rank(rank: int) -> None:
    """Be a data-parallel rank, as vLLM's engine core makes one of a model without experts.

    Such ranks know nothing of each other. What tells a request's choices to them is not here.
    """
    from vllm.engine.arg_utils import EngineArgs

    create = EngineArgs.create_engine_config

    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        config = create(self, *args, **kwargs)
        config.parallel_config.data_parallel_index = rank
        config.kv_transfer_config.engine_id += f"_dp{rank}"
        return config

    EngineArgs.create_engine_config = create_engine_config


def _follow(settings: dict[str, Any]) -> None:
    """Run the workers of an engine's other node, as ``serve --headless`` does."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    config = EngineArgs(**settings).create_engine_config(headless=True)
    MultiprocExecutor(config, monitor_workers=False).start_worker_monitor(inline=True)


_machines_time = time.time


class Commands:
    """What a test may ask of an engine; each method is a command."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self._scheduler = engine.engine_core.engine_core.scheduler
        self._answers: dict[str, tuple[Any, ...]] = {}
        self._steps = 0
        self._last_steps: dict[str, int] = {}
        self._nap = 0.0
        self._explains = False
        self._driven: Any = None
        self.paused = False

    def pause(self, paused: bool) -> None:
        """Step no more by itself: :meth:`advance` steps, until this is called with False."""
        self.paused = paused

    def advance(self, request_id: str, status: str, computed: int) -> None:
        """Step until the scheduler has a request in a status, with so many computed tokens."""
        deadline = time.monotonic() + 30
        while True:
            [request] = self._requests(request_id)
            if request.status.name == status and request.num_computed_tokens >= computed:
                return
            if time.monotonic() > deadline:
                raise TimeoutError(f"{request_id} is {request.status.name} after 30 s")
            self.step()

    def status(self, request_id: str) -> str:
        """What the scheduler says of a request; nothing if it does not know it any more."""
        return next((request.status.name for request in self._requests(request_id)), "")

    def _requests(self, request_id: str) -> list[Any]:
        """The scheduler's request of this id: vLLM appends a random part to the client's."""
        known = self._scheduler.requests.items()
        return [r for name, r in known if name == request_id or name.startswith(f"{request_id}-")]

    def step(self) -> None:
        nap, self._nap = self._nap, 0.0
        time.sleep(nap)
        self._steps += 1
        for output in self.engine.step():
            if output.finished:
                self._last_steps[output.request_id] = self._steps
                self._answers[output.request_id] = (
                    list(output.outputs[0].token_ids),
                    output.outputs[0].finish_reason and str(output.outputs[0].finish_reason),
                    output.kv_transfer_params,
                    [list(choice.token_ids) for choice in output.outputs],
                    self._error(output.outputs[0].finish_reason),
                )

    def explain(self) -> None:
        """From now on, answers of failed requests have what vLLM's API server sends to the client.

        Decode's API server is hooked into as the launcher has it done. It is not here, but it is
        this code of vLLM's that makes its answers.
        """
        from pdcluster_connector.vllm.client_errors import explain_failures

        explain_failures()
        self._explains = True

    def _error(self, finish_reason: str | None) -> dict[str, Any] | None:
        if not self._explains:
            return None
        from vllm.entrypoints.generate.base.serving import GenerateBaseServing
        from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
        from vllm.exceptions import GenerationError

        try:
            object.__new__(GenerateBaseServing)._raise_if_error(finish_reason, "")
        except GenerationError as error:
            return create_error_response(error).error.model_dump()
        return None

    def submit(
        self, request_id: str, prompt: list[int], max_tokens: int, params: Any, salt: str | None,
        sampling_options: dict[str, Any], lora: tuple[str, int, str] | None,
    ) -> None:  # fmt: skip
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest
        from vllm.sampling_params import RequestOutputKind

        options: dict[str, Any] = {
            "temperature": 0.0,
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "detokenize": False,
            "output_kind": RequestOutputKind.FINAL_ONLY,
            "extra_args": None if params is None else {"kv_transfer_params": params},
            **sampling_options,
        }
        sampling = SamplingParams(**options)
        inputs: dict[str, Any] = {"prompt_token_ids": prompt}
        if salt is not None:
            inputs["cache_salt"] = salt
        adapter = None if lora is None else LoRARequest(*lora)
        self.engine.add_request(request_id, inputs, sampling, lora_request=adapter)

    def answer(self, request_id: str) -> tuple[Any, ...] | None:
        return self._answers.get(request_id)

    def last_step(self, request_id: str) -> int:
        """The engine step that ended a request; the first one has the number 1."""
        return self._last_steps[request_id]

    def nap(self, seconds: float) -> None:
        """Let the next step last so long; the engine's other threads run."""
        self._nap = seconds

    def set_clock(self, ahead: float) -> None:
        """Let the process's clock be ahead of the machine's by so many seconds."""
        time.time = lambda: _machines_time() + ahead

    def abort(self, request_id: str) -> None:
        self.engine.abort_request([request_id])

    def held(self) -> int:
        return len(self._scheduler.requests)

    def readers(self) -> int:
        """Decode ranks whose claims on this engine's leases have come, and that still read."""
        leases = self._scheduler.connector._scheduler._leases
        held = [*leases._armed.values(), *leases._granted.values()]
        return sum(len(lease.readers) for lease in held)

    def free_blocks(self) -> int:
        return self._scheduler.kv_cache_manager.block_pool.get_num_free_blocks()

    def drive(self, method: str, *args: Any) -> Any:
        """Call the connector as `make bench` does; see ``bench_kv/driven.py``."""
        if self._driven is None:
            sys.path.append(str(Path(__file__).parents[3] / "e2e"))
            from bench_kv.driven import Driven

            self._driven = Driven(self.engine)
        return getattr(self._driven, method)(*args)

    def complete(self, method: str, *args: Any) -> Any:
        """Compute a prompt as `make bench` does; see ``bench_kv/in_process.py``."""
        sys.path.append(str(Path(__file__).parents[3] / "e2e"))
        from bench_kv.in_process import Engine

        return getattr(Engine(self.engine), method)(*args)

    def hold(self, state: str) -> None:
        held_receives.hold(state)

    def release(self) -> None:
        held_receives.release()

    def stands(self, count: int, state: str) -> bool:
        return held_receives.stands(count, state)

    def claimed(self) -> int:
        return held_receives.claimed()

    def ended(self) -> int:
        return held_receives.ended()

    def cut(self, is_cut: bool) -> None:
        held_receives.cut(is_cut)

    def reset_nixl(self, peer: int, side_channel: int) -> int:
        return held_receives.reset_nixl(peer, side_channel)

    def metrics(self) -> dict[str, float]:
        if not self.paused:  # what the last step has counted is told in the next one
            self.step()
        return _metrics()

    def reset_cache(self) -> bool:
        return self.engine.reset_prefix_cache(reset_connector=True)

    def counters(self) -> dict[str, float]:
        from prometheus_client import REGISTRY

        names = (
            "vllm:external_prefix_cache_hits",
            "vllm:kv_offload_load_bytes",
            "vllm:num_preemptions",
            "vllm:spec_decode_num_draft_tokens",
            "vllm:spec_decode_num_accepted_tokens",
        )
        return {
            family.name: sum(s.value for s in family.samples if s.name.endswith("_total"))
            for family in REGISTRY.collect()
            if family.name in names
        }

    def held_kv(self, blocks: list[list[int]]) -> list[Any]:
        """What all ranks' caches hold in these blocks, a list for each KV cache group."""
        return self._on_workers(cache_hook.held, blocks)

    def received_kv(self, request_id: str) -> list[Any]:
        """What a request's receive brought to each rank, before anything was computed on it."""
        return self._on_workers(cache_hook.received, request_id)

    def groups(self) -> list[int]:
        """The process group of each worker: the id of the engine that was forked for it."""
        return self._on_workers(cache_hook.process_group)

    def _on_workers(self, function: Any, *args: Any) -> list[Any]:
        return self.engine.engine_core.engine_core.model_executor.collective_rpc(
            function, args=args
        )


def _metrics() -> dict[str, float]:
    from prometheus_client import REGISTRY

    samples = {}
    for family in REGISTRY.collect():
        if not family.name.startswith("pdcluster_"):
            continue
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if k not in ("model_name", "engine")}
            text = ",".join(f"{k}={v}" for k, v in sorted(labels.items()))
            samples[f"{sample.name}{{{text}}}" if text else sample.name] = sample.value
    return samples


if __name__ == "__main__":
    _host(Path(sys.argv[1]))
