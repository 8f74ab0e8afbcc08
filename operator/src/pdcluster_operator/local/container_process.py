"""One container: a process behind the shim, with probes and restarts.

Three substitutions stand for the namespaces of a real node: a mount becomes a folder, a DNS name
becomes its pod's address, and a bind to 0.0.0.0 becomes a bind to the pod's own 127.x.y.z. All
other arguments and variables of a container are those that it has in a cluster.
"""

import asyncio
import json
import re
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

import aiohttp

from pdcluster_operator.api.conditions import timestamp
from pdcluster_operator.local import shim

LONGEST_BACKOFF, STEADY_SECONDS = 32.0, 60.0
MESSAGE_BYTES = 4096
PROBE_GRACE = 10.0


@dataclass(eq=False)
class Container:
    """Runs until stopped; ``status`` is the pod's ``containerStatuses`` entry."""

    spec: Mapping[str, Any]
    _: KW_ONLY
    command: list[str]
    environment: dict[str, str]
    folder: Path
    address: str
    changed: Callable[[], None]

    def __post_init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
        self._killed_because = ""
        self.log = self.folder / "container.log"
        self.status: dict[str, Any] = {"name": self.spec["name"], "ready": False, "restartCount": 0}

    async def run(self) -> None:
        """Start the process again and again, 1, 2, 4 … seconds apart, until cancelled."""
        backoff = 1.0
        while True:
            began = time.monotonic()
            try:
                await self._run_once()
            except OSError as error:
                failed = f"{error.filename or self.folder}: {error.strerror}"
                self._set(lastState={"terminated": {"exitCode": 128, "message": failed}})
            backoff = 1.0 if time.monotonic() - began > STEADY_SECONDS else backoff
            wait = {"reason": "CrashLoopBackOff", "message": f"starts again in {backoff:.0f} s"}
            self._set(state={"waiting": wait}, ready=False)
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

    @property
    def shim(self) -> int | None:
        """The pid of its first process while that runs."""
        process = self._process
        return process.pid if process and process.returncode is None else None

    def kill(self) -> None:
        """SIGKILL to everything below, at once: the shim's pipe ends."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()

    async def _run_once(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        if self.log.exists():
            self.log.replace(self.log.with_suffix(".previous.log"))
        last_words = self.folder / "termination-log"
        last_words.write_bytes(b"")
        self._killed_because, started = "", timestamp(time.time())
        with self.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-I",
                "-S",
                shim.__file__,
                str(self.folder.relative_to(self.folder.parent.parent)),
                env=self.environment,
                cwd=self.spec.get("workingDir") or self.folder,
                stdout=log,
                stderr=log,
                stdin=asyncio.subprocess.PIPE,
                start_new_session=True,
            )
        self._order(json.dumps(self.command).encode() + b"\n")
        self._set(state={"running": {"startedAt": started}}, started=False)
        probing = asyncio.create_task(self._probe())
        try:
            code = await self._process.wait()
            if code < 0:  # the shim itself was killed
                code = 128 - code
                shim.kill_below(self.folder)
        finally:
            probing.cancel()
        ended = {
            "exitCode": code,
            "startedAt": started,
            "finishedAt": timestamp(time.time()),
            "reason": "Error" if code else "Completed",
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
        startup = self.spec.get("startupProbe")
        if startup and not await self._until(startup, True):
            await self._fail("startup", startup)
            return
        self._set(ready="readinessProbe" not in self.spec, started=True)
        await asyncio.gather(self._keep_ready(), self._keep_alive())

    async def _keep_ready(self) -> None:
        probe = self.spec.get("readinessProbe")
        while probe:
            await self._until(probe, not self.status["ready"], endless=True)
            self._set(ready=not self.status["ready"])

    async def _keep_alive(self) -> None:
        probe = self.spec.get("livenessProbe")
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
            agreeing = agreeing + 1 if await passes(probe, self.spec, self.address) is wanted else 0
            if agreeing >= (1 if wanted else limit):
                return True
            await asyncio.sleep(float(probe.get("periodSeconds", 10)))
        return False

    async def _fail(self, kind: str, probe: Mapping[str, Any]) -> None:
        target = probe.get("httpGet") or probe.get("tcpSocket") or {}
        where = f"{self.address}:{target.get('port')}{target.get('path', '')}"
        self._killed_because = f"its {kind} probe of {where} failed, so it was restarted"
        await self.stop(PROBE_GRACE)

    def _order(self, order: bytes) -> None:
        if self._process is not None and self._process.stdin is not None:
            with suppress(OSError, RuntimeError):
                self._process.stdin.write(order)

    def _set(self, **changes: Any) -> None:
        if any(self.status.get(key) != value for key, value in changes.items()):
            self.status |= changes
            self.changed()


async def passes(probe: Mapping[str, Any], container: Mapping[str, Any], address: str) -> bool:
    """One attempt, within the probe's ``timeoutSeconds``."""
    timeout = float(probe.get("timeoutSeconds", 1))
    target = probe.get("httpGet") or probe.get("tcpSocket") or {}
    port = _port(target.get("port"), container)
    with suppress(aiohttp.ClientError, OSError, asyncio.TimeoutError):
        if "httpGet" in probe:
            url = f"{target.get('scheme', 'HTTP')}://{address}:{port}{target.get('path', '/')}"
            http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=timeout))
            async with http, http.get(url, ssl=False) as answer:  # like Kubernetes', it trusts all
                return 200 <= answer.status < 400
        _, writer = await asyncio.wait_for(asyncio.open_connection(address, port), timeout)
        writer.close()
        return True
    return False


