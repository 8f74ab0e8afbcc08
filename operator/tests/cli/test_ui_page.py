"""What the page of `pdcluster ui` says of a PDCluster, from its objects."""

from __future__ import annotations

import os
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from ui_objects import HOSTILE, NOW, UNREACHABLE, cluster, condition, engines, links, pod, pods

from pdcluster_operator.api.conditions import timestamp
from pdcluster_operator.cli.status_facts import Objects
from pdcluster_operator.cli.ui.page import MOST_MOMENTS, page_of, row_of
from pdcluster_operator.cli.ui.server import SECTIONS, Pages, event

GOLDEN = Path(__file__).with_name("golden")
BROKEN = [
    condition("Ready", "False", "SideChannelUnreachable", UNREACHABLE, 120),
    condition("KVLinksEstablished", "False", "SideChannelUnreachable", UNREACHABLE),
    condition("DecodeReady", "False", "LoadingWeights", "llama-decode-7f9c4-1: shard 1 of 4"),
]


def seen(
    told: dict[str, Any], pods: list[dict] | tuple = (), events: list[dict] | tuple = ()
) -> Objects:
    lease = {"spec": {"holderIdentity": "operator-0", "leaseDurationSeconds": 30,
                      "renewTime": timestamp(NOW - 5)}}  # fmt: skip
    return Objects(told, pods, lease, lease_known=True, events=events, now=NOW)


def sections(found: Objects) -> dict[str, str]:
    context = {"page": page_of(found), "now": NOW, "problem": ""}
    return Pages().sections("cluster", context)


def ended(pod_: dict, exit_code: int = 137, reason: str = "OOMKilled") -> dict:
    end = {"exitCode": exit_code, "reason": reason, "finishedAt": timestamp(NOW - 60)}
    [container] = pod_["status"]["containerStatuses"]
    container |= {"restartCount": 2, "lastState": {"terminated": end}}
    return pod_


