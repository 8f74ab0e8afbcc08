"""A launcher under test, and what a test asks of it."""

from __future__ import annotations

import json
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from forked_python import Forked

HERE = Path(__file__).parent
CONFIG = {
    "kv_connector": "PDClusterConnector",
    "kv_connector_module_path": "pdcluster_connector.vllm.connector",
    "kv_buffer_device": "cpu",
}


def http(url: str, body: Any = None, method: str = "GET", token: str = "") -> tuple[int, Any]:
    """(status, JSON or text); 0 where nothing listens."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    if token:
        headers["Authorization"] = f"Bearer {token}"
    request = urllib.request.Request(url, data=data, method=method, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            status, text = answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            status, text = error.code, error.read()
    except OSError:
        return 0, None
    try:
        return status, json.loads(text)
    except ValueError:
        return status, text.decode()


def wait_for(what: Callable[[], Any], seconds: float = 120.0) -> Any:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if answer := what():
            return answer
        time.sleep(0.05)
    raise AssertionError(f"did not happen within {seconds} s")


class Launched:
    """One launcher and what it printed."""

    def __init__(
        self,
        process: subprocess.Popen[bytes] | Forked,
        folder: Path,
        host: str,
        port: int,
        api: int,
    ) -> None:
        self.process = process
        self.folder = folder
        self.url = f"http://{host}:{port}"
        self.api = f"http://127.0.0.1:{api}"

    @property
    def out(self) -> str:
        return (self.folder / "out").read_text(errors="replace")

    @property
    def err(self) -> str:
        return (self.folder / "err").read_text(errors="replace")

    @property
    def termination(self) -> str:
        return (self.folder / "termination").read_text().strip()

    @property
    def state(self) -> str | None:
        document = http(f"{self.url}/readyz")[1]
        return document["state"] if isinstance(document, dict) else None

    def ready(self) -> dict[str, Any]:
        """Wait for 200 of /readyz."""
        try:
            return wait_for(lambda: (a := http(f"{self.url}/readyz"))[0] == 200 and a[1])
        except AssertionError:
            raise AssertionError(f"never ready: {self.describe()}") from None

    def told(self) -> dict[str, Any]:
        """What the stand-in wrote about itself: arguments, environment, process ids."""
        return json.loads(wait_for(lambda: "\n" in self.out and self.out.split("\n")[0]))

    def end(self, seconds: float = 60.0) -> int:
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it goes on: {self.describe()}") from None

    def describe(self) -> str:
        """All that is known, for a test that failed."""
        code, readyz = self.process.poll(), http(f"{self.url}/readyz")
        return f"exit code {code}, {readyz}\n{self.out[-2000:]}\n{self.err[-2000:]}"
