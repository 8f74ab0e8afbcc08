"""Whether the two roles' engines can exchange KV, as far as the spec tells.

The rules are in the connector's ``compat/``, because the handshake applies the same ones. This
module says which field of the spec a refusal comes from.
"""

from __future__ import annotations

from collections.abc import Mapping

from pdcluster_connector.compat.findings import Finding, Verdict
from pdcluster_connector.compat.rules import check, check_engine
from pdcluster_connector.compat.shape import EngineShape
from pdcluster_operator.api.findings import FieldError, Findings, shown
from pdcluster_operator.api.spec.enums import Role
from pdcluster_operator.api.spec.resolve import resolve_engine
from pdcluster_operator.api.spec.shape import engine_shape
from pdcluster_operator.api.spec.types import Cluster

# EngineShape field -> (field in engine, flags that can say it too)
SOURCES = {
    "model": ("", ("--model", "--revision", "--hf-overrides", "--quantization")),
    "kv_dtype": ("kvCacheDtype", ("--kv-cache-dtype", "--dtype")),
    "block_size": ("blockSize", ("--block-size",)),
    "prefix_caching": ("prefixCaching", ("--enable-prefix-caching",)),
    "context": ("", ("--decode-context-parallel-size", "--prefill-context-parallel-size")),
}
PARALLEL_FIELDS = ("tensor", "pipeline", "data")


def pair_findings(cluster: Cluster) -> Findings:
    """Return refusals as errors, and the fields that only the engines know."""
    shapes = {role: engine_shape(cluster, resolve_engine(cluster, role)) for role in Role}
    findings = check(shapes[Role.PREFILL], shapes[Role.DECODE])
    refused = [finding for finding in findings if finding.verdict is Verdict.REFUSED]
    waiting = [finding.field for finding in findings if finding.verdict is Verdict.UNKNOWN]
    return Findings(
        errors=tuple(_error(cluster, finding, shapes) for finding in refused),
        unchecked=tuple(dict.fromkeys(waiting)),
    )


def _error(cluster: Cluster, finding: Finding, shapes: Mapping[Role, EngineShape]) -> FieldError:
    path, *others = _paths(cluster, finding, shapes)
    return FieldError(
        path,
        shown(f"prefill {finding.prefill_value}, decode {finding.decode_value}"),
        finding.reason,
        finding.message,
        finding.remedy,
        tuple(others),
    )


def _paths(cluster: Cluster, finding: Finding, shapes: Mapping[Role, EngineShape]) -> list[str]:
    """Return the fields that the value came from, the role's own first."""
    field = finding.field
    if field in PARALLEL_FIELDS:
        at_fault = [role for role in Role if _breaks_alone(shapes[role], finding.rule)] or Role
        largest = max(at_fault, key=lambda role: getattr(shapes[role], field))
        return [f"spec.{largest}.parallelism.{field}", *(f"spec.{r}.parallelism" for r in Role)]
    if field not in SOURCES:
        return ["spec", "spec.model", "spec.engine"]
    name, flags = SOURCES[field]
    found = []
    for role in (Role.DECODE, Role.PREFILL):
        own = cluster.spec.role(role).engine
        words = [word.partition("=")[0].replace("_", "-") for word in own.extra_args]
        if any(flag in words or f"--no-{flag[2:]}" in words for flag in flags):
            found.append(f"spec.{role}.engine.extraArgs")
        elif name and getattr(own, field_name(name)) is not None:
            found.append(f"spec.{role}.engine.{name}")
    shared = f"spec.engine.{name}" if name else "spec.engine.extraArgs"
    return [*found, shared]


def _breaks_alone(shape: EngineShape, rule: str) -> bool:
    """Whether engines of this shape break a rule already among themselves."""
    return any(finding.rule == rule for finding in check_engine(shape))


def field_name(json_name: str) -> str:
    """Return the Python name of a JSON name: ``blockSize`` -> ``block_size``."""
    return "".join(f"_{c.lower()}" if c.isupper() else c for c in json_name)
