"""What ``pdcluster status`` says of a PDCluster, made from its objects. Pure.

The operator has written most of it into the status. Its pods say how often and how they ended, its
Lease whether an operator still works, and events what failed lately.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pdcluster_operator.api import remedies
from pdcluster_operator.api.conditions import (
    ConditionType,
    Status as Truth,
    find_condition,
    seconds,
)
from pdcluster_operator.api.object_names import ENGINE_LABEL
from pdcluster_operator.api.remedies import Severity
from pdcluster_operator.api.schema.status_schema import MAX_ENGINES
from pdcluster_operator.api.spec.pod_templates import as_mapping
from pdcluster_operator.api.spec.types import Role
from pdcluster_operator.cli.commands import in_context
from pdcluster_operator.cli.diagnosis import UNREACHABLE, diagnose
from pdcluster_operator.cli.rollout import announce
from pdcluster_operator.cli.status_document import (
    Condition,
    Engine,
    Failure,
    Gpus,
    Operator,
    RoleCount,
    Status,
    Step,
)
from pdcluster_operator.plan.namespace_lease import holding_of
from pdcluster_operator.plan.observed import pods as seen
from pdcluster_operator.plan.observed.pods import text_of
from pdcluster_operator.plan.observed.routers import NOT_ONE_READY
from pdcluster_operator.plan.types import Manifest

MOST_EVENTS = 8
COMPONENT = "app.kubernetes.io/component"
GOOD = (Severity.GOOD, Severity.PROGRESS)
REPEATS = (ConditionType.PROGRESSING, ConditionType.AVAILABLE)
"""Conditions that mostly repeat what others say."""
CONSEQUENCES = (
    "NoVerifiedPair",
    "WaitingForEngines",
    "NoPairs",
    "BandwidthUnmeasured",
    "LinksPending",
    "CanaryPending",
)
"""Reasons that go by themselves when another reason goes."""
OPERATOR_DOWN = "OperatorDown"


@dataclass(frozen=True, slots=True)
class Objects:
    """What was read.

    Attributes:
        leases: of the namespace; None if this account may not read them.
        events: warnings of the namespace.
        now: seconds since the epoch, by the API server's clock.
        local: the PDCluster is one of ``pdcluster up``, whose operator is the process that answers.
        context: of the kubeconfig, if the person named one: the next command names it, too.
    """

    cluster: Manifest
    pods: Sequence[Manifest]
    lease: Manifest | None
    lease_known: bool
    events: Sequence[Manifest]
    now: float
    local: bool = False
    context: str | None = None


def status_of(found: Objects) -> Status:
    """Return what the objects say."""
    cluster, status = found.cluster, as_mapping(found.cluster.get("status"))
    metadata = cluster["metadata"]
    name, namespace = str(metadata["name"]), str(metadata["namespace"])
    conditions = [
        Condition(*(text_of(find_condition(status, kind).get(one)) for one in _FIELDS))
        for kind in ConditionType
        if find_condition(status, kind)
    ]
    by_type = {one.type: one for one in conditions}
    operator = _operator(found)
    engines, cut = _engines(found, status)
    listed = [engine for engine in engines if engine.wanted]
    available = by_type.get(ConditionType.AVAILABLE)
    serves = _truth(available.status if available else Truth.UNKNOWN)
    ready = by_type.get(ConditionType.READY)
    unseen = _unseen_generation(cluster)
    is_ready = bool(ready and ready.status == Truth.TRUE and not unseen)
    diagnosis = diagnose(status, listed)
    failures = _failures(found, status)
    facts = Status(
        name=name,
        namespace=namespace,
        summary=_summary(name, serves, ready, available, operator, unseen),
        # What an operator wrote before it stopped says nothing of now.
        serves=None if operator.works is False else serves,
        ready=is_ready and operator.works is not False,
        operator=operator,
        rollout=announce(cluster).line,
        scaling=dict(as_mapping(status.get("scaling"))),
        endpoint=_endpoint(found, text_of(status.get("endpoint"))),
        links=text_of(status.get("links")),
        gpus=_gpus(found.pods),
        roles=[
            RoleCount(
                role.value,
                text_of(status.get(role.value)) or "0/?",
                sum(not one.wanted and one.role == role for one in engines),
            )
            for role in Role
        ],
        engines=engines,
        not_shown=cut,
        conditions=conditions,
        diagnosis=diagnosis,
        failures=failures,
        next=[],
    )
    facts.next = _steps(facts, found)
    return facts


_FIELDS = ("type", "status", "reason", "message", "lastTransitionTime")


def _endpoint(found: Objects, url: str) -> str:
    """Return where clients go. On this machine, no DNS knows a Service: a router's address does."""
    scheme, _, rest = url.partition("://")
    if not found.local or not rest:
        return url
    routers = (
        seen.status_of(pod).get("podIP")
        for pod in found.pods
        if as_mapping(seen.metadata_of(pod).get("labels")).get(COMPONENT) == "router"
        and seen.is_pod_ready(pod)
    )
    address = next(routers, None)
    return f"{scheme}://{address}:{rest.partition(':')[2]}" if address else ""


