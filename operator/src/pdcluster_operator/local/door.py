"""Serves the objects of `pdcluster up` to other commands, as Kubernetes' API server would.

It answers get, list and the logs of pods, on a loopback address and over TLS, for whoever has
the token of the run's kubeconfig. Secrets and ConfigMaps are not served. A list has no pages: a
machine runs few objects.
"""

import asyncio
import base64
import hmac
import os
import re
import secrets
import ssl
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import yaml
from aiohttp import web

from pdcluster_operator.adapters.api_server.kinds import BY_NAME, Kind
from pdcluster_operator.adapters.engine_authority import EngineAuthority
from pdcluster_operator.api.spec.pod_templates import as_mapping
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
STOP_SECONDS = 0.1
"""How long an answer may go on when the run ends. 0 would mean for ever."""
DAY, YEAR = 86_400.0, 365 * 86_400.0
PATH = re.compile(
    r"/(?:api|apis/(?P<group>[^/]+))/(?P<version>[^/]+)(?:/namespaces/(?P<namespace>[^/]+))?"
    r"/(?P<plural>[^/]+)(?:/(?P<name>[^/]+)(?P<log>/log)?)?"
)
LABEL = re.compile(r"([\w./-]+)(?:==?([\w.-]*))?")
FIELD = re.compile(r"([\w.]+)==?(.*)")
TRUE = ("true", "1")


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
        sent = request.headers.get("Authorization", "").encode(errors="replace")
        if not hmac.compare_digest(sent, f"Bearer {self._token}".encode()):
            return refusal(401, "Unauthorized", "the token is not that of this run")
        if request.method != "GET":
            said = "`pdcluster up` serves its objects for reading only"
            return refusal(405, "MethodNotAllowed", said)
        try:
            return await self._read(request)
        except ValueError as error:
            return refusal(400, "BadRequest", str(error))
        except Exception as error:  # noqa: BLE001 - else aiohttp would log it
            return refusal(500, "InternalError", type(error).__name__)

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
        items = [one for one in self._api.list(kind.name, namespace) if selects(one)]
        metadata = {"resourceVersion": str(self._api.version)}
        listed = {"apiVersion": kind.api_version, "kind": f"{kind.name}List"}
        return web.json_response({**listed, "metadata": metadata, "items": items})

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
    asked = [(part, LABEL.fullmatch(part)) for part in filter(None, labels.split(","))]
    asked += [(part, FIELD.fullmatch(part)) for part in filter(None, fields.split(","))]
    for part, found in asked:
        if found is None:
            raise ValueError(f"selector {part!r} is none of LABEL, LABEL=VALUE and FIELD=VALUE")
    wanted = [found for _, found in asked if found is not None]
    return lambda manifest: all(_has(manifest, found) for found in wanted)


def _has(manifest: Manifest, asked: re.Match[str]) -> bool:
    key, value = asked.groups()
    found: Any
    if asked.re is LABEL:
        found = (manifest["metadata"].get("labels") or {}).get(key)
    else:
        found = manifest
        for part in key.split("."):
            found = as_mapping(found).get(part)
    return found is not None if value is None else found == value


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
