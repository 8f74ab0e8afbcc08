"""From a PDCluster's objects to what the page shows of it. Pure: no I/O, and no HTML.

`pdcluster status` and `pdcluster links` say the same, from the same functions.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pdcluster_operator.api.conditions import ConditionType, find_condition, seconds
from pdcluster_operator.api.remedies import Severity, find
from pdcluster_operator.api.spec.pod_templates import as_mapping
from pdcluster_operator.cli import status_document as document
from pdcluster_operator.cli.links import Link, Links, links_of
from pdcluster_operator.cli.status_facts import Objects, status_of
from pdcluster_operator.cli.ui import model
from pdcluster_operator.plan.observed import pods as seen
from pdcluster_operator.plan.observed.pods import metadata_of, text_of

MOST_ENGINES = 256
MOST_MOMENTS = 40
MOST_SIDE = 64
"""Rows, and columns, of the matrix that are shown."""
MOST_LINKS = 256
WIDE = 8
"""Up to so many decode engines, a cell of the matrix has room for a number."""
STEPS = ("", "Starting", "LoadingWeights", "WarmingUp", "Ready")
"""The steps of an engine's start. The first one is that it has a pod."""
TONES = {
    Severity.GOOD: "good",
    Severity.PROGRESS: "busy",
    Severity.ADVICE: "busy",
    Severity.WAITS: "bad",
    Severity.FAULT: "bad",
}
LINKS = {
    "Verified": "good",
    "Established": "busy",
    "Pending": "busy",
    "Failed": "bad",
    "CanaryFailed": "bad",
}
ORDER = ("bad", "busy", "quiet", "good")
"""What somebody has to look at comes first."""


def page_of(found: Objects, notes: Sequence[str] = ()) -> model.Page:
    """Return the page of one PDCluster.

    Args:
        notes: what could not be read, and why.
    """
    status, links = status_of(found), links_of(found)
    pods = seen.pods_by_engine(found.pods)
    engines = sorted(
        (_engine(one, pods.get(one.name, ())) for one in status.engines),
        key=lambda one: ORDER.index(one.state.tone),
    )
    ready = find_condition(found.cluster.get("status"), ConditionType.READY)
    return model.Page(
        namespace=status.namespace,
        name=status.name,
        state=_mark(status),
        headline=status.summary,
        since=seconds(ready.get("lastTransitionTime")),
        diagnosis=tuple(status.diagnosis),
        steps=tuple(status.next),
        figures=tuple(_figures(found, status)),
        engines=tuple(engines[:MOST_ENGINES]),
        matrix=_matrix(links),
        conditions=tuple(_conditions(status)),
        timeline=_timeline(found, status),
        notes=tuple(notes),
    )


def row_of(cluster: Mapping[str, Any], now: float) -> model.Row:
    """Return the row of one PDCluster in the list of all."""
    status = status_of(Objects(cluster, (), None, lease_known=False, events=(), now=now))
    prefill, decode = (role.ready for role in status.roles)
    where = status.namespace, status.name
    return model.Row(*where, _mark(status), status.summary, prefill, decode, status.links or "–")


def _mark(status: document.Status) -> model.Mark:
    """Return whether it serves. The worst reason decides how that looks."""
    if status.ready:
        return model.Mark("Ready", "good")
    if status.operator.works is False:
        return model.Mark("No operator", "bad")
    words = {True: "Serves, not Ready", False: "Does not serve", None: "Unknown"}
    worst = TONES[Severity(status.next[0].severity)] if status.next else "busy"
    return model.Mark(words[status.serves], worst)


def _figures(found: Objects, status: document.Status) -> Iterator[tuple[str, str]]:
    told = as_mapping(found.cluster.get("status"))
    for role in status.roles:
        yield role.role.capitalize(), role.ready + (f" + {role.old} old" if role.old else "")
    yield "Links", status.links or "–"
    if status.gpus.held or status.gpus.waited_for:
        waits = f", waits for {status.gpus.waited_for}" if status.gpus.waited_for else ""
        yield "GPUs", f"{status.gpus.held}{waits}"
    yield "Model", text_of(told.get("model")) or "–"
    yield "Endpoint", status.endpoint or "–"
    yield "Rollout", text_of(find_condition(told, ConditionType.PROGRESSING).get("reason")) or "–"
    if certificates := text_of(as_mapping(told.get("transfer")).get("certificates")):
        yield "Certificates", certificates
    if status.operator.works is not True:
        yield "Operator", status.operator.message


def _tone(reason: str, message: str) -> str:
    found = find(reason, message)
    return TONES[found.severity] if found else "busy"


def _conditions(status: document.Status) -> Iterator[model.Condition]:
    """Yield the conditions but Ready, which the head shows."""
    commands = {step.reason: step.command for step in status.next}
    for one in status.conditions:
        if one.type == ConditionType.READY:
            continue
        # Progressing holds while something is still to be done.
        held = one.status == "True" and one.type != ConditionType.PROGRESSING
        tone = "good" if held else _tone(one.reason, one.message)
        remedy = find(one.reason, one.message)
        yield model.Condition(
            type=one.type,
            state=model.Mark(one.status, tone),
            reason=one.reason,
            message=one.message,
            since=seconds(one.since),
            next=commands.get(remedy.name, "") if remedy and tone == "bad" else "",
        )


