"""All rules together: which ones apply, and how admission answers.

The webhook, the planner and ``pdcluster lint`` all call :func:`check_manifest`. The webhook refuses
an update only for errors that the update adds.
"""

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from pdcluster_operator.api import object_names
from pdcluster_operator.api.findings import (
    FieldError,
    Findings,
    Rule,
    did_you_mean,
    json_errors,
    quoted,
    shown,
    under,
)
from pdcluster_operator.api.rules import (
    certificates,
    engines,
    extra_args,
    images_and_weights,
    network,
    pod_template,
    resources,
    variables,
    whole_pods,
)
from pdcluster_operator.api.rules.model import REF, model_errors, model_of, moves
from pdcluster_operator.api.spec.model_config import FoundConfig, Model, named_config_map
from pdcluster_operator.api.spec.parse import parse_cluster, parse_scaler
from pdcluster_operator.api.spec.pod_templates import as_mapping, wrong_value
from pdcluster_operator.api.spec.shared_template import as_written
from pdcluster_operator.api.spec.types import Cluster

LONGEST_WARNING = 256
"""Characters of an admission warning that API servers pass on without cutting."""
MOST_WARNINGS = 16
BY_DEFAULT: Mapping[str, str] = {
    Rule.HOST_PATH_NOT_ADMITTED: "mounts a folder of the node, which a default install refuses",
    Rule.MOUNTED_NOT_SUPPORTED: (
        "an operator of a default install has no certificate that such engines trust"
    ),
    Rule.POD_GROUPS_NOT_SERVED: "an API server serves no PodGroups by default",
}
"""What ``pdcluster lint`` says of such a finding. It sees neither the operator nor the server."""
_INDEX = re.compile(r"\[\d+\]")


def check_scaler(manifest: object, names: Collection[str] = ()) -> Findings:
    """Parse the manifest of a PrefillScaler, and apply its rules.

    Args:
        names: of the PDClusters beside it. It should have one of these names, if there are any.
    """
    spec, errors = parse_scaler(manifest)
    least, most = spec.min_percent_of_decode, spec.max_percent_of_decode
    if least is not None and most is not None and least > most:
        words = f"is above spec.maxPercentOfDecode, which is {most}"
        where, remedy = "spec.minPercentOfDecode", "Set maxPercentOfDecode to at least this number."
        errors = (*errors, FieldError(where, str(least), Rule.MIN_ABOVE_MAX, words, remedy))
    name = as_mapping(as_mapping(manifest).get("metadata")).get("name")
    if not names or name in names or not isinstance(name, str):
        return Findings(errors)
    words = "no PDCluster that is checked with it has this name, and it scales that one only"
    remedy = did_you_mean(name, names) or f"There is {', '.join(sorted(names)[:10])}."
    return Findings(errors, (FieldError("metadata.name", name, Rule.NAME_UNUSABLE, words, remedy),))


