"""Rules across fields: arithmetic, owned flags, and whether the two roles can exchange KV.

Used by the webhook, the planner and ``pdcluster lint`` alike.
"""

from __future__ import annotations

from collections.abc import Iterator

from .findings import FieldError, Findings, under
from .parse import ParseResult, parse_cluster
from .rules_args import argument_errors
from .rules_host_path import host_path_errors
from .rules_layout import layout_errors
from .rules_network import network_errors
from .rules_pair import pair_findings
from .rules_traps import trap_errors, trap_warnings
from .types import Cluster


def check_manifest(manifest: object, *, host_paths: bool = True) -> tuple[Cluster, Findings]:
    """Parse and validate: everything that is wrong, at once.

    Args:
        host_paths: whether folders of the nodes may be mounted; whoever installs the operator
            decides.

    A finding that was computed from a field that could not be read is left out: it would
    only repeat the first mistake in other words.
    """
    parsed: ParseResult = parse_cluster(manifest)
    broken = [error.path for error in parsed.errors]
    found = validate(parsed.cluster)

    def stands(finding: FieldError) -> bool:
        sources = (finding.path, *finding.related)
        return not any(under(path, source) for path in broken for source in sources)

    refused = () if host_paths else tuple(host_path_errors(parsed.cluster))
    errors = (*parsed.errors, *filter(stands, (*found.errors, *refused)))
    return parsed.cluster, Findings(
        errors=errors,
        warnings=tuple(filter(stands, found.warnings)),
        unchecked=found.unchecked,
    )


def validate(cluster: Cluster) -> Findings:
    """Check a parsed spec across its fields."""
    pair = pair_findings(cluster)
    return Findings(
        errors=tuple(_errors(cluster, pair)),
        warnings=tuple(trap_warnings(cluster)),
        unchecked=pair.unchecked,
    )


def _errors(cluster: Cluster, pair: Findings) -> Iterator[FieldError]:
    yield from layout_errors(cluster)
    yield from argument_errors(cluster)
    yield from trap_errors(cluster)
    yield from network_errors(cluster)
    yield from pair.errors
