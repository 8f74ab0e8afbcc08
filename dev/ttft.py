"""Compares the time to the first token of two versions of the connector, in one run.

    export PYTHONPATH=e2e:connector/src
    python dev/ttft.py --before OTHER/connector/src --after connector/src

Each version gets a prefill and a decode engine as they are served: an API server and an EngineCore
process each. Their requests alternate, so that what else the machine does hits both. A request's
time goes from its prefill's beginning to decode's first token. ``--before-plain`` starts the first
version without TLS and ticket key, which it may not know.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from authority import Authority
from loopback import free_port
from models.tiny import model_path
from ticket_key import KEY_FILE

HOST = "127.0.0.1"
START_SECONDS = 400.0
ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


@dataclass
class Engine:
    """One engine as it is served."""

    process: subprocess.Popen[bytes]
    port: int
    log: Path

    def wait(self) -> None:
        """Wait until it serves."""
        deadline = time.monotonic() + START_SECONDS
        while True:
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"an engine did not start:\n{self.log.read_text()[-4000:]}")
            with contextlib.suppress(OSError, http.client.HTTPException):
                self.ask("GET", "/health")
                return
            time.sleep(0.5)

    def ask(self, method: str, path: str, body: Any = None) -> bytes:
        """Send one request over a connection of its own."""
        connection = http.client.HTTPConnection(HOST, self.port, timeout=120)
        with contextlib.closing(connection):
            connection.request(method, path, json.dumps(body), {"Content-Type": "application/json"})
            answer = connection.getresponse()
            text = answer.read()
        if answer.status != 200:
            raise SystemExit(f"{path} answered {answer.status}: {text[:2000]!r}")
        return text

    def complete(self, prompt: list[int], params: dict[str, Any]) -> dict[str, Any]:
        """Compute one token of a prompt; returns the ``kv_transfer_params`` of the answer."""
        body = {
            "model": "tiny",
            "prompt": prompt,
            "max_tokens": 1,
            "temperature": 0,
            "ignore_eos": True,
            "kv_transfer_params": params,
        }
        found: dict[str, Any] = json.loads(self.ask("POST", "/v1/completions", body))
        return found["kv_transfer_params"]

    def end(self) -> None:
        """End it with everything that it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@dataclass
class Version:
    """A prefill and a decode engine of one version."""

    name: str
    prefill: Engine
    decode: Engine

    def seconds_to_first_token(self, prompt: list[int]) -> float:
        """Send one request through both engines; its KV must have moved."""
        start = time.perf_counter()
        ticket = self.prefill.complete(prompt, {"do_remote_decode": True})
        answer = self.decode.complete(prompt, ticket)
        taken = time.perf_counter() - start
        if answer["kv_path"]["outcome"] != "transferred":
            raise SystemExit(f"{self.name}: no KV was moved: {answer['kv_path']}")
        return taken


def start(
    name: str, sources: Path, folder: Path, authority: Authority | None, options: argparse.Namespace
) -> Version:
    """Start both engines of a version; they do not serve yet."""
    engines = {}
    for role, kv_role in (("prefill", "kv_producer"), ("decode", "kv_consumer")):
        engine_id = f"bench.{name}.{role}.r.0/00000000000000aa"
        extra: dict[str, Any] = {"side_channel_host": HOST, "side_channel_port": free_port()}
        if authority is not None:
            files = authority.files(folder / name / role, engine_id)
            extra["tls"] = {
                "ca": str(files.ca),
                "certificate": str(files.certificate),
                "key": str(files.key),
            }
            extra["ticket_key_file"] = KEY_FILE
        transfer = {
            "kv_connector": "PDClusterConnector",
            "kv_connector_module_path": "pdcluster_connector.vllm.connector",
            "kv_role": kv_role,
            "engine_id": engine_id,
            "kv_buffer_device": "cpu",
            "kv_load_failure_policy": "fail",
            "kv_connector_extra_config": extra,
        }
        port, log = free_port(), folder / f"{name}-{role}.log"
        command = [
            sys.executable, "-m", "pdcluster_connector.launcher.vllm_shim",
            str(model_path(options.model)), "--host", HOST, "--port", str(port),
            "--dtype", "float32", "--enforce-eager", "--served-model-name", "tiny",
            "--max-model-len", str(options.tokens + 64), "--block-size", "32",
            "--kv-transfer-config", json.dumps(transfer),
        ]  # fmt: skip
        with log.open("wb") as output:
            process = subprocess.Popen(
                command,
                env={**os.environ, **ENVIRONMENT, "PYTHONPATH": str(sources)},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        engines[role] = Engine(process, port, log)
    return Version(name, engines["prefill"], engines["decode"])


def compare(versions: list[Version], options: argparse.Namespace) -> dict[str, list[float]]:
    """Return the seconds of each request, by version; those of one index ran side by side."""
    dice = random.Random(options.seed)
    taken: dict[str, list[float]] = {version.name: [] for version in versions}
    until = time.monotonic() + options.seconds
    number = 0
    while time.monotonic() < until:
        order = versions if number % 2 == 0 else versions[::-1]
        prompt = [dice.randrange(3, 250) for _ in range(options.tokens)]
        for version in order:
            seconds = version.seconds_to_first_token(prompt)
            if number >= options.warm_up:
                taken[version.name].append(seconds)
        number += 1
    return taken


def report(taken: dict[str, list[float]], options: argparse.Namespace) -> dict[str, Any]:
    """Return the medians in milliseconds, and the ratio with the spread of a bootstrap."""
    before, after = taken["before"], taken["after"]
    pairs = [b / a for a, b in zip(before, after, strict=True)]
    dice = random.Random(1)
    samples = sorted(statistics.median(dice.choices(pairs, k=len(pairs))) for _ in range(2000))
    return {
        "tokens": options.tokens,
        "pairs": len(pairs),
        "before_ms": round(1e3 * statistics.median(before), 2),
        "after_ms": round(1e3 * statistics.median(after), 2),
        "fastest_tenth_ms": [
            round(1e3 * statistics.quantiles(each, n=10)[0], 2) for each in (before, after)
        ],
        "ratio": round(statistics.median(pairs), 4),
        "ratio_95_percent": [round(samples[50], 4), round(samples[-51], 4)],
    }


def main() -> None:
    """Start both versions, compare them and print the result as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--before", type=Path, required=True)
    parser.add_argument("--after", type=Path, required=True)
    parser.add_argument("--before-plain", action="store_true")
    parser.add_argument("--model", default="llama")
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=180.0)
    parser.add_argument("--warm-up", type=int, default=5)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    versions: list[Version] = []
    with tempfile.TemporaryDirectory(prefix="ttft-") as folder:
        try:
            for name in ("before", "after"):
                plain = name == "before" and options.before_plain
                sources = getattr(options, name).resolve()
                authority = None if plain else Authority()
                versions.append(start(name, sources, Path(folder), authority, options))
            for version in versions:
                version.prefill.wait()
                version.decode.wait()
            print(json.dumps(report(compare(versions, options), options)))
        finally:
            for version in versions:
                version.prefill.end()
                version.decode.end()


if __name__ == "__main__":
    main()
