"""The Job that downloads the weights into a claim, before there are engines that read them.

With ``model.cache.downloadedBy: Job``, new engines and new revisions wait until the Job has ended
well. The engines of before serve on. So no GPU is held during the download, and the weights come
over the network once. The Job is named by what it downloads and where to: another revision is
another Job. One that has ended well is never made again. One that has not, and whose template is to
be another, is deleted and made again. Files that are complete stay.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from pdcluster_operator.api import object_names
from pdcluster_operator.api.conditions import StatusReason, Verdict, no
from pdcluster_operator.api.spec import engine_types, pod_templates, resolve
from pdcluster_operator.api.spec.types import Cluster, Role
from pdcluster_operator.plan import connectors
from pdcluster_operator.plan.builders import weights
from pdcluster_operator.plan.builders.router import NOBODY
from pdcluster_operator.plan.objects import drift
from pdcluster_operator.plan.objects.ownership import (
    child_object,
    common_metadata,
    controller_uid,
    engine_sets,
    identity,
    is_being_deleted,
)
from pdcluster_operator.plan.observed.pods import joined, pod_trouble, status_of
from pdcluster_operator.plan.rollout.revisions import short_hash
from pdcluster_operator.plan.types import Apply, Delete, Observed, Step, TryOut, deletion

COMPONENT = "weights"
MODULE = "pdcluster_connector.launcher.hub_download"
SHARED_WITH_PREFILL = ("imagePullSecrets", "nodeSelector", "tolerations", "securityContext")
"""Fields of the prefill engines' ``podTemplate.spec`` that the Job's pods have, too."""
HUB_VARIABLES = (
    "HF_", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "SSL_CERT_", "REQUESTS_CA_",
    "CURL_CA_",
)  # fmt: skip
"""Beginnings of the prefill engines' variables that the Job has, in upper or lower case.

