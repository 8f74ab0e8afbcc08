"""Makes the webhook's certificate, and says when it has to be renewed.

Each certificate is signed by a CA of its own. The key of that CA signs once and is then thrown
away, so nobody can steal it. After a renewal clients trust the former CA until it expires, so
webhook pods can take up the new certificate at different times. ``own_secrets.py`` stores it.
The certificates of engines are signed in ``engine_authority.py``.
"""

import ipaddress
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID

from pdcluster_operator.adapters.engine_authority import common_name, key_usage, private_pem

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
    ca_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    title = f"pdcluster webhook CA {moment:%Y-%m-%d %H:%M:%S}"
    issuer = common_name(title)
    authority = (
        _builder(issuer, issuer, ca_key.public_key(), moment)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(key_usage(signs_certificates=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(ca_key.public_key()), False)
        .sign(ca_key, hashes.SHA256())
    )
    subject = common_name(names[0][:64])
    serving = (
        _builder(subject, issuer, key.public_key(), moment)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(key_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName([_name(name) for name in names]), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False
        )
        .sign(ca_key, hashes.SHA256())
    )
    former = [one for one in read_certificates(trusted) if one.not_valid_after_utc > moment]
    return Certificate(
        _pem([serving]), private_pem(key), _pem([authority, *former[:TRUSTED_BEFORE]])
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


def expiry(pem: bytes) -> float | None:
    """Return when a certificate expires, in seconds since the epoch; None for anything else."""
    chain = read_certificates(pem)
    return chain[0].not_valid_after_utc.timestamp() if chain else None


def read_certificates(pem: bytes) -> list[x509.Certificate]:
    """Return the certificates of a PEM text; none if it is not one."""
    try:
        return x509.load_pem_x509_certificates(pem)
    except ValueError:
        return []


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, now: datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCKS_DIFFER)
        .not_valid_after(now + LIFETIME)
    )


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
