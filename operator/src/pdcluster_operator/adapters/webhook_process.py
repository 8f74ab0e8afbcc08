"""The webhook as a process. It is ready when it answers a review that it sends to itself.

A renewed certificate is loaded into the running server. kopf would restart its server for it, and
the API server refuses every change whose review arrives during a restart.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import ssl
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from pdcluster_connector.certificate_files import no_password
from pdcluster_operator.adapters.api_server.kinds import PDCLUSTER
from pdcluster_operator.adapters.metrics import Metrics
from pdcluster_operator.adapters.status_pages import serve_pages
from pdcluster_operator.api.rules.validate import Review, review

log = logging.getLogger(__name__)

SELF_CHECK = "ready?"
"""Name of the manifest that readiness asks about: no cluster can have it."""
WEBHOOK_ID = "validate"
"""The last part of the URL that the API server calls."""
ASK_SECONDS = 3.0
WAIT_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class WebhookOptions:
    """The command line of ``pdcluster-operator webhook``."""

    folder: Path
    host_path_models: bool = False
    mounted_certificates: bool = False
    host: str = "0.0.0.0"  # noqa: S104 - a pod's own network
    port: int = 9443
    health_port: int = 8081
    metrics_port: int = 8080
    check_seconds: float = 10.0


class WebhookProcess:
    """The pages, the certificate and the judge of one process; kopf answers with them.

    Attributes:
        context: the server's TLS, into which a renewed certificate is loaded.
    """

    def __init__(self, options: WebhookOptions) -> None:
        self.options = options
        self.context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        metrics = self._metrics = Metrics()
        self.judge = Judge(
            metrics,
            host_paths=options.host_path_models,
            mounted_certificates=options.mounted_certificates,
        )
        self._stack = AsyncExitStack()

    async def start(self) -> None:
        """Serve health and metrics, and wait for a certificate that can serve."""

        async def alive() -> str | None:
            return None

        async def readiness() -> str | None:
            return await ask_review(self.options.port)

        async with self._stack as stack:
            await serve_pages(
                stack,
                host=self.options.host,
                health_port=self.options.health_port,
                metrics_port=self.options.metrics_port,
                checks={"/healthz": alive, "/readyz": readiness},
                metrics=self._metrics,
            )
            await _certificate(self.options.folder)
            load(self.context, self.options.folder)
            following = asyncio.create_task(
                keep_loaded(self.context, self.options.folder, self.options.check_seconds)
            )
            stack.callback(following.cancel)
            self._stack = stack.pop_all()

    async def stop(self) -> None:
        """Close the pages."""
        await self._stack.aclose()


class Judge:
    """Judges reviews, logs and counts them."""

    def __init__(
        self, metrics: Metrics, *, host_paths: bool, mounted_certificates: bool = False
    ) -> None:
        self._metrics = metrics
        self._host_paths = host_paths
        self._mounted_certificates = mounted_certificates

    def __call__(
        self, new: Mapping[str, Any] | None, old: Mapping[str, Any] | None, operation: str
    ) -> Review:
        """Judge one review of (new, old, operation)."""
        answer = review(
            new,
            old,
            host_paths=self._host_paths,
            mounted_certificates=self._mounted_certificates,
        )
        metadata = (new or old or {}).get("metadata") or {}
        if metadata.get("name") == SELF_CHECK:
            return answer
        outcome = "refused" if answer.errors else "allowed"
        self._metrics.reviews.labels(operation, outcome).inc()
        for rule in sorted({str(error.rule) for error in answer.errors}):
            self._metrics.refusals.labels(rule).inc()
        if answer.errors:
            who = f"{metadata.get('namespace')}/{metadata.get('name')}"
            log.info("%s of %s refused: %s", operation, who, answer.message)
        return answer


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


async def _certificate(folder: Path) -> None:
    """Wait for a certificate that can serve."""
    said = ""
    while (problem := tls_problem(folder)) is not None:
        if problem != said:
            log.warning("%s; waiting", problem)
            said = problem
        await asyncio.sleep(WAIT_SECONDS)


def tls_problem(folder: Path) -> str | None:
    """Return why the folder's certificate cannot serve; None if it can."""
    try:
        load(ssl.create_default_context(ssl.Purpose.CLIENT_AUTH), folder)
    except (OSError, ValueError) as error:
        return f"{folder} holds no usable tls.crt and tls.key: {error}"
    return None


def load(context: ssl.SSLContext, folder: Path) -> None:
    """Use the folder's certificate for new connections; open ones keep theirs.

    Raises:
        OSError: it cannot be read, or is none (ssl.SSLError).
        ValueError: its key has a password.
    """
    context.load_cert_chain(folder / "tls.crt", folder / "tls.key", password=no_password)


async def keep_loaded(context: ssl.SSLContext, folder: Path, seconds: float) -> None:
    """Load the folder's certificate when it changes. Look every ``seconds``; never return."""
    loaded = refused = b""
    while True:
        await asyncio.sleep(seconds)
        found = _digest(folder)
        if found == loaded:
            continue
        # Try it in another context first. While only one of the two files is new, every new
        # connection would fail.
        if (problem := tls_problem(folder)) is not None:
            if found != refused:
                refused = found
                log.warning("%s; the former certificate stays in use", problem)
            continue
        load(context, folder)
        loaded = refused = found


def _digest(folder: Path) -> bytes:
    digest = hashlib.sha256()
    for name in ("tls.crt", "tls.key"):
        try:
            digest.update((folder / name).read_bytes())
        except OSError:
            return b""
    return digest.digest()
