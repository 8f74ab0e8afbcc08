"""The Secrets in the operator's own namespace: the engines' CA, and the webhook's certificate.

The engines' CA is made at the first start and is never replaced. Its key enters no pod but the
operator's. The webhook's certificate is renewed, and its CA is written where the API server looks
for it.
"""

import asyncio
import base64
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pdcluster_operator.adapters import webhook_certificate
from pdcluster_operator.adapters.api_server.client import APPLY, MERGE, KubeClient
from pdcluster_operator.adapters.api_server.kinds import SECRET, WEBHOOK_CONFIGURATION
from pdcluster_operator.adapters.api_server.kube_api import ABSENT
from pdcluster_operator.adapters.engine_authority import AuthorityError, EngineAuthority
from pdcluster_operator.api.object_names import FIELD_MANAGER
from pdcluster_operator.runtime.interfaces import ApiError

log = logging.getLogger(__name__)

CHECK_SECONDS = 600.0
RETRY_SECONDS = 5.0
KEYS = ("tls.crt", "tls.key", "ca.crt")
WAIT_SECONDS = 2.0
"""How long to wait for an API server that does not give the engines' CA."""
CERTIFICATE, KEY = "ca.crt", "ca.key"


@dataclass(frozen=True, slots=True)
class WebhookPlace:
    """Where the webhook's parts lie.

    Attributes:
        configuration: name of the ValidatingWebhookConfiguration.
        service: namespace and name of the Service before the webhook's pods.
        secret: namespace and name of the certificate's Secret.
    """

    configuration: str
    service: tuple[str, str]
    secret: tuple[str, str]

    @property
    def names(self) -> tuple[str, ...]:
        """Every name in the certificate. The last two are for checks inside of the pod."""
        namespace, service = self.service
        host = f"{service}.{namespace}.svc"
        return (host, f"{service}.{namespace}", f"{host}.cluster.local", "localhost", "127.0.0.1")


async def keep_certificate(
    client: KubeClient, place: WebhookPlace, expires: Callable[[float], None]
) -> None:
    """Check the webhook's certificate every few minutes; never return. Try again after a failure.

    Args:
        expires: called with the moment at which the certificate expires, after each check.
    """
    while True:
        try:
            expires(await renew_certificate(client, place, time.time()))
        except ApiError as error:
            log.warning("the webhook's certificate: %s", error)
            await asyncio.sleep(RETRY_SECONDS)
        else:
            await asyncio.sleep(CHECK_SECONDS)


async def renew_certificate(client: KubeClient, place: WebhookPlace, now: float) -> float:
    """Make sure that the Secret holds a good certificate and that its CA is trusted.

    A new CA is announced before its certificate is stored. So the API server trusts the CA before a
    webhook pod uses the certificate. Return when it expires, in seconds since the epoch.
    """
    secret = await client.read(SECRET.path(*place.secret)) or {}
    held = webhook_certificate.Certificate(
        *(_decoded(secret.get("data") or {}, key) for key in KEYS)
    )
    if (why := webhook_certificate.why_renew(held, place.names, now)) is not None:
        log.info("making a new certificate for the webhook: %s", why)
        held = webhook_certificate.make_certificate(place.names, now, held.authorities)
    await _trust(client, place.configuration, held.authorities)
    if why is not None:
        parts = (held.certificate, held.key, held.authorities)
        await _apply(client, place.secret, dict(zip(KEYS, parts, strict=True)))
    return webhook_certificate.expiry(held.certificate) or now


async def _trust(client: KubeClient, configuration: str, authorities: bytes) -> None:
    """Write the CAs into every webhook of the configuration that lacks them."""
    path = WEBHOOK_CONFIGURATION.path(name=configuration)
    live = await client.call("GET", path)
    bundle = base64.b64encode(authorities).decode()
    webhooks = [dict(webhook) for webhook in live.get("webhooks") or ()]
    if all(hook["clientConfig"].get("caBundle") == bundle for hook in webhooks):
        return
    for hook in webhooks:
        hook["clientConfig"] = {**hook["clientConfig"], "caBundle": bundle}
    version = live["metadata"]["resourceVersion"]
    body = {"metadata": {"resourceVersion": version}, "webhooks": webhooks}
    await client.call(
        "PATCH", path, query={"fieldManager": FIELD_MANAGER}, body=body, content=MERGE
    )


def _decoded(data: Mapping[str, Any], key: str) -> bytes:
    try:
        return base64.b64decode(str(data.get(key) or ""), validate=True)
    except ValueError:
        return b""


async def find_authority(client: KubeClient, place: tuple[str, str]) -> EngineAuthority:
    """Return the CA that the Secret holds. Make it if there is none; wait for the API server.

    Args:
        place: namespace and name of the Secret.
    """
    while True:
        try:
            return await _find(client, place)
        except (ApiError, AuthorityError) as error:
            log.warning("waiting for Secret %s/%s, which holds the engines' CA: %s", *place, error)
        await asyncio.sleep(WAIT_SECONDS)


async def _find(client: KubeClient, place: tuple[str, str]) -> EngineAuthority:
    live = await client.read(SECRET.path(*place))
    if live is not None and (held := live.get("data")):
        return EngineAuthority(_decoded(held, CERTIFICATE), _decoded(held, KEY))
    authority, stored = EngineAuthority.new(time.time())
    parts = {CERTIFICATE: stored.certificate, KEY: stored.key}
    # With the version, another operator that was faster makes this a conflict.
    version = ABSENT if live is None else {"resourceVersion": live["metadata"]["resourceVersion"]}
    await _apply(client, place, parts, version)
    return authority


async def _apply(
    client: KubeClient,
    place: tuple[str, str],
    parts: Mapping[str, bytes],
    version: Mapping[str, str] | None = None,
) -> None:
    """Apply a Secret, whose version is compared if one is given."""
    namespace, name = place
    body = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": name, "namespace": namespace, **(version or {})},
        "data": {key: base64.b64encode(part).decode() for key, part in parts.items()},
    }
    query = {"fieldManager": FIELD_MANAGER, "force": "true"}
    path = SECRET.path(namespace, name)
    await client.call("PATCH", path, query=query, body=body, content=APPLY)