def _truth(status: str) -> bool | None:
    return {"True": True, "False": False}.get(status)


def _summary(
    name: str,
    serves: bool | None,
    ready: Condition | None,
    available: Condition | None,
    operator: Operator,
    unseen: int,
) -> str:
    why = ready if ready is not None and ready.status != Truth.TRUE else available
    because = f"{why.reason}: {why.message}" if why is not None else "nothing is known yet"
    if serves and ready is not None and ready.status == Truth.TRUE:
        said = f"{name} serves" if unseen else f"{name} serves: {ready.message}"
    elif serves:
        said = f"{name} serves, but is not Ready: {because}"
    elif serves is None:
        said = f"nobody knows whether {name} serves: {because}"
    else:
        said = f"{name} does not serve: {because}"
    if unseen:
        said = f"{said}; the operator has not seen generation {unseen} yet"
    if operator.works is False:
        return f"no operator works on {name}, so this may be old: {said}"
    return said


def _unseen_generation(cluster: Manifest) -> int:
    """Return the generation of the spec if the operator has not seen it yet; 0 if it has."""
    generation = int(cluster["metadata"].get("generation") or 0)
    observed = as_mapping(cluster.get("status")).get("observedGeneration") or 0
    return generation if observed < generation else 0


def _operator(found: Objects) -> Operator:
    """Tell an operator that is down from a PDCluster that waits."""
    if found.local:
        return Operator(works=True, message="pdcluster up works on it")
    unseen = _unseen_generation(found.cluster)
    behind = f"; it has not seen generation {unseen} yet" if unseen else ""
    if not found.lease_known:
        message = f"this account may not read Leases, which say whether an operator works{behind}"
        return Operator(works=None, message=message)
    holding = holding_of(found.lease)
    if found.lease is None or not holding.holder:
        message = "no operator holds the Lease of this namespace: none runs, or none watches it"
        return Operator(works=False, message=message)
    spec = as_mapping(found.lease.get("spec"))
    renewed = seconds(spec.get("renewTime"))
    ago = max(0.0, found.now - renewed) if renewed is not None else holding.seconds + 1
    said = f"{holding.holder} renewed its Lease {duration(ago)} ago"
    if ago > holding.seconds:
        late = f"{said}, and holds it for {duration(holding.seconds)} only: it has stopped"
        return Operator(works=False, message=late)
    return Operator(works=True, message=f"{said}{behind}")


def duration(span: float) -> str:
    """Return a time as people say it: 5 s, 3 min, 2 h or 4 d."""
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if span >= 2 * size:
            return f"{int(span // size)} {unit}"
    return f"{int(span)} s"


def _engines(found: Objects, status: Mapping[str, Any]) -> tuple[list[Engine], int]:
    """Return the engines that the status names, then others that have pods; and how many more."""
    entries = [as_mapping(one) for one in status.get("engines") or ()]
    by_engine = seen.pods_by_engine(found.pods)
    engines = [
        Engine(
            name=text_of(one.get("name")),
            role=text_of(one.get("role")),
            state=text_of(one.get("state")),
            message=text_of(one.get("message")),
        )
        for one in entries
    ]
    known = {engine.name for engine in engines}
    full = len(entries) >= MAX_ENGINES  # others may be wanted, too
    for name, pods in sorted(by_engine.items()):
        if name not in known and not full:
            engines.append(_old(name, pods))
    for engine in engines:
        own = by_engine.get(engine.name, [])
        engine.restarts = sum(map(_restarts, own))
        engine.ended = next(filter(None, map(seen.previous_end, own)), "")
    wanted = (text_of(status.get(role.value)).partition("/")[2] for role in Role)
    total = sum(int(one) for one in wanted if one.isdecimal())
    return engines, max(0, total - len(entries))


def _old(name: str, pods: Sequence[Manifest]) -> Engine:
    labels = as_mapping(seen.metadata_of(pods[0]).get("labels"))
    trouble = next(filter(None, map(seen.pod_trouble, pods)), None)
    ready = all(map(seen.is_pod_ready, pods))
    state = trouble.reason if trouble else "Ready" if ready else "Starting"
    role, message = text_of(labels.get(COMPONENT)), trouble.message if trouble else ""
    return Engine(name=name, role=role, state=state, message=message, wanted=False)


