"""The rules of ``spec.autoscaling``, each with the nearest spec that it accepts."""

from __future__ import annotations

from typing import Any

import pytest

from pdcluster_operator.api.findings import FieldError
from pdcluster_operator.api.rules.validate import check_manifest

RIGHT: dict[str, Any] = {"ttftMs": 900, "prefill": {"max": 4}, "decode": {"min": 2, "max": 8}}


def errors_of(**changes: Any) -> tuple[FieldError, ...]:
    manifest = {
        "apiVersion": "pdcluster.dev/v1alpha1",
        "kind": "PDCluster",
        "metadata": {"name": "llama", "namespace": "ns", "uid": "u", "generation": 4},
        "spec": {
            "model": {"source": {"hostPath": {"path": "/models/x"}}},
            "autoscaling": {**RIGHT, **changes},
        },
    }
    _, findings = check_manifest(manifest)
    return findings.errors


def found(**changes: Any) -> list[tuple[str, str]]:
    return [(one.path.removeprefix("spec.autoscaling"), one.rule) for one in errors_of(**changes)]


def test_bounds_and_a_target_are_enough() -> None:
    assert found() == []
    assert found(ttftMs=None, itlMs=40, mode="Apply", prefill={"min": 4, "max": 4}) == []


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_min_is_not_above_max(role: str) -> None:
    [error] = errors_of(**{role: {"min": 5, "max": 4}})
    assert error.rule == "MinAboveMax"
    assert str(error).startswith(f"spec.autoscaling.{role}.min = 5: is above")
    assert found(**{role: {"min": 4, "max": 4}}) == []


def test_a_target_is_needed() -> None:
    [error] = errors_of(ttftMs=None)
    assert error.rule == "NoTarget"
    assert error.path == "spec.autoscaling"


def test_the_largest_numbers_may_not_have_more_links_than_are_allowed() -> None:
    assert found(prefill={"max": 65}, decode={"max": 64}) == [(".decode.max", "OutOfRange")]
    assert found(prefill={"max": 64}, decode={"max": 64}) == []


def test_what_cannot_be_read_is_said_once() -> None:
    assert found(prefill={"max": 0}, ttftMs="fast") == [
        (".ttftMs", "WrongType"),
        (".prefill.max", "OutOfRange"),
    ]
    assert found(prefill=None) == [(".prefill", "Required")]
    assert found(decode={"max": 2, "minimum": 1}) == [(".decode.minimum", "UnknownField")]
