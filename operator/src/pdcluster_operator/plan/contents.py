"""What is kept of large objects: all that plans read, and no more.

Each cluster has a ConfigMap with the connector, of some hundred kB. The operator compares its
content and never reads it, so it keeps the hash: a thousand clusters would need a gigabyte.
A pod's spec is the largest part of a pod. Strings that many objects have are held once.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import Any

from pdcluster_operator.plan.model import Manifest

CONTENTS = ("data", "binaryData")
MARK = "sha256:"
SHORT = 128
"""Characters that are kept as they are."""
LEVELS = 32
"""A pod template's deepest field of Kubernetes' own lies at half of that."""


def without_contents(manifest: Manifest) -> Manifest:
    """Return an immutable ConfigMap with hashes of its contents; any other object as it is.

    The result for a result is the same, so that both sides of a comparison may come from here.
    """
    if manifest.get("kind") != "ConfigMap" or not manifest.get("immutable"):
        return manifest
    hashed: dict[str, Any] = {
        part: {name: _hashed(text) for name, text in manifest[part].items()}
        for part in CONTENTS
        if manifest.get(part)
    }
    return {**manifest, **hashed}


def pod_spec_that_is_read(spec: Manifest) -> dict[str, Any]:
    """Return a pod's node, the limits of its containers (GPUs), and the Secrets that it mounts."""
    volumes = spec.get("volumes") or ()
    secrets = (one["secret"].get("secretName") for one in volumes if one.get("secret"))
    limits = ((one.get("resources") or {}).get("limits") for one in spec.get("containers") or ())
    kept = {
        "nodeName": spec.get("nodeName"),
        "volumes": [{"secret": {"secretName": name}} for name in secrets],
        "containers": [{"resources": {"limits": one}} for one in limits if one],
    }
    return {name: value for name, value in kept.items() if value}


def with_shared_text(value: Any, levels: int = LEVELS) -> Any:
    """Return a copy in which equal short strings are one object.

    Each JSON document brings strings of its own. The objects of a thousand clusters have the same
    keys, images, commands and addresses, and would hold each of them thousands of times.

    Args:
        levels: how deep to look. Nobody's pod template may exhaust the stack.
    """
    if isinstance(value, dict) and levels:
        return {_shared(key): with_shared_text(item, levels - 1) for key, item in value.items()}
    if isinstance(value, list) and levels:
        return [with_shared_text(item, levels - 1) for item in value]
    return _shared(value) if isinstance(value, str) and len(value) <= SHORT else value


@lru_cache(maxsize=1 << 14)
def _shared(text: str) -> str:
    """Not ``sys.intern``: some versions of Python never free what that was given."""
    return text


def _hashed(text: str) -> str:
    return text if len(text) <= SHORT else _digest(text)


@lru_cache(maxsize=4)
def _digest(text: str) -> str:
    """Remembered, because all clusters of an operator have the same content."""
    return MARK + hashlib.sha256(text.encode()).hexdigest()
