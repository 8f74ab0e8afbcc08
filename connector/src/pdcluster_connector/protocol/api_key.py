"""The key that clients send, as OpenAI's clients do: ``Authorization: Bearer KEY``.

A container gets it from a Secret, in the variable that vLLM reads. It is never an argument, because
every process of the node can read arguments.
"""

import hmac
from typing import Final

VARIABLE: Final = "VLLM_API_KEY"


def problem(key: str) -> str | None:
    """Return what is wrong with a key, in one sentence without the key; None if it can be sent."""
    if not key:
        return f"{VARIABLE} is empty: give the Secret's key a value"
    if key != key.strip():
        return (
            f"{VARIABLE} begins or ends with white space, often a newline that `echo` added: "
            "write the Secret with `kubectl create secret generic NAME --from-literal=KEY=…`"
        )
    if not key.isascii() or not key.isprintable() or " " in key:
        return f"{VARIABLE} holds characters that no HTTP header carries: use letters and digits"
    return None


def headers(key: str | None) -> dict[str, str]:
    """Return the headers that a request needs; none if there is no key."""
    return {} if key is None else {"Authorization": f"Bearer {key}"}


def admits(key: str, authorization: str) -> bool:
    """Return whether ``Authorization`` holds the key, in the same time for every wrong key.

    Args:
        authorization: the header's value; empty if there was none.
    """
    scheme, _, given = authorization.partition(" ")
    right = hmac.compare_digest(given.strip().encode(errors="replace"), key.encode())
    return right and scheme.lower() == "bearer"
