"""A launcher from the built zip file, with a small program in vLLM's place."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from launched import CONFIG, HERE, Launched

import machine
from forked_python import Forked, ForkedPython
from loopback import free_port
from pdcluster_connector.launcher import bundle
from ticket_key import KEY_FILE

ENVIRONMENT = {
    "PYTHONPATH": str(HERE),
    "PYTHONUNBUFFERED": "1",
    # aiohttp reads the machine's certificates at every import; nobody needs them.
    "SSL_CERT_FILE": os.devnull,
}


def inside(cgroup: Path | None) -> tuple[str, ...]:
    """Words before a command that start it, and so all of its children, in a cgroup."""
    script = 'echo $$ > "$0/cgroup.procs" && exec "$@"'
    return ("/bin/sh", "-c", script, str(cgroup)) if cgroup else ()


def may_open(files: int) -> tuple[str, ...]:
    """Words before a command that let it open at most so many files."""
    return ("/bin/sh", "-c", f'ulimit -n {files} && exec "$@"', "sh") if files else ()


@pytest.fixture
def small_cgroup() -> Iterator[Path]:
    """A cgroup that allows 300 MiB. A test that uses it is marked ``needs("cgroup")``."""
    with machine.small_cgroup(300 << 20) as folder:
        yield folder


@pytest.fixture(scope="session")
def pyz(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("bundle") / "connector.pyz"
    bundle.build(out)
    return out


@pytest.fixture(scope="session")
def unpacked(pyz: Path) -> Path:
    """What the zip file holds, as a folder: its bytecode is kept, so a start compiles nothing."""
    folder = pyz.with_suffix("")
    with zipfile.ZipFile(pyz) as archive:
        archive.extractall(folder)
    return folder


@pytest.fixture(scope="session")
def forks(unpacked: Path) -> Iterator[ForkedPython]:
    """Starts launchers that have been imported."""
    host = ForkedPython(
        "pdcluster_connector.launcher.main",
        "pdcluster_connector.launcher.supervisor",
        path=[unpacked],
        environment={**os.environ, **ENVIRONMENT},
    )
    yield host
    host.close()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(
        '{"architectures": ["LlamaForCausalLM"], "vocab_size": 512}'
    )
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


@pytest.fixture
def launch(
    unpacked: Path, forks: ForkedPython, model: Path, tmp_path: Path
) -> Iterator[Callable[..., Launched]]:
    """Start a launcher: ``launch("serve", "--port 1", ...)``; its processes end with the test.

    It is forked from a process that has imported it. With ``bundle``, the zip file, it is a new
    Python, as in a pod.
    """
    started: list[subprocess.Popen[bytes] | Forked] = []

    def start(
        behaviour: str = "serve",
        *flags: str,
        role: str = "prefill",
        runner: str = "stand_in_engine",
        vllm: tuple[str, ...] = (),
        sink: int | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        cgroup: Path | None = None,
        bundle: Path | None = None,
        files: int = 0,
        policy: str = "fail",
        **environment: str,
    ) -> Launched:
        folder = tmp_path / f"launcher-{len(started)}"
        folder.mkdir()
        (folder / "termination").touch()
        port, api, side = port or free_port(), free_port(), free_port()
        kv_role = "kv_producer" if role == "prefill" else "kv_consumer"
        own = {"side_channel_port": side, "ticket_key_file": KEY_FILE}
        extra = {"kv_connector_extra_config": own, "kv_load_failure_policy": policy}
        config = json.dumps({**CONFIG, "kv_role": kv_role, **extra})
        arguments = vllm or (str(model), "--host", "127.0.0.1", "--port", str(api))
        command = [
            str(bundle or unpacked), "--engine", "default.tiny.prefill.r1.0", "--role", role,
            "--host", host, "--port", str(port),
            "--termination-log", str(folder / "termination"), "--runner", runner,
            *flags, "--", *arguments, "--kv-transfer-config", config,
        ]  # fmt: skip
        environment = {**os.environ, **ENVIRONMENT, "STAND_IN": behaviour, **environment}
        with (folder / "out").open("wb") as out, (folder / "err").open("wb") as err:
            stdout, stderr = (sink, sink) if sink is not None else (out.fileno(), err.fileno())
            process: subprocess.Popen[bytes] | Forked
            if bundle or cgroup or files:
                process = subprocess.Popen(
                    [*may_open(files), *inside(cgroup), sys.executable, *command],
                    stdout=stdout,
                    stderr=stderr,
                    env=environment,
                    start_new_session=True,
                )
            else:
                process = forks.start(
                    *command, stdout=stdout, stderr=stderr, environment=environment
                )
        started.append(process)
        return Launched(process, folder, host, port, api)

    yield start
    for process in started:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
