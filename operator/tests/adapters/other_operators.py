"""Operators of others beside ours, as processes: their CRDs, and their webhooks on this machine."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
from operator_runs import until
from real_api import RealApi, die_with_us

STARTS_SECONDS = 60.0


@contextlib.contextmanager
def controllers(
    program: Path, configuration: Path, kubeconfig: Path, log: Path, webhooks: int
) -> Iterator[psutil.Process]:
    """Run another operator's program until the block ends.

    Args:
        webhooks: the port of its webhooks, on which it listens when the block begins.
    """
    command = (str(program), f"--config={configuration}")
    with process(command, {"KUBECONFIG": str(kubeconfig)}, log, webhooks) as started:
        yield started


@contextlib.contextmanager
def process(
    command: Sequence[str], environment: Mapping[str, str], log: Path, port: int
) -> Iterator[psutil.Process]:
    """Run a program until the block ends. It listens on the port when the block begins."""
    with (
        log.open("wb") as output,
        subprocess.Popen(
            command,
            env={**os.environ, **environment},
            stdout=output,
            stderr=output,
            preexec_fn=die_with_us,  # noqa: PLW1509
        ) as started,
    ):
        try:
            until(lambda: _listens(started.pid, port), STARTS_SECONDS, log.read_text)
            yield psutil.Process(started.pid)
        finally:
            started.kill()


def install(real: RealApi, body: dict[str, Any]) -> None:
    """Create a CRD, or the configuration of webhooks. Returns when a CRD is served."""
    group = body["apiVersion"]
    plural = f"{body['kind'].lower()}s"
    status, answer = real.call("POST", f"/apis/{group}/{plural}", body)
    assert status == 201, json.dumps(answer)
    if body["kind"] == "CustomResourceDefinition":
        spec = body["spec"]
        path = f"/apis/{spec['group']}/{spec['versions'][0]['name']}/{spec['names']['plural']}"
        until(lambda: real.call("GET", path)[0] == 200, 30, lambda: f"{path} is not served")


def hooks_at(hooks: dict[str, Any], port: int, authority: bytes) -> dict[str, Any]:
    """Return a configuration of webhooks that names this machine instead of a Service."""
    for hook in hooks["webhooks"]:
        hook["clientConfig"] = place(hook["clientConfig"]["service"]["path"], port, authority)
    return hooks


def place(path: str, port: int, authority: bytes) -> dict[str, str]:
    """Return a ``clientConfig``: where the API server finds a webhook."""
    bundle = base64.b64encode(authority).decode()
    return {"url": f"https://127.0.0.1:{port}{path}", "caBundle": bundle}


def _listens(pid: int, port: int) -> bool:
    """Whether a process listens on a port."""
    return any(one.laddr.port == port for one in psutil.Process(pid).net_connections())
