"""Serves the objects of `pdcluster up` to other commands, as Kubernetes' API server would.

It only reads, on a loopback address, over TLS, for whoever has the token of the run's kubeconfig.
Secrets and ConfigMaps are not served. A list has no pages: a machine runs few objects.
"""

import asyncio
import base64
import hmac
import json
import os
import re
import secrets
import ssl
import tempfile
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, Self

import yaml
from aiohttp import web

from pdcluster_operator.adapters.api_server.kinds import BY_NAME, Kind
from pdcluster_operator.adapters.engine_authority import EngineAuthority
from pdcluster_operator.local.api_server import LocalApi, Manifest
from pdcluster_operator.local.pod_logs import Part, PodLogs

ADDRESS = "127.0.0.1"
NAME = "pdcluster-up"
"""What the certificate names. The kubeconfig says so, because the address is no name."""
KUBECONFIG = "kubeconfig"
HIDDEN = frozenset({"Secret", "ConfigMap"})
SERVED = {
    (kind.group, kind.version, kind.plural): kind
    for kind in BY_NAME.values()
    if kind.name not in HIDDEN
}
TOKEN_BYTES = 32
MOST_NEWS = 512
"""So many changes are kept. A watch that begins before them has to list again (410)."""
BOOKMARK_SECONDS = 60.0
STOP_SECONDS = 0.1
"""How long an answer may go on when the run ends. 0 would mean for ever."""
DAY, YEAR = 86_400.0, 365 * 86_400.0
PATH = re.compile(
    r"/(?:api|apis/(?P<group>[^/]+))/(?P<version>[^/]+)(?:/namespaces/(?P<namespace>[^/]+))?"
    r"/(?P<plural>[^/]+)(?:/(?P<name>[^/]+)(?P<log>/log)?)?"
)
TRUE = ("true", "1")


class _News(NamedTuple):
    version: int
    type: str
    object: Manifest


class Changes:
    """The last changes of the in-memory API, for watches."""

    def __init__(self, api: LocalApi) -> None:
        self._news: deque[_News] = deque(maxlen=MOST_NEWS)
        self._forgotten = 0
        self._next = asyncio.Event()
        api.watch(self._add)

    def _add(self, event: str, manifest: Manifest) -> None:
        if manifest["kind"] in HIDDEN:
            return
        if len(self._news) == MOST_NEWS:
            self._forgotten = self._news[0].version
        version = int(manifest["metadata"]["resourceVersion"])
        self._news.append(_News(version, event, manifest))
        self._next.set()
        self._next = asyncio.Event()

    def knows(self, version: int) -> bool:
        """Whether all changes after a version are kept."""
        return version >= self._forgotten

    async def after(self, version: int) -> AsyncIterator[_News | None]:
        """Yield each change after a version, for ever; None after a minute without one."""
        while True:
            woken = self._next
            for one in [one for one in self._news if one.version > version]:
                version = one.version
                yield one
            try:
                await asyncio.wait_for(woken.wait(), BOOKMARK_SECONDS)
            except TimeoutError:
                yield None


