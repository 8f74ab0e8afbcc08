"""Try admission as a dry run: a good PDCluster passes, a bad one is refused by name.

Standard library only; runs in a pod with a service account that may create PDClusters.
"""

from __future__ import annotations

import json
import ssl
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

SERVER = "https://kubernetes.default.svc"
ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
SAMPLES = Path("/test")
PATIENCE = 60.0


def dry_run(namespace: str, body: bytes) -> tuple[int, str]:
    """HTTP code and message of a create that changes nothing."""
    path = f"/apis/pdcluster.dev/v1alpha1/namespaces/{namespace}/pdclusters?dryRun=All"
    headers = {
        "Authorization": f"Bearer {(ACCOUNT / 'token').read_text()}",
        "Content-Type": "application/json",
    }
    request = urllib.request.Request(SERVER + path, data=body, headers=headers)
    context = ssl.create_default_context(cafile=str(ACCOUNT / "ca.crt"))
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)
    )
    try:
        with opener.open(request, timeout=15) as answer:
            return answer.status, "admitted"
    except urllib.error.HTTPError as error:
        text = error.read().decode(errors="replace")
        try:
            return error.code, str(json.loads(text)["message"])
        except (ValueError, KeyError, TypeError):
            return error.code, text[:500]
    except OSError as error:
        return 0, str(error)


def until(namespace: str, sample: str, codes: tuple[int, ...], names: str) -> bool:
    """Whether the sample gets one of the codes and a message with `names`; patient with a start."""
    body = (SAMPLES / sample).read_bytes()
    end = time.monotonic() + PATIENCE
    while True:
        code, message = dry_run(namespace, body)
        if code in codes and names in message:
            print(f"ok: {sample}: {code} {message}")
            return True
        # Only what a starting webhook or API server answers is worth another try.
        if time.monotonic() > end or code not in (0, 500, 503, 504):
            print(f"FAILED: {sample}: {code} {message}; expected {codes} {names!r}")
            return False
        time.sleep(1)


def main() -> int:
    """Try both samples in the namespace of the first argument; the second names the rule."""
    namespace, rule = sys.argv[1:3]
    good = until(namespace, "good.json", (201,), "")
    bad = until(namespace, "bad.json", (400, 403, 422), rule)
    return 0 if good and bad else 1


if __name__ == "__main__":
    sys.exit(main())
