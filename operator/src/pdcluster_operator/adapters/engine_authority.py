"""The CA that signs the certificates of all engines, and the operator's own certificate.

A certificate and its key follow from the CA's key, the name and the first moment of validity. So
they can be made again at any time, and what is made is the same as before. The engines of a
PDCluster find theirs in one Secret: ``plan/renewals.py`` decides which engines get one,
and when all of them are made again.
"""

import base64
import hashlib
import json
import ssl
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Self

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric.ec import (
    EllipticCurvePrivateKey,
    EllipticCurvePublicKey,
)
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from pdcluster_connector.certificate_files import TlsFiles, client_context
from pdcluster_connector.protocol.engine_id import engine_name
from pdcluster_operator.api import object_names
from pdcluster_operator.plan.builders.secrets import AUTHORITY_FILE
from pdcluster_operator.plan.types import HeldCertificates, Manifest, WriteCertificates

LIFETIME = timedelta(days=20 * 365)
CLOCKS_DIFFER = timedelta(days=1)
KEY_BYTES = 32
FINGERPRINT_DIGITS = 16


class AuthorityError(Exception):
    """A CA cannot be used. The message says why."""


@dataclass(frozen=True, slots=True)
class Signed:
    """PEM texts: a certificate and its private key."""

    certificate: bytes
    key: bytes


class EngineAuthority:
    """Signs certificates that name engines.

    Args:
        certificate: PEM of the CA's certificate.
        key: PEM of its Ed25519 key.

    Raises:
        AuthorityError: these are not a CA and its key.
    """

    def __init__(self, certificate: bytes, key: bytes) -> None:
        try:
            self._authority = x509.load_pem_x509_certificate(certificate)
            private = serialization.load_pem_private_key(key, password=None)
        except (ValueError, TypeError) as error:
            raise AuthorityError(f"no certificate and its key in PEM: {error}") from None
        if not isinstance(private, Ed25519PrivateKey):
            raise AuthorityError("the key is no Ed25519 key")
        try:
            self._authority.verify_directly_issued_by(self._authority)
        except (ValueError, TypeError, InvalidSignature):
            raise AuthorityError("the certificate is no CA that signed itself") from None
        if private.public_key() != self._authority.public_key():
            raise AuthorityError("the key is not the certificate's")
        self._private = private
        self.pem = certificate

    @classmethod
    def new(cls, now: float) -> tuple[Self, Signed]:
        """Return a new CA, and what to store of it."""
        key = Ed25519PrivateKey.generate()
        moment = datetime.fromtimestamp(now, UTC)
        title = common_name(f"pdcluster engine CA {moment:%Y-%m-%d %H:%M:%S}")
        period = moment - CLOCKS_DIFFER, moment + LIFETIME
        certificate = (
            unsigned(title, title, key.public_key(), period, ca=True)
            .serial_number(x509.random_serial_number())
            .sign(key, None)
        )
        stored = Signed(certificate.public_bytes(serialization.Encoding.PEM), private_pem(key))
        return cls(stored.certificate, stored.key), stored

    @property
    def fingerprint(self) -> str:
        """A short name of this CA."""
        return self._authority.fingerprint(hashes.SHA256()).hex()[:FINGERPRINT_DIGITS]

    def sign(self, name: str, start: float, end: float) -> Signed:
        """Return the certificate of ``name`` from ``start`` to ``end``, in seconds since 1970."""
        about = f"pdcluster certificate {name} {int(start)}".encode()
        derive = HKDF(algorithm=hashes.SHA256(), length=KEY_BYTES, salt=None, info=about)
        key = Ed25519PrivateKey.from_private_bytes(derive.derive(self._private.private_bytes_raw()))
        usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        public, issuer = self._private.public_key(), self._authority.subject
        period = datetime.fromtimestamp(int(start), UTC), datetime.fromtimestamp(int(end), UTC)
        certificate = (
            unsigned(common_name(name[:64]), issuer, key.public_key(), period, ca=False)
            .serial_number(int.from_bytes(hashlib.sha256(about).digest()[:16], "big") | 1)
            .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(public), False)
            .sign(self._private, None)
        )
        return Signed(certificate.public_bytes(serialization.Encoding.PEM), private_pem(key))

    def client_context(self, signed: Signed) -> ssl.SSLContext:
        """Return the TLS context of a client that shows ``signed`` and trusts this CA alone."""
        # Python's ssl takes a private key from a file only.
        with tempfile.TemporaryDirectory() as folder:
            authority, own = Path(folder, "ca.pem"), Path(folder, "client.pem")
            authority.write_bytes(self.pem)
            own.touch(mode=0o600)
            own.write_bytes(signed.certificate + signed.key)
            return client_context(TlsFiles(authority, own, own))


