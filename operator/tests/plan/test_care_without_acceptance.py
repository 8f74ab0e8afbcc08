"""A spec that is not accepted holds changes back. The engines that there are, are cared for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from simulated_cluster import SimulatedCluster, brought_up, copied, manifest

from pdcluster_operator.api.conditions import find_condition, timestamp
from pdcluster_operator.api.object_names import ACCEPTED_ANNOTATION, EngineName
from pdcluster_operator.api.rules.engines import MOST_LINKS, within_links
from pdcluster_operator.api.rules.validate import check_manifest
from pdcluster_operator.api.spec.types import Role
from pdcluster_operator.plan.builders import router
from pdcluster_operator.plan.observed.pods import LOST_SECONDS
from pdcluster_operator.plan.types import Delete, Place, WriteCertificates, WriteTicketKey

TWO: dict[str, Any] = {"prefill": {"replicas": 2}, "decode": {"replicas": 2}}
WRONG: dict[str, dict[str, Any]] = {
    "an argument that the operator owns": {"engine": {"extraArgs": ["--kv-transfer-config={}"]}},
    "a number that is none": {"decode": {"replicas": "many"}},
    "one that is negative, and another router": {
        "prefill": {"replicas": -1},
        "router": {"policy": "Random", "allowFrom": "everybody"},
    },
    "lists for objects": {"prefill": [1], "decode": [], "router": 7, "rollout": "soon"},
    "another model, and no engines": {
        "model": {"source": {"hostPath": {"path": "/models/other"}}, "name": "other"},
        "prefill": {"replicas": 0},
        "nonsense": True,
    },
}


def refused(**spec: Any) -> SimulatedCluster:
    """Return a cluster at rest whose spec was accepted, and no longer is."""
    world = brought_up(**TWO)
    world.edit(**(spec or {"nonsense": True}))
    plan = world.step()
    assert plan.steps == (), "what is right stays as it is"
    assert world.condition("Accepted")["status"] == "False"
    return world


def routed(world: SimulatedCluster, name: EngineName) -> bool:
    deployments = [one for (kind, _), one in world.children.items() if kind == "Deployment"]
    return any(name.api_url in str(one["spec"]["template"]) for one in deployments)


@pytest.mark.parametrize("wrong", WRONG)
def test_routers_forget_an_evicted_engine_and_take_it_back(wrong: str) -> None:
    world = refused(**WRONG[wrong])
    name = world.leaders("decode")[0]
    world.pods[name.pod()]["metadata"]["deletionTimestamp"] = timestamp(world.now + 30)
    world.step()
    assert not routed(world, name)
    world.others_act()
    world.step()
    world.others_act()
    world.settle()
    assert routed(world, name)
    assert len(world.leaders("decode")) == 2
    assert world.condition("Available")["status"] == "True"


@pytest.mark.parametrize("wrong", WRONG)
def test_what_somebody_deletes_is_made_again_as_it_was(wrong: str) -> None:
    world = refused(**WRONG[wrong])
    mine = {
        name: {**one, "metadata": {**one["metadata"], "uid": "", "resourceVersion": ""}}
        for name, one in world.children.items()
        if name[0] in ("Service", "PodDisruptionBudget", "ServiceAccount")
    }
    assert len(mine) == 8
    for name in mine:
        del world.children[name]
    policies = [name for name in world.children if name[0] == "NetworkPolicy"]
    for name in policies:
        del world.children[name]
    world.ticket_key = None
    world.step()
    again = {
        name: {**one, "metadata": {**one["metadata"], "uid": "", "resourceVersion": ""}}
        for name, one in world.children.items()
        if name in mine
    }
    assert again == mine
    assert world.children.keys() >= set(policies)
    assert world.ticket_key is not None
    world.route()
    assert world.settle().steps == ()
    assert world.condition("Available")["status"] == "True"


def test_peers_and_certificates_go_on() -> None:
    world = brought_up(**TWO, transfer={"device": "CPU", "tls": "Enabled"})
    peers = world.plan().peers
    world.edit(nonsense=True)
    assert world.step().peers == peers != {}
    prefill = world.leaders("prefill")[0]
    world.engines[prefill.logical] = type(world.engines[prefill.logical])(
        engine=prefill.logical, role="prefill", engine_id="another", state="Ready", ready=True
    )
    after = world.plan().peers
    assert after.keys() == peers.keys()
    assert after != peers, "it started again"
    world.now += 40 * 86_400
    assert any(isinstance(step, WriteCertificates) for step in world.plan().steps)
    assert not any(isinstance(step, WriteTicketKey) for step in world.plan().steps)


def test_an_engine_whose_node_is_gone_gets_no_requests() -> None:
    world = refused()
    name = world.leaders("decode")[0]
    world.pods[name.pod()]["metadata"]["deletionTimestamp"] = timestamp(world.now)
    del world.engines[name.logical], world.links[name.logical]
    world.now += LOST_SECONDS + 60
    world.step()
    assert not routed(world, name)
    assert len(world.leaders("decode")) == 2, "changes wait, so nothing is added or removed"


@pytest.mark.sampled
@pytest.mark.parametrize("how", ["Surge", "Replace", "Recreate"])
@pytest.mark.parametrize("rounds", range(5))
def test_half_way_through_a_change_nothing_begins_and_nothing_ends(how: str, rounds: int) -> None:
    world = brought_up(**TWO, rollout={"type": how})
    world.edit(engine={"blockSize": 32})
    for _ in range(rounds):
        world.step()
        world.others_act()
    before = {name for name in world.children if name[0] in ("StatefulSet", "Deployment")}
    seen = find_condition(world.plan().status, "Available")  # now that the others have acted
    world.edit(nonsense=True, rollout={"type": how})
    for _ in range(6):
        plan = world.step()
        assert not any(isinstance(step, Delete) for step in plan.steps)
        world.others_act()
        kept = {name for name in world.children if name[0] in ("StatefulSet", "Deployment")}
        assert kept >= before
        assert {one for one in kept if one[0] == "StatefulSet"} <= before
        assert seen["status"] == "False" or world.condition("Available")["status"] == "True"
    del world.cluster["spec"]["nonsense"]
    world.edit()
    for _ in range(20):
        world.step()
        world.others_act()
    assert world.condition("Ready")["status"] == "True"


def test_a_change_that_is_stored_and_has_no_engine_yet_is_not_in_force() -> None:
    """Canaries ask for the model by the name that it has in the engines that run."""
    world = brought_up(rollout={"type": "Replace"})
    revisions = {name for name in world.children if name[0] == "ControllerRevision"}
    peers, model = world.plan().peers, world.cluster["status"]["model"]
    world.edit(model={**world.cluster["spec"]["model"], "name": "other"})
    for _ in range(3):
        world.step()  # one engine of a role makes no room for another
        world.others_act()
    assert revisions < {name for name in world.children if name[0] == "ControllerRevision"}
    world.edit(nonsense=True)
    world.step()
    assert world.condition("Accepted")["status"] == "False"
    assert world.cluster["status"]["model"] == model
    assert world.plan().peers == peers


def test_a_network_policy_keeps_its_peers_while_the_spec_may_be_wrong() -> None:
    peers = [{"podSelector": {"matchLabels": {"app": "client"}}}]
    world = brought_up(router={"allowFrom": peers})
    before = world.children["NetworkPolicy", "llama-router"]
    world.edit(router={"allowFrom": "everybody"})
    assert world.step().steps == ()
    assert world.children["NetworkPolicy", "llama-router"] == before
    del world.children["NetworkPolicy", "llama-router"]
    world.step()
    assert world.children["NetworkPolicy", "llama-router"]["spec"] == before["spec"]


def router_scaled_to_three(world: SimulatedCluster) -> dict[str, Any]:
    """Return the routers' Deployment after a scale and a spec that is refused: it has stayed so."""
    world.edit(router={"replicas": 3})
    world.settle()
    world.route()
    world.settle()
    world.edit(nonsense=True)
    assert world.step().steps == ()
    [found] = [one for (kind, _), one in world.children.items() if kind == "Deployment"]
    assert found["spec"]["replicas"] == 3
    return found


