"""What an API server refuses stops its engine or itself, and nothing else."""

from __future__ import annotations

import pytest
from simulated_cluster import SimulatedCluster, brought_up

from pdcluster_operator.api.conditions import timestamp
from pdcluster_operator.plan.types import Apply, Step, TryOut, WriteCertificates, WriteTicketKey

SERVICE = ("Service", "llama-router")


def refuse(world: SimulatedCluster, kind: str, name: str = "") -> None:
    def refuses(step: Step) -> bool:
        if not isinstance(step, Apply):
            return False
        found = step.manifest["kind"], step.manifest["metadata"]["name"]
        return found[0] == kind and name in ("", found[1])

    world.refuses = refuses


def engines(world: SimulatedCluster) -> set[str]:
    return {name for kind, name in world.children if kind == "StatefulSet"}


@pytest.mark.parametrize(
    ("kind", "made"),
    [
        ("PodDisruptionBudget", 3),
        ("Service", 2),
        ("NetworkPolicy", 2),
        ("ServiceAccount", 2),
    ],
)
def test_routers_forget_an_evicted_engine_whatever_child_is_refused(kind: str, made: int) -> None:
    """A new engine needs its address, its identity and its fences, and no budget."""
    world = brought_up(prefill={"replicas": 2}, decode={"replicas": 2}, router={"replicas": 2})
    for name in [one for one in world.children if one[0] == kind and one != SERVICE]:
        del world.children[name]
    world.edit(decode={"replicas": 3})
    refuse(world, kind)
    evicted = world.leaders("decode")[0]
    world.pods[evicted.pod()]["metadata"]["deletionTimestamp"] = timestamp(world.now + 30)
    world.step()
    [router] = [one for (kind, _), one in world.children.items() if kind == "Deployment"]
    assert evicted.api_url not in str(router["spec"]["template"])
    assert len(world.leaders("decode")) == made
    world.refuses = lambda _: False
    world.others_act()
    world.step()
    assert len(world.leaders("decode")) == 3


def test_an_engine_without_an_address_keeps_no_other_from_being_made() -> None:
    """A quota of Services may have place for one more."""
    world = brought_up()
    old = engines(world)
    world.edit(prefill={"replicas": 2}, decode={"replicas": 2})
    new = {step.manifest["metadata"]["name"] for step in world.plan().steps
           if isinstance(step, Apply) and step.manifest["kind"] == "StatefulSet"}  # fmt: skip
    refused, taken = sorted(new)
    refuse(world, "Service", refused)
    world.step()
    assert engines(world) == {*old, taken}
    world.refuses = lambda _: False
    world.step()
    assert engines(world) == {*old, *new}


def test_engines_leave_while_those_of_the_other_role_have_no_address() -> None:
    """Their Services are what a full quota of Services waits for."""
    world = brought_up(prefill={"replicas": 3})
    world.edit(prefill={"replicas": 1}, decode={"replicas": 2})
    refuse(world, "Service")
    for _ in range(8):
        world.step()
        world.others_act()
    assert (len(world.leaders("prefill")), len(world.leaders("decode"))) == (1, 1)


@pytest.mark.parametrize(("kind", "left"), [("Deployment", 2), ("Service", 1)])
def test_an_engine_stays_while_routers_cannot_forget_it(kind: str, left: int) -> None:
    """What clients come through has nothing to do with it."""
    world = brought_up(prefill={"replicas": 2})
    world.edit(prefill={"replicas": 1})
    world.children.pop(SERVICE)
    refuse(world, kind)
    for _ in range(8):
        world.step()
        world.others_act()
    assert len(world.leaders("prefill")) == left


def test_routers_stay_while_the_address_cannot_move_to_others() -> None:
    """The new engines have another pairing key."""
    world = brought_up()
    [old] = [name for name in world.children if name[0] == "Deployment"]
    world.edit(engine={"blockSize": 32})
    refuse(world, "Service", SERVICE[1])
    for _ in range(12):
        world.step()
        world.others_act()
    assert old in world.children
    assert world.condition("Available")["status"] == "True"
    world.refuses = lambda _: False
    for _ in range(12):
        world.step()
        world.others_act()
    assert old not in world.children
    assert world.condition("Ready")["status"] == "True"


