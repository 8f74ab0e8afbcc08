"""Who can use a cluster's API: a key from a Secret, and a NetworkPolicy that is enforced."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from client_pod import client
from cluster_access import Proxy
from cluster_install import Installation
from cluster_run import ClusterRun, manifest, running

from cluster.session import Cluster
from pdcluster_operator.api.object_names import HTTP_PORT

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

KEY = "sk-cluster-0123456789"
# Runs in a pod that may connect and in one that may not. It prints 0 if there is no connection.
ASK = """
import json, sys, urllib.error, urllib.request
url, key = sys.argv[1:3]
body = json.dumps({"model": "guarded", "prompt": "x", "max_tokens": 2}).encode()
request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
if key:
    request.add_header("Authorization", f"Bearer {key}")
try:
    print(urllib.request.urlopen(request, timeout=float(sys.argv[3])).status)
except urllib.error.HTTPError as error:
    print(error.code)
except OSError:
    print(0)
"""


@pytest.fixture(scope="module")
def guarded(cluster: Cluster, proxy: Proxy, operator: Installation) -> Iterator[ClusterRun]:
    document = manifest(
        "guarded",
        router={
            "apiKeySecretRef": {"name": "api", "key": "key"},
            "allowFrom": [{"podSelector": {"matchLabels": {"client": "friend"}}}],
        },
    )
    with running(cluster, proxy, None, "guarded") as run:
        run.kubectl("create", "secret", "generic", "api", f"--from-literal=key={KEY}")
        run.apply(document)
        for name in ("friend", "stranger"):
            run.kubectl(
                "apply",
                "--filename=-",
                stdin=json.dumps(client(name, document["spec"]["router"]["image"])),
            )
        run.wait_ready()
        run.kubectl("wait", "--for=condition=Ready", "pod/friend", "pod/stranger", "--timeout=180s")
        yield run


def asked(run: ClusterRun, who: str, url: str, key: str = "", seconds: float = 60) -> int:
    words = ("python3", "-c", ASK, url, key, str(seconds))
    return int(run.kubectl("exec", who, "--", *words))


def test_ready_with_a_key_means_that_the_canary_had_it(guarded: ClusterRun) -> None:
    assert guarded.condition("KVPathVerified")["status"] == "True"
    assert guarded.condition("Available")["status"] == "True"


def test_the_router_asks_the_friend_for_the_key_and_hears_no_stranger(guarded: ClusterRun) -> None:
    url = f"http://{guarded.service_address()}:{HTTP_PORT}/v1/completions"
    assert asked(guarded, "friend", url) == 401
    assert asked(guarded, "friend", url, "sk-wrong") == 401
    assert asked(guarded, "friend", url, KEY) == 200
    assert asked(guarded, "stranger", url, KEY, 5) == 0


def test_engines_hear_neither_and_ask_for_the_key_themselves(guarded: ClusterRun) -> None:
    pod = guarded.pods("decode")[0]
    url = f"http://{pod['status']['podIP']}:{HTTP_PORT}/v1/completions"
    with ThreadPoolExecutor() as threads:
        heard = threads.map(lambda who: asked(guarded, who, url, KEY, 5), ("friend", "stranger"))
        assert list(heard) == [0, 0]
    assert guarded.complete("x", role="decode").status == 401
    assert guarded.at_pod(guarded.pod("decode"), HTTP_PORT, "GET", "/health").status == 200


def test_the_key_stands_in_no_object_but_the_secret(guarded: ClusterRun) -> None:
    kinds = "pdc,pod,statefulset,deployment,replicaset,configmap,event"
    assert KEY not in guarded.kubectl("get", kinds, "--output=yaml")
