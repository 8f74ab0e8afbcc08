"""The steps that write the Secrets with certificates and ticket keys; the certificates of engines.

All certificates of a cluster are made for the same period. In the next period they are made again,
long before they expire. The kubelet brings the new files into the pods, and the engines read them
for new connections, so nothing is restarted. The ticket keys are written once, and again for each
rotation. The connector's ``sidechannel/ticket_key_file.py`` says when a new key begins to sign.
"""

from collections.abc import Iterable

from pdcluster_operator.api.object_names import (
    CERTIFICATES_ANNOTATION,
    ROTATE_TICKET_KEY_ANNOTATION,
    EngineName,
)
from pdcluster_operator.api.spec.types import Certificates, Cluster
from pdcluster_operator.plan import types
from pdcluster_operator.plan.builders import secrets
from pdcluster_operator.plan.objects.ownership import engine_sets, engines_of
from pdcluster_operator.plan.rollout.revisions import revisions_in, short_hash

DAY = 86_400.0
PERIOD_SECONDS = 30 * DAY
PERIODS = 3
"""How many periods a certificate is valid: so an operator may be away for two."""
MOST_CERTIFICATES = 1024
"""What 1 MiB, the most of a Secret, holds for the longest names. A spec may want 1,004 engines, but
while they are replaced, there may be more."""
CLOCKS_DIFFER = DAY


def certificates_step(
    observed: types.Observed, cluster: Cluster, wanted: Iterable[EngineName], begin: float
) -> types.WriteCertificates | None:
    """Return the step that the Secret needs; None if it is as it should be.

    An engine that leaves keeps its certificate until its last pod is gone. So do engines whose
    spec is not accepted any more, or has TLS no longer. If there are too many, the last engines
    wait: the kubelet starts no container without its certificate.

    It is for clusters of which some ``are_needed``.

    Args:
        begin: when the period began.
    """
    held = observed.certificates
    there = {*engine_sets(observed.children), *engines_of(observed.pods)}
    held_now = {name: secrets.entry_of(name) in held.engines for name in {*wanted, *there}}
    # By index, so that both roles get some: those of one alone would be no pair.
    names = sorted(held_now, key=lambda one: (one not in there, not held_now[one], one.index, one))
    engines = {secrets.entry_of(name): name.logical for name in names[:MOST_CERTIFICATES]}
    if not engines:
        return None
    issue = f"{held.authority}.{int(begin)}"
    if held.issue == issue and held.engines == engines.keys():
        return None
    return types.WriteCertificates(
        secrets.build_secret(cluster, "certificates", {CERTIFICATES_ANNOTATION: issue}),
        engines,
        begin - CLOCKS_DIFFER,
        begin + PERIODS * PERIOD_SECONDS,
        _why(observed, issue),
        held.uid,
    )


def certificates_as_due(children: Iterable[types.Manifest], now: float) -> types.HeldCertificates:
    """Return the certificates that the Secret should hold now, for a reader who may not read it."""
    entries = frozenset(map(secrets.entry_of, engine_sets(children)))
    return types.HeldCertificates("", f".{int(period_start(now))}", entries)


def are_needed(observed: types.Observed, cluster: Cluster) -> bool:
    """Whether an engine has certificates of the operator, or is to have them."""
    if secrets.certificates_of(cluster) is Certificates.OPERATOR:
        return True
    live = certificates_by_engine(observed.pods, observed.children).values()
    return Certificates.OPERATOR in live


def period_start(now: float) -> float:
    """Return the start of the current certificate period, in which all are made alike."""
    return now // PERIOD_SECONDS * PERIOD_SECONDS


def _why(observed: types.Observed, issue: str) -> str:
    held = observed.certificates.issue
    if held is None:
        return "the engines' certificates"
    if held != issue:
        return "the engines' certificates, made again before they expire"
    return "the certificates of the engines that there are now"


def certificates_by_engine(
    pods: Iterable[types.Manifest], children: Iterable[types.Manifest]
) -> dict[EngineName, Certificates]:
    """Return which certificates the engine of each pod has.

    Args:
        pods: the pods that the cluster's own workloads made; see :mod:`.objects.ownership`.
        children: the objects that the cluster controls.
    """
    children = tuple(children)
    sets = {
        str(child["metadata"]["name"]): child["spec"]["template"]
        for child in children
        if child.get("kind") == "StatefulSet"
    }
    engines = engines_of(pods)
    templates = {name: sets.get(name.stateful_set) for name in engines}
    if None in templates.values():
        stored = {(one.role, one.name): one.template for one in revisions_in(children)}
        for name, template in templates.items():
            templates[name] = template or stored.get((name.role, name.revision))
    return {
        name: Certificates.UNKNOWN
        if template is None
        else secrets.certificates_of_template(template, name.cluster)
        for name, template in templates.items()
    }


def rotation_of(manifest: types.Manifest) -> str:
    """Return the annotation that asks for a new ticket key, of a PDCluster or of its Secret.

    A long one is hashed: the Secret has other annotations, and all have 256 KiB.
    """
    annotations = manifest["metadata"].get("annotations") or {}
    value = str(annotations.get(ROTATE_TICKET_KEY_ANNOTATION, ""))
    return value if len(value) <= 1024 else short_hash(value, 64)


def ticket_key_step(observed: types.Observed, cluster: Cluster) -> types.WriteTicketKey | None:
    """Return the step that the Secret needs; None if it is as it should be.

    A Secret that exists keeps its keys. Only a new value of the annotation replaces one; taking the
    annotation away replaces none.
    """
    wanted, held = rotation_of(observed.cluster), observed.ticket_key
    if held is not None and wanted in ("", held):
        return None
    return types.WriteTicketKey(
        secrets.build_secret(cluster, "ticket-key", {ROTATE_TICKET_KEY_ANNOTATION: wanted}),
        rotate=held is not None,
        why="a new key that signs tickets; the old one stays valid"
        if held is not None
        else "the key that signs tickets",
    )
