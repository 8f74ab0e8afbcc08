"""What becomes of the advice: fields of the status, a condition, and numbers to set.

A PDCluster with ``spec.autoscaling`` is looked at once in ``LOOK_SECONDS``. In between, its status
stays as it is. Measured values go up and down all the time. They are written only with other
advice, or after ``RENEW_SECONDS`` if one of them has really changed.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pdcluster_connector.protocol.load_report import LoadReport
from pdcluster_operator.api.conditions import (
    ConditionType,
    Status,
    StatusReason,
    Verdict,
    find_condition,
    no,
    seconds,
    timestamp,
    unknown,
    yes,
)
from pdcluster_operator.api.object_names import KIND, SCALER_KIND, EngineName
from pdcluster_operator.api.spec.autoscaling_types import Autoscaling, EngineBounds, ScalingMode
from pdcluster_operator.api.spec.pod_templates import as_mapping
from pdcluster_operator.api.spec.types import Cluster, Role
from pdcluster_operator.plan.moments import Bounds, Goal, Moment, RoleLoad, TransferLoad
from pdcluster_operator.plan.objects.ownership import is_being_deleted
from pdcluster_operator.plan.observed import pods
from pdcluster_operator.plan.scaling.advice import MEMORY_SECONDS, Advice, Outlook, advise
from pdcluster_operator.plan.types import Manifest, Observed, Scale

LOOK_SECONDS = 60.0
"""A launcher tells the load of the last minute, and the operator reads it once a minute."""
RENEW_SECONDS = 600.0
SMALLEST, LARGEST = 1e-9, 1e20
"""What is less than the one was not measured, and nothing is more than the other."""
DIFFERENT = 0.25
"""By this share a measured value has to change before it is written again."""

VERDICTS = {
    Outlook.MET: (yes, StatusReason.TARGETS_MET),
    Outlook.SCALING: (no, StatusReason.MORE_ENGINES_NEEDED),
    Outlook.BOUNDED: (no, StatusReason.SCALING_BOUNDED),
    Outlook.NO_ENGINES: (no, StatusReason.ENGINES_DID_NOT_COME),
    Outlook.UNREACHABLE: (no, StatusReason.TARGETS_UNREACHABLE),
    Outlook.UNKNOWN: (unknown, StatusReason.NOT_MEASURED),
}


@dataclass(frozen=True, slots=True)
class Scaling:
    """What a look at a PDCluster says about its number of engines.

    Attributes:
        window: what was seen at this look and those before; the next plan needs it.
        fields: ``status.scaling``.
        verdict: the condition ScalingTargetsMet.
        steps: numbers to set.
        wait: seconds to the next look.
        fault: an exception, which is a bug of the operator.
    """

    window: tuple[Moment, ...]
    fields: Mapping[str, Any]
    verdict: Verdict
    steps: tuple[Scale, ...]
    wait: float
    fault: Exception | None = None


def follow(
    observed: Observed,
    cluster: Cluster,
    names: Mapping[Role, Iterable[EngineName]],
    now: float,
    *,
    rolling: bool,
) -> Scaling | None:
    """Return what becomes of the advice; None if the spec asks for none.

    Args:
        names: the engines that serve the spec. Others may still exist, and are not measured.
        rolling: engines that the spec does not ask for still exist.
    """
    wanted = cluster.spec.autoscaling
    if wanted is None:
        return None
    status = as_mapping(observed.cluster.get("status"))
    before = as_mapping(status.get("scaling"))
    try:
        return _follow(observed, cluster, wanted, status, before, names, now, rolling=rolling)
    except Exception as error:  # noqa: BLE001 - the engines need the rest of the plan
        # Without what was seen so far, which may be the cause.
        words = f"the number of engines stays as it is: {type(error).__name__}: {error}"
        verdict = unknown(StatusReason.ADVICE_FAILED, words)
        return Scaling((), before, verdict, (), LOOK_SECONDS, error)


def _follow(
    observed: Observed,
    cluster: Cluster,
    wanted: Autoscaling,
    status: Manifest,
    before: Mapping[str, Any],
    names: Mapping[Role, Iterable[EngineName]],
    now: float,
    *,
    rolling: bool,
) -> Scaling:
    window = tuple(one for one in observed.moments if now - MEMORY_SECONDS < one.at <= now)
    goal, applies = _goal(wanted, observed.scaler), wanted.mode is ScalingMode.APPLY
    past = now - window[-1].at if window else LOOK_SECONDS
    if past < LOOK_SECONDS and before and _is_allowed(before, goal):
        old = find_condition(status, ConditionType.SCALING_TARGETS_MET)
        verdict = Verdict(
            Status(old.get("status", "Unknown")),
            old.get("reason", StatusReason.NOT_MEASURED),
            old.get("message", ""),
        )
        return Scaling(window, before, verdict, (), LOOK_SECONDS - past)
    last = advise(window, goal) if window else None
    asked = (last.prefill, last.decode) if last is not None and applies else None
    moment = _look(observed, cluster, names, now, asked, rolling=rolling)
    window = (*window, moment)
    advice = advise(window, goal)
    steps, words = _steps(observed, moment, advice) if applies else ((), "")
    verdict = _verdict(advice, words)
    fields = _fields(before, advice, moment, now)
    new = last is not None and last.outlook is not advice.outlook
    old = find_condition(status, ConditionType.SCALING_TARGETS_MET)
    if new and old and before and _is_allowed(before, goal):
        # Only what was seen twice is said: near a limit, each minute may say something else.
        verdict, fields = Verdict(Status(old["status"]), old["reason"], old["message"]), before
    return Scaling(window, fields, verdict, steps, LOOK_SECONDS)


def _goal(wanted: Autoscaling, scaler: Manifest | None) -> Goal:
    def bounds(of: EngineBounds) -> Bounds:
        return Bounds(of.min, of.max)

    shares = as_mapping((scaler or {}).get("spec"))
    least, most = (shares.get(name) for name in ("minPercentOfDecode", "maxPercentOfDecode"))
    return Goal(
        prefill=bounds(wanted.prefill),
        decode=bounds(wanted.decode),
        ttft=None if wanted.ttft_ms is None else wanted.ttft_ms / 1000,
        itl=None if wanted.itl_ms is None else wanted.itl_ms / 1000,
        ratio=(
            least if isinstance(least, int) else None,
            most if isinstance(most, int) else None,
        ),
    )


def _is_allowed(before: Mapping[str, Any], goal: Goal) -> bool:
    """Whether the last advice is within bounds that may be new. A role at zero stays there."""
    numbers = (goal.prefill, before.get("prefill")), (goal.decode, before.get("decode"))
    return all(not one or bounds.clamp(int(one)) == one for bounds, one in numbers)


def _look(
    observed: Observed,
    cluster: Cluster,
    names: Mapping[Role, Iterable[EngineName]],
    now: float,
    asked: tuple[int, int] | None,
    *,
    rolling: bool,
) -> Moment:
    """Return this moment. Only engines that are wanted and ready are measured."""
    loads: dict[Role, list[LoadReport]] = {}
    came, ready = dict.fromkeys(Role, 0), dict.fromkeys(Role, 0)
    by_engine = pods.pods_by_engine(observed.pods)
    for role in Role:
        told = {name.logical: observed.engines.get(name.logical) for name in names[role]}
        # An engine whose launcher cannot be reached is judged by its pods: it may serve well.
        nodes = cluster.spec.role(role).parallelism.nodes
        silent = [by_engine.get(name.stateful_set, ()) for name in names[role]
                  if told[name.logical] is None]  # fmt: skip
        run = [own for own in silent if len(own) >= nodes and not any(map(pods.pod_trouble, own))]
        serving = [one for one, report in told.items() if report and report.ready]
        came[role] = len(told) - len(silent) + len(run)
        ready[role] = len(serving) + sum(all(map(pods.is_pod_ready, own)) for own in run)
        loads[role] = [observed.loads[one] for one in serving if one in observed.loads]
    return Moment(
        at=now,
        prefill=role_load(loads[Role.PREFILL]),
        decode=role_load(loads[Role.DECODE]),
        transfer=transfer_load(loads[Role.DECODE]),
        wanted=(cluster.spec.prefill.replicas, cluster.spec.decode.replicas),
        came=(came[Role.PREFILL], came[Role.DECODE]),
        ready=(ready[Role.PREFILL], ready[Role.DECODE]),
        asked=asked,
        rolling=rolling,
    )


def role_load(reports: Iterable[LoadReport]) -> RoleLoad:
    """Return the load of a role, of the reports of its engines."""
    reports = tuple(reports)
    return RoleLoad(
        engines=len(reports),
        busy=_sum(min(1.0, one.busy_seconds / one.seconds) for one in reports),
        tokens=_sum(one.tokens / one.seconds for one in reports),
        requests=_sum(one.requests / one.seconds for one in reports),
        first_token=_mean(reports, "first_token_seconds", "requests"),
        gap=_mean(reports, "gap_seconds", "gaps"),
        running=_sum(one.running for one in reports),
        waiting=_sum(one.waiting for one in reports),
        kv=_sum(one.kv for one in reports),
    )


def transfer_load(decodes: Iterable[LoadReport]) -> TransferLoad:
    """Return what decode engines received, of their reports."""
    decodes = tuple(decodes)
    return TransferLoad(
        rate=_sum(one.received_bytes / one.seconds for one in decodes),
        seconds=_mean(decodes, "receive_seconds", "receives"),
        in_flight=_sum(one.receive_seconds / one.seconds for one in decodes),
    )


def _mean(reports: Iterable[LoadReport], total: str, number: str) -> float:
    reports = tuple(reports)
    count = _sum(getattr(one, number) for one in reports)
    return _sum(getattr(one, total) for one in reports) / count if count else 0.0


def _sum(values: Iterable[float]) -> float:
    """Return a sum with which one can reckon: none so small or large that a quotient overflows."""
    found = sum(values)
    return min(found, LARGEST) if found >= SMALLEST else 0.0


def _steps(observed: Observed, moment: Moment, advice: Advice) -> tuple[tuple[Scale, ...], str]:
    """Return the numbers to set, as an autoscaler would set them, and what cannot be set."""
    steps, words = [], ""
    scaler = observed.scaler
    if advice.decode != moment.wanted[1]:
        steps.append(_step(KIND, observed.cluster, advice.decode))
    if advice.prefill != moment.wanted[0]:
        if scaler is not None and not is_being_deleted(scaler):
            steps.append(_step(SCALER_KIND, scaler, advice.prefill))
        else:
            words = (
                "prefill is not scaled, because there is no PrefillScaler with the name of this "
                "PDCluster"
            )
    return tuple(steps), words


def _step(kind: str, live: Manifest, number: int) -> Scale:
    return Scale(kind, str(live["metadata"].get("resourceVersion", "")), number)


def _verdict(advice: Advice, words: str) -> Verdict:
    make, reason = VERDICTS[advice.outlook]
    return make(reason, "; ".join(filter(None, (advice.why, words))))


def _fields(
    before: Mapping[str, Any], advice: Advice, moment: Moment, now: float
) -> Mapping[str, Any]:
    """Return ``status.scaling``: as it is, while it says the same."""
    advised = {"prefill": advice.prefill, "decode": advice.decode, "limit": advice.limit.value}
    measured = {name: number for name, value in _measured(moment) if (number := _rounded(value))}
    kept = as_mapping(before.get("measured"))
    age = now - (seconds(before.get("measuredAt")) or 0.0)
    same = advised == {name: before.get(name) for name in advised}
    if same and (age < RENEW_SECONDS or not _differ(kept, measured)):
        return before
    return {**advised, "measured": measured, "measuredAt": timestamp(now)}


def _measured(moment: Moment) -> Iterable[tuple[str, float]]:
    prefill, decode = moment.prefill, moment.decode
    yield "prefillTokensPerSecond", prefill.velocity
    yield "linkMBps", moment.transfer.velocity / 1e6
    yield "decodeTokensPerSecond", decode.velocity
    yield "prefillBusyPercent", 100 * prefill.busy / max(1, prefill.engines)
    yield "ttftMs", 1000 * moment.first_token
    yield "itlMs", 1000 * decode.gap
    yield "waitingRequests", prefill.waiting + decode.waiting


def _rounded(value: float) -> int:
    """Return a whole number with two digits that say something."""
    return int(float(f"{min(value, 1e15):.1e}")) if value >= 100 else round(value)


def _differ(old: Mapping[str, Any], new: Mapping[str, int]) -> bool:
    for name in old.keys() | new.keys():
        was, now = old.get(name, 0), new.get(name, 0)
        if not isinstance(was, int) or abs(was - now) > max(1, DIFFERENT * max(was, now)):
            return True
    return False
