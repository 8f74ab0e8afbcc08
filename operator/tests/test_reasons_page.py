"""No name that users can meet is without a test that makes it appear."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from dev.provocations import provoked
from dev.reasons_page import families, page, provocations

ROOT = Path(__file__).parents[2]
NAMES = [name for names in families().values() for name in names]


def test_every_reason_is_provoked_and_the_page_says_by_what() -> None:
    """One test, because each process that runs a part of it reads all tests for a second."""
    missing = {
        title: [name for name in names if name not in provocations()]
        for title, names in families().items()
    }
    assert all(families().values()), "where are they declared now?"
    assert {title: names for title, names in missing.items() if names} == {}, (
        "write a test that makes it appear and compares what it got with the name, or delete it"
    )
    assert (ROOT / "docs/reasons.md").read_text() == page(), "run make generate"


PREAMBLE = """
def failed(link, reason):
    assert link.reason == reason

def landed(engine):
    engine.land("d0", reason="BackendError")

CASES = [("one", "ModelMismatch"), ("two", "LayerMismatch")]
"""


@pytest.mark.parametrize(
    ("body", "shown"),
    [
        ('assert link.reason == "PeerRestarted"', {"PeerRestarted"}),
        ("assert link.reason is Reason.PEER_RESTARTED", {"PeerRestarted"}),
        ('assert (path["outcome"], path["reason"]) == ("x", "NoTicket")', {"NoTicket"}),
        ('[e] = [e for e in errors if e.rule == Rule.DUPLICATE.value]', {"Duplicate"}),
        ('failed(link, "CanaryFailed")', {"CanaryFailed"}),
        ('with pytest.raises(ApiError, match="NameConflict: x"): api.apply(x)', {"NameConflict"}),
        ("for name, reason in CASES:\n  assert link.reason == reason",
         {"ModelMismatch", "LayerMismatch"}),
        # What is not seen, is handed in, or is another word that sounds the same.
        ('assert link.reason != "PeerRestarted"', set()),
        ('assert "PeerRestarted" not in reasons', set()),
        ('link.fail(reason="NoTicket")\nassert link.reason == "NoTicket"', set()),
        ('assert link_of(Refusal("NoTicket", "x")).reason == "NoTicket"', set()),
        ('landed(engine)\nassert path["reason"] == "BackendError"', set()),
        ('assert condition("Ready")["reason"]', set()),
        ('"""Shows PeerRestarted."""\nassert link.failed', set()),
    ],
)  # fmt: skip
def test_what_counts_as_a_provocation(body: str, shown: set[str]) -> None:
    indented = "\n".join(f"    {line}" for line in body.splitlines())
    module = ast.parse(f"{PREAMBLE}\ndef test_it():\n{indented}")
    test = module.body[-1]
    assert isinstance(test, ast.FunctionDef)
    assert provoked(test, module) & set(NAMES) == shown


def test_parameters_stand_for_their_column() -> None:
    source = """
@pytest.mark.parametrize(("given", "reason"), [("NoTicket", "TicketInvalid"), ("NoTicket", "X")])
def test_it(given, reason):
    engine.use(given)
    assert answer.reason == reason
"""
    module = ast.parse(source)
    [test] = module.body
    assert isinstance(test, ast.FunctionDef)
    assert provoked(test, module) & set(NAMES) == {"TicketInvalid"}
