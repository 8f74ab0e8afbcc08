"""Ask the API server to review PDClusters, with dry runs, which change nothing.

    admission_check.py test NAMESPACE RULE
        For `helm test`. A good PDCluster must be admitted. A bad one must be refused with a message
        that names RULE.
    admission_check.py wait NAMESPACE RULE SECONDS
        For the hook after an installation or an upgrade. Tries until the bad PDCluster is refused
        with that message.

Uses the standard library only. Runs in a pod whose service account may create PDClusters.
"""

from __future__ import annotations

import argparse
import json
import ssl
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

SERVER = "https://kubernetes.default.svc"
ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
SAMPLES = Path("/check")
# A webhook may take 30 seconds (webhook.timeoutSeconds) before the API server gives up on it.
ANSWER_SECONDS = 40.0
TEST_SECONDS = 60.0
REFUSED = (400, 403, 422)
# Each request has a connection of its own and may reach another API server. Each API server reaches
# the webhook in its own way, so one refusal is not enough.
IN_A_ROW = 3


def dry_run(namespace: str, body: bytes) -> tuple[int, str]:
    """Return HTTP code and message of a create that changes nothing; code 0 without an answer."""
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
        with opener.open(request, timeout=ANSWER_SECONDS) as answer:
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
    """Whether the sample gets one of the codes and a message with `names`.

    Tries again for a while if a webhook or an API server that is starting answers.
    """
    body = (SAMPLES / sample).read_bytes()
    end = time.monotonic() + TEST_SECONDS
    while True:
        code, message = dry_run(namespace, body)
        if code in codes and names in message:
            say(f"ok: {sample}: {code} {message}")
            return True
        # A webhook or an API server that is starting gives these codes. Only they are tried again.
        if time.monotonic() > end or code not in (0, 500, 503, 504):
            say(f"FAILED: {sample}: {code} {message}; expected {codes} {names!r}")
            return False
        time.sleep(1)


def test(namespace: str, rule: str) -> bool:
    """Whether admission admits the good sample and refuses the bad one by the rule's name."""
    good = until(namespace, "good.json", (201,), "")
    bad = until(namespace, "bad.json", REFUSED, rule)
    return good and bad


def wait(namespace: str, rule: str, seconds: float) -> bool:
    """Whether the bad sample was refused by the rule's name within that time.

    Any other answer leads to another try. The API server may not know the CRD, our rights, the
    webhook or the way to it yet. "admitted" proves nothing: with webhook.failurePolicy Ignore, the
    API server admits what the webhook could not review.
    """
    body = (SAMPLES / "bad.json").read_bytes()
    started, refused, shown = time.monotonic(), 0, ""
    while True:
        code, message = dry_run(namespace, body)
        took = time.monotonic() - started
        refused = refused + 1 if code in REFUSED and rule in message else 0
        if refused == IN_A_ROW:
            say(f"ok: the webhook answers after {took:.0f} s")
            return True
        if refused:
            continue
        if message != shown:
            say(f"waiting: {code or 'no answer'}: {message}")
            shown = message
        if took > seconds:
            say(
                f"FAILED: no review by the webhook within {seconds:.0f} s; see the last answer "
                "above. Look at the pods and logs of the webhook, and of the operator, which makes "
                "the webhook's certificate. To install without this check: "
                "--set webhook.startupCheck.enabled=false"
            )
            return False
        time.sleep(1)


def say(text: str) -> None:
    print(text, flush=True)


def main() -> int:
    """The exit code: 0 where admission does what it should."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("mode", choices=("test", "wait"))
    parser.add_argument("namespace")
    parser.add_argument("rule")
    parser.add_argument("seconds", type=float, nargs="?", default=TEST_SECONDS)
    options = parser.parse_args()
    if options.mode == "test":
        return 0 if test(options.namespace, options.rule) else 1
    return 0 if wait(options.namespace, options.rule, options.seconds) else 1


if __name__ == "__main__":
    sys.exit(main())