def _port(port: Any, container: Mapping[str, Any]) -> int:
    for entry in container.get("ports") or ():
        if entry.get("name") == port:
            return int(entry["containerPort"])
    return int(port)


Manifest = Mapping[str, Any]

_REFERENCE = re.compile(r"\$(\$|\(([A-Za-z_][\w.-]*)\))")
_DNS_NAME = re.compile(r"(?<![\w.-])(?:[a-z0-9-]+\.){2,3}svc(?:\.cluster\.local)?(?![\w-])")
_WILDCARD = re.compile(r"(?<![\d.])0\.0\.0\.0(?![\d.])")


def substitute(
    text: str, address: str, folders: Mapping[str, str], resolve: Callable[[str], str | None]
) -> str:
    """Return an argument or a variable's value as this machine needs it.

    Args:
        address: the pod's own address, which replaces 0.0.0.0.
        folders: mount path to the folder that stands for it.
        resolve: cluster DNS name to an address; None leaves the name as it is.
    """
    # One pass, longest first: what a folder's own path holds is not replaced again.
    mounts = sorted(folders, key=len, reverse=True)
    pattern = rf"(?<![\w./-])({'|'.join(map(re.escape, mounts))})(?![\w.-])"
    if mounts:
        text = re.sub(pattern, lambda mount: folders[mount[1]], text)
    text = _DNS_NAME.sub(lambda name: resolve(name[0]) or name[0], text)
    return _WILDCARD.sub(address, text)


def kubernetes_environment(pod: Manifest, container: Manifest, address: str) -> dict[str, str]:
    """Return the container's ``env`` as a kubelet resolves it.

    What comes from Secrets and ConfigMaps is left to the surrounding environment, where the
    pre-flight (:mod:`.facts`) has looked for it.
    """
    values: dict[str, str] = {}
    for entry in container.get("env") or ():
        source = entry.get("valueFrom")
        if source is None:
            values[entry["name"]] = expand(entry.get("value", ""), values)
        elif "fieldRef" in source:
            values[entry["name"]] = _field(pod, source["fieldRef"]["fieldPath"], address)
    return values


def expand(text: str, values: Mapping[str, str]) -> str:
    """Replace ``$(NAME)``. An unknown name stays as it is, and ``$$`` is a dollar."""
    return _REFERENCE.sub(lambda m: "$" if m[1] == "$" else values.get(m[2], m[0]), text)


def _field(pod: Manifest, path: str, address: str) -> str:
    if path in ("status.podIP", "status.hostIP"):
        return address
    if quoted := re.fullmatch(r"metadata\.(labels|annotations)\['(.+)'\]", path):
        return str((pod["metadata"].get(quoted[1]) or {}).get(quoted[2], ""))
    value: Any = pod
    for part in path.split("."):
        value = value.get(part, "") if isinstance(value, Mapping) else ""
    return str(value)
