"""Networks that are partly broken: only KV is cut off, or only the operator is."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
from cluster_install import NAMESPACE, Installation
from cluster_run import KILLED, ClusterRun, broken_under_load
from kv_load import Load, moved, text
from local_run import condition

from cluster import network
from cluster.session import Cluster
from pdcluster_operator.api.object_names import HTTP_PORT, LAUNCHER_PORT, SIDE_CHANNEL_PORT

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

RECOVERY_SECONDS = 400.0


def everywhere_but_pods(cluster: Cluster) -> dict[str, Any]:
    """Cut the sender's egress: a second policy cannot forbid what the cluster's own one allows."""
    pods = [str(network.PODS)]
    if not cluster.ours:  # whose network plugin may give out addresses as it likes
        words = ("get", "pods", "--all-namespaces", "--output=json")
        found = [
            pod["status"].get("podIP", "") for pod in json.loads(cluster.kubectl(*words))["items"]
        ]
        pods = sorted({f"{address}/32" for address in found if address and ":" not in address})
    return {"to": [{"ipBlock": {"cidr": "0.0.0.0/0", "except": pods}}]}


def policy(chosen: dict[str, str], *egress: dict[str, Any]) -> str:
    """A NetworkPolicy that allows the chosen pods only these outgoing connections."""
    spec = {"podSelector": {"matchLabels": chosen}, "policyTypes": ["Egress"], "egress": [*egress]}
    kind = {"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy"}
    return json.dumps({**kind, "metadata": {"name": "cut"}, "spec": spec})


def to_prefill(*ports: int) -> dict[str, Any]:
    return {
        "to": [{"podSelector": {"matchLabels": {"pdcluster.dev/role": "prefill"}}}],
        "ports": [{"protocol": "TCP", "port": port} for port in ports],
    }


@contextmanager
def decode_without(run: ClusterRun, *ports: int) -> Iterator[None]:
    """Decode reaches only these ports of prefill, then all again: and all heals by itself."""
    prefill = run.restarts("prefill")
    cut = policy(
        {"pdcluster.dev/role": "decode"}, everywhere_but_pods(run.cluster), to_prefill(*ports)
    )
    run.kubectl("apply", "--filename=-", stdin=cut)
    try:
        yield
        for role in ("prefill", "decode"):
            assert run.condition(f"{role.title()}Ready")["status"] == "True"
            assert run.complete("x", role=role).status == 200, "the API answers"
    finally:
        run.kubectl("delete", "networkpolicy", "cut")
    took = run.wait_ready(RECOVERY_SECONDS)
    print(f"Ready again after {took:.1f} s")
    assert run.restarts("prefill") == prefill
    moved(run, text(60, 5000 + len(ports)))


def only_failed_link(run: ClusterRun, status: Mapping[str, Any]) -> dict[str, Any]:
    """The one link in a status: it names this pair."""
    [link] = status["failedLinks"]
    print(link)
    for role in ("prefill", "decode"):
        assert link[role] == run.pod(role).rpartition("-")[0]
    return dict(link)


def test_kv_ports_that_are_cut_off_are_named_although_every_api_answers(tiny: ClusterRun) -> None:
    def cut_off(status: Mapping[str, Any]) -> bool:
        ready = condition(status, "Ready")
        reasons = [link["reason"] for link in status.get("failedLinks", ())]
        named = reasons in (["SideChannelUnreachable"], ["TransferStalled"])
        return named and ready["status"] == "False" and ready["reason"] == reasons[0]

    tiny.wait_ready()
    decode = tiny.restarts("decode")
    with decode_without(tiny, HTTP_PORT, LAUNCHER_PORT):
        status = tiny.wait_status("link that is cut off", cut_off)
        print(condition(status, "Ready"))
        only_failed_link(tiny, status)
    assert tiny.restarts("decode") == decode


def test_a_transfer_port_alone_that_is_cut_off_is_named(tiny: ClusterRun) -> None:
    """Open connections may outlive a new policy, so decode is killed and starts behind this one.

    It is there before decode is killed: decode's next start may be quick.
    """

    def stalled(status: Mapping[str, Any]) -> bool:
        reasons = [link["reason"] for link in status.get("failedLinks", ())]
        ready = condition(status, "DecodeReady")["status"] == "True"
        return ready and reasons == ["TransferStalled"]

    tiny.wait_ready()
    before, survivor = tiny.engine_id("decode"), tiny.engine_id("prefill")
    without = decode_without(tiny, HTTP_PORT, LAUNCHER_PORT, SIDE_CHANNEL_PORT)
    with ExitStack() as stack:
        broken_under_load(
            *(tiny, tiny.pod("decode"), 2500, *KILLED),
            before=lambda: stack.enter_context(without),
        )
        status = tiny.wait_status("stalled link of an engine that is ready", stalled)
        only_failed_link(tiny, status)
        assert condition(status, "KVPathVerified")["status"] != "True"
        assert condition(status, "Ready")["status"] == "False"
        assert condition(status, "Ready")["reason"] == "TransferStalled"
    assert tiny.engine_id("decode").rpartition("/")[0] == before.rpartition("/")[0]
    assert tiny.engine_id("decode") != before, "a restart is a new incarnation"
    assert tiny.engine_id("prefill") == survivor


def test_an_operator_that_is_cut_off_says_unknown_and_changes_no_traffic(
    tiny: ClusterRun, operator: Installation
) -> None:
    tiny.wait_ready()
    children = tiny.children()
    chosen = {"app.kubernetes.io/component": "operator"}
    cut = policy(chosen, everywhere_but_pods(tiny.cluster))
    since = time.time()
    with Load(tiny, lambda number: text(60, 6000 + number)) as load:
        operator.kubectl("apply", "--filename=-", stdin=cut)
        try:
            status = tiny.wait_status(
                "Unknown", lambda seen: condition(seen, "Ready")["status"] == "Unknown", 120
            )
            ready = condition(status, "Ready")
            print(f"Ready=Unknown after {time.time() - since:.1f} s: {ready}")
            print(tiny.kubectl("get", "pdc", "--output=wide"))
            assert ready["reason"] == "LauncherUnreachable"
            false = [one["type"] for one in status["conditions"] if one["status"] == "False"]
            assert false in ([], ["Progressing"])
            time.sleep(10)
            asked = len(load.replies)
            tiny.wait("request that is answered", lambda: len(load.replies) > asked, 120)
        finally:
            operator.kubectl("delete", "networkpolicy", "cut", f"--namespace={NAMESPACE}")
        tiny.wait_ready(RECOVERY_SECONDS)
    assert load.broken == []
    assert {reply.status for reply in load.replies} == {200}
    assert {reply.kv_path["outcome"] for reply in load.replies} == {"transferred"}
    assert tiny.children() == children
    if tiny.cluster.ours:
        written = {write.resource for write in operator.writes(since)}
        assert written <= {"pdclusters/status", "events"}, written
