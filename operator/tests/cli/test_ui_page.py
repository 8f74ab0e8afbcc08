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
from pdcluster_operator.cli.ui.model import Facts
from pdcluster_operator.cli.ui.page import MOST_MOMENTS, headline_of, page_of, row_of
from pdcluster_operator.cli.ui.server import SECTIONS, Pages, event

GOLDEN = Path(__file__).with_name("golden")
BROKEN = [
    condition("Ready", "False", "SideChannelUnreachable", UNREACHABLE, 120),
    condition("KVLinksEstablished", "False", "SideChannelUnreachable", UNREACHABLE),
    condition("DecodeReady", "False", "LoadingWeights", "llama-decode-7f9c4-1: shard 1 of 4"),
]


def sections(facts: Facts, **context: Any) -> dict[str, str]:
    found = {"page": page_of(facts), "now": NOW, "problem": "", **context}
    return Pages().sections("cluster", found)


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
    found = sections(Facts(told, all_pods))
    text = "".join(f"<!-- {name} -->\n{found[name].strip()}\n" for name in SECTIONS["cluster"])
    golden = GOLDEN / "ui_cluster.html"
    text = re.sub(r"[ \t]+$", "", text, flags=re.MULTILINE)
    if os.environ.get("PDCLUSTER_REGENERATE"):
        golden.write_text(text)
    assert golden.read_text() == text


@pytest.mark.parametrize(
    ("conditions", "generation", "mark", "tone", "says"),
    [
        ([], 3, "Ready", "good", "KV was seen to move"),
        (BROKEN, 3, "Serves, not Ready", "bad", f"SideChannelUnreachable: {UNREACHABLE}"),
        ([*BROKEN, condition("Available", "False", "NoVerifiedPair")], 3, "Does not serve", "bad",
         UNREACHABLE),
        ([condition("Ready", "False", "LoadingWeights", "shard 1 of 4")], 3, "Serves, not Ready",
         "busy", "shard 1 of 4"),
        ([], 4, "Serves", "busy", "has not seen the newest spec"),
    ],
)  # fmt: skip
def test_the_headline_says_whether_it_serves_and_why_not(
    conditions: list[dict], generation: int, mark: str, tone: str, says: str
) -> None:
    told = cluster(conditions=conditions)
    told["metadata"]["generation"] = generation
    state, headline = headline_of(told)
    assert (state.word, state.tone) == (mark, tone)
    assert says in headline


def test_before_the_first_status_it_says_so() -> None:
    bare = {"metadata": {"name": "llama", "namespace": "llm", "generation": 1}, "spec": {}}
    page = page_of(Facts(bare))
    assert page.state.tone == "busy"
    assert "has not written a status" in page.headline
    assert (page.engines, page.matrix.rows, page.conditions) == ((), (), ())
    assert row_of(bare).prefill == "–"


def test_a_condition_that_does_not_hold_has_the_next_command() -> None:
    page = page_of(Facts(cluster(conditions=BROKEN)))
    by_type = {one.type: one for one in page.conditions}
    assert by_type["KVLinksEstablished"].next.startswith("kubectl get pods,networkpolicies -n llm")
    assert by_type["Available"].next == ""
    assert by_type["Progressing"].state.tone == "good", "Complete is no fault"
    assert page.ready is not None
    assert "Ready" not in by_type, "the head shows it"


def test_an_engine_shows_its_step_what_it_does_and_how_it_ended() -> None:
    told = cluster(1, 2)
    told["status"]["engines"][2] |= {"state": "LoadingWeights", "message": "shard 1 of 4"}
    page = page_of(Facts(told, [*pods(1, 1), ended(pod(engines("decode", 2)[1]))]))
    first, *others = page.engines
    assert first.short == "decode/1", "what is not ready comes first"
    assert (first.state.word, first.state.tone, first.step) == ("LoadingWeights", "bad", 3)
    assert first.doing.startswith("shard 1 of 4; its last process ended: out of memory")
    assert (first.restarts, first.gpus) == (2, 2)
    assert {(one.state.tone, one.step) for one in others} == {("good", 5)}


def test_an_engine_that_the_spec_no_longer_wants_is_leaving_and_has_no_link() -> None:
    page = page_of(Facts(cluster(1, 1), pods(1, 2)))
    assert [one.short for one in page.engines if one.state.word == "Leaving"] == ["decode/1"]
    assert page.matrix.columns == ("decode/0",)


def test_the_matrix_has_prefill_in_rows_and_what_the_status_tells_of_each_link() -> None:
    told = cluster(2, 3, **links(2, 3, p1d2="ShapeMismatch"))
    page = page_of(Facts(told, pods(2, 3)))
    assert [row for row, _ in page.matrix.rows] == ["prefill/0", "prefill/1"]
    assert page.matrix.columns == ("decode/0", "decode/1", "decode/2")
    cell = page.matrix.rows[1][1][2]
    assert cell is not None
    assert (cell.state.word, cell.reason, cell.message) == ("Failed", "ShapeMismatch", UNREACHABLE)
    assert page.matrix.links[0] == cell, "faults first"
    fast = page.matrix.rows[1][1][0]
    assert fast is not None
    assert (fast.gigabytes, fast.canary, fast.descriptors) == (13.5, "Passed", 96)
    assert (fast.proven, fast.late) == (NOW - 900, False)


