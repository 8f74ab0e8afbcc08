"""What ``pdcluster status`` and ``links`` say of clusters that the real planner judged."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import io
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from simulated_cluster import START, SimulatedCluster, brought_up, manifest

from pdcluster_connector.protocol.launcher_documents import CanaryReport, CanaryState, LinkState
from pdcluster_operator.api.conditions import timestamp
from pdcluster_operator.cli import links, output, status, status_view
from pdcluster_operator.cli.diagnosis import diagnose
from pdcluster_operator.cli.exits import Exit, UserError
from pdcluster_operator.cli.status_document import Engine
from pdcluster_operator.cli.status_facts import Objects, status_of
from pdcluster_operator.runtime.interfaces import Key

KEY = Key("default", "llama")
GOLDEN = Path(__file__).with_name("golden") / "status"
REVISION = re.compile(r"(?<=llama-(?:decode|router)-)[a-z0-9]{5}|(?<=llama-prefill-)[a-z0-9]{5}")


def lease(renewed: float, holder: str = "operator-1") -> dict[str, Any]:
    spec = {
        "holderIdentity": holder,
        "leaseDurationSeconds": 30,
        "renewTime": timestamp(renewed),
    }
    return {"kind": "Lease", "metadata": {"name": "pdcluster"}, "spec": spec}


def changed(found: Objects, **changes: Any) -> Objects:
    return dataclasses.replace(found, **changes)


def objects(world: SimulatedCluster, **changes: Any) -> Objects:
    found: dict[str, Any] = {
        "cluster": world.cluster,
        "pods": list(world.pods.values()),
        "lease": lease(world.now - 4),
        "lease_known": True,
        "events": [],
        "now": world.now,
    }
    return Objects(**{**found, **changes})


def starting() -> Objects:
    world = SimulatedCluster(manifest(prefill={"replicas": 2}))
    for _ in range(4):
        world.step()
        world.make_pods()
        world.run_pods()
    return objects(world)


def out_of_memory() -> Objects:
    world = brought_up(decode={"replicas": 2})
    engine = world.leaders("prefill")[0]
    end = {"terminated": {"exitCode": 137, "reason": "OOMKilled", "message": ""}}
    waits = {"waiting": {"reason": "CrashLoopBackOff"}}
    container = {"name": "engine", "restartCount": 3, "state": waits, "lastState": end}
    world.pods[engine.pod()]["status"] |= {"containerStatuses": [container], "conditions": []}
    message = "the side channel at 10.0.0.1:5600: connection refused"
    world.link(state=LinkState.FAILED, reason="SideChannelUnreachable", message=message)
    del world.engines[engine.logical]
    world.step()
    event = {
        "type": "Warning",
        "reason": "BackOff",
        "note": "Back-off restarting failed container engine",
        "regarding": {"kind": "Pod", "name": engine.pod()},
        "series": {"count": 9, "lastObservedTime": timestamp(world.now - 60)},
    }
    elsewhere = {**event, "regarding": {"kind": "Pod", "name": "somebody-else"}}
    normal = {**event, "type": "Normal"}
    return objects(world, events=[elsewhere, event, normal])


def operator_down() -> Objects:
    world = brought_up()
    world.edit(decode={"replicas": 3})
    return objects(world, lease=lease(world.now - 400))


CASES = {
    "ready": lambda: objects(brought_up()),
    "starting": starting,
    "out-of-memory": out_of_memory,
    "operator-down": operator_down,
}


def printed(width: int, show: Any) -> str:
    console = Console(
        file=io.StringIO(), width=width, force_terminal=True, highlight=False, color_system=None
    )
    show(console)
    file = console.file
    assert isinstance(file, io.StringIO)
    lines = REVISION.sub("abcde", file.getvalue()).splitlines()
    return "".join(f"{line.rstrip()}\n" for line in lines)


def compare(name: str, text: str) -> None:
    golden = GOLDEN / f"{name}.txt"
    if os.environ.get("PDCLUSTER_REGENERATE"):
        GOLDEN.mkdir(exist_ok=True)
        golden.write_text(text)
    assert text == golden.read_text()


@pytest.mark.parametrize("width", [80, 40])
@pytest.mark.parametrize("case", CASES)
def test_golden_status(case: str, width: int) -> None:
    found = CASES[case]()
    facts = status_of(found)
    for step in facts.next:  # other tests hold the words of the table
        step.means, step.remedy, step.page = "What it means.", "What helps.", "page.md"
        step.command = f"the command for {step.reason}"
    text = printed(width, lambda console: status_view.print_status(console, facts, found.now))
    assert max(map(len, text.splitlines())) <= width or "next: " in text
    compare(f"status-{case}-{width}", text)
    assert output.document(facts)["kind"] == "Status"


@pytest.mark.parametrize("width", [80, 40])
@pytest.mark.parametrize("case", CASES)
def test_golden_links(case: str, width: int) -> None:
    facts = links.links_of(CASES[case]())
    compare(f"links-{case}-{width}", printed(width, lambda to: links.print_links(to, facts)))


def test_the_first_line_says_whether_it_serves_and_why_not() -> None:
    ready = status_of(CASES["ready"]())
    assert (ready.serves, ready.ready) == (True, True)
    assert ready.summary == "llama serves: what the spec wants is there and verified"
    assert ready.next == []
    died = status_of(out_of_memory())
    assert died.serves is False
    assert died.summary.startswith("llama does not serve: EngineFailed: ")
    assert "out of memory" in died.summary


def test_how_an_engine_ended_and_the_next_command_are_there() -> None:
    facts = status_of(out_of_memory())
    [prefill] = [one for one in facts.engines if one.role == "prefill"]
    assert (prefill.state, prefill.restarts) == ("EngineFailed", 3)
    assert "exit code 137, OOMKilled" in prefill.ended
    first = facts.next[0]
    assert first.severity == "Fault"
    assert "memory" in first.means
    assert f"{prefill.name}-0" in first.command or "-l pdcluster.dev/cluster=llama" in first.command
    own = [one for one in facts.failures if "->" not in one.about]
    assert [(one.about, one.reason) for one in own] == [(f"{prefill.name}-0", "BackOff")]


def test_what_others_wrote_cannot_change_the_terminal() -> None:
    found = out_of_memory()
    status = copy.deepcopy(found.cluster["status"])
    for one in (*status["conditions"], *status["engines"], *status["failedLinks"]):
        one["message"] = "\x1b]0;title\x07[bold]\x1b[31m"
    hostile = changed(found, cluster={**found.cluster, "status": status})
    facts = status_of(hostile)
    text = printed(80, lambda console: status_view.print_status(console, facts, found.now))
    text += printed(80, lambda console: links.print_links(console, links.links_of(hostile)))
    assert "]0;title?[bold]" in text
    assert not {"\x1b", "\x07"} & set(text)


def test_links_of_a_spec_that_this_version_cannot_read() -> None:
    found = objects(brought_up())
    spec = {**found.cluster["spec"], "verification": {"canary": {"intervalSeconds": "often"}}}
    facts = links.links_of(changed(found, cluster={**found.cluster, "spec": spec}))
    assert [link.state for link in facts.links] == ["Verified"]


def test_a_local_run_is_told_local_commands() -> None:
    facts = status_of(changed(out_of_memory(), local=True))
    assert {step.command for step in facts.next} == {"pdcluster logs llama --local --since 10m"}
    assert facts.operator.works


@pytest.mark.parametrize(
    ("changes", "works", "words"),
    [
        ({}, True, "operator-1 renewed its Lease 4 s ago"),
        ({"lease": None}, False, "no operator holds the Lease"),
        ({"lease": None, "lease_known": False}, None, "may not read Leases"),
        ({"lease": lease(START, holder="")}, False, "no operator holds the Lease"),
        ({"lease": {"spec": {"holderIdentity": "x"}}}, False, "it has stopped"),
    ],
)
def test_an_operator_that_is_down_is_told_from_a_cluster_that_waits(
    changes: dict[str, Any], works: bool | None, words: str
) -> None:
    facts = status_of(objects(brought_up(), **changes))
    assert facts.operator.works is works
    assert words in facts.operator.message
    assert (facts.next[:1] and facts.next[0].reason == "OperatorDown") == (
        True if works is False else []
    )
    assert facts.summary.startswith("no operator works") is (works is False)


def test_a_generation_that_was_not_seen_yet_is_said() -> None:
    world = brought_up()
    world.edit(decode={"replicas": 2})
    facts = status_of(objects(world))
    assert "has not seen generation 2 yet" in facts.operator.message
    assert "waits until the operator sees generation 2" in facts.rollout
    assert (facts.serves, facts.ready) == (True, False)
    assert facts.summary == "llama serves; the operator has not seen generation 2 yet"


def test_what_a_dead_operator_wrote_is_neither_ready_nor_a_young_proof() -> None:
    found = objects(brought_up())
    days = later(found)
    facts = status_of(days)
    assert (facts.serves, facts.ready) == (None, False)
    [link] = links.links_of(days).links
    assert link.proof_seconds is not None
    assert link.proof_seconds >= 3 * 86_400


def edited(found: Objects) -> Objects:
    cluster = copy.deepcopy(found.cluster)
    cluster["metadata"]["generation"] += 1
    return changed(found, cluster=cluster)


def later(found: Objects) -> Objects:
    return changed(found, now=found.now + 3 * 86_400)


@pytest.mark.parametrize(
    ("of", "codes"),
    [
        (lambda found: found, (Exit.DONE, Exit.DONE, Exit.DONE)),
        (later, (Exit.NOT_READY, Exit.NOT_READY, Exit.NOT_READY)),
        (edited, (Exit.DONE, Exit.NOT_READY, Exit.DONE)),
    ],
    ids=["now", "dead operator", "unseen generation"],
)
def test_exit_codes_say_what_is_known_of_now(
    monkeypatch: pytest.MonkeyPatch, of: Any, codes: tuple[Exit, Exit, Exit]
) -> None:
    found = of(objects(brought_up()))

    async def read(*_: Any, **__: Any) -> Objects:
        return found

    monkeypatch.setattr(status, "read", read)
    client: Any = SimpleNamespace(now=lambda: found.now)
    once = asyncio.run(status.once(client, KEY, "text", local=False))
    try:
        waited = asyncio.run(status.follow(client, KEY, "text", 0.0, local=False, until_ready=True))
    except UserError as error:
        waited = error.exit
    assert (once, waited, asyncio.run(links.show(client, KEY, "text", local=False))) == codes


def test_an_engine_of_before_and_gpus_are_counted() -> None:
    world = brought_up(decode={"replicas": 2})
    pods = [copy.deepcopy(pod) for pod in world.pods.values()]
    engines = [pod for pod in pods if "pdcluster.dev/engine" in pod["metadata"]["labels"]]
    for number, pod in enumerate(engines):
        limits = {"nvidia.com/gpu": "2"}
        pod["spec"] = {"containers": [{"name": "engine", "resources": {"limits": limits}}]}
        if number:
            pod["spec"]["nodeName"] = "node"
    old = copy.deepcopy(engines[-1])
    old["metadata"]["labels"]["pdcluster.dev/engine"] = "llama-decode-older-0"
    facts = status_of(objects(world, pods=[*pods, old]))
    assert (facts.gpus.held, facts.gpus.waited_for) == (2 * len(engines), 2)
    assert [one.name for one in facts.engines if not one.wanted] == ["llama-decode-older-0"]
    for pod, phase in zip(engines, ("Failed", "Succeeded"), strict=False):  # as after an eviction
        pod["spec"]["nodeName"] = "node"
        pod["status"] = {"phase": phase}
    facts = status_of(objects(world, pods=[*pods, old]))
    assert (facts.gpus.held, facts.gpus.waited_for) == (2 * len(engines) - 2, 0)


@pytest.mark.parametrize(
    ("prefill", "router", "told"),
    [
        ("Starting", "no router pod is ready", False),
        ("Ready", "no router pod is ready", True),
        ("Unknown", "no router pod is ready", True),
        ("Starting", "no router pod is ready: r-0: ImagePullBackOff", True),
    ],
)
def test_a_router_that_only_waits_for_engines_is_no_step(
    prefill: str, router: str, told: bool
) -> None:
    found = objects(brought_up())
    status = copy.deepcopy(found.cluster["status"])
    for engine in status["engines"]:
        if engine["role"] == "prefill":
            engine["state"] = prefill
    for one in status["conditions"]:
        if one["type"] == "Available":
            one |= {"status": "False", "reason": "RouterUnavailable", "message": router}
    sick = dataclasses.replace(found, cluster={**found.cluster, "status": status})
    assert ("RouterUnavailable" in {step.reason for step in status_of(sick).next}) is told


@pytest.mark.parametrize(
    ("said", "number"),
    [("{}-0-1: 0/3 nodes are available", 1), ("x{}-0-1: y", 0), ("{}-01: y", 0), ("", 0)],
)
def test_the_next_command_is_about_the_pod_that_the_message_names(said: str, number: int) -> None:
    found = starting()
    changes = copy.deepcopy(found.cluster)
    entry = changes["status"]["engines"][0]
    entry |= {"state": "Unschedulable", "message": said.format(entry["name"].removesuffix("-0"))}
    steps = {step.reason: step for step in status_of(changed(found, cluster=changes)).next}
    assert f"describe pods {entry['name']}-{number} " in steps["Unschedulable"].command


def link(prefill: str, decode: str, reason: str = "") -> dict[str, str]:
    state = "Failed" if reason else "Established"
    return {"prefill": prefill, "decode": decode, "state": state, "reason": reason}


def engines(**states: str) -> list[Engine]:
    return [Engine(name=name, role="", state=state) for name, state in states.items()]


@pytest.mark.parametrize(
    ("entries", "states", "words"),
    [
        (  # all links of one prefill engine fail, and the operator reaches it
            [link("p0", "d0", "TransferStalled"), link("p0", "d1", "TransferStalled"),
             link("p1", "d0"), link("p1", "d1")],
            {"p0": "Ready", "p1": "Ready"},
            ["p0: every link to it fails and other links stand", "vLLM is frozen there"],
        ),
        (  # neither
            [link("p0", "d0", "SideChannelUnreachable")],
            {"p0": "Unknown", "d0": "Ready"},
            ["p0: neither its peers nor the operator reach it"],
        ),
        (  # one pair of four: the network between the two
            [link("p0", "d0", "TransferStalled"), link("p0", "d1"), link("p1", "d0"),
             link("p1", "d1")],
            {},
            ["d0 does not reach p0", "the network between their nodes is cut"],
        ),
        ([link("p0", "d0"), link("p0", "d1", "WeightsDiffer")], {}, []),
        ([], {}, []),
    ],
)  # fmt: skip
def test_a_frozen_engine_is_told_from_a_cut_network_as_far_as_links_show_it(
    entries: list[dict], states: dict[str, str], words: list[str]
) -> None:
    found = diagnose({"linkStates": entries}, engines(**states))
    assert len(found) == bool(words)
    assert all(word in found[0] for word in words)


@pytest.mark.parametrize("started", [True, False])
def test_a_container_that_is_silent_after_it_was_ready_does_not_just_start(started: bool) -> None:
    world = brought_up()
    engine = world.leaders("prefill")[0]
    container = {"name": "engine", "state": {"running": {}}, "ready": False, "started": started}
    world.pods[engine.pod()]["status"] |= {"containerStatuses": [container], "conditions": []}
    del world.engines[engine.logical]
    world.step()
    facts = status_of(objects(world))
    [prefill] = [one for one in facts.engines if one.role == "prefill"]
    assert prefill.state == ("ContainerFrozen" if started else "Starting")
    steps = {step.reason: step for step in facts.next}
    assert set(steps) & {"ContainerFrozen", "Starting"} == {prefill.state}
    assert not started or f" {engine.pod()} " in steps["ContainerFrozen"].command


def test_links_that_the_status_leaves_out_are_counted() -> None:
    found = objects(brought_up())
    status = found.cluster["status"]
    cut = {**found.cluster, "status": {**status, "links": "3/70"}}
    facts = links.links_of(changed(found, cluster=cut))
    assert facts.not_shown == 69
    assert "1 of 70 links verified" in facts.summary
    older = {key: value for key, value in status.items() if key != "linkStates"}
    before = links.links_of(changed(found, cluster={**found.cluster, "status": older}))
    assert "an older operator wrote no more" in before.summary


def test_what_makes_a_link_slow_stands_in_its_row() -> None:
    world = brought_up()
    canary = CanaryReport(CanaryState.PASSED, 4096)
    world.link(canary=canary, descriptors=10_080, message="Set --block-size 64")
    world.step()
    facts = links.links_of(objects(world))
    assert [(one.state, one.message) for one in facts.links] == [
        ("Verified", "Set --block-size 64")
    ]
    text = printed(200, lambda console: links.print_links(console, facts))
    [row] = [line for line in text.splitlines() if "10,080" in line]
    assert row.rstrip().endswith("Set --block-size 64")


def test_a_wide_matrix_is_drawn_in_blocks_and_without_utf8_in_letters() -> None:
    world = SimulatedCluster(manifest(prefill={"replicas": 3}, decode={"replicas": 20}))
    world.bring_up()
    world.link(canary=CanaryReport(CanaryState.PASSED, 4096))
    world.step()
    facts = links.links_of(objects(world))
    text = printed(40, lambda console: console.print(links.Matrix(facts)))
    assert max(map(len, text.splitlines())) <= 40
    assert text.count("decode") == 2
    heads = [line.split()[1:] for line in text.splitlines() if line.startswith("prefill")]
    assert [int(one) for head in heads for one in head] == list(range(20))
    ascii_only = Console(file=io.TextIOWrapper(io.BytesIO(), "ascii"), width=80)
    ascii_only.print(links.Matrix(facts))
    ascii_only.file.flush()
    assert b" V" in ascii_only.file.buffer.getvalue()
