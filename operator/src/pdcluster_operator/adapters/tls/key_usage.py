"""What the key of a certificate may do, as X.509 says it."""

from __future__ import annotations

from cryptography import x509


def key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    """Return what a key may do: sign certificates, or be shown in a handshake."""
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=False,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