def test_a_late_proof_is_the_last_one() -> None:
    told = cluster(**links(1, 1))
    told["status"]["linkStates"][0]["lastProofTime"] = timestamp(NOW - 700)
    [link] = page_of(Facts(told, pods())).matrix.links
    assert (link.proven, link.late) == (NOW - 700, True)


def test_an_established_link_whose_canary_moved_nothing_is_a_fault() -> None:
    told = cluster(**links(1, 1))
    told["status"]["linkStates"][0]["canary"] = "Failed"
    [p], [d] = engines("prefill", 1), engines("decode", 1)
    told["status"]["failedLinks"] = [
        {"prefill": p.stateful_set, "decode": d.stateful_set, "reason": "CanaryFailed",
         "message": "no KV moved"}
    ]  # fmt: skip
    [found] = page_of(Facts(told, pods())).matrix.links
    assert (found.state.tone, found.reason, found.message) == ("bad", "CanaryFailed", "no KV moved")


def test_an_older_operator_tells_only_which_links_failed() -> None:
    one = {"prefill": "llama-prefill-5d8bf-1", "decode": "llama-decode-7f9c4-0"}
    failed = [{**one, "reason": "SideChannelUnreachable", "message": UNREACHABLE}]
    told = cluster(2, 2, BROKEN, failedLinks=failed)
    told["status"]["engines"][3]["state"] = "LoadingWeights"
    rows = dict(page_of(Facts(told, pods(2, 2))).matrix.rows)
    words = {
        name: [link.state.word if link else "" for link in cells] for name, cells in rows.items()
    }
    assert words == {"prefill/0": ["Unknown", "Pending"], "prefill/1": ["Failed", "Pending"]}
    told = cluster(2, 2)
    assert {link.state.word for link in page_of(Facts(told, pods(2, 2))).matrix.links} == {
        "Established"
    }


def test_engines_of_two_pairing_keys_have_no_link() -> None:
    mixed = [pod(engines("prefill", 1)[0], key="old"), pod(engines("decode", 1)[0], key="new")]
    matrix = page_of(Facts(cluster(), mixed)).matrix
    assert matrix.rows == (("prefill/0", (None,)),)
    assert matrix.links == ()


def test_of_very_many_links_the_kept_ones_are_shown() -> None:
    page = page_of(Facts(cluster(64, 64, engines=[
        {"name": one.stateful_set, "role": one.role.value, "state": "Ready"}
        for one in (*engines("prefill", 64), *engines("decode", 64))
    ]), pods(64, 64)))  # fmt: skip
    assert len(page.matrix.rows) == len(page.matrix.columns) == 64
    assert 64 <= page.matrix.total <= 192
    html = sections(Facts(cluster(64, 64), pods(64, 64)))["links"]
    assert len(html) < 1_000_000


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
        Facts(cluster(conditions=BROKEN), [ended(pods()[0])], [happened, {"reason": "NoTime"}])
    ).timeline
    assert [one.at for one in timeline] == sorted((one.at for one in timeline), reverse=True)
    assert timeline[0].text == "EngineFailed: decode/0 ended (3 times)"
    assert timeline[0].tone == "bad"
    assert timeline[1].text.startswith("its process ended: out of memory")
    assert timeline[2].subject == "Ready"
    assert timeline[2].text == "became False: SideChannelUnreachable"
    assert "NoTime" not in {one.text for one in timeline}
    many = [{**happened, "metadata": {"name": str(n)}} for n in range(500)]
    assert len(page_of(Facts(cluster(), pods(), many)).timeline) == MOST_MOMENTS


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
    facts = Facts(told, pods(), [happened], notes=(HOSTILE,))
    page = Pages()
    found = page.sections("cluster", {"page": page_of(facts), "now": NOW, "problem": HOSTILE})
    rows = page.sections("list", {"rows": [row_of(told)], "now": NOW, "problem": HOSTILE})
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


@pytest.mark.parametrize("wrong", [None, 7, "text", [], [7, None, "x"], {"a": 1}])
def test_a_status_of_any_shape_is_shown(wrong: object) -> None:
    for field in (
        "conditions",
        "engines",
        "failedLinks",
        "linkStates",
        "model",
        "transfer",
        "prefill",
    ):
        told = cluster()
        told["status"][field] = wrong
        sections(Facts(told, pods(), [{"series": wrong, "regarding": wrong}]))
    sections(Facts({"metadata": {"name": "llama"}, "status": wrong}))
