"""Engines as they are served: an API server, an EngineCore and a worker process each.

The client is the router: it asks prefill, and sends decode what prefill answered. The processes are
forked from a host that has imported vLLM, so a pair starts in seconds.
"""

from __future__ import annotations

import contextlib
import functools
import http.client
import json
import os
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

from authority import Authority
from bench_kv import noted, phases
from bench_kv.phases import Phase
from forked_python import Forked, ForkedPython
from loopback import free_port
from models.tiny import model_path
from ticket_key import KEY_FILE

HOST = "127.0.0.1"
START_SECONDS = 400.0
LONGEST = 1024
ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_NIXL_SIDE_CHANNEL_HOST": HOST,
}
IMPORTED = (
    "pdcluster_connector.launcher.vllm_shim",  # before anything of vLLM
    "vllm.entrypoints.cli.main",
    "vllm.entrypoints.cli.serve",
    "vllm.entrypoints.openai.api_server",
    "vllm.model_executor.models.llama",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
)
KV_ROLES = {"prefill": "kv_producer", "decode": "kv_consumer"}
PROGRAM = Path(__file__).with_name("forked_serve.py")
STOCK_WANTED = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


@dataclass(frozen=True)
class Arm:
    """One connector that is compared.

    Attributes:
        connector: its class.
        module: where that lies.
        sources: the ``connector/src`` that its engines import.
        wanted: ``kv_transfer_params`` of a prefill request.
        tls: whether its engines have certificates, and sign tickets.
        phases: those of its hand-over, if it writes moments down.
    """

    name: str
    connector: str
    module: str = "bench_kv.noted"
    sources: Path = ROOT / "connector/src"
    wanted: dict[str, Any] = field(default_factory=lambda: {"do_remote_decode": True})
    tls: bool = False
    phases: tuple[Phase, ...] | None = None


OURS = Arm("ours", "NotedOurs", tls=True, phases=phases.OURS)
STOCK = Arm("stock", "NotedStock", wanted=STOCK_WANTED, phases=phases.STOCK)
CALM = replace(STOCK, name="calm", connector="NotedCalm")
"""NixlConnector whose progress threads wait for events, as ours do."""


def older(checkout: Path, *, tls: bool) -> Arm:
    """Return an older version of our connector, without the notes that it may not allow."""
    sources = (checkout / "connector/src").resolve()
    module = "pdcluster_connector.vllm.connector"
    return Arm("checkout", "PDClusterConnector", module, sources, tls=tls)


def host(arm: Arm) -> ForkedPython:
    """Start the host of an arm's engines."""
    return ForkedPython(*IMPORTED, environment=_environment(arm))


