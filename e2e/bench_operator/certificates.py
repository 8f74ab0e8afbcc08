"""TLS for the simulated launchers: each engine with the certificate that the operator made for it.

One server answers for all engines. It chooses the certificate by the name that a client asks for,
and the operator asks for the name of the engine that it means.
"""

from __future__ import annotations

import base64
import ssl
import tempfile
from pathlib import Path
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler
from cryptography import x509

from bench_operator.watching import events
from pdcluster_connector.certificate_files import TlsFiles, server_context
from pdcluster_connector.protocol.engine_id import OPERATOR_NAME, engine_name, names_in
from pdcluster_operator.plan.builders.secrets import AUTHORITY_FILE

SELECTOR = "app.kubernetes.io/component=certificates"


class Certificates:
    """What the Secrets of all PDClusters hold: a TLS context for each engine, made once."""

    def __init__(self) -> None:
        self.contexts: dict[str, ssl.SSLContext] = {}
        self._expire: dict[str, int] = {}
        self._known: set[str] = set()

    def take(self, secret: dict[str, Any]) -> None:
        """Make the contexts of the engines that are new in a Secret."""
        data = secret["data"]
        for file, certificate in data.items():
            is_one = file.endswith(".crt") and file != AUTHORITY_FILE
            if is_one and certificate not in self._known:
                self._known.add(certificate)
                self._make(data[AUTHORITY_FILE], certificate, data[f"{file[:-4]}.key"])

    def expires(self, engine: str) -> int | None:
        """Return when the engine's certificate expires, in seconds since the epoch."""
        return self._expire.get(engine_name(engine))

    def context(self) -> ssl.SSLContext:
        """Return the context of a server for all engines, as the launcher's: a client may have no
        certificate. What it may ask for then, ``known_clients`` says.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_OPTIONAL
        context.num_tickets = 0
        context.sni_callback = self._choose
        return context

    def _choose(
        self, connection: ssl.SSLObject, name: str | None, _: ssl.SSLContext
    ) -> ssl.AlertDescription | None:
        if (context := self.contexts.get(name or "")) is None:
            return ssl.AlertDescription.ALERT_DESCRIPTION_UNRECOGNIZED_NAME
        connection.context = context
        return None

    def _make(self, *texts: str) -> None:
        with tempfile.TemporaryDirectory() as folder:
            files = [Path(folder, str(number)) for number in range(len(texts))]
            for file, text in zip(files, texts, strict=True):
                file.write_bytes(base64.b64decode(text))
            context = server_context(TlsFiles(*files))
            certificate = x509.load_pem_x509_certificate(files[1].read_bytes())
        context.verify_mode = ssl.CERT_OPTIONAL
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        for name in names.get_values_for_type(x509.DNSName):
            self.contexts[name] = context
            self._expire[name] = int(certificate.not_valid_after_utc.timestamp())


@web.middleware
async def known_clients(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Refuse a client that is not the operator, as the launcher does where it speaks TLS."""
    if request.secure and request.path != "/readyz":
        shown = request.transport and request.transport.get_extra_info("peercert")
        if OPERATOR_NAME not in names_in(shown):
            raise web.HTTPForbidden
    return await handler(request)


async def follow_secrets(folder: Path, certificates: Certificates) -> None:
    """Take up what the operator writes."""
    async for event in events(folder, "/api/v1/secrets", SELECTOR):
        if event["type"] != "DELETED":
            certificates.take(event["object"])
