"""The webhook as a process. It is ready when it answers a review that it sends to itself.

A renewed certificate is used for new connections of the running server. kopf would restart its
server for it, and the API server refuses every change whose review arrives during a restart.
"""

import asyncio
import logging
import ssl
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp

from pdcluster_connector.certificate_files import TlsError, TlsFiles, Watched, no_password
from pdcluster_operator.adapters.api_server import kubeconfig
from pdcluster_operator.adapters.api_server.client import KubeClient
from pdcluster_operator.adapters.api_server.kinds import BY_NAME, PDCLUSTER
from pdcluster_operator.adapters.metrics import Metrics, PageOptions, serve_pages
from pdcluster_operator.api.rules.validate import Review, review
from pdcluster_operator.api.spec.model_config import FoundConfig, found_in, named_config_map
from pdcluster_operator.api.spec.pod_templates import as_mapping
from pdcluster_operator.runtime.interfaces import ApiError

log = logging.getLogger(__name__)

Manifest = Mapping[str, Any] | None
SELF_CHECK = "ready?"
"""Name of the manifest that readiness asks about: no cluster can have it."""
WEBHOOK_ID = "validate"
"""The last part of the URL that the API server calls."""
ASK_SECONDS = 3.0
WAIT_SECONDS = 1.0
READ_SECONDS = 0.8
"""An API server waits for a review for 5 seconds, and with the chart's least setting for 1."""


@dataclass(frozen=True, slots=True)
class WebhookOptions(PageOptions):
    """The command line of ``pdcluster-operator webhook``."""

    folder: Path
    host_path_models: bool = False
    host_path_prefixes: tuple[str, ...] = ()
    mounted_certificates: bool = False
    port: int = 9443


class WebhookProcess:
    """The pages, the certificate and the judge of one process; kopf answers with them.

    Attributes:
        context: the server's TLS, once it has started. Each connection moves on to the context of
            the present certificate.
    """

    context: ssl.SSLContext

    def __init__(self, options: WebhookOptions) -> None:
        self.options = options
        self.metrics = Metrics()
        self._stack = AsyncExitStack()

    async def start(self) -> None:
        """Serve health and metrics, and wait for a certificate that can serve."""
        readiness = partial(ask_review, self.options.port)
        async with self._stack as stack:
            await serve_pages(stack, self.options, readiness, self.metrics)
            watched = await _certificate(self.options.folder)
            self.context = watched.present()

            def move_on(connection: ssl.SSLObject, _: str | None, __: ssl.SSLContext) -> None:
                connection.context = watched.present()

            self.context.sni_callback = move_on  # OpenSSL calls it also without a name
            self._stack = stack.pop_all()

    async def stop(self) -> None:
        """Close the pages."""
        await self._stack.aclose()

    def judge(
        self, new: Manifest, old: Manifest, operation: str, found: FoundConfig | None = None
    ) -> Review:
        """Judge one review of (new, old, operation, :func:`find_config`). Log and count it."""
        answer = review(
            new,
            old,
            host_paths=self.options.host_path_models or self.options.host_path_prefixes,
            mounted_certificates=self.options.mounted_certificates,
            found=found,
        )
        metadata = (new or old or {}).get("metadata") or {}
        if metadata.get("name") == SELF_CHECK:
            return answer
        outcome = "refused" if answer.errors else "allowed"
        self.metrics.reviews.labels(operation, outcome).inc()
        for rule in sorted({str(error.rule) for error in answer.errors}):
            self.metrics.refusals.labels(rule).inc()
        if answer.errors:
            who = f"{metadata.get('namespace')}/{metadata.get('name')}"
            log.info("%s of %s refused: %s", operation, who, answer.message)
        return answer


async def find_config(new: Manifest) -> FoundConfig | None:
    """Read the ConfigMap with the model's config.json; return None if the manifest names none.

    Each read has a connection of its own, because few reviews need one. It never raises, and takes
    ``READ_SECONDS`` at most: what cannot be read is a warning, and refuses nothing.
    """
    name, key = named_config_map(new)
    namespace = as_mapping(as_mapping(new).get("metadata")).get("namespace")
    if not name or not isinstance(namespace, str):
        return None
    try:
        async with (
            asyncio.timeout(READ_SECONDS),
            KubeClient(await kubeconfig.find_configuration()) as client,
        ):
            return found_in(await client.read(BY_NAME["ConfigMap"].path(namespace, name)), key)
    except TimeoutError:
        return FoundConfig(unread=f"no answer in {READ_SECONDS:g} s")
    except (ApiError, kubeconfig.NotConnected, OSError, ValueError) as error:
        return FoundConfig(unread=str(error))


async def ask_review(port: int) -> str | None:
    """Return None if the server refuses a manifest that must be refused, else what is wrong."""
    resource = {
        "group": PDCLUSTER.group,
        "version": PDCLUSTER.version,
        "resource": PDCLUSTER.plural,
    }
    manifest = {
        "apiVersion": PDCLUSTER.api_version,
        "kind": PDCLUSTER.name,
        "metadata": {"name": SELF_CHECK, "namespace": "default"},
        "spec": {},
    }
    body = {
        "apiVersion": "admission.k8s.io/v1",
        "kind": "AdmissionReview",
        "request": {
            "uid": SELF_CHECK,
            "resource": resource,
            "operation": "CREATE",
            "userInfo": {"username": SELF_CHECK},
            "object": manifest,
            "oldObject": None,
            "dryRun": True,
        },
    }
    url = f"https://127.0.0.1:{port}/{WEBHOOK_ID}"
    timeout = aiohttp.ClientTimeout(total=ASK_SECONDS)
    try:
        # Whose certificate it is does not matter here: the API server checks that.
        async with (
            aiohttp.ClientSession(timeout=timeout) as http,
            http.post(url, json=body, ssl=False) as answer,
        ):
            if answer.status != 200:
                return f"a review is answered with {answer.status}"
            document = await answer.json()
    except (TimeoutError, aiohttp.ClientError, OSError, ValueError) as error:
        return f"a review is not answered: {error or type(error).__name__}"
    refused = document.get("response", {}).get("allowed") is False
    return None if refused else "a manifest without a model was admitted"


async def _certificate(folder: Path) -> Watched[ssl.SSLContext]:
    """Wait for a certificate that can serve."""
    certificate = folder / "tls.crt"
    files = TlsFiles(certificate, certificate, folder / "tls.key")  # clients show none
    said = ""
    while True:
        try:
            return Watched(files.paths, lambda: serving_context(files))
        except TlsError as error:
            if str(error) != said:
                said = str(error)
                log.warning("%s; waiting", said)
        await asyncio.sleep(WAIT_SECONDS)


def serving_context(files: TlsFiles) -> ssl.SSLContext:
    """Return the context of a server that wants no certificate of clients; raises TlsError."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(files.certificate, files.key, password=no_password)
    except (OSError, ValueError) as error:
        folder = files.certificate.parent
        raise TlsError(f"{folder} holds no usable tls.crt and tls.key: {error}") from None
    return context
