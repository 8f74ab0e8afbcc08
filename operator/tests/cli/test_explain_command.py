"""``pdcluster explain``: every name has an explanation, and its manifests are what it says."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from pdcluster_connector.compat.check import RULES
from pdcluster_operator.api.remedies import table
from pdcluster_operator.api.rule_examples import LONG_TEXT, examples
from pdcluster_operator.cli.explain import Explanations
from pdcluster_operator.cli.main import main
from pdcluster_operator.cli.output import schema

Captured = pytest.CaptureFixture[str]


def document(capsys: Captured, *words: str) -> list[dict[str, Any]]:
    assert main(["explain", *words, "-o", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    jsonschema.validate(found, schema(Explanations))
    items: list[dict[str, Any]] = found["items"]
    return items


def test_the_list_and_the_document_have_every_name(capsys: Captured) -> None:
    assert [one["name"] for one in document(capsys)] == list(table())
    assert main(["explain"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert [one for one in table() if not any(line.split()[:1] == [one] for line in printed)] == []


def test_a_reason_is_explained_with_the_next_command(capsys: Captured) -> None:
    assert main(["explain", "paused"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("Paused: it goes on when somebody has done something\n")
    assert "next    pdcluster rollout resume NAME -n NAMESPACE\n" in printed
    assert "docs/troubleshooting.md#paused" in printed


def test_a_rule_is_shown_with_a_manifest_and_the_change_that_mends_it(capsys: Captured) -> None:
    assert main(["explain", "OwnedFlag", "NoRdma"]) == 0
    printed = capsys.readouterr().out
    assert "Admission refuses this manifest:\n  apiVersion: pdcluster.dev/v1alpha1\n" in printed
    assert "finding spec.engine.extraArgs[0] = --port 9000: --port belongs to" in printed
    assert "  -    - --port\n  -    - '9000'\n" in printed
    assert "Admission warns of this manifest:\n" in printed


def test_a_compatibility_rule_is_found_by_its_reason_and_by_its_id(capsys: Captured) -> None:
    [reason] = document(capsys, "LayoutUnsupported")
    named = {rule.id for rule in RULES if rule.reason == "LayoutUnsupported"}
    assert {rule["id"] for rule in reason["rules"]} == named
    assert len(reason["examples"]) == 3
    [one] = document(capsys, "layoutunsupported/QUANTIZED")
    assert [rule["id"] for rule in one["rules"]] == ["LayoutUnsupported/quantized"]
    assert [example["rule"] for example in one["examples"]] == ["LayoutUnsupported/quantized"]


@pytest.mark.parametrize(
    ("word", "name"),
    [
        ("OOMKilled", "OutOfMemory"),
        ("pods is forbidden: exceeded quota: team-a", "QuotaExceeded"),
        ("ImagePullBackOff", "ImageUnavailable"),
        ("crashloopbackoff", "EngineFailed"),
    ],
)
def test_a_word_of_a_pod_or_a_message_finds_what_it_means(
    word: str, name: str, capsys: Captured
) -> None:
    assert [one["name"] for one in document(capsys, word)] == [name]


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("NoTikcet", '"NoTikcet"; did you mean NoTicket'),
        ("ticket", "did you mean"),
        ("lease", "LeaseLost or LeaseExpired"),
        ("", '""; `pdcluster explain` lists'),
        ("x" * 9999, "…; `pdcluster explain` lists all names"),
    ],
)
def test_an_unknown_word_names_those_that_are_near(word: str, said: str, capsys: Captured) -> None:
    assert main(["explain", "Ready", word]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert said in printed.err
    assert printed.err.count("\n") == 1
    assert len(printed.err) < 500


def test_what_it_prints_is_what_lint_says(tmp_path: Path, capsys: Captured) -> None:
    """The manifests of all rules, saved and given to ``pdcluster lint``."""
    for explained in document(capsys):
        if explained["name"] == "ModelNotChecked":
            continue  # lint sees no ConfigMap beside it
        for example in explained["examples"]:
            text = yaml.safe_dump(example["wrong"]).replace(LONG_TEXT, "x" * 250_000)
            (tmp_path / "wrong.yaml").write_text(text)
            (tmp_path / "right.yaml").write_text(yaml.safe_dump(example["right"]))
            code = main(["lint", str(tmp_path / "wrong.yaml")])
            said = capsys.readouterr().out
            # lint does not see the operator. It warns of what a default install refuses.
            unseen = explained["name"] in {
                "HostPathNotAdmitted", "MountedNotSupported", "PodGroupsNotServed",
            }  # fmt: skip
            assert code == (example["refused"] and not unseen), example["rule"]
            assert f"[{explained['name']}]" in said
            assert main(["lint", str(tmp_path / "right.yaml")]) == 0
            assert f"[{explained['name']}]" not in capsys.readouterr().out
    assert set(examples()) > {"LayoutUnsupported/quantized"}


def test_a_terminal_of_40_columns_and_no_colours(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stream(io.StringIO):
        def isatty(self) -> bool:
            return True

    for name, value in {"TERM": "xterm", "COLUMNS": "40", "NO_COLOR": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.stdout", stream := Stream())
    assert main(["explain", "LeaseLost"]) == 0
    written = re.sub(r"\x1b\[\d*m", "", stream.getvalue())
    for line in written.splitlines():
        assert len(line) <= 40 or line.split()[1:] == ["docs/troubleshooting.md#leaselost"]
    assert "\n  cause   The lease was over when the\n          data had landed" in written
