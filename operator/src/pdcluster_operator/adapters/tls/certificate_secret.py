"""Puts the engines' certificates into the Secret that a plan describes, and reads what is there.

``engine_authority.py`` signs each certificate. ``plan/secrets/certificates.py`` decides which
engines get one, and when all of them are made again.
"""

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

    What is not as it was written does not count, so it is made again. Entries that somebody else
    added are left alone.
    """
    if secret is None:
        return HeldCertificates(authority.fingerprint)
    annotations = secret["metadata"].get("annotations") or {}
    data = secret.get("data") or {}
    written = _written(annotations.get(CERTIFICATES_HASH_ANNOTATION, ""))
    whole = {entry for entry, value in written.items() if value == _hash(data, entry)}
    issue = str(annotations.get(CERTIFICATES_ANNOTATION, ""))
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
        CERTIFICATES_HASH_ANNOTATION: json.dumps(hashes, sort_keys=True),
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