def _restarts(pod: Manifest) -> int:
    containers = seen.status_of(pod).get("containerStatuses") or ()
    return sum(int(one.get("restartCount") or 0) for one in containers)


def _gpus(pods: Iterable[Manifest]) -> Gpus:
    held = waited = 0
    for pod in pods:
        if ENGINE_LABEL not in as_mapping(seen.metadata_of(pod).get("labels")):
            continue
        spec = as_mapping(pod.get("spec"))
        if seen.status_of(pod).get("phase") in ("Succeeded", "Failed"):
            continue  # its node has the GPUs back
        if spec.get("nodeName"):
            held += seen.accelerators(pod)
        else:
            waited += seen.accelerators(pod)
    return Gpus(held, waited)


def _pod_of(engine: Engine) -> str:
    """Return the pod that the engine's message begins with; without one, its first pod."""
    named = re.match(rf"{re.escape(engine.name)}-\d+\b", engine.message)
    return named[0] if named else f"{engine.name}-0"


def _failures(found: Objects, status: Mapping[str, Any]) -> list[Failure]:
    """Return what failed lately, the latest first: failed links, and warnings of its objects."""
    failures = [
        Failure(
            text_of(one.get("lastTransitionTime")),
            f"{text_of(one.get('prefill'))} -> {text_of(one.get('decode'))}",
            text_of(one.get("reason")),
            text_of(one.get("message")),
        )
        for one in map(as_mapping, status.get("failedLinks") or ())
    ]
    own = {text_of(seen.metadata_of(pod).get("name")) for pod in found.pods}
    own.add(found.cluster["metadata"]["name"])
    for event in found.events:
        about = text_of(as_mapping(event.get("regarding")).get("name"))
        if about in own and event.get("type") == "Warning":
            note, reason = text_of(event.get("note")), text_of(event.get("reason"))
            failures.append(Failure(_time_of(event), about, reason, " ".join(note.split())))
    latest = sorted(failures, key=lambda one: seconds(one.time) or 0.0, reverse=True)
    return latest[:MOST_EVENTS]


def _time_of(event: Manifest) -> str:
    series = as_mapping(event.get("series"))
    times = (series.get("lastObservedTime"), event.get("deprecatedLastTimestamp"))
    return next((text_of(one) for one in (*times, event.get("eventTime")) if one), "")


def _steps(facts: Status, found: Objects) -> list[Step]:
    """Return what to do, once for each reason, the worst first."""
    name, conditions, engines = facts.name, facts.conditions, facts.engines
    reasons = [(OPERATOR_DOWN, "", "")] if facts.operator.works is False else []
    for engine in engines:
        if engine.state not in ("Ready", "Unknown"):
            message = seen.joined(engine.message, engine.ended)
            reasons.append((engine.state, message, _pod_of(engine)))
    reasons += [
        (one.reason, one.message, "")
        for one in conditions
        if one.status != Truth.TRUE and one.type not in REPEATS and one.type != ConditionType.READY
    ]
    reasons += [
        (one.reason, one.message, "")
        for one in conditions
        if one.status == Truth.FALSE and one.type in REPEATS
    ]
    reasons += [(one.reason, one.message, "") for one in facts.failures if "->" in one.about]
    serving = {one.role for one in engines if one.state in ("Ready", "Unknown")}
    if not serving.issuperset(Role):  # a router is ready when it has an engine of each role
        reasons = [one for one in reasons if one[1] != NOT_ONE_READY]
    steps: dict[str, Step] = {}
    for reason, message, pod in reasons:
        remedy = remedies.find(reason, message)
        if remedy is None or remedy.severity is Severity.GOOD or remedy.name in steps:
            continue
        command = remedies.next_step(
            reason, name, facts.namespace, message=message, pod=pod, local=found.local
        )
        steps[remedy.name] = Step(
            remedy.name,
            remedy.severity.value,
            remedy.cause,
            remedy.remedy,
            in_context(command, found.context),
            remedy.link,
        )
    ready = all(engine.state in ("Ready", "Unknown") for engine in engines)
    follow = CONSEQUENCES if ready else (*CONSEQUENCES, *UNREACHABLE)
    causes = [step for name, step in steps.items() if name not in follow]
    order = [Severity.FAULT, Severity.WAITS, Severity.ADVICE, Severity.PROGRESS]
    return sorted(causes or steps.values(), key=lambda step: order.index(Severity(step.severity)))
