"""A role's revision, and the pairing key: what each of them is made from.

A role's revision is what forces its pods to restart: see :mod:`.targets`. ``pairing_key`` names
what decides whether KV can be exchanged. The key is part of the pod template, so a change of it
changes both roles' revisions, and a change of one role's environment only that role's.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from pdcluster_operator.api.object_names import REVISION_LENGTH
from pdcluster_operator.api.spec.enums import Role, TlsMode
from pdcluster_operator.api.spec.resolve import resolve_engine
from pdcluster_operator.api.spec.shape import MODEL_FLAGS, engine_shape
from pdcluster_operator.api.spec.types import Cluster

# No vowels, so that no word appears by accident, and no characters that look alike.
ALPHABET = "bcdfghjklmnpqrstvwxz2456789"


def is_same_json(one: Any, other: Any) -> bool:
    """Whether two documents are the same JSON. For Python, 1 and true are equal."""
    return one == other and json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


def short_hash(document: Any, length: int = REVISION_LENGTH) -> str:
    """Return a short name of a JSON document, fit for object names and labels."""
    text = json.dumps(document, sort_keys=True, separators=(",", ":"), default=str)
    number = int.from_bytes(hashlib.sha256(text.encode()).digest(), "big")
    letters = []
    for _ in range(length):
        number, rest = divmod(number, len(ALPHABET))
        letters.append(ALPHABET[rest])
    return "".join(letters)


def pairing_key(cluster: Cluster) -> str:
    """Return the key of all engines of a spec; engines pair when their keys are equal."""
    document: dict[str, Any] = {"model": _source(cluster)}
    if (tls := cluster.spec.transfer.tls) is not TlsMode.DISABLED:
        # Without TLS, the key is the same as before the field existed.
        document["tls"] = True if tls is TlsMode.ENABLED else tls.value
    for role in Role:
        engine = resolve_engine(cluster, role)
        shape = engine_shape(cluster, engine)
        document[role.value] = {
            "model": shape.model,
            "kv_dtype": shape.kv_dtype,
            "block_size": shape.block_size,
            "memory": shape.memory,
            "attention_backend": engine.attention_backend,
            "flags": sorted(flag.words for flag in engine.flags if flag.head in MODEL_FLAGS),
        }
    return short_hash(document)


def _source(cluster: Cluster) -> str:
    return repr(cluster.spec.model.source)