class Door:
    """An HTTPS server. Use as an async context manager; the kubeconfig goes away with it.

    Args:
        folder: where the kubeconfig is written, for this user alone.
        logs: returns the current log of each pod.
        namespace: the one that the kubeconfig's context names.
    """

    def __init__(
        self, api: LocalApi, logs: Callable[[], Mapping[str, Path]], folder: Path, namespace: str
    ) -> None:
        self._api, self._namespace = api, namespace
        self._logs = PodLogs(logs)
        self._changes = Changes(api)
        self._token = secrets.token_urlsafe(TOKEN_BYTES)
        self.kubeconfig = folder / KUBECONFIG

    async def __aenter__(self) -> Self:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(
            app, access_log=None, handler_cancellation=True, shutdown_timeout=STOP_SECONDS
        )
        await self._runner.setup()
        authority, _ = EngineAuthority.new(time.time())
        site = web.TCPSite(self._runner, ADDRESS, 0, ssl_context=_server_context(authority))
        await site.start()
        port = self._runner.addresses[0][1]
        self.kubeconfig.touch(mode=0o600)
        self.kubeconfig.write_text(self._config(port, authority.pem))
        self._looking = asyncio.create_task(self._logs.keep(), name="logs")
        return self

    async def __aexit__(self, *_: object) -> None:
        self.kubeconfig.unlink(missing_ok=True)
        self._looking.cancel()
        await asyncio.gather(self._looking, return_exceptions=True)
        await self._runner.cleanup()

    def _config(self, port: int, authority: bytes) -> str:
        server = {
            "server": f"https://{ADDRESS}:{port}",
            "tls-server-name": NAME,
            "certificate-authority-data": base64.b64encode(authority).decode(),
        }
        context = {"cluster": NAME, "user": NAME, "namespace": self._namespace}
        return yaml.safe_dump(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "current-context": NAME,
                "clusters": [{"name": NAME, "cluster": server}],
                "users": [{"name": NAME, "user": {"token": self._token}}],
                "contexts": [{"name": NAME, "context": context}],
            }
        )

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        sent = request.headers.get("Authorization", "").encode()
        if not hmac.compare_digest(sent, f"Bearer {self._token}".encode()):
            return refusal(401, "Unauthorized", "the token is not that of this run")
        if request.method != "GET":
            said = "`pdcluster up` serves its objects for reading only"
            return refusal(405, "MethodNotAllowed", said)
        try:
            return await self._read(request)
        except ValueError as error:
            return refusal(400, "BadRequest", str(error))

    async def _read(self, request: web.Request) -> web.StreamResponse:
        found = PATH.fullmatch(request.path)
        parts = found.groupdict() if found else {}
        where = parts.get("group") or "", parts.get("version"), parts.get("plural")
        kind = SERVED.get(where)  # type: ignore[arg-type]
        if kind is None:
            return refusal(404, "NotFound", f"`pdcluster up` does not serve {request.path}")
        namespace, name = parts["namespace"], parts["name"]
        if parts["log"]:
            return await self._log(request, kind, namespace, name)
        if name is None:
            return await self._collection(request, kind, namespace)
        one = self._api.get(kind.name, namespace, name)
        if one is None:
            return refusal(404, "NotFound", f'{kind.plural} "{name}" not found')
        return web.json_response(one)

    async def _collection(
        self, request: web.Request, kind: Kind, namespace: str | None
    ) -> web.StreamResponse:
        query = request.query
        selects = selector(query.get("labelSelector", ""), query.get("fieldSelector", ""))
        if query.get("watch") in TRUE:
            return await self._watch(request, kind, namespace, selects)
        items = [one for one in self._api.list(kind.name, namespace) if selects(one)]
        metadata = {"resourceVersion": str(self._api.version)}
        listed = {"apiVersion": kind.api_version, "kind": f"{kind.name}List"}
        return web.json_response({**listed, "metadata": metadata, "items": items})

    async def _watch(
        self,
        request: web.Request,
        kind: Kind,
        namespace: str | None,
        selects: Callable[[Manifest], bool],
    ) -> web.StreamResponse:
        since = int(request.query.get("resourceVersion") or 0)
        if since and not self._changes.knows(since):
            return refusal(410, "Expired", f"changes since {since} are forgotten; list again")
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        if not since:
            since = self._api.version
            for one in self._api.list(kind.name, namespace):
                if selects(one):
                    await response.write(_line("ADDED", one))
        with suppress(TimeoutError, ConnectionError):
            limit = float(request.query.get("timeoutSeconds") or YEAR)
            async with asyncio.timeout(limit):
                async for news in self._changes.after(since):
                    if news is None:
                        metadata = {"resourceVersion": str(self._api.version)}
                        await response.write(_line("BOOKMARK", {"metadata": metadata}))
                    elif (
                        news.object["kind"] == kind.name
                        and namespace in (None, news.object["metadata"].get("namespace"))
                        and selects(news.object)
                    ):
                        await response.write(_line(news.type, news.object))
        return response

    async def _log(
        self, request: web.Request, kind: Kind, namespace: str | None, name: str
    ) -> web.StreamResponse:
        pod = self._api.get(kind.name, namespace or "", name)
        if kind.name != "Pod" or pod is None:
            return refusal(404, "NotFound", f'pods "{name}" not found')
        query, response = request.query, web.StreamResponse(headers={"Content-Type": "text/plain"})
        seconds, tail = query.get("sinceSeconds"), query.get("tailLines")
        part = Part(
            since=time.time() - float(seconds) if seconds else 0.0,
            tail=int(tail) if tail else None,
            follow=query.get("follow") in TRUE,
            timestamps=query.get("timestamps") in TRUE,
        )
        lines = self._logs.lines(name, part, former=query.get("previous") in TRUE)
        try:
            first = await anext(lines, None)
        except OSError:
            said = f'pod "{name}" has no such log: none of its processes has ended or begun yet'
            return refusal(400, "BadRequest", said)
        await response.prepare(request)
        with suppress(ConnectionError):
            if first is not None:
                await response.write(first)
            async for line in lines:
                await response.write(line)
        return response


