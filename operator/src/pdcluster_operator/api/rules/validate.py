"""Rules across fields: arithmetic, owned flags, and whether the two roles can exchange KV.

The webhook, the planner and ``pdcluster lint`` all use them.
"""

from __future__ import annotations

from collections.abc import Iterator

from pdcluster_operator.api.findings import FieldError, Findings, under
from pdcluster_operator.api.rules.exposure import exposure_warnings
from pdcluster_operator.api.rules.extra_args import argument_errors
from pdcluster_operator.api.rules.flags import flag_errors
from pdcluster_operator.api.rules.gang import gang_errors, pod_group_errors, pod_group_warnings
from pdcluster_operator.api.rules.host_path import (
    host_path_errors,
    host_path_warnings,
    node_local_warnings,
)
from pdcluster_operator.api.rules.images import image_errors, image_warnings
from pdcluster_operator.api.rules.layout import layout_errors
from pdcluster_operator.api.rules.mounted_certificates import (
    mount_errors,
    mount_warnings,
    support_errors,
    support_warnings,
)
from pdcluster_operator.api.rules.network_peers import network_errors
from pdcluster_operator.api.rules.one_sided import one_sided_warnings
from pdcluster_operator.api.rules.pair import pair_findings
from pdcluster_operator.api.rules.pod_template_fields import (
    pod_template_errors,
    pod_template_warnings,
)
from pdcluster_operator.api.rules.resource_amounts import resource_errors, resource_warnings
from pdcluster_operator.api.rules.traps import trap_errors, trap_warnings
from pdcluster_operator.api.rules.weights import weight_warnings
from pdcluster_operator.api.spec.parse import ParseResult, parse_cluster
from pdcluster_operator.api.spec.types import Cluster


def check_manifest(
    manifest: object,
    *,
    host_paths: bool | None = True,
    one_node: bool = False,
    mounted_certificates: bool | None = True,
    pod_groups: bool | None = True,
) -> tuple[Cluster, Findings]:
    """Parse and validate: everything that is wrong, at once.

    Args:
        host_paths: whether folders of the nodes may be mounted. Whoever installs the operator
            decides. With None the operator is not known: a warning says what the default is.
        one_node: whether all pods run on one machine, as in local mode.
        mounted_certificates: whether the operator has a certificate for engines whose certificates
            are mounted. None as above.
        pod_groups: whether the API server serves PodGroups. Local mode ignores them. None as above.

    A finding is left out if it was computed from a field that could not be read. It would only
    repeat the first mistake in other words.
    """
    parsed: ParseResult = parse_cluster(manifest)
    broken = [error.path for error in parsed.errors]
    found = validate(parsed.cluster)

    def stands(finding: FieldError) -> bool:
        sources = (finding.path, *finding.related)
        return not any(under(path, source) for path in broken for source in sources)

    refused = list(host_path_errors(parsed.cluster)) if host_paths is False else []
    if one_node or mounted_certificates is False:
        refused += support_errors(parsed.cluster)
    if pod_groups is False and not one_node:
        refused += pod_group_errors(parsed.cluster)
    told = [] if one_node else list(node_local_warnings(parsed.cluster))
    told += host_path_warnings(parsed.cluster) if host_paths is None else ()
    told += support_warnings(parsed.cluster) if mounted_certificates is None else ()
    told += pod_group_warnings(parsed.cluster) if pod_groups is None else ()
    errors = (*parsed.errors, *filter(stands, (*found.errors, *refused)))
    return parsed.cluster, Findings(
        errors=errors,
        warnings=tuple(filter(stands, (*found.warnings, *told))),
        unchecked=found.unchecked,
    )


def validate(cluster: Cluster) -> Findings:
    """Check a parsed spec across its fields."""
    pair = pair_findings(cluster)
    return Findings(
        errors=tuple(_errors(cluster, pair)),
        warnings=tuple(_warnings(cluster)),
        unchecked=pair.unchecked,
    )


def _errors(cluster: Cluster, pair: Findings) -> Iterator[FieldError]:
    yield from layout_errors(cluster)
    yield from resource_errors(cluster)
    yield from pod_template_errors(cluster)
    yield from image_errors(cluster)
    yield from argument_errors(cluster)
    yield from flag_errors(cluster)
    yield from trap_errors(cluster)
    yield from mount_errors(cluster)
    yield from network_errors(cluster)
    yield from gang_errors(cluster)
    yield from pair.errors


def _warnings(cluster: Cluster) -> Iterator[FieldError]:
    yield from one_sided_warnings(cluster)
    yield from image_warnings(cluster)
    yield from weight_warnings(cluster)
    yield from resource_warnings(cluster)
    yield from pod_template_warnings(cluster)
    yield from trap_warnings(cluster)
    yield from mount_warnings(cluster)
    yield from exposure_warnings(cluster)