class Texts(HTMLParser):
    """The visible text of HTML, one line for each piece, and its tags."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if text := data.strip():
            self.lines.append(text)


def test_the_fragments_are_as_they_were_looked_at() -> None:
    """PDCLUSTER_REGENERATE=1 writes them again."""
    told = cluster(2, 2, BROKEN, **links(2, 2, p0d1="SideChannelUnreachable"))
    all_pods = [*pods(2, 1), ended(pod(engines("decode", 2)[1]))]
    found = sections(seen(told, all_pods))
    text = "".join(f"<!-- {name} -->\n{found[name].strip()}\n" for name in SECTIONS["cluster"])
    golden = GOLDEN / "ui_cluster.html"
    text = re.sub(r"[ \t]+$", "", text, flags=re.MULTILINE)
    # The words of the remedies are not the page's own.
    text = re.sub(r'(class="next">|<li class="free small"><strong>\w+</strong>)[^<]+', r"\1…", text)
    if os.environ.get("PDCLUSTER_REGENERATE"):
        golden.write_text(text)
    assert golden.read_text() == text


@pytest.mark.parametrize(
    ("conditions", "mark", "tone", "says"),
    [
        ([], "Ready", "good", "llama serves"),
        (BROKEN, "Serves, not Ready", "bad", f"SideChannelUnreachable: {UNREACHABLE}"),
        ([*BROKEN, condition("Available", "False", "NoVerifiedPair")], "Does not serve", "bad",
         UNREACHABLE),
        ([condition("Ready", "False", "LoadingWeights", "shard 1 of 4"),
          condition("DecodeReady", "False", "LoadingWeights", "shard 1 of 4")],
         "Serves, not Ready", "busy", "shard 1 of 4"),
    ],
)  # fmt: skip
def test_the_head_says_whether_it_serves_and_why_not(
    conditions: list[dict], mark: str, tone: str, says: str
) -> None:
    page = page_of(seen(cluster(conditions=conditions)))
    assert (page.state.word, page.state.tone) == (mark, tone)
    assert says in page.headline
    row = row_of(cluster(conditions=conditions), NOW)
    assert (row.state, row.prefill) == (page.state, "1/1")


def test_an_operator_that_stopped_is_no_green_page() -> None:
    found = seen(cluster())
    assert found.lease is not None
    found.lease["spec"]["renewTime"] = timestamp(NOW - 900)  # type: ignore[index]
    page = page_of(found)
    assert (page.state.word, page.state.tone) == ("No operator", "bad")
    assert page.headline.startswith("no operator works on llama, so this may be old")
    assert "it has stopped" in dict(page.figures)["Operator"]


def test_before_the_first_status_it_says_so() -> None:
    bare = {"metadata": {"name": "llama", "namespace": "llm", "generation": 1}, "spec": {}}
    page = page_of(seen(bare))
    assert page.state.tone == "busy"
    assert "nobody knows whether llama serves" in page.headline
    assert (page.engines, page.matrix.rows, page.conditions) == ((), (), ())
    assert row_of(bare, NOW).links == "–"


def test_a_condition_that_does_not_hold_has_the_next_command() -> None:
    page = page_of(seen(cluster(conditions=BROKEN)))
    by_type = {one.type: one for one in page.conditions}
    assert by_type["KVLinksEstablished"].next.startswith("kubectl get pods,networkpolicies -n llm")
    assert by_type["KVLinksEstablished"].next in {step.command for step in page.steps}
    assert by_type["Available"].next == ""
    assert by_type["Progressing"].state.tone == "good", "Complete is no fault"
    assert "Ready" not in by_type, "the head shows it"


def test_an_engine_shows_its_step_what_it_does_and_how_it_ended() -> None:
    told = cluster(1, 2)
    told["status"]["engines"][2] |= {"state": "LoadingWeights", "message": "shard 1 of 4"}
    page = page_of(seen(told, [*pods(1, 1), ended(pod(engines("decode", 2)[1]))]))
    first, *others = page.engines
    assert first.short == "decode/1", "what is not ready comes first"
    assert (first.state.word, first.state.tone, first.step) == ("LoadingWeights", "bad", 3)
    assert first.doing.startswith("shard 1 of 4; its last process ended: out of memory")
    assert (first.restarts, first.gpus) == (2, 2)
    assert {(one.state.tone, one.step) for one in others} == {("good", 5)}


def test_an_engine_that_the_spec_no_longer_wants_is_leaving_and_has_no_link() -> None:
    page = page_of(seen(cluster(1, 1), pods(1, 2)))
    assert [one.short for one in page.engines if one.state.word == "Leaving"] == ["decode/1"]
    assert page.matrix.columns == ("decode/0",)


def test_the_matrix_has_prefill_in_rows_and_what_the_status_tells_of_each_link() -> None:
    told = cluster(2, 3, **links(2, 3, p1d2="ShapeMismatch"))
    page = page_of(seen(told, pods(2, 3)))
    assert [row for row, _ in page.matrix.rows] == ["prefill/0", "prefill/1"]
    assert page.matrix.columns == ("decode/0", "decode/1", "decode/2")
    cell = page.matrix.rows[1][1][2]
    assert cell is not None
    assert (cell.state.word, cell.reason, cell.message) == ("Failed", "ShapeMismatch", UNREACHABLE)
    assert page.matrix.links[0] == cell, "faults first"
    fast = page.matrix.rows[1][1][0]
    assert fast is not None
    assert (fast.state.word, fast.gigabytes, fast.descriptors) == ("Verified", 13.5, 96)
    assert fast.proof == 900


def test_an_established_link_whose_canary_moved_nothing_is_a_fault() -> None:
    told = cluster(**links(1, 1))
    told["status"]["linkStates"][0]["canary"] = "Failed"
    [p], [d] = engines("prefill", 1), engines("decode", 1)
    told["status"]["failedLinks"] = [
        {"prefill": p.stateful_set, "decode": d.stateful_set, "reason": "CanaryFailed",
         "message": "no KV moved"}
    ]  # fmt: skip
    [found] = page_of(seen(told, pods())).matrix.links
    assert (found.state.tone, found.reason, found.message) == ("bad", "CanaryFailed", "no KV moved")


def test_a_matrix_of_very_many_engines_is_bounded() -> None:
    told = cluster(64, 64, **links(64, 2))
    page = page_of(seen(told, pods(64, 64)))
    assert len(page.matrix.rows) == len(page.matrix.columns) == 64
    assert not page.matrix.wide
    assert "3968 links, which the status leaves out" in page.matrix.hidden
    assert len(sections(seen(told, pods(64, 64)))["links"]) < 1_000_000


def test_the_timeline_has_conditions_events_and_pods_the_newest_first() -> None:
    happened = {
        "metadata": {"name": "llama.1"},
        "regarding": {"name": "llama"},
        "type": "Warning",
        "reason": "EngineFailed",
        "note": "decode/0 ended",
        "eventTime": timestamp(NOW - 300),
        "series": {"count": 3, "lastObservedTime": timestamp(NOW - 30)},
    }
    timeline = page_of(
        seen(cluster(conditions=BROKEN), [ended(pods()[0])], [happened, {"reason": "NoTime"}])
    ).timeline
    assert [one.at for one in timeline] == sorted((one.at for one in timeline), reverse=True)
    assert timeline[0].text == "EngineFailed: decode/0 ended (3 times)"
    assert timeline[0].tone == "bad"
    assert timeline[1].text.startswith("its process ended: out of memory")
    assert timeline[2].subject == "Ready"
    assert timeline[2].text == "became False: SideChannelUnreachable"
    assert "NoTime" not in {one.text for one in timeline}
    many = [{**happened, "metadata": {"name": str(n)}} for n in range(500)]
    assert len(page_of(seen(cluster(), pods(), many)).timeline) == MOST_MOMENTS


def test_hostile_words_stay_words() -> None:
    told = cluster(conditions=[condition("Ready", "False", "EngineFailed", HOSTILE)])
    told["status"] |= {"model": HOSTILE, "endpoint": HOSTILE, "prefill": HOSTILE}
    told["status"]["engines"][0] |= {"message": HOSTILE, "state": HOSTILE, "name": HOSTILE}
    told["status"]["failedLinks"] = [
        {"prefill": HOSTILE, "decode": HOSTILE, "reason": HOSTILE, "message": HOSTILE}
    ]
    told["metadata"]["name"] = HOSTILE
    happened = {"regarding": {"name": HOSTILE}, "reason": HOSTILE, "note": HOSTILE,
                "eventTime": timestamp(NOW)}  # fmt: skip
    shown = page_of(seen(told, pods(), [happened]), [HOSTILE])
    page = Pages()
    found = page.sections("cluster", {"page": shown, "now": NOW, "problem": HOSTILE})
    rows = page.sections("list", {"rows": [row_of(told, NOW)], "now": NOW, "problem": HOSTILE})
    whole = page.whole("cluster", title=HOSTILE, events="/e", sections=found)
    for html in (*found.values(), *rows.values(), whole):
        tags = Texts(html).tags
        assert "img" not in {tag for tag, _ in tags}
        assert not [name for _, names in tags for name in names if name.startswith("on")]
    assert "onerror=alert(1)" in "".join(Texts(found["head"]).lines), "it is shown"
    sent = event("engines", found["engines"])
    assert [line for line in re.split(r"\r\n|\r|\n", sent) if not line.startswith("data: ")] == [
        "event: engines", "", "",
    ]  # fmt: skip
