"""``check_manifest`` for tests: each finding says what is wrong, and then what to do."""

from __future__ import annotations

from typing import Any

from pdcluster_operator.api.findings import FieldError, Findings
from pdcluster_operator.api.rules import validate
from pdcluster_operator.api.spec.types import Cluster

END_OF_SENTENCE = (".", "?")


def check_manifest(manifest: Any, **known: Any) -> tuple[Cluster, Findings]:
    """Call the real one; fail if a path, a message and a remedy are mixed up."""
    cluster, findings = validate.check_manifest(manifest, **known)
    for finding in (*findings.errors, *findings.warnings):
        assert_said(finding)
    return cluster, findings


def assert_said(finding: FieldError) -> None:
    """A finding reads ``path = value: message [rule] remedy``; its remedy is whole sentences."""
    assert finding.path == "." or finding.path[0].isalpha(), finding
    assert finding.message, finding
    assert not finding.message.endswith(END_OF_SENTENCE), finding
    assert finding.remedy.endswith(END_OF_SENTENCE), finding
    assert finding.remedy[0].isupper(), finding