def common_name(text: str) -> x509.Name:
    """Return a subject or an issuer."""
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def private_pem(key: Ed25519PrivateKey | EllipticCurvePrivateKey) -> bytes:
    """Return the PEM text of a private key."""
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def unsigned(
    subject: x509.Name,
    issuer: x509.Name,
    key: Ed25519PublicKey | EllipticCurvePublicKey,
    period: tuple[datetime, datetime],
    *,
    ca: bool,
) -> x509.CertificateBuilder:
    """Return a certificate without serial number, whose key signs others or is shown by a peer."""
    usage = x509.KeyUsage(
        digital_signature=not ca,
        key_cert_sign=ca,
        crl_sign=False,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
    builder = (
        x509.CertificateBuilder(issuer, subject, key)
        .not_valid_before(period[0])
        .not_valid_after(period[1])
        .add_extension(x509.BasicConstraints(ca=ca, path_length=0 if ca else None), critical=True)
        .add_extension(usage, critical=True)
    )
    identifier = x509.SubjectKeyIdentifier.from_public_key(key)
    return builder.add_extension(identifier, critical=False) if ca else builder


def held_certificates(secret: Manifest | None, authority: EngineAuthority) -> HeldCertificates:
    """Return what the planner may know of the live Secret.

    What is not as it was written does not count, so it is made again. Entries that somebody else
    added are left alone.
    """
    if secret is None:
        return HeldCertificates(authority.fingerprint)
    annotations = secret["metadata"].get("annotations") or {}
    data = secret.get("data") or {}
    written = _written(annotations.get(object_names.CERTIFICATES_HASH_ANNOTATION, ""))
    whole = {entry for entry, value in written.items() if value == _hash(data, entry)}
    issue = str(annotations.get(object_names.CERTIFICATES_ANNOTATION, ""))
    if AUTHORITY_FILE not in whole:
        issue = ""
    uid = str(secret["metadata"].get("uid") or "")
    return HeldCertificates(authority.fingerprint, issue, frozenset(whole - {AUTHORITY_FILE}), uid)


def with_certificates(step: WriteCertificates, authority: EngineAuthority) -> dict[str, Any]:
    """Return the Secret with a certificate and a key for each engine."""
    files = {AUTHORITY_FILE: authority.pem}
    for entry, logical in step.engines.items():
        signed = authority.sign(engine_name(logical), step.start, step.end)
        files |= {f"{entry}.crt": signed.certificate, f"{entry}.key": signed.key}
    data = {name: base64.b64encode(text).decode() for name, text in files.items()}
    hashes = {entry: _hash(data, entry) for entry in (AUTHORITY_FILE, *step.engines)}
    metadata = step.manifest["metadata"]
    annotations = {
        **metadata["annotations"],
        object_names.CERTIFICATES_HASH_ANNOTATION: json.dumps(hashes, sort_keys=True),
    }
    return {**step.manifest, "metadata": {**metadata, "annotations": annotations}, "data": data}


def _written(annotation: str) -> dict[str, str]:
    """Return the hash of each entry that was written; nothing if somebody spoiled the note."""
    try:
        found = json.loads(annotation or "{}")
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _hash(data: Mapping[str, Any], entry: str) -> str:
    """Return a short hash of an entry's files. Keys are random, so it tells nothing of them."""
    names = (entry, f"{entry}.crt", f"{entry}.key")
    text = json.dumps([data.get(name) for name in names])
    return hashlib.sha256(text.encode()).hexdigest()[:16]
