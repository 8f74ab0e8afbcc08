"""New certificates under load: nothing restarts, and no request fails."""

from __future__ import annotations

import json
import time

import pytest
from cluster_install import Installation
from cluster_run import ClusterRun
from kv_load import Load, text

from cluster.report import ClusterError
from pdcluster_operator.adapters.engine_authority import EngineAuthority, with_certificates
from pdcluster_operator.api.object_names import CERTIFICATES_ANNOTATION, certificates_name
from pdcluster_operator.plan.types import WriteCertificates

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

HOUR = 3600.0
KUBELET_SECONDS = 240.0
# Prints the serial numbers that the launcher and the side channel of this pod show.
SERVED = """
import os, socket, ssl
context = ssl.create_default_context(cafile="/pdcluster-tls/ca.crt")
context.check_hostname = False
context.load_cert_chain("/pdcluster-tls/tls.crt", "/pdcluster-tls/tls.key")
for port in (5590, 5600):
    with socket.create_connection((os.environ["POD_IP"], port), 10) as plain:
        with context.wrap_socket(plain) as peer:
            print(peer.getpeercert()["serialNumber"])
"""


def served(run: ClusterRun) -> list[str]:
    """Return the serial numbers of the certificates in use: of prefill's two servers, decode's."""
    return [
        serial
        for role in ("prefill", "decode")
        for serial in run.kubectl("exec", run.pod(role), "--", "python3", "-c", SERVED).split()
    ]


def seen(run: ClusterRun) -> list[str]:
    """The same while the files change: nothing when one is new and another one is not."""
    try:
        return served(run)
    except ClusterError as error:
        print(error)
        return []


def give_other_certificates(run: ClusterRun, authority: EngineAuthority) -> None:
    """Do what the operator does when a period begins: sign again, for another time."""
    name = certificates_name(run.name)
    live = json.loads(run.kubectl("get", "secret", name, "--output=json"))
    entries = [file.removesuffix(".crt") for file in live["data"] if file.endswith(".crt")]
    engines = {
        entry: f"{run.namespace}.{run.name}.{entry.replace('-', '.')}"
        for entry in entries
        if entry != "ca"
    }
    step = WriteCertificates(live, engines, time.time() - HOUR, time.time() + HOUR, "a test")
    secret = with_certificates(step, authority)
    annotations = secret["metadata"]["annotations"]
    change = {"metadata": {"annotations": annotations}, "data": secret["data"]}
    run.kubectl("patch", "secret", name, "--type=merge", "--patch", json.dumps(change))


def test_new_certificates_restart_nothing_and_fail_no_request(
    tiny: ClusterRun, operator: Installation, authority: EngineAuthority
) -> None:
    tiny.wait_ready()
    of_the_operator = served(tiny)
    assert len(set(of_the_operator)) == 2, "one for each engine"
    pods = [tiny.restarts(role) for role in ("prefill", "decode")]
    with Load(tiny, lambda number: text(60, 40_000 + number)) as load:
        tiny.wait("request that is answered", lambda: load.answered, 120)
        give_other_certificates(tiny, authority)

        took = tiny.wait(
            "use of the other certificates",
            lambda: (now := seen(tiny)) and not set(now) & set(of_the_operator),
            KUBELET_SECONDS,
        )
        print(f"other certificates in use after {took:.0f} s")

        # The operator does not find its own name on them, and makes them again.
        name = certificates_name(tiny.name)
        note = f"{CERTIFICATES_ANNOTATION}=somebody"
        tiny.kubectl("annotate", "secret", name, note, "--overwrite")
        operator.restart()  # a new one reads the Secret at once
        took = tiny.wait(
            "use of the operator's", lambda: seen(tiny) == of_the_operator, KUBELET_SECONDS
        )
        print(f"the operator's certificates in use after {took:.0f} s")
        tiny.wait_ready()
    print(f"{len(load.replies)} requests")
    assert load.broken == []
    assert {reply.status for reply in load.replies} == {200}
    assert {reply.kv_path["outcome"] for reply in load.replies} == {"transferred"}
    assert [tiny.restarts(role) for role in ("prefill", "decode")] == pods
