"""Tables at every width: no word is cut, no line is longer, a pipe gets no padding."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from pdcluster_connector.protocol.launcher_documents import (
    CanaryReport,
    CanaryState,
    LinkReport,
    LinkState,
)
from pdcluster_operator.cli.columns import Columns
from pdcluster_operator.cli.view import (
    Condition,
    PodLine,
    conditions_table,
    links_table,
    pods_table,
)

PODS = [
    PodLine("tiny-prefill-ddrn9-0-0", "prefill", "127.0.0.2", "LoadingWeights", "loading", None, 0),
    PodLine("tiny-decode-gwr2t-0-0", "decode", "127.0.0.3", "Starting", "starting vLLM", None, 1),
]
LINK = LinkReport(
    "ns.tiny.prefill.abcde.0",
    state=LinkState.FAILED,
    reason="BlockSizesDiffer",
    message="prefill has blocks of 16 tokens and decode of 32: set one size for both",
    shards="0/1",
    bytes_per_second=1e9,
    canary=CanaryReport(CanaryState.PENDING),
)
CONDITIONS = [
    Condition("KVLinksEstablished", "True", "LinksEstablished", "1 of 1 links established"),
    Condition("Ready", "False", "WaitingForEngines", ""),
]
TABLES = {
    "pods": pods_table(PODS),
    "links": links_table([("ns.tiny.decode.fghij.0", LINK)]),
    "conditions": conditions_table(CONDITIONS),
}


def printed(table: Columns, width: int, *, terminal: bool = True) -> list[str]:
    output = io.StringIO()
    console = Console(file=output, width=width, force_terminal=terminal, color_system=None)
    console.print(table, soft_wrap=True)
    return output.getvalue().splitlines()


def set_aside(words: list[str], header: str) -> list[str]:
    """Words without the header of the last column, which goes where its text goes below."""
    rest = list(words)
    rest.remove(header)
    return rest


@pytest.mark.parametrize("name", TABLES)
def test_no_width_cuts_a_word_or_makes_a_line_too_long(name: str) -> None:
    wanted = " ".join(printed(TABLES[name], 400)).split()
    for width in range(30, 200):
        lines = printed(TABLES[name], width)
        assert max(map(len, lines)) <= width, lines
        found = " ".join(lines).split()
        if name == "pods":  # a live view: what does not fit ends with an ellipsis
            found = [word for word in found if not word.endswith("…")]
            assert set(found) <= set(wanted)
        elif width >= 60:
            last = printed(TABLES[name], 400)[0].split()[-1]
            assert sorted(found) in (sorted(wanted), sorted(set_aside(wanted, last)))


def test_sixty_columns_show_states_and_headers_whole() -> None:
    assert printed(TABLES["pods"], 60) == [
        "POD                     ROLE     ADDRESS    STATE",
        "tiny-prefill-ddrn9-0-0  prefill  127.0.0.2  LoadingWeights",
        "  loading",
        "tiny-decode-gwr2t-0-0   decode   127.0.0.3",
        "  Starting (start 2)",
        "  starting vLLM",
    ]
    first, second, *reason = printed(TABLES["links"], 60)
    assert first == "PREFILL    DECODE    STATE   SHARDS  GB/s  CANARY"
    assert second == "prefill/0  decode/0  Failed  0/1     1.00  Pending"
    assert " ".join(map(str.strip, reason)) == f"{LINK.reason} {LINK.message}"


def test_free_text_wraps_in_its_own_column_where_there_is_room() -> None:
    lines = printed(TABLES["links"], 90)
    assert lines[0].endswith("CANARY   REASON")
    start = lines[0].index("REASON")
    assert all(line[:start].strip() == "" for line in lines[2:])
    assert "prefill has blocks" in lines[1] + lines[2]


@pytest.mark.parametrize("name", TABLES)
def test_a_pipe_gets_whole_rows_without_padding(name: str) -> None:
    lines = printed(TABLES[name], 20, terminal=False)
    assert len(lines) == {"pods": 3, "links": 2, "conditions": 3}[name]
    assert [line for line in lines if line != line.rstrip()] == []


def test_a_table_without_rows_is_its_header() -> None:
    assert printed(links_table([]), 80) == ["PREFILL  DECODE  STATE  SHARDS  GB/s  CANARY  REASON"]


def test_conditions_are_shown_in_the_order_of_their_fields() -> None:
    first, second, _ = printed(TABLES["conditions"], 200)
    assert first.split() == ["CONDITION", "STATUS", "REASON", "MESSAGE"]
    assert second.split()[:4] == ["KVLinksEstablished", "True", "LinksEstablished", "1"]