def test_routers_that_were_scaled_stay_so() -> None:
    """More of them need no new template, so the stored spec is that of fewer."""
    world = brought_up(router={"replicas": 1})
    router_scaled_to_three(world)


def test_a_rule_that_got_stricter_stops_no_care(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stored spec breaks it, too."""
    world = brought_up(**TWO)
    observed = world.observed
    strict = Place(host_path_models=False)
    monkeypatch.setattr(world, "observed", lambda: replace(observed(), place=strict))
    assert world.step().steps == ()
    assert world.condition("Accepted")["reason"] == "HostPathNotAdmitted"
    name = world.leaders("decode")[0]
    world.pods[name.pod()]["metadata"]["deletionTimestamp"] = timestamp(world.now + 30)
    service = world.children.pop(("Service", "llama-router"))
    world.step()
    assert not routed(world, name)
    assert world.children["Service", "llama-router"]["spec"] == service["spec"]
    world.edit(decode={"replicas": 3})
    world.step()
    assert len(world.leaders("decode")) == 2, "no engine is made that nobody admits"


def test_without_engines_nothing_is_made() -> None:
    world = SimulatedCluster(manifest(nonsense=True))
    assert world.step().steps == ()
    assert world.children == {}


@pytest.mark.parametrize("replicas", [0, 1])
def test_no_router_is_made_of_a_spec_that_is_not_accepted(replicas: int) -> None:
    """Not even one that mounts a folder of its node."""
    world = brought_up(router={"replicas": 0})
    folder = {"name": "root", "hostPath": {"path": "/"}}
    wrong = {"replcas": replicas, "podTemplate": {"spec": {"volumes": [folder]}}}
    world.edit(router=wrong)
    assert world.step().steps == ()
    assert world.condition("Accepted")["status"] == "False"
    assert not [name for name in world.children if name[0] == "Deployment"]
    assert world.condition("Available")["status"] == "True"


@pytest.mark.parametrize("lost", [False, True])
@pytest.mark.parametrize("address", [True, False])
def test_a_routers_deployment_that_somebody_deletes_waits_until_the_spec_is_accepted(
    address: bool, lost: bool
) -> None:
    """The Deployment held the template that was accepted, and nothing else does.

    The status may be lost, too, as after the restore of a backup.
    """
    world = refused(router={"replicas": 2, "podTemplate": {"spec": {"hostNetwork": "yes"}}})
    [deployment] = [name for name in world.children if name[0] == "Deployment"]
    del world.children[deployment]
    if not address:
        del world.children["Service", "llama-router"]
    if lost:
        world.cluster["status"] = {}
    for _ in range(2):
        assert world.step().steps == ()
    assert (("Service", "llama-router") in world.children) is address
    assert world.condition("Available")["status"] == "False"
    assert world.condition("Available")["reason"] == "RouterUnavailable"
    assert "made again when the spec is accepted" in world.condition("Available")["message"]
    world.cluster["spec"]["router"] = {"replicas": 2}
    world.edit()
    world.settle()
    world.route()
    world.settle()
    assert world.condition("Ready")["status"] == "True"


def test_routers_scaled_by_a_newer_operator_stay_so(monkeypatch: pytest.MonkeyPatch) -> None:
    world = brought_up(router={"replicas": 1})
    monkeypatch.setattr(router, "PROBE_SECONDS", 9)
    world.settle()
    found = router_scaled_to_three(world)
    [container] = found["spec"]["template"]["spec"]["containers"]
    assert container["readinessProbe"]["periodSeconds"] == 1, "no router was replaced"


@pytest.mark.parametrize("how", ["Replace", "Recreate"])
@pytest.mark.parametrize("rounds", range(6))
def test_a_budget_that_exists_stays_as_it_is(how: str, rounds: int) -> None:
    """Half-way through a rollout fewer engines exist than are wanted, and all of them count."""
    world = brought_up(**TWO, rollout={"type": how})
    world.edit(prefill={"replicas": 2, "engine": {"env": [{"name": "A", "value": "1"}]}})
    for _ in range(rounds):
        world.step()
        world.others_act()
    before = world.children["PodDisruptionBudget", "llama-prefill"]["spec"]
    world.edit(nonsense=True)
    for _ in range(2):
        world.step()
        world.others_act()
    assert world.children["PodDisruptionBudget", "llama-prefill"]["spec"] == before


def test_the_status_tells_nobody_to_end_a_pause_that_he_did_not_ask_for() -> None:
    world = brought_up(transfer={"device": "CPU", "tls": "Disabled"})
    world.edit(transfer={"device": "CPU", "tls": "Enabled"})
    for _ in range(2):
        world.step()
    world.make_pods()
    world.step()
    assert "They are being replaced" in world.cluster["status"]["transfer"]["message"]
    world.edit(nonsense=True)
    world.step()
    message = world.cluster["status"]["transfer"]["message"]
    assert message.endswith("They stay until the spec is accepted.")


NULLS: list[dict[str, Any]] = [{"spec": None}, {"spec": {"containers": None}}]


@pytest.mark.parametrize("forgotten", [False, True])
@pytest.mark.parametrize("template", NULLS)
@pytest.mark.parametrize("part", ["prefill", "decode", "router"])
def test_a_null_for_what_every_pod_needs_is_refused_and_changes_nothing(
    part: str, template: dict[str, Any], forgotten: bool
) -> None:
    """Nobody asks the webhook where it is not installed, so such a spec may be stored."""
    world = brought_up()
    if forgotten:
        for name in [one for one in world.children if one[0] == "ControllerRevision"]:
            del world.children[name]
    world.edit(**{part: {"podTemplate": template}})
    assert world.step().steps == ()
    said = world.condition("Accepted")
    assert (said["status"], said["reason"]) == ("False", "Required")
    assert f"spec.{part}.podTemplate.spec" in said["message"]
    assert "= null: " in said["message"]
    assert world.condition("Available")["status"] == "True"
    new = SimulatedCluster(manifest(**{part: {"podTemplate": template}}))
    assert new.step().steps == ()
    assert new.condition("Ready")["reason"] == "Required"


def each_null(given: Any) -> Iterator[Any]:
    """Yield a document with each of its values in turn replaced by null."""
    for key, value in given.items() if isinstance(given, dict) else enumerate(given):
        changed = copied(given)
        changed[key] = None
        yield changed
        if isinstance(value, dict | list):
            for inner in each_null(value):
                yield {**given, key: inner} if isinstance(given, dict) else [inner, *given[1:]]


FULL_TEMPLATE: dict[str, Any] = {
    "metadata": {"labels": {"a": "b"}, "annotations": {"a": "b"}},
    "spec": {
        "priorityClassName": "high",
        "terminationGracePeriodSeconds": 3600,
        "nodeSelector": {"a": "b"},
        "securityContext": {"runAsUser": 1},
        "volumes": [{"name": "shm", "emptyDir": {"sizeLimit": "1Gi"}, "configMap": {"name": "x"}}],
        "containers": [
            {
                "name": "engine",
                "image": "i",
                "command": ["c"],
                "args": ["a"],
                "env": [{"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "x"}}}],
                "ports": [{"containerPort": 8000, "name": "http"}],
                "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
                "resources": {"limits": {"nvidia.com/gpu": 1}, "requests": {"cpu": 1}},
                "readinessProbe": {"httpGet": {"path": "/"}, "periodSeconds": 1},
                "securityContext": {"capabilities": {"add": ["A"]}},
            }
        ],
    },
}


@pytest.mark.sampled
@pytest.mark.parametrize("part", ["prefill", "router"])
def test_with_any_null_in_a_pod_template_there_is_a_plan(part: str) -> None:
    ready = brought_up()
    named = json.loads(json.dumps(FULL_TEMPLATE).replace('"engine"', f'"{OURS[part]}"'))
    templates = list(each_null(named))
    assert len(templates) > 40
    for template in templates:
        world = ready.twin()
        world.edit(**{part: {"podTemplate": template}})
        for _ in range(3):
            world.step()
            world.others_act()
        assert world.condition("Available")["status"] == "True", template


OURS = {"prefill": "engine", "router": "router"}


@pytest.mark.parametrize("own", [True, False])
def test_how_the_kv_path_is_judged_stays_as_it_was_accepted(own: bool) -> None:
    accepted = {"maxLocalShare": 100, "canary": {"intervalSeconds": 3600}} if own else {}
    world = brought_up(**({"verification": accepted} if own else {}))
    world.count_prompts(100, 90 if own else 0)
    world.step()
    healthy, peers = world.condition("TransportHealthy"), world.plan().peers
    assert healthy["status"] == "True"
    for wrong in ({"canary": {"intervalSeconds": "1h"}}, {"maxLocalShare": 1}, None, 7):
        world.edit(verification=wrong, nonsense=True)
        assert world.step().peers == peers, "its canaries, too"
        assert world.condition("Accepted")["status"] == "False"
        assert world.condition("TransportHealthy")["status"] == "True"
    del world.cluster["spec"]["nonsense"]
    world.edit(verification={"canary": {"intervalSeconds": 600}})
    world.step()
    assert world.plan().peers != peers


@pytest.mark.parametrize(
    "given",
    ["", "[", "[" * 100_000, "7", '{"verification": 7}', '{"router": [1]}', "{}"],
    ids=["empty", "broken", "deep", "number", "no object", "a list", "nothing"],
)
def test_without_what_was_accepted_the_defaults_hold(given: str) -> None:
    """Somebody may delete it, or write something else."""
    world = brought_up(verification={"maxLocalShare": 100})
    world.count_prompts(100, 90)
    world.step()
    world.edit(verification={"maxLocalShare": 100}, nonsense=True)
    account = world.children["ServiceAccount", "llama-pods"]
    account["metadata"]["annotations"][ACCEPTED_ANNOTATION] = given
    for _ in range(2):
        world.step()
    assert world.condition("TransportHealthy")["reason"] == "LocalPrefill"
    assert world.step().steps == ()


@pytest.mark.parametrize("replicas", [0, 1])
def test_a_policy_that_somebody_deletes_lets_in_whom_the_accepted_spec_names(replicas: int) -> None:
    peers = [{"podSelector": {"matchLabels": {"app": "client"}}}]
    world = brought_up(
        router={"replicas": replicas, "allowFrom": peers}, monitoring={"scrapeFrom": peers}
    )
    policies = {name: one["spec"] for name, one in world.children.items() if "Policy" in name[0]}
    everybody = [{"ipBlock": {"cidr": "0.0.0.0/0"}}]
    world.edit(
        router={"replicas": replicas, "allowFrom": everybody},
        monitoring={"scrapeFrom": everybody},
        nonsense=True,
    )
    assert world.step().steps == ()
    for name in policies:
        del world.children[name]
    world.step()
    assert policies == {name: world.children[name]["spec"] for name in policies}


def clients(world: SimulatedCluster) -> object:
    """Return who may send requests to the engines, as their policy says; None for everybody."""
    return world.children["NetworkPolicy", "llama-engines"]["spec"]["ingress"][2].get("from")


CLIENTS = [{"podSelector": {"matchLabels": {"app": "client"}}}]
ACCOUNT = ("ServiceAccount", "llama-pods")
POLICY = ("NetworkPolicy", "llama-engines")


NO_PEERS = (  # JSON of which a part is not as the operator writes it
    '{"router": [7]}',
    '{"router": {}}',
    '{"router": {"allowFrom": 7}}',
    '{"router": {"allowFrom": null}}',
    '{"router": {"allowFrom": []}}',
    '{"router": {"allowFrom": ["client"]}}',
    '{"router": {"allowFrom": [{"podSelector": {"matchLabels": {"app": 7}}}]}}',
    '{"router": {"allowfrom": [{"podSelector": {}}]}}',
    '{"rooter": {"allowFrom": [{"podSelector": {}}]}}',
    '{"monitoring": {"scrapeFrom": "everybody"}}',
    '{"monitoring": null}',
)


@pytest.mark.parametrize("lost", ["the account", "its annotation", *NO_PEERS, "both at once"])
def test_a_policy_is_not_opened_while_it_is_not_known_who_was_accepted(lost: str) -> None:
    """An older operator wrote no annotation, and somebody may delete what carries it."""
    world = brought_up(router={"replicas": 0, "allowFrom": CLIENTS})
    scraped = world.children[POLICY]["spec"]["ingress"][3:]
    world.edit(router={"replicas": 0, "allowFrom": CLIENTS}, nonsense=True)
    assert world.step().steps == ()
    assert "not known" not in world.condition("Accepted")["message"]
    if lost in ("the account", "both at once"):
        del world.children[ACCOUNT]
    else:
        annotations = world.children[ACCOUNT]["metadata"]["annotations"]
        del annotations[ACCEPTED_ANNOTATION]
        if lost in NO_PEERS:
            annotations[ACCEPTED_ANNOTATION] = lost
    if lost != "both at once":
        for _ in range(2):
            world.step()
        assert clients(world) == CLIENTS, "a policy that exists keeps its peers"
    for _ in range(2):
        world.children.pop(POLICY, None)
        world.step()
        assert clients(world) not in (None, [], CLIENTS)
        assert [one["podSelector"]["matchLabels"] for one in clients(world)] == [
            {ACCEPTED_ANNOTATION: "unknown"}
        ]
        assert world.children[POLICY]["spec"]["ingress"][3:] == scraped == []
        accepted = world.condition("Accepted")
        assert accepted["status"] == "False"
        assert "which clients were accepted is not known any more" in accepted["message"]
    assert world.step().steps == ()
    del world.cluster["spec"]["nonsense"]
    world.edit()
    world.step()
    assert clients(world) == CLIENTS
    assert world.condition("Accepted")["status"] == "True"


@pytest.mark.parametrize("other", [{"maxLocalShare": 150}, {"canary": {"old": 1}}])
def test_what_another_release_wrote_beside_the_peers_locks_nobody_out(
    other: dict[str, Any],
) -> None:
    """Its rules of the verification may be others."""
    world = brought_up(router={"replicas": 0, "allowFrom": CLIENTS})
    world.edit(router={"replicas": 0, "allowFrom": CLIENTS}, nonsense=True)
    world.step()
    known = {"router": {"allowFrom": CLIENTS}, "verification": other}
    world.children[ACCOUNT]["metadata"]["annotations"][ACCEPTED_ANNOTATION] = json.dumps(known)
    del world.children[POLICY]
    world.step()
    assert clients(world) == CLIENTS


def test_a_policy_that_let_in_everybody_does_so_again() -> None:
    """That is known, too."""
    world = brought_up(router={"replicas": 0})
    world.edit(nonsense=True)
    assert world.step().steps == ()
    assert clients(world) is None
    del world.children[POLICY]
    world.step()
    assert clients(world) is None
    assert "not known" not in world.condition("Accepted")["message"]


def test_an_upgrade_that_refuses_a_spec_keeps_what_the_older_operator_accepted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The older one has written no annotation, and its status says that it accepted this spec."""
    given = {"scrapeFrom": CLIENTS}
    world = brought_up(
        router={"replicas": 0, "allowFrom": CLIENTS},
        verification={"maxLocalShare": 100},
        monitoring=given,
    )
    world.count_prompts(100, 90)
    world.step()
    policy, peers = world.children[POLICY]["spec"], world.plan().peers
    annotations = world.children[ACCOUNT]["metadata"]["annotations"]
    accepted = annotations.pop(ACCEPTED_ANNOTATION)
    observed = world.observed
    strict = Place(host_path_models=False)
    monkeypatch.setattr(world, "observed", lambda: replace(observed(), place=strict))
    for _ in range(2):
        assert world.step().peers == peers
        assert world.condition("Accepted")["reason"] == "HostPathNotAdmitted"
        assert world.condition("TransportHealthy")["status"] == "True"
        world.children.pop(POLICY, None)
    world.step()
    assert world.children[POLICY]["spec"] == policy
    annotations = world.children[ACCOUNT]["metadata"]["annotations"]
    assert annotations[ACCEPTED_ANNOTATION] == accepted


@pytest.mark.parametrize(
    ("prefill", "decode", "made"),
    [(5, 1000, (5, 819)), (1000, 1000, (64, 64)), (128, 64, (64, 64)), (80, 60, (68, 60))],
)
def test_numbers_that_links_do_not_allow_are_cut_and_said(
    prefill: int, decode: int, made: tuple[int, int]
) -> None:
    """A PrefillScaler can ask for them, and a CRD of an older release has no rule about links."""
    world = brought_up(prefill={"replicas": min(prefill, 2)})
    world.edit(prefill={"replicas": prefill}, decode={"replicas": decode})
    status = world.plan().status
    world.cluster["status"] = status
    accepted = world.condition("Accepted")
    assert accepted["status"] == "True"
    said = f"({made[0]} prefill and {made[1]} decode engines are made) [TooManyLinks]"
    assert said in accepted["message"]
    assert status["prefill"].endswith(f"/{made[0]}")
    assert status["decode"].endswith(f"/{made[1]}")


@pytest.mark.parametrize(
    ("there", "asked", "made"),
    [
        ((100, 40), (100, 60), (100, 40)),
        ((40, 100), (60, 100), (40, 100)),
        ((100, 40), (200, 200), (100, 40)),
        ((102, 40), (200, 200), (102, 40)),
        ((100, 40), (90, 60), (90, 45)),  # fewer are asked for
        ((103, 40), (200, 200), (102, 40)),  # a surge
        ((65, 65), (200, 200), (64, 64)),
        ((100, 0), (100, 60), (100, 40)),
        ((0, 1000), (5, 1000), (4, 1000)),
        ((10, 3), (200, 200), (64, 64)),
    ],
)
def test_where_links_allow_no_more_engines_those_that_exist_stay(
    there: tuple[int, int], asked: tuple[int, int], made: tuple[int, int]
) -> None:
    spec = manifest(**{role: {"replicas": n} for role, n in zip(Role, asked, strict=True)})
    cluster, findings = within_links(*check_manifest(spec), dict(zip(Role, there, strict=True)))
    assert tuple(cluster.spec.role(role).replicas for role in Role) == made
    assert f"({made[0]} prefill and {made[1]} decode" in findings.warnings[0].path
    assert made[0] * made[1] <= MOST_LINKS


def test_an_autoscaler_that_asks_for_too_many_of_one_role_ends_none_of_the_other() -> None:
    world = brought_up(prefill={"replicas": 100}, decode={"replicas": 40})
    assert world.condition("Ready")["message"] == "what the spec wants is there and verified"
    world.edit(decode={"replicas": 60})
    world.settle()
    assert [len(world.leaders(role.value)) for role in Role] == [100, 40]
    ready = world.condition("Ready")
    assert (ready["status"], ready["message"]) == (
        "True",
        "as many engines as links allow are there and verified",
    )
    world.edit(decode={"replicas": 40})
    world.settle()
    assert world.condition("Ready")["message"] == "what the spec wants is there and verified"


def test_links_to_data_parallel_ranks_are_counted() -> None:
    asked = manifest(prefill={"replicas": 200, "parallelism": {"data": 8}}, decode={"replicas": 8})
    cluster, findings = within_links(*check_manifest(asked), dict.fromkeys(Role, 0))
    assert findings.ok
    assert [cluster.spec.role(role).replicas for role in Role] == [128, 8]
    assert [str(one.rule) for one in findings.warnings].count("TooManyLinks") == 1
