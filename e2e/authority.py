"""A certificate authority for tests: engines' certificates as files, right and wrong ones."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from pdcluster_connector.certificate_files import TlsFiles
from pdcluster_connector.protocol.engine_id import engine_name, role_name

# Clients of Python 3.13 and later ask for these and for the identifiers (``VERIFY_X509_STRICT``).
_SIGNS_CERTIFICATES = x509.KeyUsage(
    digital_signature=False,
    key_cert_sign=True,
    crl_sign=False,
    content_commitment=False,
    key_encipherment=False,
    data_encipherment=False,
    key_agreement=False,
    encipher_only=False,
    decipher_only=False,
)


def _signed_by(key: ec.EllipticCurvePrivateKey) -> x509.AuthorityKeyIdentifier:
    return x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key())


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


@dataclass
class Authority:
    """Signs certificates. Two authorities do not trust each other.

    Attributes:
        above: the authority that signed this one's certificate; None for a root.
        days: how long its certificate is valid, from two days ago on.
    """

    title: str = "test CA"
    above: Authority | None = None
    days: int = 30
    key: ec.EllipticCurvePrivateKey = field(
        default_factory=lambda: ec.generate_private_key(ec.SECP256R1())
    )

    def __post_init__(self) -> None:
        now = datetime.now(UTC)
        start, signer = now - timedelta(days=2), self.above or self
        self.certificate = (
            _builder(self.title, signer.title, self.key.public_key(), start, self.days)
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .add_extension(_SIGNS_CERTIFICATES, critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(self.key.public_key()), False)
            .add_extension(_signed_by(signer.key), critical=False)
            .sign(signer.key, hashes.SHA256())
        )

    def chain(self) -> list[Authority]:
        """Return this authority and those above it, the root last."""
        return [self, *self.above.chain()] if self.above else [self]

    def files(
        self,
        folder: Path,
        engine_id: str,
        *,
        expired: bool = False,
        trusting: tuple[Authority, ...] = (),
        named: bool | None = True,
        by_role: bool = False,
        name: str = "",
        days: int = 10,
        common_name: str = "engine",
    ) -> TlsFiles:
        """Write three files.

        Args:
            engine_id: whose name the certificate has, unless ``name`` is another one.
            expired: a certificate of yesterday.
            trusting: authorities that the holder trusts beside this one.
            named: whether certificates name engines; if not, it is ``localhost``'s. None for one
                without a subjectAltName.
            by_role: whether certificates name roles.
            days: how long it is valid, from two days ago on.
            common_name: what its subject says.
        """
        folder.mkdir(parents=True, exist_ok=True)
        key = ec.generate_private_key(ec.SECP256R1())
        start = datetime.now(UTC) - timedelta(days=2)
        own = role_name if by_role else engine_name
        held = name or (own(engine_id) if named else "localhost")
        valid = 1 if expired else days
        builder = _builder(common_name, self.title, key.public_key(), start, valid)
        builder = builder.add_extension(_signed_by(self.key), critical=False)
        if named is not None:
            names = x509.SubjectAlternativeName([x509.DNSName(held)])
            builder = builder.add_extension(names, critical=False)
        certificate = builder.sign(self.key, hashes.SHA256())
        pem = serialization.Encoding.PEM
        private = key.private_bytes(
            pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        *between, root = self.chain()
        texts = {
            "ca.crt": b"".join(one.certificate.public_bytes(pem) for one in (root, *trusting)),
            "tls.crt": b"".join(
                one.public_bytes(pem) for one in (certificate, *(ca.certificate for ca in between))
            ),
            "tls.key": private,
        }
        for file, text in texts.items():
            new = folder / f".{file}"
            new.write_bytes(text)
            new.rename(folder / file)  # as the kubelet does, so that no half of a file is read
        paths = (folder / "ca.crt", folder / "tls.crt", folder / "tls.key")
        return TlsFiles(*paths, named=bool(named), by_role=by_role)


def _builder(
    subject: str, issuer: str, key: ec.EllipticCurvePublicKey, start: datetime, days: int
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(_name(subject))
        .issuer_name(_name(issuer))
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(start)
        .not_valid_after(start + timedelta(days=days))
    )