def check_manifest(
    manifest: object,
    *,
    host_paths: bool | tuple[str, ...] | None = True,
    one_node: bool = False,
    mounted_certificates: bool | None = True,
    pod_groups: bool | None = True,
    model: Model | None = None,
    found: FoundConfig | None = None,
) -> tuple[Cluster, Findings]:
    """Parse a manifest and apply all rules; return all findings at once.

    Args:
        host_paths: whether folders of the nodes may be mounted, or the folders that may be read.
            Whoever installs the operator decides. None is for ``pdcluster lint``, which does not
            see the operator: a warning names the default.
        one_node: whether all pods run on one machine, as in local mode.
        mounted_certificates: whether the operator has a certificate for engines whose certificates
            are mounted. None as above.
        pod_groups: whether the API server serves PodGroups. Local mode ignores them. None as above.
        model: what the model's config.json says; None if nobody has it.
        found: what was found for the model's config.json; None if nobody looked.

    A finding is left out if it was computed from a field that could not be read. It would only
    repeat the first mistake in other words.
    """
    parsed = parse_cluster(manifest)
    if unread := json_errors(manifest):
        return parsed.cluster, Findings(unread)
    broken = [error.path for error in parsed.errors]

    def stands(finding: FieldError) -> bool:
        sources = (finding.path, *finding.related)
        return not any(under(path, source) for path in broken for source in sources)

    cluster, doubts = parsed.cluster, tuple[FieldError, ...]()
    if found is not None and not any(under(path, REF) for path in broken):
        model, doubts = model_of(cluster, found)
    pair = engines.pair_findings(cluster, model)
    folders = host_paths if isinstance(host_paths, tuple) else None
    supported = (
        (
            host_paths if folders is None else False,
            images_and_weights.host_path_errors(cluster, folders or ()),
        ),
        (False if one_node else mounted_certificates, certificates.support_errors(cluster)),
        (True if one_node else pod_groups, resources.pod_group_errors(cluster)),
    )
    refused = [error for one, errors in supported if one is False for error in errors]
    refused += resources.stored_errors(manifest)
    refused += dict.fromkeys(model_errors(cluster, model) if model else ())
    by_default = [error for one, errors in supported if one is None for error in errors]
    warned = [] if one_node else list(images_and_weights.node_local_warnings(cluster))
    warned += [replace(error, message=BY_DEFAULT[error.rule]) for error in by_default]
    warned += doubts
    errors = filter(stands, (*_errors(cluster), *pair.errors, *refused))
    warnings = filter(stands, (*_warnings(cluster), *warned))
    return cluster, Findings(
        errors=(*parsed.errors, *as_written(manifest, cluster, errors)),
        warnings=tuple(as_written(manifest, cluster, warnings)),
        unchecked=pair.unchecked,
        model=moves(cluster, model) if found and model and not doubts else "",
    )


def _errors(cluster: Cluster) -> Iterator[FieldError]:
    yield from engines.size_errors(cluster)
    yield from resources.resource_errors(cluster)
    yield from resources.offload_errors(cluster)
    yield from pod_template.pod_template_errors(cluster)
    yield from _metadata_errors(cluster)
    yield from whole_pods.pod_errors(cluster)
    yield from images_and_weights.reference_errors(cluster)
    yield from images_and_weights.image_errors(cluster)
    yield from images_and_weights.weight_errors(cluster)
    yield from extra_args.argument_errors(cluster)
    yield from variables.variable_errors(cluster)
    yield from extra_args.flag_errors(cluster)
    yield from engines.numbered_image_errors(cluster)
    yield from network.pod_network_errors(cluster)
    yield from extra_args.miscounted_errors(cluster, images_and_weights.releases(cluster))
    yield from extra_args.start_errors(cluster)
    yield from variables.transport_errors(cluster)
    yield from certificates.mount_errors(cluster)
    spec = cluster.spec
    yield from network.peer_errors("spec.monitoring.scrapeFrom", spec.monitoring.scrape_from)
    yield from network.peer_errors("spec.router.allowFrom", spec.router.allow_from or ())
    yield from network.router_errors(cluster)
    yield from network.service_errors(cluster)
    yield from network.backend_errors(cluster)
    yield from network.device_errors(cluster)
    yield from resources.gang_errors(cluster)
    yield from engines.autoscaling_errors(cluster)


def _warnings(cluster: Cluster) -> Iterator[FieldError]:
    yield from engines.one_sided_warnings(cluster)
    yield from images_and_weights.image_warnings(cluster)
    yield from images_and_weights.weight_warnings(cluster)
    yield from resources.resource_warnings(cluster)
    yield from pod_template.pod_template_warnings(cluster)
    yield from extra_args.flag_warnings(cluster, images_and_weights.releases(cluster))
    yield from variables.variable_warnings(cluster)
    yield from variables.user_warnings(cluster)
    yield from variables.mount_warnings(cluster)
    yield from pod_template.overlay_warnings(cluster)
    yield from whole_pods.pod_warnings(cluster)
    yield from engines.idle_warnings(cluster)
    yield from network.rdma_warnings(cluster)
    yield from network.nvlink_warnings(cluster)
    yield from certificates.mount_warnings(cluster)
    yield from pod_template.exposure_warnings(cluster)
    yield from network.service_warnings(cluster)
    yield from network.sidecar_warnings(cluster)


