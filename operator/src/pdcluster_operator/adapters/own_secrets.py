"""The Secrets in the operator's own namespace: the engines' CA, and the webhook's certificate.

The engines' CA is made at the first start and is never replaced. Its key enters no pod but the
operator's. The webhook's certificate is renewed, and its CA is written where the API server looks
for it.

Each certificate of the webhook is signed by a CA of its own. The key of that CA signs once and is
then thrown away, so nobody can steal it. After a renewal clients trust the former CA until it
expires, so webhook pods can take up the new certificate at different times.
"""

import asyncio
import base64
import ipaddress
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID

from pdcluster_operator.adapters import engine_authority
from pdcluster_operator.adapters.api_server.client import APPLY, MERGE, KubeClient
from pdcluster_operator.adapters.api_server.kinds import SECRET, WEBHOOK_CONFIGURATION
from pdcluster_operator.adapters.api_server.kube_api import ABSENT
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
    held = Certificate(*(_decoded(secret.get("data") or {}, key) for key in KEYS))
    if (why := why_renew(held, place.names, now)) is not None:
        log.info("making a new certificate for the webhook: %s", why)
        held = make_certificate(place.names, now, held.authorities)
    await _trust(client, place.configuration, held.authorities)
    if why is not None:
        parts = (held.certificate, held.key, held.authorities)
        await _apply(client, place.secret, dict(zip(KEYS, parts, strict=True)))
    return read_certificates(held.certificate)[0].not_valid_after_utc.timestamp()


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


async def find_authority(
    client: KubeClient, place: tuple[str, str]
) -> engine_authority.EngineAuthority:
    """Return the CA that the Secret holds. Make it if there is none; wait for the API server.

    Args:
        place: namespace and name of the Secret.
    """
    while True:
        try:
            return await _find(client, place)
        except (ApiError, engine_authority.AuthorityError) as error:
            log.warning("waiting for Secret %s/%s, which holds the engines' CA: %s", *place, error)
        await asyncio.sleep(WAIT_SECONDS)


async def _find(client: KubeClient, place: tuple[str, str]) -> engine_authority.EngineAuthority:
    live = await client.read(SECRET.path(*place))
    if live is not None and (held := live.get("data")):
        return engine_authority.EngineAuthority(_decoded(held, CERTIFICATE), _decoded(held, KEY))
    authority, stored = engine_authority.EngineAuthority.new(time.time())
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


LIFETIME = timedelta(days=365)
RENEW_BEFORE = timedelta(days=120)
CLOCKS_DIFFER = timedelta(hours=1)
TRUSTED_BEFORE = 4
"""Former CAs that a bundle holds at most."""


@dataclass(frozen=True, slots=True)
class Certificate:
    """PEM texts: serving certificate, its key, and every CA that clients should trust."""

    certificate: bytes
    key: bytes
    authorities: bytes


def make_certificate(names: Sequence[str], now: float, trusted: bytes = b"") -> Certificate:
    """Return a new serving certificate for DNS names and IP addresses.

    Args:
        names: the first is the subject.
        now: seconds since the epoch.
        trusted: PEM of CAs that clients trust already; those that have not expired stay.
    """
    moment = datetime.fromtimestamp(now, UTC)
    period = moment - CLOCKS_DIFFER, moment + LIFETIME
    ca_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    title = f"pdcluster webhook CA {moment:%Y-%m-%d %H:%M:%S}"
    issuer = engine_authority.common_name(title)
    authority = (
        engine_authority.unsigned(issuer, issuer, ca_key.public_key(), period, ca=True)
        .serial_number(x509.random_serial_number())
        .sign(ca_key, hashes.SHA256())
    )
    subject = engine_authority.common_name(names[0][:64])
    serving = (
        engine_authority.unsigned(subject, issuer, key.public_key(), period, ca=False)
        .serial_number(x509.random_serial_number())
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName([_name(name) for name in names]), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False
        )
        .sign(ca_key, hashes.SHA256())
    )
    former = [one for one in read_certificates(trusted) if one.not_valid_after_utc > moment]
    return Certificate(
        _pem([serving]),
        engine_authority.private_pem(key),
        _pem([authority, *former[:TRUSTED_BEFORE]]),
    )


def why_renew(held: Certificate, names: Iterable[str], now: float) -> str | None:
    """Return why a certificate has to be replaced; None while it serves."""
    moment = datetime.fromtimestamp(now, UTC)
    chain, authorities = read_certificates(held.certificate), read_certificates(held.authorities)
    if not chain or not authorities:
        return "there is none"
    serving = chain[0]
    if not _belongs(held.key, serving):
        return "its key is not the certificate's"
    if not any(_signed(serving, authority) for authority in authorities):
        return "none of its CAs signed it"
    if serving.not_valid_after_utc - moment < RENEW_BEFORE:
        return f"it expires at {serving.not_valid_after_utc:%Y-%m-%dT%H:%M:%SZ}"
    if serving.not_valid_before_utc > moment:
        return "it is not valid yet"
    missing = [name for name in names if _name(name) not in _alternatives(serving)]
    return f"it lacks {', '.join(missing)}" if missing else None


def read_certificates(pem: bytes) -> list[x509.Certificate]:
    """Return the certificates of a PEM text; none if it is not one."""
    try:
        return x509.load_pem_x509_certificates(pem)
    except ValueError:
        return []


def _name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _alternatives(certificate: x509.Certificate) -> set[x509.GeneralName]:
    try:
        extension = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    except x509.ExtensionNotFound:
        return set()
    return set(extension.value)


def _signed(certificate: x509.Certificate, authority: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(authority)
    except Exception:  # noqa: BLE001 - whatever is wrong with the pair, it does not verify
        return False
    return True


def _belongs(key: bytes, certificate: x509.Certificate) -> bool:
    try:
        private = serialization.load_pem_private_key(key, password=None)
    except (ValueError, TypeError):
        return False
    return private.public_key() == certificate.public_key()


def _pem(certificates: Iterable[x509.Certificate]) -> bytes:
    return b"".join(one.public_bytes(serialization.Encoding.PEM) for one in certificates)
