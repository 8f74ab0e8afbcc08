"""`kubectl apply`, then `Ready`, then tokens. `Ready` means that KV moved between the pods."""

from __future__ import annotations

import itertools
import re
import time

import pytest
from cluster_install import NAMESPACE, Installation
from cluster_run import ClusterRun
from kv_load import moved, text

from cluster.audit import Write
from pdcluster_operator.api.findings import Rule

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

ALL = (
    *("Accepted", "PrefillReady", "DecodeReady", "KVLinksEstablished", "KVPathVerified"),
    *("TransportHealthy", "Available", "Progressing", "Ready"),
)
WELL = {
    "KVLinksEstablished": "LinksEstablished",
    "KVPathVerified": "CanaryPassed",
    "Available": "Serving",
    "Ready": "Ready",
}
REST_SECONDS = 30.0
TO_REST_SECONDS = 300.0


def test_tokens_are_prefills_own_and_bytes_are_the_computed_ones(tiny: ClusterRun) -> None:
    tiny.wait_ready()
    tiny.kubectl("wait", "--for=condition=Ready", "pdc/tiny", "--timeout=300s")
    replies = [moved(tiny, text(20 + 10 * seed, seed)) for seed in range(8)]
    assert len({reply.completion for reply in replies}) == 8, "each prompt has its own answer"


def test_the_reasons_of_a_cluster_that_is_well(tiny: ClusterRun) -> None:
    tiny.wait_ready()
    reasons = {one["type"]: one["reason"] for one in tiny.status()["conditions"]}
    assert reasons == {**reasons, **WELL}


def test_the_engines_image_lacks_the_connector(tiny: ClusterRun) -> None:
    for role in ("prefill", "decode"):
        pod = tiny.pods(role)[0]
        [connector] = [v for v in pod["spec"]["volumes"] if v["name"] == "connector"]
        assert connector["configMap"]["name"].startswith("pdcluster-connector-")
        code = (
            "import importlib.util as u; "
            "print(u.find_spec('vllm') and u.find_spec('nixl') and 1, "
            "u.find_spec('pdcluster_connector'))"
        )
        said = tiny.kubectl("exec", tiny.pod(role), "--", "python3", "-c", code)
        assert said.strip() == "1 None"


def test_get_shows_what_one_wants_to_know(tiny: ClusterRun) -> None:
    header = ["NAME", "AVAILABLE", "READY", "PREFILL", "DECODE", "LINKS", "MODEL"]
    row = ["tiny", "True", "True", "1/1", "1/1", "1/1", "tiny"]

    def shown() -> list[list[str]]:
        table = tiny.kubectl("get", "pdc", "--output=wide")
        print(table)
        return [re.split(r"\s{2,}", line.strip()) for line in table.splitlines()]

    tiny.wait_ready()
    tiny.wait("row that is Ready", lambda: shown()[1][:7] == row and shown()[1][8] == "Ready", 60)
    assert shown()[0] == [*header, "AGE", "REASON", "CERTIFICATES"]
    assert shown()[1][9] == "Operator"


def described(run: ClusterRun) -> str:
    return run.kubectl("describe", "pdc", run.name)


def test_describe_shows_conditions_and_events(tiny: ClusterRun) -> None:
    tiny.wait_ready()
    shown = described(tiny)
    print(shown)
    for condition in ALL:
        assert re.search(rf"Type:\s+{condition}$", shown, re.MULTILINE), condition
    assert [c["type"] for c in tiny.status()["conditions"]] == list(ALL)

    def posted() -> bool:
        return "Ready is True" in described(tiny).partition("Events:")[2]

    tiny.wait("event, which is posted after the status", posted, 60)
    assert Rule.INSECURE_SIDE_CHANNEL not in described(tiny), "its side channel has TLS"


def test_explain_describes_every_field(tiny: ClusterRun) -> None:
    shown = tiny.kubectl("explain", "pdc.spec.prefill")
    print(shown)
    fields = re.findall(r"^  (\w+)\t<.+>.*\n(.*)", shown, re.MULTILINE)
    assert {"replicas", "parallelism", "resources", "podTemplate", "engine"} <= {
        f for f, _ in fields
    }
    undescribed = [f for f, text in fields if "<no description>" in text or not text.strip()]
    assert undescribed == []


def test_nothing_is_written_at_rest_or_for_requests(
    tiny: ClusterRun, operator: Installation
) -> None:
    """The last of this file: the time began before the others, which change nothing."""
    if not tiny.cluster.ours:
        pytest.skip("who wrote what stands in the API server's audit log")
    tiny.wait_ready()
    deadline = time.monotonic() + TO_REST_SECONDS
    for number in itertools.count():
        moved(tiny, text(60, 100 + number))
        # What an engine that was late for a moment makes the operator write begins it anew.
        written = last_write(tiny, operator)
        if (left := written.at + REST_SECONDS - time.time()) <= 0:
            break
        assert time.monotonic() < deadline, written
        time.sleep(min(left, 5))
    assert tiny.condition("Ready")["status"] == "True"


def last_write(run: ClusterRun, operator: Installation) -> Write:
    """What the operator wrote last, but for PDClusters of other tests."""
    places = ("", NAMESPACE, run.namespace)
    return max(
        (one for one in operator.writes(0) if one.namespace in places), key=lambda one: one.at
    )
