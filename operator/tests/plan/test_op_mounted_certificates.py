"""Engines whose certificates the user mounts: the operator makes none and knows such pods."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs
from simulated_cluster import START, SimulatedCluster, manifest as cluster

from pdcluster_operator.api.conditions import timestamp
from pdcluster_operator.api.spec.types import Certificates
from pdcluster_operator.plan.launchers import Target, launchers_to_poll
from pdcluster_operator.plan.planner import make_plan
from pdcluster_operator.plan.types import Place, WriteCertificates

ROLE = {
    "podTemplate": {
        "spec": {
            "containers": [
                {"name": "engine", "volumeMounts": [{"name": "own", "mountPath": "/pdcluster-tls"}]}
            ],
            "volumes": [{"name": "own", "secret": {"secretName": "engine"}}],
        }
    }
}


def spec_of(tls: str) -> dict[str, Any]:
    """The pod templates mount certificates only where engines are to use them."""
    role = ROLE if tls == "Mounted" else {}
    return {"transfer": {"device": "CPU", "tls": tls}, "prefill": role, "decode": role}


def targets_of(world: SimulatedCluster) -> list[Target]:
    seen = world.observed()
    return list(launchers_to_poll(seen.pods, seen.children))


def world_of(tls: str, **spec: Any) -> SimulatedCluster:
    return SimulatedCluster(cluster(**spec_of(tls), **spec))


def engines(world: SimulatedCluster) -> list[dict[str, Any]]:
    return [child for child in world.children.values() if child["kind"] == "StatefulSet"]


def pairing_keys(world: SimulatedCluster) -> set[str]:
    return {engine["metadata"]["labels"]["pdcluster.dev/pairing-key"] for engine in engines(world)}


def change_to(world: SimulatedCluster, tls: str) -> None:
    """Change the spec, and let the replacement of engines end."""
    world.edit(**spec_of(tls))
    for _ in range(10):
        world.step()
        world.others_act()


def test_engines_use_the_mounted_files_and_the_operator_makes_none() -> None:
    world = world_of("Mounted")
    assert not [step for step in world.plan().steps if isinstance(step, WriteCertificates)]
    world.bring_up()
    assert world.condition("Ready")["status"] == "True"
    assert world.certificates.issue is None
    assert len(engines(world)) == 2
    for engine in engines(world):
        pod = engine["spec"]["template"]["spec"]
        container = pod["containers"][0]
        args = container["args"]
        config = json.loads(args[args.index("--kv-transfer-config") + 1])
        option = config["kv_connector_extra_config"]["tls"]
        assert option == {
            "ca": "/pdcluster-tls/ca.crt",
            "certificate": "/pdcluster-tls/tls.crt",
            "key": "/pdcluster-tls/tls.key",
            "names": "roles",
        }
        assert "allow_insecure" not in config["kv_connector_extra_config"]
        at = [m["name"] for m in container["volumeMounts"] if m["mountPath"] == "/pdcluster-tls"]
        assert at == ["own"]
        assert [v for v in pod["volumes"] if v["name"] == "certificate"] == []
        for probe in ("startupProbe", "readinessProbe"):
            assert container[probe]["httpGet"]["scheme"] == "HTTPS"


def test_their_launchers_are_asked_over_tls_with_the_operators_mounted_certificate() -> None:
    for tls, scheme, held in (
        ("Mounted", "https", Certificates.MOUNTED),
        ("Enabled", "https", Certificates.OPERATOR),
        ("Disabled", "http", Certificates.NONE),
    ):
        world = world_of(tls)
        world.step()
        world.run_pods()
        targets = targets_of(world)
        assert len(targets) == 2
        for target in targets:
            assert (target.url.split(":")[0], target.certificates) == (scheme, held)


def test_no_label_of_a_pod_template_makes_engines_look_as_if_they_had_certificates() -> None:
    template = {"metadata": {"labels": {"pdcluster.dev/tls": "Mounted"}}}
    world = SimulatedCluster(
        cluster(
            transfer={"device": "CPU", "tls": "Disabled"},
            prefill={"podTemplate": template},
            decode={"podTemplate": template},
        )
    )
    world.step()
    world.run_pods()
    targets = targets_of(world)
    assert [target.certificates for target in targets] == [Certificates.NONE] * 2


def test_the_status_says_that_they_are_mounted_and_when_they_expire() -> None:
    world = world_of("Mounted")
    world.bring_up()
    world.step()
    assert world.cluster["status"]["transfer"] == {"certificates": "Mounted"}
    for name, report in world.engines.items():
        world.engines[name] = structs.replace(report, certificate_expires=START + 9.0)
    world.step()
    told = world.cluster["status"]["transfer"]
    assert told == {"certificates": "Mounted", "notAfter": timestamp(START + 9.0)}


def test_the_end_of_a_certificate_is_not_forgotten_with_the_engine_that_it_silences() -> None:
    world = world_of("Mounted")
    world.bring_up()
    first, second = world.engines
    for name, days in ((first, 1), (second, 300)):
        report = world.engines[name]
        world.engines[name] = structs.replace(report, certificate_expires=START + days * 86400.0)
    world.step()
    answers = world.engines.pop(first)
    world.step()
    told = world.cluster["status"]["transfer"]
    assert told["notAfter"] == timestamp(START + 86400.0)
    world.engines[first] = structs.replace(answers, certificate_expires=START + 200 * 86400.0)
    world.step()
    told = world.cluster["status"]["transfer"]
    assert told["notAfter"] == timestamp(START + 200 * 86400.0), "it has a new one"


def test_engines_with_certificates_of_different_authorities_never_pair() -> None:
    keys = [pairing_keys(world_of_settled(tls)) for tls in ("Enabled", "Mounted", "Disabled")]
    assert [len(key) for key in keys] == [1, 1, 1]
    assert len(set.union(*keys)) == 3


def world_of_settled(tls: str) -> SimulatedCluster:
    world = world_of(tls)
    world.settle()
    return world


@pytest.mark.parametrize("how", ["Recreate", "Surge"])
def test_engines_go_over_to_mounted_certificates_and_back(how: str) -> None:
    world = world_of("Enabled", rollout={"type": how})
    world.bring_up()
    for tls, status in (("Mounted", "Mounted"), ("Enabled", "Operator"), ("Mounted", "Mounted")):
        change_to(world, tls)
        assert world.condition("Ready")["status"] == "True", world.condition("Ready")
        assert world.cluster["status"]["transfer"] == {"certificates": status}
        for engine in engines(world):
            [mount] = [
                mount["name"]
                for mount in engine["spec"]["template"]["spec"]["containers"][0]["volumeMounts"]
                if mount["mountPath"] == "/pdcluster-tls"
            ]
            assert mount == ("own" if tls == "Mounted" else "certificate")


@pytest.mark.parametrize("mounted", [False, True], ids=["without the files", "with the files"])
def test_engines_from_before_there_was_tls_are_replaced_for_mounted_certificates(
    mounted: bool,
) -> None:
    """Their user wants TLS. Whether their pods mounted such files already makes no difference."""
    pods = spec_of("Mounted" if mounted else "Disabled")
    world = SimulatedCluster(cluster(**pods | {"transfer": spec_of("Disabled")["transfer"]}))
    world.bring_up()
    for child in world.children.values():
        if child["kind"] == "ControllerRevision":
            del child["data"]["spec"]["transfer"]["tls"]
    before = pairing_keys(world)
    change_to(world, "Mounted")
    assert not pairing_keys(world) & before
    assert world.cluster["status"]["transfer"] == {"certificates": "Mounted"}
    assert world.condition("Ready")["status"] == "True"


def test_an_operator_that_such_engines_do_not_trust_makes_none() -> None:
    observed = replace(world_of("Mounted").observed(), place=Place(mounted_certificates=False))
    plan = make_plan(observed, START)
    assert plan.steps == ()
    accepted = next(c for c in plan.status["conditions"] if c["type"] == "Accepted")
    assert (accepted["status"], accepted["reason"]) == ("False", "MountedNotSupported")
