"""A local cluster for end-to-end tests: the real control loop, launchers, engines and router.

The cluster runs on an event loop in a thread of its own. So a test reads like the steps of a
person: apply, wait for a condition, send a prompt, kill a process, look at the links.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import ssl
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import psutil
import yaml
from reply import Reply, answer

from loopback import free_ports
from models.tiny import model_path
from pdcluster_connector.protocol.engine_id import OPERATOR_NAME
from pdcluster_operator.adapters.connector_bundle import build_connector
from pdcluster_operator.adapters.metrics import Metrics, PageOptions, serve_pages
from pdcluster_operator.api.object_names import HTTP_PORT, LAUNCHER_PORT, SIDE_CHANNEL_PORT
from pdcluster_operator.api.spec.parse import parse_cluster
from pdcluster_operator.cli.view import Snapshot, take_snapshot
from pdcluster_operator.local.cluster import LocalCluster
from pdcluster_operator.local.door import Door
from pdcluster_operator.plan.builders.secrets import has_certificates
from waiting import until

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "tiny-cpu.yaml"
START_SECONDS = 400.0  # two engines that load beside each other on two slow cores

# A third of an engine's start is a third process that imports vLLM. With this, a single rank has
# no process of its own beside its engine core: so it is on a GPU, but vLLM for CPU must be told.
# `make demo` and test_local_up_once.py run the example as it is.
ONE_PROCESS_A_RANK = {"name": "VLLM_ENABLE_V1_MULTIPROCESSING", "value": "0"}
# With several ranks vLLM compiles one tiny function with the C++ compiler in each: 10 s.
UNCOMPILED = {"name": "TORCHDYNAMO_DISABLE", "value": "1"}

# One layer's K and V of one token: KV heads x (K, V) x head size x float32.
KV_BYTES_PER_TOKEN = 4 * 4 * 2 * 32 * 4  # layers x heads x 2 x head_dim x 4
BLOCK_TOKENS = 32


def manifest(**changes: Any) -> dict[str, Any]:
    """The example manifest over the tiny Llama; ``changes`` are merged into its spec."""
    document: dict[str, Any] = yaml.safe_load(EXAMPLE.read_text())
    document["spec"]["model"]["source"] = {"hostPath": {"path": str(model_path("llama"))}}
    document["spec"]["engine"]["env"].append(ONE_PROCESS_A_RANK)
    return {**document, "spec": _merged(document["spec"], changes)}


def tensor(ranks: int, nodes: int = 1) -> dict[str, Any]:
    """A role whose engines have so many tensor ranks, on so many nodes."""
    parallelism = {"tensor": ranks, "nodes": nodes}
    return {"parallelism": parallelism, "engine": {"env": [UNCOMPILED]}}


def appended(*words: str) -> dict[str, Any]:
    """A pod template that adds words to the engine's arguments. No admission rule sees them."""
    script = f'exec python3 /pdcluster/connector.pyz "$@" {" ".join(words)}'
    return {
        "spec": {
            "containers": [{"name": "engine", "command": ["/bin/sh", "-c", script, "launcher"]}]
        }
    }


# A router that ends lets 20 s pass in which clients go to another one. These have no client then.
END_AT_ONCE: dict[str, Any] = {"lifecycle": {"preStop": {"sleep": {"seconds": 1}}}}


def idle(container: str = "engine") -> dict[str, Any]:
    """A pod template that serves nothing: for tests of what stands, not of what it does.

    It ends at a SIGTERM from its first instruction on: the kernel drops one that process 1 does
    not handle, but here process 1 is the pause process.
    """
    command = ["/bin/sleep", "3600"]
    more = END_AT_ONCE if container == "router" else {}
    containers = [{"name": container, "command": command, "args": [], **more}]
    return {"spec": {"shareProcessNamespace": True, "containers": containers}}


def mounted(model: Path) -> dict[str, Any]:
    """A pod template that mounts another model. Admission warns, and does not see its files."""
    return {"spec": {"volumes": [{"name": "model", "hostPath": {"path": str(model)}}]}}


def _merged(base: Any, over: Any) -> Any:
    if isinstance(base, dict) and isinstance(over, dict):
        return {**base, **{key: _merged(base.get(key), value) for key, value in over.items()}}
    return over


