"""Each rule refuses its example, or warns of it, and says nothing about the nearest other one."""

from __future__ import annotations

import pytest
from said_findings import assert_said

from pdcluster_connector.compat.check import RULES, check
from pdcluster_connector.compat.reasons import Reason
from pdcluster_operator.api.findings import Rule
from pdcluster_operator.api.remedies import Severity, table
from pdcluster_operator.api.rule_examples import Example, examples
from pdcluster_operator.api.rules.engines import engine_shape
from pdcluster_operator.api.spec.parse import parse_cluster
from pdcluster_operator.api.spec.resolve import resolve_engine
from pdcluster_operator.api.spec.types import Role

# An event, whose words are about the cluster that runs.
NO_FINDINGS = {Rule.INSECURE_SIDE_CHANNEL}
# A manifest does not say what layers, scales, memory or CPU an engine will have.
DECIDED_BY_ENGINES = {
    "KVDtypeMismatch/layer", "KVScalesMismatch", "LayoutUnsupported/scales",
    "LayoutUnsupported/layers", "LayoutUnsupported/heads", "LayoutUnsupported/empty",
    "BlockInteriorOpaque/packing", "LayerMismatch", "MemoryTypeUnsupported",
}  # fmt: skip
COMPAT = {rule.id for rule in RULES}


def test_every_rule_that_a_manifest_can_break_has_an_example() -> None:
    assert DECIDED_BY_ENGINES < COMPAT
    wanted = {*map(str, set(Rule) - NO_FINDINGS), *(COMPAT - DECIDED_BY_ENGINES)}
    wanted.add(Reason.VERSION_UNSUPPORTED)
    assert set(examples()) == wanted, "write it in api/rule_examples.yaml"


@pytest.mark.parametrize("rule", examples())
def test_the_rule_reports_the_wrong_one_and_nothing_is_said_of_the_right_one(rule: str) -> None:
    example = examples()[rule]
    found = example.judge(example.wrong)
    name = rule.partition("/")[0]
    assert {str(one.rule) for one in found.errors or found.warnings} == {name}
    assert example.finding.rule == name
    assert example.finding.remedy == example.remedy, "and `right` is what who follows it has"
    assert_said(example.finding)
    right = example.judge(example.right)
    assert (right.errors, right.warnings) == ((), ())
    if rule in COMPAT:
        assert rule in refused_by(example)


@pytest.mark.parametrize("rule", examples())
def test_the_two_are_near_each_other(rule: str) -> None:
    changed = [line for line in examples()[rule].difference() if line[0] in "+-"]
    assert 1 <= len(changed) <= (28 if rule == Rule.MOUNTED_NOT_SUPPORTED else 12), changed


def test_the_table_knows_which_rules_only_warn() -> None:
    warned = {rule for rule, example in examples().items() if not example.refused}
    advice = {one.name for one in table().values() if one.severity is Severity.ADVICE}
    assert warned == {name for name in advice if name in examples()}


def refused_by(example: Example) -> set[str]:
    cluster = parse_cluster(example.wrong).cluster
    prefill, decode = (engine_shape(cluster, resolve_engine(cluster, role)) for role in Role)
    return {finding.rule for finding in check(prefill, decode)}