class Engine:
    """One engine. Each request has a connection of its own."""

    def __init__(self, process: Forked, port: int, log: Path) -> None:
        self.process = process
        self._port = port
        self._log = log

    def wait(self) -> None:
        """Wait until it serves."""
        deadline = time.monotonic() + START_SECONDS
        while True:
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"an engine did not start:\n{self._log.read_text()[-4000:]}")
            with contextlib.suppress(OSError, http.client.HTTPException):
                self._ask("GET", "/health")
                return
            time.sleep(0.1)

    def complete(self, prompt: list[int], params: dict[str, Any] | None) -> dict[str, Any]:
        """Compute one token of a prompt; return the answer."""
        body = {
            "model": "tiny",
            "prompt": prompt,
            "max_tokens": 1,
            "temperature": 0,
            "ignore_eos": True,
            **({} if params is None else {"kv_transfer_params": params}),
        }
        found: dict[str, Any] = json.loads(self._ask("POST", "/v1/completions", body))
        return found

    def bind(self, cores: Sequence[int]) -> None:
        """Let all of its threads run on these cores only."""
        for process in self._processes():
            for thread in process.threads():
                os.sched_setaffinity(thread.id, cores)

    def idle_share(self, seconds: float) -> float:
        """Return what share of a core its processes take while nobody asks anything."""
        processes = self._processes()

        def used() -> float:
            return sum(sum(one.cpu_times()[:2]) for one in processes)

        before, began = used(), time.monotonic()
        time.sleep(seconds)
        return (used() - before) / (time.monotonic() - began)

    def _processes(self) -> list[psutil.Process]:
        first = psutil.Process(self.process.pid)
        return [first, *first.children(recursive=True)]

    def end(self) -> None:
        """End it with everything that it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        with contextlib.suppress(ValueError):  # the host has ended before
            self.process.wait()

    def _ask(self, method: str, path: str, body: Any = None) -> bytes:
        connection = http.client.HTTPConnection(HOST, self._port, timeout=120)
        with contextlib.closing(connection):
            connection.request(method, path, json.dumps(body), {"Content-Type": "application/json"})
            answer = connection.getresponse()
            text = answer.read()
        if answer.status != 200:
            raise SystemExit(f"{path} answered {answer.status}: {text[:2000]!r}")
        return text


class Pair:
    """A prefill and a decode engine of one arm; they do not serve before :meth:`wait`."""

    def __init__(self, arm: Arm, host: ForkedPython, folder: Path) -> None:
        self.arm = arm
        self._notes = folder / f"{arm.name}.notes"
        authority = Authority() if arm.tls else None
        start = functools.partial(_start, arm, host, folder, authority, self._notes)
        self.prefill = start("prefill")
        self.decode = start("decode")

    def wait(self) -> None:
        """Wait until both serve."""
        self.prefill.wait()
        self.decode.wait()

    def first_token(self, prompt: list[int]) -> dict[str, float]:
        """Serve a prompt; return when it began, and the moments of its way.

        Raises:
            SystemExit: its KV did not move.
        """
        began = time.monotonic()
        params = self.prefill.complete(prompt, self.arm.wanted)["kv_transfer_params"]
        ticket = time.monotonic()
        answer = self.decode.complete(prompt, params)
        ended = time.monotonic()
        see_moved(self.arm, answer.get("kv_transfer_params"))
        return {"began": began, "ticket": ticket, "sent": ticket, "answered": ended}

    def notes(self) -> list[str]:
        """Return all moments that its engines have written down."""
        return self._notes.read_text().splitlines() if self._notes.exists() else []

    def end(self) -> None:
        """End both."""
        self.prefill.end()
        self.decode.end()


def see_moved(arm: Arm, params: Mapping[str, Any] | None) -> None:
    """Raise SystemExit if decode says that KV did not move. NixlConnector says nothing."""
    path = (params or {}).get("kv_path", {})
    if arm.wanted is not STOCK_WANTED and path.get("outcome") != "transferred":
        raise SystemExit(f"{arm.name}: no KV was moved: {path}")


def transfer_config(
    arm: Arm, role: str, folder: Path, authority: Authority | None
) -> dict[str, Any]:
    """Return the ``--kv-transfer-config`` of an engine; write its certificates."""
    engine_id = f"bench.{arm.name}.{role}.r.0/00000000000000aa"
    extra: dict[str, Any] = {}
    if arm.wanted is not STOCK_WANTED:
        extra = {"side_channel_host": HOST, "side_channel_port": free_port()}
        extra["show_internal_names"] = True
    if authority is not None:
        files = authority.files(folder / arm.name / role, engine_id)
        extra["tls"] = {
            "ca": str(files.ca),
            "certificate": str(files.certificate),
            "key": str(files.key),
        }
        extra["ticket_key_file"] = KEY_FILE
    return {
        "kv_connector": arm.connector,
        "kv_connector_module_path": arm.module,
        "kv_role": KV_ROLES[role],
        "engine_id": engine_id,
        "kv_buffer_device": "cpu",
        "kv_load_failure_policy": "fail",
        "kv_connector_extra_config": extra,
    }


def _environment(arm: Arm) -> dict[str, str]:
    made = {**os.environ, **ENVIRONMENT, "PYTHONPATH": f"{arm.sources}:{ROOT / 'e2e'}"}
    made.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)
    return made


def _start(
    arm: Arm, host: ForkedPython, folder: Path, authority: Authority | None, notes: Path,
    role: str,
) -> Engine:  # fmt: skip
    port, log = free_port(), folder / f"{arm.name}-{role}.log"
    command = [
        str(PROGRAM), str(model_path("llama")), "--host", HOST, "--port", str(port),
        "--dtype", "float32", "--enforce-eager", "--served-model-name", "tiny",
        "--max-model-len", str(LONGEST), "--block-size", "32",
        "--kv-transfer-config", json.dumps(transfer_config(arm, role, folder, authority)),
    ]  # fmt: skip
    environment = {
        **_environment(arm),
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
        noted.FILE: str(notes),
    }
    with log.open("wb") as output:
        process = host.start(
            *command, stdout=output.fileno(), stderr=output.fileno(), environment=environment
        )
    return Engine(process, port, log)
