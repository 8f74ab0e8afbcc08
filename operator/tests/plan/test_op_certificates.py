"""The engines' certificates, as the planner sees them: when they are made, and who mounts them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from msgspec import structs
from simulated_cluster import START, SimulatedCluster, manifest as cluster

from pdcluster_operator.api.conditions import timestamp
from pdcluster_operator.api.object_names import engine_of
from pdcluster_operator.plan.launchers import launchers_to_poll
from pdcluster_operator.plan.renewals import PERIOD_SECONDS
from pdcluster_operator.plan.types import Apply, HeldCertificates, WriteCertificates

A_DAY = 24 * 60 * 60


def secured(**spec: Any) -> SimulatedCluster:
    return SimulatedCluster(cluster(transfer={"device": "CPU", "tls": "Enabled"}, **spec))


def steps(world: SimulatedCluster) -> list[WriteCertificates]:
    return [step for step in world.plan().steps if isinstance(step, WriteCertificates)]


def engines(world: SimulatedCluster) -> list[dict[str, Any]]:
    return [child for child in world.children.values() if child["kind"] == "StatefulSet"]


def revisions(world: SimulatedCluster) -> set[str]:
    names = (engine_of(engine) for engine in engines(world))
    return {name.revision for name in names if name is not None}


def certificate_of(pod: dict[str, Any]) -> str | None:
    """Return the name of the certificate that a pod mounts; None if it mounts none."""
    items = [
        item
        for volume in pod["spec"]["volumes"]
        if volume["name"] == "certificate"
        for item in volume["secret"]["items"]
    ]
    files = {item["path"]: item["key"] for item in items}
    return files["tls.crt"].removesuffix(".crt") if files else None


def transfer_config(engine: dict[str, Any]) -> dict[str, Any]:
    args = engine["spec"]["template"]["spec"]["containers"][0]["args"]
    return json.loads(args[args.index("--kv-transfer-config") + 1])["kv_connector_extra_config"]


def test_the_secret_comes_before_the_engines_and_once() -> None:
    world = secured(prefill={"replicas": 2})
    kinds = [
        step.manifest["kind"]
        for step in world.plan().steps
        if isinstance(step, Apply | WriteCertificates)
    ]
    assert kinds.index("Secret") < kinds.index("StatefulSet")
    [step] = steps(world)
    assert len(step.engines) == 3
    assert not {"data", "stringData"} & step.manifest.keys()
    [owner] = step.manifest["metadata"]["ownerReferences"]
    assert owner["uid"] == world.cluster["metadata"]["uid"]
    world.settle()
    assert world.plan().steps == ()


def test_each_engine_mounts_its_own_certificate_and_routers_mount_none() -> None:
    world = secured(prefill={"replicas": 2})
    [step] = steps(world)
    world.settle()
    mounted = {}
    for engine in engines(world):
        pod = engine["spec"]["template"]["spec"]
        [volume] = [one for one in pod["volumes"] if one["name"] == "certificate"]
        container = pod["containers"][0]
        [mount] = [m for m in container["volumeMounts"] if m["name"] == "certificate"]
        assert mount["readOnly"]
        assert "subPath" not in mount, "the kubelet updates no subPath"
        files = {item["path"]: item["key"] for item in volume["secret"]["items"]}
        option = transfer_config(engine)["tls"]
        assert option == {
            name: f"{mount['mountPath']}/{file}"
            for name, file in (("ca", "ca.crt"), ("certificate", "tls.crt"), ("key", "tls.key"))
        }
        assert files.keys() == {"ca.crt", "tls.crt", "tls.key"}
        entry = files["tls.crt"].removesuffix(".crt")
        assert files["tls.key"] == f"{entry}.key"
        name = engine_of(engine)
        assert name is not None
        mounted[entry] = name.logical
        for probe in ("startupProbe", "readinessProbe"):
            assert container[probe]["httpGet"]["scheme"] == "HTTPS"
        assert "allow_insecure" not in transfer_config(engine)
    assert mounted == step.engines
    for child in world.children.values():
        if child["kind"] == "Deployment":
            assert "certificate" not in json.dumps(child)


def test_launchers_are_asked_as_their_pods_were_made_not_as_the_spec_is_now() -> None:
    world = secured()
    world.step()
    world.run_pods()
    seen = world.observed()
    assert {one.url[:6] for one in launchers_to_poll(seen.pods, seen.children)} == {"https:"}
    mine = {"name": "certificate", "secret": {"secretName": "of-my-own"}}
    plain = SimulatedCluster(
        cluster(
            transfer={"device": "CPU", "tls": "Disabled"},
            prefill={"podTemplate": {"spec": {"volumes": [mine]}}},
        )
    )
    plain.step()
    plain.run_pods()
    seen = plain.observed()
    assert {one.url[:5] for one in launchers_to_poll(seen.pods, seen.children)} == {"http:"}
    assert steps(plain) == []


def test_a_new_period_makes_them_again_and_restarts_nothing() -> None:
    world = secured()
    world.bring_up()
    templates = [engine["spec"]["template"] for engine in engines(world)]
    held = world.certificates.engines
    plan = world.plan()
    assert plan.requeue_after is not None, "no event tells a cluster at rest of a new period"
    assert 0 < plan.requeue_after <= 30 * A_DAY
    world.now += plan.requeue_after
    [step] = world.plan().steps
    assert isinstance(step, WriteCertificates)
    assert step.engines.keys() == held
    assert step.start == world.now - A_DAY, "clocks of two machines differ"
    assert step.end == world.now + 90 * A_DAY, "an operator may be away for two months"
    begun = world.now
    world.settle()
    again = world.plan().requeue_after
    assert again is not None
    assert world.now + again == begun + 30 * A_DAY
    assert [engine["spec"]["template"] for engine in engines(world)] == templates


def test_another_authority_and_a_deleted_secret_make_them_again() -> None:
    world = secured()
    world.settle()
    issue = world.certificates.issue
    for found in (
        HeldCertificates("another", issue, world.certificates.engines),
        HeldCertificates("authority"),
        HeldCertificates("authority", "", world.certificates.engines),
    ):
        world.certificates = found
        assert [type(step) for step in world.plan().steps] == [WriteCertificates]


def test_each_reason_to_write_the_secret_is_told() -> None:
    world = secured()
    [first] = steps(world)
    world.bring_up()
    world.edit(decode={"replicas": 2})
    [more] = steps(world)
    world.settle()
    world.now += PERIOD_SECONDS
    [again] = steps(world)
    assert [step.why for step in (first, more, again)] == [
        "the engines' certificates",
        "the certificates of the engines that there are now",
        "the engines' certificates, made again before they expire",
    ]


def test_engines_that_come_and_go_change_the_secret() -> None:
    world = secured()
    world.bring_up()
    world.edit(decode={"replicas": 2})
    [more] = steps(world)
    assert len(more.engines) == 3
    world.settle()
    world.run_pods()
    world.edit(decode={"replicas": 1})
    world.step()
    assert len(world.certificates.engines) == 3, "the pod that leaves still has it"
    world.reap()
    [fewer] = steps(world)
    assert len(fewer.engines) == 2


@pytest.mark.parametrize("how", ["Recreate", "Surge", "Replace"])
@pytest.mark.parametrize("tls", [("Enabled", "Enabled"), ("Enabled", "Disabled")])
def test_while_engines_are_replaced_each_one_has_its_certificate(
    how: str, tls: tuple[str, str]
) -> None:
    """Also those of the old revision, in a new period, and where the new ones have none."""
    before, after = ({"device": "CPU", "tls": one} for one in tls)
    sides = {role: {"replicas": 2} for role in ("prefill", "decode")}
    world = SimulatedCluster(cluster(transfer=before, rollout={"type": how}, **sides))
    world.bring_up()
    world.edit(transfer=after, engine={"blockSize": 32})
    seen: set[str] = set()
    still = 0
    for _ in range(60):
        before = revisions(world), set(world.children), set(world.pods)
        world.now += PERIOD_SECONDS / 7
        world.step()
        seen |= revisions(world)
        templates = [engine["spec"]["template"] for engine in engines(world)]
        mounted = [certificate_of(pod) for pod in (*templates, *world.pods.values())]
        assert set(filter(None, mounted)) <= world.certificates.engines
        if any(map(certificate_of, world.pods.values())):
            begun = (world.now - 1) // PERIOD_SECONDS * PERIOD_SECONDS
            assert world.certificates.issue == f"authority.{begun:.0f}"
        world.reap()
        world.run_pods()
        world.speak()
        world.link()
        world.route()
        there = revisions(world), set(world.children), set(world.pods)
        still = still + 1 if there == before else 0
        if still == 15:  # two periods with nothing but new certificates
            break
    assert len(seen) == 4
    assert len(revisions(world)) == 2
    assert world.condition("Ready")["status"] == "True"


def test_a_spec_that_is_refused_renews_the_certificates_of_the_engines_that_run() -> None:
    world = secured()
    world.bring_up()
    world.edit(prefill={"parallelism": {"tensor": 3, "nodes": 2}})
    assert world.step().steps == ()
    wait = world.plan().requeue_after
    assert wait is not None
    world.now += wait
    assert [type(step) for step in world.plan().steps] == [WriteCertificates]


def test_engines_with_and_without_tls_never_pair() -> None:
    keys = set()
    for tls in ("Enabled", "Disabled"):
        world = SimulatedCluster(cluster(transfer={"device": "CPU", "tls": tls}))
        world.settle()
        keys |= {
            engine["metadata"]["labels"]["pdcluster.dev/pairing-key"] for engine in engines(world)
        }
    assert len(keys) == 2


def test_without_tls_there_is_no_secret_and_the_side_channel_says_so() -> None:
    world = SimulatedCluster(cluster(transfer={"device": "CPU", "tls": "Disabled"}))
    world.settle()
    assert world.certificates.issue is None
    world.bring_up()
    assert world.plan().requeue_after is None
    for engine in engines(world):
        assert transfer_config(engine)["allow_insecure"] is True
        assert "tls" not in transfer_config(engine)


def replaced(world: SimulatedCluster) -> None:
    """Let a replacement of engines end."""
    for _ in range(8):
        world.step()
        world.reap()
        world.run_pods()
        world.speak()
        world.link()
        world.route()


def test_engines_that_have_tls_by_default_lose_it_when_the_spec_says_so() -> None:
    """Their stored spec says nothing of TLS either, but they are of a time when there was TLS."""
    world = SimulatedCluster(cluster(transfer={"device": "CPU"}))
    world.bring_up()
    assert all(certificate_of(engine["spec"]["template"]) for engine in engines(world))
    world.edit(transfer={"device": "CPU", "tls": "Disabled"})
    replaced(world)
    assert not any(certificate_of(engine["spec"]["template"]) for engine in engines(world))
    assert world.condition("Ready")["status"] == "True"


def transfer(world: SimulatedCluster) -> dict[str, Any]:
    world.step()
    return dict(world.cluster["status"].get("transfer", {}))


def expires(world: SimulatedCluster, *moments: float | None) -> None:
    """Let engines tell when their certificates expire."""
    for (name, report), moment in zip(sorted(world.engines.items()), moments, strict=True):
        world.engines[name] = structs.replace(report, certificate_expires=moment)


def test_the_status_says_whose_certificates_are_used_and_when_the_first_expires() -> None:
    world = secured()
    assert transfer(world) == {}, "nothing runs yet"
    world.bring_up()
    assert transfer(world) == {"certificates": "Operator"}, "older launchers do not tell"
    expires(world, START + 90 * A_DAY, START + 60 * A_DAY)
    told = {"certificates": "Operator", "notAfter": timestamp(START + 60 * A_DAY)}
    assert transfer(world) == told
    world.engines.clear()
    assert transfer(world) == told, "an operator that starts again has not heard an engine yet"
    world.edit(transfer={"device": "CPU", "tls": "Disabled"})
    replaced(world)
    assert transfer(world) == {"certificates": "None"}


def test_the_first_moment_stays_while_its_engine_is_silent_and_goes_when_it_is_renewed() -> None:
    """An engine whose certificate has expired no longer answers."""
    world = secured()
    world.bring_up()
    expires(world, START + 90 * A_DAY, START + 60 * A_DAY)
    assert transfer(world)["notAfter"] == timestamp(START + 60 * A_DAY)
    first = min(world.engines, key=lambda name: world.engines[name].certificate_expires or 0.0)
    del world.engines[first]
    assert transfer(world)["notAfter"] == timestamp(START + 60 * A_DAY)
    world.speak()
    expires(world, START + 150 * A_DAY, START + 120 * A_DAY)
    assert transfer(world)["notAfter"] == timestamp(START + 120 * A_DAY)


def test_engines_that_are_being_replaced_are_not_said_to_have_tls() -> None:
    world = SimulatedCluster(cluster(transfer={"device": "CPU", "tls": "Disabled"}))
    world.bring_up()
    world.edit(
        transfer={"device": "CPU", "tls": "Enabled"},
        rollout={"type": "Surge"},
        prefill={"replicas": 2},
    )
    plan = world.step()
    status = transfer(world)
    assert status["certificates"] == "None"
    assert "2 of 2 engines without TLS" in status["message"]
    assert "They are being replaced" in status["message"], "what helps"
    said = [event for event in plan.events if event.reason == "InsecureSideChannel"]
    assert [(event.type, event.message) for event in said] == [("Warning", status["message"])]
    assert world.step().events == (), "once"
    replaced(world)
    assert transfer(world) == {"certificates": "Operator"}


def test_engines_that_a_paused_rollout_keeps_are_not_said_to_have_tls() -> None:
    world = SimulatedCluster(cluster(transfer={"device": "CPU", "tls": "Disabled"}))
    world.bring_up()
    assert transfer(world) == {"certificates": "None"}, "as the spec wants it"
    world.edit(transfer={"device": "CPU", "tls": "Enabled"}, rollout={"paused": True})
    world.settle()
    assert "spec.rollout.paused" in transfer(world)["message"]


def test_while_engines_with_and_without_tls_run_the_status_says_neither() -> None:
    world = SimulatedCluster(
        cluster(transfer={"device": "CPU", "tls": "Disabled"}, rollout={"type": "Surge"})
    )
    world.bring_up()
    world.edit(transfer={"device": "CPU", "tls": "Enabled"})
    world.step()  # stores the new revisions
    world.step()  # makes their engines
    world.run_pods()
    status = transfer(world)
    assert status["certificates"] == "Mixed"
    assert "2 of 4 engines without TLS" in status["message"]