def condition(status: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    """A condition of a PDCluster's status; Unknown before there is one."""
    found = [c for c in status.get("conditions", ()) if c["type"] == kind]
    return found[0] if found else {"status": "Unknown", "reason": "", "message": ""}


async def _ready() -> None:
    """Say that nothing is wrong."""


class LocalRun:
    """Use as a context manager; ends every process on the way out."""

    def __init__(self, document: dict[str, Any], folder: Path, key: str = "") -> None:
        self._document, self.folder, self._key_of_api = document, folder, key
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self.said: list[str] = []
        self._stack = contextlib.AsyncExitStack()
        self._opened = False

    def __enter__(self) -> Self:
        self._thread.start()
        self._call(self._start())
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._call(self._stop())
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(10)
            self._loop.close()

    async def _start(self) -> None:
        self._local = LocalCluster(self.folder, build_connector(), self.said.append)
        await self._local.__aenter__()
        self._key = self._local.apply(self._document)

    async def _stop(self) -> None:
        await self._stack.aclose()
        await self._local.stop(10.0)
        await self._local.__aexit__(None, None, None)

    def _call(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(120)

    def serve_metrics(self) -> int:
        """Serve the operator's metrics until the run ends, as its process does; return the port."""
        health, port = free_ports(2)
        metrics = Metrics()

        async def serve() -> None:
            metrics.loop = self._local.loop
            metrics.loop._worked = metrics.reconciled
            pages = PageOptions(host="127.0.0.1", health_port=health, metrics_port=port)
            await serve_pages(self._stack, pages, _ready, metrics)

        self._call(serve())
        return port

    def command(self, *words: str) -> tuple[int, str]:
        """Run ``pdcluster WORD NAME --local …`` as people do; return its exit code and output."""
        cache, name = self.folder / "cache", self._document["metadata"]["name"]
        if not self._opened:
            folder = cache / "runs" / f"{name}-20260101-000000-{os.getpid()}"
            folder.mkdir(mode=0o700, parents=True)
            local = self._local
            self._call(self._open(Door(local.api, local.kubelet.logs, folder, self._key.namespace)))
            self._opened = True
        first, *more = words
        done = subprocess.run(
            [sys.executable, "-m", "pdcluster_operator", first, name, "--local", *more],
            env={**os.environ, "PDCLUSTER_CACHE": str(cache), "COLUMNS": "200"},
            capture_output=True,
            text=True,
            timeout=START_SECONDS,
            check=False,
        )
        print(f"$ pdcluster {' '.join(words)}: exit code {done.returncode}\n{done.stdout}")
        return done.returncode, done.stdout + done.stderr

    async def _open(self, door: Door) -> None:
        await self._stack.enter_async_context(door)

    def apply(self, document: dict[str, Any]) -> None:
        """Change the PDCluster, as ``kubectl apply`` would."""

        async def change() -> None:
            self._local.apply(document)

        self._call(change())

    def snapshot(self) -> Snapshot:
        async def take() -> Snapshot:
            return take_snapshot(self._local, self._key)

        return self._call(take())

    def status(self) -> dict[str, Any]:
        async def read() -> dict[str, Any]:
            return dict(self._local.cluster(self._key).get("status") or {})

        return self._call(read())

    def condition(self, kind: str) -> Mapping[str, Any]:
        return condition(self.status(), kind)

    def wait(self, what: str, holds: Callable[[], Any], seconds: float = START_SECONDS) -> float:
        return until(what, holds, seconds, self.report)

    def wait_ready(self, seconds: float = START_SECONDS) -> float:
        return self.wait("Ready", lambda: self.condition("Ready")["status"] == "True", seconds)

    def wait_pod(self, role: str, seconds: float = START_SECONDS) -> float:
        """Wait until a pod of a role is ready, whatever the cluster's status says."""

        def ready() -> bool:
            return any(p.state == "Ready" for p in self.snapshot().pods if p.role == role)

        return self.wait(f"{role} pod that is ready", ready, seconds)

    def report(self) -> str:
        snapshot = self.snapshot()
        lines = [str(item) for item in (*snapshot.pods, *snapshot.conditions, *snapshot.links)]
        for log in sorted(self.folder.glob("*/engine/container*.log")):
            lines += [f"--- {log}", *log.read_text(errors="replace").splitlines()[-25:]]
        return "\n".join([*lines, *self.said[-20:]])

    def address(self, role: str, node: int = 0) -> str:
        """A pod's address; of an engine of several pods the leader's, or another node's."""
        pods = [pod for pod in self.snapshot().pods if pod.role == role]
        return sorted(pods, key=lambda pod: pod.name)[node].address

    def complete(
        self,
        prompt: str,
        *,
        role: str = "router",
        tokens: int = 16,
        data_rank: int | None = None,
        headers: Mapping[str, str] | None = None,
        **more: Any,
    ) -> Reply:
        """One greedy completion through the router, or straight from an engine or its rank."""
        body = {"model": "tiny", "prompt": prompt, "max_tokens": tokens, "temperature": 0, **more}
        request = urllib.request.Request(
            f"http://{self.address(role)}:{HTTP_PORT}/v1/completions",
            data=json.dumps(body).encode(),
            headers={
                "Content-Type": "application/json",
                **(headers or {}),
                **({} if data_rank is None else {"X-data-parallel-rank": str(data_rank)}),
                **({"Authorization": f"Bearer {self._key_of_api}"} if self._key_of_api else {}),
            },
        )
        return answer(request)

    def post(self, role: str, path: str) -> Reply:
        """What a role's engine answers to a POST without a body."""
        url = f"http://{self.address(role)}:{HTTP_PORT}{path}"
        return answer(urllib.request.Request(url, method="POST"))

    def metric(self, role: str, name: str) -> float:
        """The sum of an engine's samples of one name."""
        lines = self.get(role, HTTP_PORT, "/metrics").splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(f"{name}{{"))

    def launcher(self, role: str) -> psutil.Process:
        """The launcher of a role's engine: PID 1 of its container."""
        for process in psutil.Process(os.getpid()).children(recursive=True):
            try:
                words = process.cmdline()
            except psutil.Error:
                continue
            if not any(word.endswith("connector.pyz") for word in words[:2]):
                continue
            if f".{role}." in words[words.index("--engine") + 1]:
                return process
        raise AssertionError(f"no launcher of {role}\n{self.report()}")

    def kill(self, role: str) -> None:
        """Send SIGKILL to every process of a role's engine, as if its node were lost."""
        launcher = self.launcher(role)
        for process in (launcher, *launcher.children(recursive=True)):
            try:
                process.send_signal(signal.SIGKILL)
            except psutil.NoSuchProcess:
                continue

    def kill_core(self, role: str) -> None:
        """Send SIGKILL to the process of a role's engine that vLLM names EngineCore."""
        processes = self.launcher(role).children(recursive=True)
        [core] = [process for process in processes if "EngineCore" in "".join(process.cmdline())]
        core.send_signal(signal.SIGKILL)

    @contextlib.contextmanager
    def standing_still(self, role: str) -> Iterator[None]:
        """Stop a role's engine until the block ends. Its launcher keeps running."""
        processes = self.launcher(role).children(recursive=True)
        for process in processes:
            process.suspend()
        try:
            yield
        finally:
            for process in processes:
                with contextlib.suppress(psutil.NoSuchProcess):  # killed meanwhile
                    process.resume()

    def engine_id(self, role: str) -> str:
        return str(json.loads(self.get(role, LAUNCHER_PORT, "/readyz"))["engine_id"])

    @property
    def secured(self) -> bool:
        """Whether the engines speak TLS."""
        return has_certificates(parse_cluster(self._document).cluster)

    def shown_as(self, name: str) -> ssl.SSLContext:
        """A client's TLS context, with a certificate of this name from the operator's CA."""
        authority, now = self._local.authority, time.time()
        context = authority.client_context(authority.sign(name, now - 3600, now + 3600))
        context.check_hostname = False  # a test asks by address, whoever is there
        return context

    def get(self, role: str, port: int, path: str, node: int = 0) -> str:
        """What an engine's pod answers to a GET: to the operator, or to another engine."""
        with_tls = (LAUNCHER_PORT, *range(SIDE_CHANNEL_PORT, HTTP_PORT))
        secured = self.secured and port in with_tls
        context = self.shown_as(OPERATOR_NAME) if secured else None
        scheme = "https" if secured else "http"
        url = f"{scheme}://{self.address(role, node)}:{port}{path}"
        with urllib.request.urlopen(url, timeout=60, context=context) as reply:
            return str(reply.read().decode())