It also has those that their values name, as in ``http://$(MIRROR)``, and the template's mounts of
folders that values name, such as those of certificates.
"""
REFERENCE = re.compile(r"\$\(([^()]+)\)")
ATTEMPTS = 6
HOPELESS = 2
"""Exit code of the Job if another attempt cannot help, for example without access to the model."""
HINDERS = (
    StatusReason.IMAGE_UNAVAILABLE, StatusReason.POD_CONFIG_ERROR, StatusReason.UNSCHEDULABLE,
)  # fmt: skip
"""What waiting for the Job does not cure."""
RESOURCES = {"requests": {"cpu": "1", "memory": "2Gi"}, "limits": {"memory": "8Gi"}}


@dataclass(frozen=True, slots=True)
class Download:
    """What is to be done for a download.

    Attributes:
        job: name of the Job.
        waits: why engines wait; None if the weights are there.
        step: None if nothing is to be done.
    """

    job: str
    waits: Verdict | None
    step: Step | None = None


def is_for(observed: Observed, cluster: Cluster) -> bool:
    """Whether a Job downloads the weights of a cluster. In local mode, none does."""
    return resolve.downloads_by_job(cluster) and not observed.place.one_node


def waits(observed: Observed, cluster: Cluster) -> bool:
    """Whether engines of the spec wait for their weights."""
    return is_for(observed, cluster) and download(observed, cluster).waits is not None


def download(observed: Observed, cluster: Cluster) -> Download:
    """Return what is to be done for the download of a cluster's weights.

    It is for a cluster with :func:`is_for`.
    """
    wanted = drift.stamped(build_job(cluster, observed.connector.digest))
    name = wanted["metadata"]["name"]
    live = next((one for one in observed.children if identity(one) == ("Job", name)), None)
    repo = wanted["spec"]["template"]["spec"]["containers"][0]["args"][0]
    waits = no(StatusReason.DOWNLOADING_WEIGHTS, f"Job {name} downloads {repo}")
    if live is None or is_being_deleted(live):
        step = Apply(wanted, "the weights are not downloaded yet")
        return Download(name, waits, step if live is None else None)
    ended = {
        one.get("type"): str(one.get("message") or "")
        for one in status_of(live).get("conditions") or ()
        if one.get("status") == "True"
    }
    if "Complete" in ended:
        return Download(name, None)
    if "Suspended" in ended:  # by hand, or by a queue
        waits = no(waits.reason, f"{waits.message}; it is suspended")
    if drift.applied_hash(live) != drift.applied_hash(wanted):
        return Download(name, waits, deletion(live, "it is made again from another template"))
    uid = live["metadata"]["uid"]
    attempts = [pod for pod in observed.pods if controller_uid(pod) == uid]
    last = max(
        attempts, key=lambda pod: str(pod["metadata"].get("creationTimestamp")), default=None
    )
    if last is None and "Suspended" not in ended:
        waits = no(waits.reason, f"{waits.message}; it has no pod yet")
    trouble = (pod_trouble(last) if last is not None else None) or waits
    if trouble.message.endswith("exit code 0"):  # the Job's controller will say so in a moment
        trouble = waits
    failed = ended.get("Failed", ended.get("FailureTarget"))  # the latter while its pods end
    if failed is not None:
        words = trouble.message if trouble is not waits else failed
        waits = no(StatusReason.DOWNLOAD_FAILED, joined(f"Job {name} failed", words))
    elif trouble.reason == StatusReason.ENGINE_FAILED:  # Kubernetes makes another pod
        waits = no(waits.reason, f"{waits.message}, and tries again: {trouble.message}")
    elif trouble is not waits:
        reason = trouble.reason if trouble.reason in HINDERS else waits.reason
        waits = no(reason, joined(waits.message, trouble.message))
    return Download(name, waits)


def build_job(cluster: Cluster, digest: str) -> dict[str, Any]:
    """Return the Job of a cluster.

    Args:
        digest: of the connector, which has the program that downloads.
    """
    engine, model = resolve.resolve_engine(cluster, Role.PREFILL), cluster.spec.model
    source, claim = model.source.hugging_face, model.cache.persistent_volume_claim
    if source is None or claim is None:
        raise ValueError("the weights of this cluster are not downloaded by a Job")
    what = [source.repo, source.revision, claim.claim_name, claim.path]
    labels = object_names.cluster_labels(cluster.name, COMPONENT)
    bundled = engine.connector is engine_types.ConnectorSource.BUNDLED
    shared = object_names.connector_name(digest)
    python_path = {"name": "PYTHONPATH", "value": connectors.CONNECTOR_PATH}
    revision = ["--revision", source.revision] if source.revision else []
    env = _env(cluster, engine)
    mounts, volumes = _named_folders(cluster, env)
    container = {
        "name": pod_templates.DOWNLOAD_CONTAINER,
        "image": engine.image,
        "command": ["python3", "-m", MODULE],
        "args": [source.repo, *revision],
        "env": [*env, *([python_path] if bundled else [])],
        "resources": RESOURCES,
        "volumeMounts": [
            *([connectors.connector_mount()] if bundled else []),
            {**weights.model_mounts(cluster)[0], "readOnly": False},
            {"name": "tmp", "mountPath": "/tmp"},  # noqa: S108 - a mount of the pod's own
            *mounts,
        ],
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
        },
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    pod: dict[str, Any] = {
        "restartPolicy": "Never",
        "serviceAccountName": object_names.service_account_name(cluster.name),
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": NOBODY,
            "runAsGroup": NOBODY,
            # The claim's files may belong to another user. The kubelet gives them this group.
            "fsGroup": NOBODY,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container],
        "volumes": [
            *([connectors.connector_volume(shared)] if bundled else []),
            *weights.model_volumes(cluster),
            {"name": "tmp", "emptyDir": {}},
            *volumes,
        ],
    }
    template = pod_templates.as_mapping(cluster.spec.prefill.pod_template)
    own = pod_templates.as_mapping(template.get("spec"))
    pod = pod_templates.merge(pod, {key: own[key] for key in SHARED_WITH_PREFILL if own.get(key)})
    user = pod["securityContext"]
    user["runAsNonRoot"] = user.get("runAsUser") != 0
    spec = {
        "backoffLimit": ATTEMPTS,
        "podFailurePolicy": {
            "rules": [
                {
                    "action": "FailJob",
                    "onExitCodes": {
                        "containerName": pod_templates.DOWNLOAD_CONTAINER,
                        "operator": "In",
                        "values": [HOPELESS],
                    },
                },
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget"}]},
            ]
        },
        "template": {"metadata": common_metadata(cluster, labels), "spec": pod},
    }
    name = f"{cluster.name}-{COMPONENT}-{short_hash(what)}"
    return child_object(cluster, "batch/v1", "Job", name, labels, spec=spec)


def _named_folders(
    cluster: Cluster, env: list[dict[str, Any]]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the prefill template's ConfigMaps and Secrets that values name: mounts, volumes."""
    template = cluster.spec.prefill.pod_template
    box = pod_templates.engine_container(cluster, Role.PREFILL)[1]
    volumes = {
        one["name"]: {**one}
        for _, one in pod_templates.mappings(template, "volumes")
        if one["name"] not in ("tmp", weights.CACHE)
        and {"configMap", "secret", "projected"} & one.keys()
    }
    values = [f"{one.get('value')}/" for one in env]
    mounts = [
        {**one, "readOnly": True}
        for one in pod_templates.as_list(box.get("volumeMounts"))
        if one.get("name") in volumes
        and any(value.startswith(one["mountPath"].rstrip("/") + "/") for value in values)
    ]
    return mounts, [volumes[name] for name in dict.fromkeys(one["name"] for one in mounts)]


