"""What a client learns of its request's KV: ``kv_path`` in an answer's parameters, or a failure.

Engine ids name the Kubernetes namespace, the cluster and the engine. A client gets them only if the
manifest allows it. The launcher's canary always gets them. The launcher imports this module, so it
imports nothing that is heavy.
"""

import hmac
from collections.abc import Mapping
from typing import Any, Final

KEY_PARAMETER: Final = "kv_path_key"
FAILURE_HEADER: Final = "pdcluster-kv-failure"
"""Under it, vLLM's output of a failed request carries :func:`failure` to the API server."""
_NAMES: Final = ("prefill", "decode", "message")


def key_of(token: str) -> str:
    """Derive the key that reveals names from the launcher's token; empty without a token.

    The token itself is not sent, because vLLM may log a request's parameters.
    """
    return hmac.digest(token.encode(), b"kv_path", "sha256").hex() if token else ""


def has_key(params: Mapping[str, Any] | None, key: str) -> bool:
    """Whether a request's ``kv_transfer_params`` hold the key. Does not raise."""
    given = params.get(KEY_PARAMETER) if isinstance(params, Mapping) else None
    if not key or not isinstance(given, str):
        return False
    return hmac.compare_digest(given.encode(errors="replace"), key.encode())


def without_names(path: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``kv_path`` without engine ids, and without the message, which may hold addresses."""
    return {name: part for name, part in path.items() if name not in _NAMES}


def failure(path: Mapping[str, Any], request_id: str) -> str:
    """Return what the client of a failed request reads. Decode's log has the same id."""
    link = f", from {path['prefill']} to {path['decode']}" if "decode" in path else ""
    message = f": {path['message']}" if path.get("message") else ""
    return f"KV was not received: {path['reason']}{link}{message} (request {request_id})"