def rolled(how: str, refused: str, **edit: object) -> tuple[SimulatedCluster, set[str], object]:
    """Begin a rollout of what is stored already, while one kind of its objects is refused.

    Return the cluster after a while, its engines before, and the router's Service before.
    """
    tls = {"device": "CPU", "tls": "Enabled"}
    two = {"replicas": 2}
    world = brought_up(prefill=two, decode=two, rollout={"type": how}, transfer=tls)
    old, address = engines(world), world.children[SERVICE]["spec"]
    world.edit(**edit)
    world.step()
    world.others_act()
    if refused == "ConfigMap":
        world.shared.clear()
    for name in [one for one in world.children if one[0] == refused]:
        del world.children[name]
    refuse(world, refused)
    if refused == "certificates":
        world.refuses = lambda step: isinstance(step, WriteCertificates)
    if refused == "ticket key":
        world.ticket_key = None
        world.refuses = lambda step: isinstance(step, WriteTicketKey)
    for _ in range(10):
        world.step()
        world.others_act()
    return world, old, address


EDITS: dict[str, dict[str, object]] = {
    "another pairing key": {"engine": {"blockSize": 32}},
    "one role": {"prefill": {"replicas": 2, "engine": {"env": [{"name": "A", "value": "1"}]}}},
}


@pytest.mark.sampled
@pytest.mark.parametrize("how", ["Recreate", "Replace"])
@pytest.mark.parametrize(
    "refused", ["certificates", "ticket key", "ConfigMap", "NetworkPolicy", "ServiceAccount"]
)
@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_old_engines_serve_on_while_new_ones_cannot_be_created(
    how: str, refused: str, edit: dict[str, object]
) -> None:
    """Neither do their routers forget them, nor are clients sent to routers without engines."""
    world, old, address = rolled(how, refused, **edit)
    assert old == engines(world)
    assert world.condition("Available")["status"] == "True"
    assert world.children[SERVICE]["spec"] == address
    key = world.children[SERVICE]["spec"]["selector"]["pdcluster.dev/pairing-key"]
    router = world.children["Deployment", f"llama-router-{key}"]
    listed = [one.api_url in str(router["spec"]) for one in world.leaders("prefill")]
    # Replace has taken one out of the routers before anything was refused.
    assert sum(listed) >= (2 if how == "Recreate" else 1)
    world.refuses = lambda _: False
    for _ in range(30):
        world.step()
        world.others_act()
    assert not old & engines(world) or "prefill" in edit
    assert world.condition("Ready")["status"] == "True"


@pytest.mark.parametrize("refused", ["certificates", "NetworkPolicy", "a trial"])
@pytest.mark.parametrize("routers", [0, 1])
@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_available_says_what_clients_get_while_recreate_is_held(
    routers: int, refused: str, edit: dict[str, object]
) -> None:
    tls = {"device": "CPU", "tls": "Enabled"}
    two, router = {"replicas": 2}, {"replicas": routers}
    world = brought_up(prefill=two, rollout={"type": "Recreate"}, transfer=tls, router=router)
    old = engines(world)
    world.edit(**edit)
    world.step()
    world.others_act()
    world.refuses = lambda step: (
        isinstance(step, WriteCertificates)
        if refused == "certificates"
        else isinstance(step, TryOut)
        if refused == "a trial"
        else isinstance(step, Apply) and step.manifest["kind"] == refused
    )
    if refused == "NetworkPolicy":
        del world.children["NetworkPolicy", "llama-engines"]
    for _ in range(4):
        world.step()
        assert world.condition("Available")["status"] == "True"
        assert world.condition("Ready")["status"] == "False"
        world.others_act()
    assert old == engines(world)
    gone = world.leaders("decode")[0]
    world.pods[gone.pod()]["metadata"]["deletionTimestamp"] = timestamp(world.now + 30)
    world.step()
    assert world.condition("Available")["status"] == "False"
    world.others_act()
    world.step()
    assert world.condition("Available")["status"] == "True"
    world.refuses = lambda _: False
    seen = set()
    for _ in range(12):
        world.step()
        seen.add(world.condition("Available")["status"])
        world.others_act()
    assert "False" in seen, "nothing is served once the old ones are ended"
    assert world.condition("Ready")["status"] == "True"


@pytest.mark.parametrize("refused", [SERVICE, ("Deployment",)])
def test_old_engines_stay_while_clients_cannot_be_sent_to_new_ones(refused: tuple[str]) -> None:
    """Recreate would end them, and nobody would reach the new ones."""
    world = brought_up(rollout={"type": "Recreate"})
    old = engines(world)
    world.edit(engine={"blockSize": 32})
    refuse(world, *refused)
    for _ in range(8):
        world.step()
        world.others_act()
        assert world.condition("Available")["status"] == "True"
    assert old == engines(world)


def test_an_engine_too_many_leaves_although_no_other_could_be_created() -> None:
    world = brought_up(prefill={"replicas": 2})
    world.edit(prefill={"replicas": 1})
    for name in [one for one in world.children if one[0] == "ServiceAccount"]:
        del world.children[name]
    refuse(world, "ServiceAccount")
    for _ in range(8):
        world.step()
        world.others_act()
    assert len(world.leaders("prefill")) == 1