def _env(cluster: Cluster, engine: resolve.Engine) -> list[dict[str, Any]]:
    """Return how to reach the Hub, and where the cache is."""
    env: list[dict[str, Any]] = [
        {"name": "HF_HOME", "value": resolve.CACHE_FOLDER},
        {"name": "PYTHONUNBUFFERED", "value": "1"},
        *weights.token_env(cluster),
    ]
    ours = {one["name"] for one in env} | {"HF_HUB_CACHE", "HF_HUB_OFFLINE"}
    given = {
        var.name: {"valueFrom": dict(var.value_from)} if var.value_from else {"value": var.value}
        for var in engine.env
    }
    box = pod_templates.engine_container(cluster, engine.role)[1]
    given |= {one["name"]: {**one} for one in pod_templates.as_list(box.get("env"))}
    wanted = {name for name in given if name.upper().startswith(HUB_VARIABLES)}
    for name in reversed(given):  # a value may name variables that stand before it
        if name in wanted:
            wanted |= {*REFERENCE.findall(str(given[name].get("value")))}
    return [*env, *({"name": name, **given[name]} for name in given if name in wanted - ours)]


def with_download(
    steps: Iterable[Step], observed: Observed, cluster: Cluster
) -> tuple[list[Step], Verdict | None]:
    """Return a plan's steps with what the download needs, and why engines wait; None if not.

    New revisions wait, and the first engines of one.
    """
    found = download(observed, cluster)
    gone = ("Job", found.job)  # no other part of the plan wants the Job
    kept = [one for one in steps if not (isinstance(one, Delete) and (one.kind, one.name) == gone)]
    if found.waits is not None:
        first = any(isinstance(one, TryOut) and one.first for one in kept)
        held = first or not engine_sets(observed.children)
        kept = [one for one in kept if not (isinstance(one, TryOut) or (held and _creates(one)))]
    return [*kept, *([found.step] if found.step else [])], found.waits


def _creates(step: Step) -> bool:
    return isinstance(step, Apply) and not step.uid and step.manifest["kind"] == "StatefulSet"
