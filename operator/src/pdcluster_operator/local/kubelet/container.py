"""One container: a process behind the shim, which is restarted with back-off when it ends."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from pdcluster_operator.local import shim
from pdcluster_operator.local.kubelet.probes import passes
from pdcluster_operator.local.machine import oom_kills

LONGEST_BACKOFF, STEADY_SECONDS = 32.0, 60.0
MESSAGE_BYTES = 4096
PROBE_GRACE = 10.0


class Container:
    """Runs until stopped; ``status`` is the pod's ``containerStatuses`` entry."""

    def __init__(
        self,
        spec: Mapping[str, Any],
        *,
        command: list[str],
        environment: dict[str, str],
        folder: Path,
        address: str,
        changed: Callable[[], None],
    ) -> None:
        self._spec, self._command, self._environment = spec, command, environment
        self._folder, self._address, self._changed = folder, address, changed
        self._process: asyncio.subprocess.Process | None = None
        self._killed_because = ""
        self.log = folder / "container.log"
        self.status: dict[str, Any] = {
            "name": spec["name"],
            "ready": False,
            "started": False,
            "restartCount": 0,
            "image": spec.get("image", ""),
        }

    async def run(self) -> None:
        """Start the process again and again, 1, 2, 4 … seconds apart, until cancelled."""
        backoff = 1.0
        while True:
            began = time.monotonic()
            try:
                await self._run_once()
            except OSError as error:
                failed = f"{error.filename or self._folder}: {error.strerror}"
                self._set(lastState={"terminated": {"exitCode": 128, "message": failed}})
            backoff = 1.0 if time.monotonic() - began > STEADY_SECONDS else backoff
            wait = {"reason": "CrashLoopBackOff", "message": f"starts again in {backoff:.0f} s"}
            self._set(state={"waiting": wait}, ready=False, started=False)
            await asyncio.sleep(backoff)
            backoff = min(backoff * 2, LONGEST_BACKOFF)
            self.status["restartCount"] += 1

    async def stop(self, grace: float) -> None:
        """SIGTERM, then SIGKILL to everything below after ``grace`` seconds."""
        process = self._process
        if process is None or process.returncode is not None:
            return
        self._order(b"t")
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(process.wait(), grace)
        self.kill()
        await process.wait()

    def kill(self) -> None:
        """SIGKILL to everything below, at once: the shim's pipe ends."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()

    async def _run_once(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        if self.log.exists():
            self.log.replace(self.log.with_suffix(".previous.log"))
        last_words = self._folder / "termination-log"
        last_words.write_bytes(b"")
        self._killed_because, kills, started = "", oom_kills(), _now()
        with self.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-I",
                "-S",
                shim.__file__,
                str(self._folder.relative_to(self._folder.parent.parent)),
                env=self._environment,
                cwd=self._spec.get("workingDir") or self._folder,
                stdout=log,
                stderr=log,
                stdin=asyncio.subprocess.PIPE,
                start_new_session=True,
            )
        self._order(json.dumps(self._command).encode() + b"\n")
        self._set(state={"running": {"startedAt": started}})
        probing = asyncio.create_task(self._probe())
        try:
            code = await self._process.wait()
            if code < 0:  # the shim itself was killed
                code = 128 - code
                shim.kill_below(self._folder)
        finally:
            probing.cancel()
        out_of_memory = code == 137 and not self._killed_because and oom_kills() > kills
        ended = {
            "exitCode": code,
            "startedAt": started,
            "finishedAt": _now(),
            "reason": "OOMKilled" if out_of_memory else "Error" if code else "Completed",
            "message": self._killed_because or self._last_words(last_words, code),
        }
        self._set(lastState={"terminated": ended})

    def _last_words(self, path: Path, code: int) -> str:
        """Return the termination message, or the log's last line if a failure left no message."""
        if words := path.read_bytes()[:MESSAGE_BYTES].decode(errors="replace").strip():
            return words
        if code == 0:
            return ""
        tail = self.log.read_bytes()[-MESSAGE_BYTES:].decode(errors="replace").strip()
        return tail.splitlines()[-1] if tail else f"ended with code {code} and said nothing"

    async def _probe(self) -> None:
        startup = self._spec.get("startupProbe")
        if startup and not await self._until(startup, True):
            await self._fail("startup", startup)
            return
        self._set(started=True, ready="readinessProbe" not in self._spec)
        await asyncio.gather(self._keep_ready(), self._keep_alive())

    async def _keep_ready(self) -> None:
        probe = self._spec.get("readinessProbe")
        while probe:
            await self._until(probe, not self.status["ready"], endless=True)
            self._set(ready=not self.status["ready"])

    async def _keep_alive(self) -> None:
        probe = self._spec.get("livenessProbe")
        if probe:
            await self._until(probe, False, endless=True)
            await self._fail("liveness", probe)

    async def _until(
        self, probe: Mapping[str, Any], wanted: bool, *, endless: bool = False
    ) -> bool:
        """Wait for the probe to turn ``wanted``; False when it did not within its threshold."""
        await asyncio.sleep(float(probe.get("initialDelaySeconds", 0)))
        limit = int(probe.get("failureThreshold", 3))
        attempts = agreeing = 0
        while endless or attempts < limit:
            attempts += 1
            agreeing = (
                agreeing + 1 if await passes(probe, self._spec, self._address) is wanted else 0
            )
            if agreeing >= (1 if wanted else limit):
                return True
            await asyncio.sleep(float(probe.get("periodSeconds", 10)))
        return False

    async def _fail(self, kind: str, probe: Mapping[str, Any]) -> None:
        target = probe.get("httpGet") or probe.get("tcpSocket") or {}
        where = f"{self._address}:{target.get('port')}{target.get('path', '')}"
        self._killed_because = f"its {kind} probe of {where} failed, so it was restarted"
        await self.stop(PROBE_GRACE)

    def _order(self, order: bytes) -> None:
        if self._process is not None and self._process.stdin is not None:
            with suppress(OSError, RuntimeError):
                self._process.stdin.write(order)

    def _set(self, **changes: Any) -> None:
        if any(self.status.get(key) != value for key, value in changes.items()):
            self.status |= changes
            self._changed()


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