TAKEN = {
    object_names.QUEUE_LABEL: "is written from spec.scheduling.queueName",
    "k8s.v1.cni.cncf.io/networks": "is written from spec.transfer.rdma.networks",
    "kubectl.kubernetes.io/last-applied-configuration": "belongs to kubectl",
    "argocd.argoproj.io/instance": "has Argo CD delete what it did not apply itself",
    "argocd.argoproj.io/tracking-id": "has Argo CD delete what it did not apply itself",
}
"""Keys that common metadata may not have, beside the operator's own."""
MOST_ANNOTATION_LETTERS = 16 << 10


def _metadata_errors(cluster: Cluster) -> Iterator[FieldError]:
    """Yield labels and annotations that the operator's objects may not have."""
    common, own = cluster.spec.common_metadata, object_names.cluster_labels("", "")
    service = cluster.spec.router.service
    for place, given in (
        ("spec.commonMetadata.labels", common.labels),
        ("spec.commonMetadata.annotations", common.annotations),
        ("spec.router.service.annotations", service.annotations if service else {}),
    ):
        for key, value in given.items():
            where = f"{place}.{key}"
            ours = key in own or key.startswith(f"{object_names.GROUP}/")
            if why := "belongs to the operator" if ours else TAKEN.get(key):
                yield FieldError(where, shown(value), Rule.NOT_ALLOWED, why, "Remove it.")
            elif wrong := wrong_value("@key", key):
                yield FieldError(where, shown(value), *wrong)
            elif not isinstance(value, str):
                remedy = "Put it in quotes."
                yield FieldError(where, quoted(value), Rule.WRONG_TYPE, "must be a string", remedy)
        if (size := sum(len(str(one)) for one in given.values())) > MOST_ANNOTATION_LETTERS:
            message = f"has {size:,} characters; {MOST_ANNOTATION_LETTERS:,} are allowed"
            yield FieldError(place, "", Rule.TOO_LARGE, message, "Keep long texts in a ConfigMap.")


@dataclass(frozen=True, slots=True)
class Review:
    """The answer to one admission review.

    Attributes:
        errors: the manifest is refused if there are any.
        warnings: lines for the client.
    """

    errors: tuple[FieldError, ...]
    warnings: tuple[str, ...]

    @property
    def message(self) -> str:
        """Every error on a line of its own, as in ``str(FieldError)``."""
        count = len(self.errors)
        head = "1 field is" if count == 1 else f"{count} fields are"
        lines = "".join(f"\n  {error}" for error in self.errors)
        return f"{head} not acceptable:{lines}"


def review(
    new: Mapping[str, Any] | None,
    old: Mapping[str, Any] | None,
    *,
    host_paths: bool | tuple[str, ...],
    mounted_certificates: bool = True,
    found: FoundConfig | None = None,
) -> Review:
    """Judge a PDCluster that is created (``old`` is None), changed, or deleted (no ``new``).

    When a rule becomes stricter, clusters that exist may break it. Users can still delete such a
    cluster or change something else in it: only an error that the update adds refuses it. One that
    comes from another class is judged as if it were new.

    Args:
        found: the ConfigMap that ``new`` names; None if it names none.
    """
    if new is None or as_mapping(new.get("metadata")).get("deletionTimestamp"):
        return Review((), ())
    if old is not None and new.get("spec") == old.get("spec"):
        return Review((), ())
    admits: dict[str, Any] = {"host_paths": host_paths}
    admits["mounted_certificates"] = mounted_certificates
    _, findings = check_manifest(new, **admits, found=found)
    if old is None or _class_of(old) != _class_of(new):  # then nobody has judged it by our flags
        return Review(findings.errors, _lines(findings))
    try:
        same = found if named_config_map(old) == named_config_map(new) else None
        _, before = check_manifest(old, **admits, found=same)
    except Exception:  # noqa: BLE001  (else nobody could mend what another version has stored)
        before = Findings()
    return Review(added(findings.errors, before.errors), _lines(findings))


def _class_of(manifest: Mapping[str, Any]) -> object:
    return as_mapping(manifest.get("spec")).get("operatorClass") or ""


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


def _lines(findings: Findings) -> tuple[str, ...]:
    lines = (str(warning) for warning in findings.warnings[:MOST_WARNINGS])
    return tuple(
        line if len(line) <= LONGEST_WARNING else line[: LONGEST_WARNING - 1] + "…"
        for line in lines
    )
