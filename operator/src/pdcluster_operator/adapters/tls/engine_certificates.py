"""Puts the engines' certificates into the Secret that a plan describes, and reads what is there."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from typing import Any

from pdcluster_connector.protocol.peer_name import engine_name
from pdcluster_operator.adapters.tls.engine_authority import EngineAuthority
from pdcluster_operator.api.labels import CERTIFICATES_ANNOTATION, CERTIFICATES_HASH_ANNOTATION
from pdcluster_operator.plan.builders.certificates import AUTHORITY_FILE
from pdcluster_operator.plan.model import HeldCertificates, WriteCertificates

Manifest = Mapping[str, Any]


def held_certificates(secret: Manifest | None, authority: EngineAuthority) -> HeldCertificates:
    """Return what the planner may know of the live Secret.

    Content that is not what was written counts as no issue, so that it is made again.
    """
    if secret is None:
        return HeldCertificates(authority.fingerprint)
    annotations = secret["metadata"].get("annotations") or {}
    data = secret.get("data") or {}
    engines = {name.removesuffix(".crt") for name in data if name.endswith(".crt")}
    complete = {name for name in engines if f"{name}.key" in data}
    issue = str(annotations.get(CERTIFICATES_ANNOTATION, ""))
    if AUTHORITY_FILE not in data or annotations.get(CERTIFICATES_HASH_ANNOTATION) != _hash(data):
        issue = ""
    return HeldCertificates(authority.fingerprint, issue, frozenset(complete))


def with_certificates(step: WriteCertificates, authority: EngineAuthority) -> dict[str, Any]:
    """Return the Secret with a certificate and a key for each engine."""
    files = {AUTHORITY_FILE: authority.pem}
    for entry, logical in step.engines.items():
        signed = authority.sign(engine_name(logical), step.start, step.end)
        files |= {f"{entry}.crt": signed.certificate, f"{entry}.key": signed.key}
    data = {name: base64.b64encode(text).decode() for name, text in files.items()}
    metadata = step.manifest["metadata"]
    annotations = {**metadata["annotations"], CERTIFICATES_HASH_ANNOTATION: _hash(data)}
    return {**step.manifest, "metadata": {**metadata, "annotations": annotations}, "data": data}


def _hash(data: Mapping[str, Any]) -> str:
    """Return a hash of the content. Keys are random, so it tells nothing of them."""
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()