def refusal(code: int, reason: str, message: str) -> web.Response:
    """Return an error as Kubernetes' API gives it."""
    status = {"kind": "Status", "apiVersion": "v1", "status": "Failure"}
    return web.json_response(
        {**status, "message": message, "reason": reason, "code": code}, status=code
    )


def selector(labels: str, fields: str) -> Callable[[Manifest], bool]:
    """Return whether an object has the labels and the fields of two selectors.

    Raises:
        ValueError: a selector has a form that is not known here.
    """
    tests = [_label_test(part) for part in filter(None, labels.split(","))]
    tests += [_field_test(part) for part in filter(None, fields.split(","))]
    return lambda manifest: all(test(manifest) for test in tests)


def _label_test(text: str) -> Callable[[Manifest], bool]:
    found = re.fullmatch(r"(!?)([\w./-]+)(?:(!=|==?)([\w.-]*))?", text.strip())
    if found is None or (found[1] and found[3]):
        raise ValueError(f"labelSelector {text!r} is none of KEY, !KEY, KEY=VALUE and KEY!=VALUE")
    absent, key, compares, value = found.groups()

    def test(manifest: Manifest) -> bool:
        labels = manifest["metadata"].get("labels") or {}
        if not compares:
            return (key in labels) is not bool(absent)
        return (labels.get(key) == value) is not (compares == "!=")

    return test


def _field_test(text: str) -> Callable[[Manifest], bool]:
    found = re.fullmatch(r"([\w.]+)(!=|==?)(.*)", text.strip())
    if found is None:
        raise ValueError(f"fieldSelector {text!r} is neither FIELD=VALUE nor FIELD!=VALUE")
    path, compares, value = found.groups()

    def test(manifest: Manifest) -> bool:
        field: Any = manifest
        for part in path.split("."):
            field = field.get(part) if isinstance(field, Mapping) else None
        return (str(field or "") == value) is not (compares == "!=")

    return test


def _line(event: str, manifest: Mapping[str, Any]) -> bytes:
    return json.dumps({"type": event, "object": manifest}).encode() + b"\n"


def _server_context(authority: EngineAuthority) -> ssl.SSLContext:
    now = time.time()
    signed = authority.sign(NAME, now - DAY, now + YEAR)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    # Python's ssl takes a private key from a file only.
    descriptor, name = tempfile.mkstemp()
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(signed.certificate + signed.key)
        context.load_cert_chain(name)
    finally:
        os.unlink(name)
    return context
