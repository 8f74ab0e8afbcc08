"""What the status says of each link, and that it says it without writing all the time."""

from __future__ import annotations

import jsonschema
from msgspec import structs
from simulated_cluster import START, SimulatedCluster, brought_up, manifest

from pdcluster_connector.protocol.launcher_documents import CanaryReport, CanaryState, LinkState
from pdcluster_operator.api.conditions import seconds
from pdcluster_operator.api.schema.status_schema import MAX_LINKS, status_schema

STATUS = jsonschema.Draft202012Validator(status_schema())


def states(world: SimulatedCluster) -> list[dict]:
    status = world.cluster["status"]
    STATUS.validate(status)
    return status["linkStates"]


def near(moment: str, then: float) -> bool:
    """Whether it is the moment, to a turn of the simulated clock."""
    return abs((seconds(moment) or 0.0) - then) <= 2


def passed(**fields: object) -> dict:
    return {"canary": CanaryReport(CanaryState.PASSED, 4096), **fields}


def test_each_link_has_its_speed_its_descriptors_and_since_when_it_is_verified() -> None:
    world = brought_up(decode={"replicas": 2})
    world.link(**passed(bytes_per_second=2.5e9, descriptors=2016))
    world.step()
    first, second = states(world)
    since = first["verifiedTime"]
    assert first == {
        "prefill": world.leaders("prefill")[0].stateful_set,
        "decode": world.leaders("decode")[0].stateful_set,
        "state": "Established",
        "canary": "Passed",
        "megabytesPerSecond": 2500,
        "descriptors": 2016,
        "verifiedTime": since,
    }
    assert second["decode"] == world.leaders("decode")[1].stateful_set
    world.now += 5000
    before = world.cluster["status"]
    world.step()
    assert world.cluster["status"] == before, "canaries that pass again change nothing"


def test_what_makes_an_established_link_slow_is_said_and_bounded() -> None:
    world = brought_up()
    world.link(**passed(descriptors=10_080, message="Set --block-size 64. " + "x" * 1000))
    world.step()
    [link] = states(world)
    assert link["message"].startswith("Set --block-size 64. x")
    assert len(link["message"]) == 512


def test_a_link_that_is_not_established_says_why_and_begins_anew_afterwards() -> None:
    world = brought_up()
    [before] = states(world)
    world.link(state=LinkState.FAILED, reason="TransferStalled", bytes_per_second=2e9)
    world.step()
    [link] = states(world)
    assert (link["state"], link["reason"]) == ("Failed", "TransferStalled")
    assert not {"canary", "megabytesPerSecond", "verifiedTime"} & link.keys()
    world.now += 60
    world.link(canary=CanaryReport())
    world.step()
    [link] = states(world)
    assert (link["state"], link["canary"]) == ("Established", "Pending")
    assert "verifiedTime" not in link
    world.now += 60
    world.link(**passed(bytes_per_second=0.0))
    world.step()
    [link] = states(world)
    assert near(link["verifiedTime"], world.now)
    assert link["verifiedTime"] != before["verifiedTime"]
    assert "megabytesPerSecond" not in link, "none was measured"


def test_a_launcher_that_is_silent_makes_its_links_unknown() -> None:
    world = brought_up()
    world.links.clear()
    world.engines.clear()
    world.step()
    [link] = states(world)
    assert (link["state"], link["reason"]) == ("Unknown", "LauncherUnreachable")


def test_a_busy_engine_changes_nothing_for_ten_minutes_and_then_once() -> None:
    interval = 60
    world = brought_up(verification={"canary": {"intervalSeconds": interval}})
    [before] = states(world)
    busy = CanaryReport(CanaryState.PASSED, 4096, age_seconds=interval + 590, message="HTTP 429")
    world.link(canary=busy)
    world.step()
    assert states(world) == [before]
    world.link(canary=structs.replace(busy, age_seconds=interval + 601))
    world.step()
    [link] = states(world)
    assert near(link["lastProofTime"], world.now - interval - 601)
    assert link == {**before, "lastProofTime": link["lastProofTime"]}
    world.now += 100
    world.link(canary=structs.replace(busy, age_seconds=interval + 601 + 60))  # read late
    world.step()
    assert states(world) == [link]
    world.link(**passed())
    world.step()
    assert states(world) == [before]


def test_links_are_bounded() -> None:
    world = SimulatedCluster(manifest(prefill={"replicas": 11}, decode={"replicas": 12}))
    world.bring_up()
    assert 64 <= len(states(world)) <= MAX_LINKS
    assert world.now >= START
