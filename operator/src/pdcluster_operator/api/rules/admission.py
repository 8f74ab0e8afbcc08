"""What admission answers: the planner's check, where an update is refused only for new errors."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pdcluster_operator.api.findings import FieldError, Findings
from pdcluster_operator.api.rules.validate import check_manifest

LONGEST_WARNING = 256
"""Characters of an admission warning that API servers pass on without cutting."""
MOST_WARNINGS = 16
_INDEX = re.compile(r"\[\d+\]")


@dataclass(frozen=True, slots=True)
class Review:
    """The answer to one admission review.

    Attributes:
        errors: what refuses the manifest; none admits it.
        warnings: lines for whoever sent it.
    """

    errors: tuple[FieldError, ...]
    warnings: tuple[str, ...]

    @property
    def message(self) -> str:
        """Every error on a line of its own: path, value, what is wrong, rule, remedy."""
        count = len(self.errors)
        head = "1 field is" if count == 1 else f"{count} fields are"
        lines = "".join(f"\n  {error}" for error in self.errors)
        return f"{head} not acceptable:{lines}"


def review(
    new: Mapping[str, Any] | None,
    old: Mapping[str, Any] | None,
    *,
    host_paths: bool,
    mounted_certificates: bool = True,
) -> Review:
    """Judge a PDCluster that is created (``old`` is None), changed, or deleted (no ``new``).

    When a rule becomes stricter, clusters that exist may break it. Users can still delete such a
    cluster or change something else in it: only an error that the update adds refuses it.
    """
    if new is None or (new.get("metadata") or {}).get("deletionTimestamp"):
        return Review((), ())
    if old is not None and new.get("spec") == old.get("spec"):
        return Review((), ())
    admits = {"host_paths": host_paths, "mounted_certificates": mounted_certificates}
    _, findings = check_manifest(new, **admits)
    if old is None:
        return Review(findings.errors, _warnings(findings))
    _, before = check_manifest(old, **admits)
    return Review(added(findings.errors, before.errors), _warnings(findings))


def added(errors: tuple[FieldError, ...], before: tuple[FieldError, ...]) -> tuple[FieldError, ...]:
    """Return the errors that were not there before. An update may have moved items of lists."""
    known = Counter(map(_identity, before))
    new = []
    for error in errors:
        if known[_identity(error)] > 0:
            known[_identity(error)] -= 1
        else:
            new.append(error)
    return tuple(new)


def _identity(error: FieldError) -> tuple[str, str, str]:
    return error.rule, _INDEX.sub("[]", error.path), error.value


def _warnings(findings: Findings) -> tuple[str, ...]:
    lines = (str(warning) for warning in findings.warnings[:MOST_WARNINGS])
    return tuple(
        line if len(line) <= LONGEST_WARNING else line[: LONGEST_WARNING - 1] + "…"
        for line in lines
    )