def _engine(told: document.Engine, pods: Sequence[Mapping[str, Any]]) -> model.Engine:
    _, role, revision, index = ["", "", "", *told.name.rsplit("-", 3)][-4:]
    ended = f"its last process ended: {told.ended}" if told.ended not in told.message else ""
    doing = "; ".join(filter(None, (told.message, ended)))
    state = model.Mark(told.state, _tone(told.state, doing))
    if not told.wanted:
        state, doing = model.Mark("Leaving", "quiet"), "the spec does not want it any more"
    return model.Engine(
        name=told.name,
        short=f"{role}/{index}" if index.isdecimal() else told.name,
        revision=revision,
        state=state,
        step=STEPS.index(told.state) + 1 if told.state in STEPS else int(bool(pods)),
        doing=doing,
        restarts=told.restarts,
        gpus=sum(map(seen.accelerators, pods)),
        since=min(filter(None, map(_made, pods)), default=None),
    )


def _matrix(links: Links) -> model.Matrix:
    rows, columns = links.prefill[:MOST_SIDE], links.decode[:MOST_SIDE]
    known = {(one.prefill, one.decode): _link(links, one) for one in links.links}
    listed = sorted(known.values(), key=lambda one: ORDER.index(one.state.tone))
    counts = {
        "prefill engines": len(links.prefill) - MOST_SIDE,
        "decode engines": len(links.decode) - MOST_SIDE,
        "links, which the status leaves out": links.not_shown,
        "links in the list": len(listed) - MOST_LINKS,
    }
    return model.Matrix(
        summary=links.summary,
        columns=tuple(_short(one, links.decode) for one in columns),
        rows=tuple(
            (_short(p, links.prefill), tuple(known.get((p, d)) for d in columns)) for p in rows
        ),
        links=tuple(listed[:MOST_LINKS]),
        hidden=", ".join(f"{left} {what}" for what, left in counts.items() if left > 0),
        wide=len(columns) <= WIDE,
    )


def _link(links: Links, told: Link) -> model.Link:
    return model.Link(
        prefill=_short(told.prefill, links.prefill),
        decode=_short(told.decode, links.decode),
        state=model.Mark(told.state, LINKS.get(told.state, "quiet")),
        reason=told.reason,
        message=told.message,
        gigabytes=told.gigabytes_per_second,
        descriptors=told.descriptors,
        proof=told.proof_seconds,
    )


def _short(name: str, side: Sequence[str]) -> str:
    """Return ``prefill/0`` of a StatefulSet's name; with its revision if the side has several."""
    *_, role, revision, index = ["", "", *name.rsplit("-", 3)]
    several = len({one.rsplit("-", 2)[-2:][0] for one in side}) > 1
    return f"{role}/{index} {revision}" if several else f"{role}/{index}"


def _timeline(found: Objects, status: document.Status) -> tuple[model.Moment, ...]:
    """Return what happened, the newest first: conditions that flipped, events, pods."""
    moments = [*_flips(status), *_happened(found.events)]
    for pod in found.pods:
        moments += _lived(pod)
    newest = sorted(moments, key=lambda one: (one.at, one.subject), reverse=True)
    return tuple(newest[:MOST_MOMENTS])


def _flips(status: document.Status) -> Iterator[model.Moment]:
    for one in status.conditions:
        if (at := seconds(one.since)) is not None:
            tone = "good" if one.status == "True" else _tone(one.reason, one.message)
            yield model.Moment(at, one.type, f"became {one.status}: {one.reason}", tone)


def _happened(events: Sequence[Mapping[str, Any]]) -> Iterator[model.Moment]:
    for event in events:
        series = as_mapping(event.get("series"))
        times = (
            series.get("lastObservedTime"),
            event.get("eventTime"),
            event.get("deprecatedLastTimestamp"),
            metadata_of(event).get("creationTimestamp"),
        )
        at = next((moment for time in times if (moment := seconds(time)) is not None), None)
        if at is None:
            continue
        count = series.get("count") or event.get("deprecatedCount")
        again = f" ({count} times)" if isinstance(count, int) and count > 1 else ""
        words = ": ".join(filter(None, (text_of(event.get("reason")), text_of(event.get("note")))))
        subject = text_of(as_mapping(event.get("regarding")).get("name"))
        tone = "bad" if event.get("type") == "Warning" else "quiet"
        yield model.Moment(at, subject, words + again, tone)


def _lived(pod: Mapping[str, Any]) -> Iterator[model.Moment]:
    """Yield when a pod was made, became ready, and when its processes ended."""
    name, status = text_of(metadata_of(pod).get("name")), seen.status_of(pod)
    if (made := _made(pod)) is not None:
        yield model.Moment(made, name, "the pod was made", "quiet")
    for one in map(as_mapping, status.get("conditions") or ()):
        at = seconds(one.get("lastTransitionTime"))
        if one.get("type") == "Ready" and one.get("status") == "True" and at is not None:
            yield model.Moment(at, name, "the pod is ready", "good")
    for container in map(as_mapping, status.get("containerStatuses") or ()):
        for part in ("lastState", "state"):
            ended = as_mapping(as_mapping(container.get(part)).get("terminated"))
            if (at := seconds(ended.get("finishedAt"))) is not None:
                words = f"its process ended: {seen.describe_end(ended)}"
                yield model.Moment(at, name, words, "bad" if ended.get("exitCode") else "quiet")


def _made(pod: Mapping[str, Any]) -> float | None:
    return seconds(metadata_of(pod).get("creationTimestamp"))
