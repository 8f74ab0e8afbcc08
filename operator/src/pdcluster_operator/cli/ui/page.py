"""From a PDCluster's objects to what the page shows of it. Pure: no I/O, and no HTML.

A field of the PDCluster that has another type than expected counts as missing.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pdcluster_operator.api.conditions import ConditionType, find_condition, seconds
from pdcluster_operator.api.remedies import Severity, find, next_step
from pdcluster_operator.api.spec.pod_templates import as_mapping
from pdcluster_operator.cli.ui import model
from pdcluster_operator.cli.ui.matrix import ORDER, matrix_of
from pdcluster_operator.plan.observed import pods as pod_views
from pdcluster_operator.plan.observed.pods import metadata_of, status_of, text_of

COUNTS = ("prefill", "decode", "links")
"""Fields of the status, each as in 1/2."""
MOST_ENGINES = 256
MOST_MOMENTS = 40
LONGEST = 2048
STEPS = ("", "Starting", "LoadingWeights", "WarmingUp", "Ready")
"""The steps of an engine's start. The first one is that it has a pod."""
TONES = {
    Severity.GOOD: "good",
    Severity.PROGRESS: "busy",
    Severity.ADVICE: "busy",
    Severity.WAITS: "bad",
    Severity.FAULT: "bad",
}


def page_of(facts: model.Facts) -> model.Page:
    """Return the page of one PDCluster."""
    metadata = metadata_of(facts.cluster)
    state, headline = headline_of(facts.cluster)
    engines = tuple(_engines(facts))
    conditions = tuple(_conditions(facts.cluster))
    return model.Page(
        namespace=text_of(metadata.get("namespace")) or "default",
        name=text_of(metadata.get("name")),
        state=state,
        headline=headline,
        figures=tuple(_figures(facts.cluster, engines)),
        engines=tuple(sorted(engines, key=lambda one: ORDER[one.state.tone])[:MOST_ENGINES]),
        matrix=matrix_of(facts, engines),
        conditions=tuple(one for one in conditions if one.type != ConditionType.READY),
        ready=next((one for one in conditions if one.type == ConditionType.READY), None),
        timeline=timeline_of(facts),
        notes=facts.notes,
    )


def row_of(cluster: Mapping[str, Any]) -> model.Row:
    """Return the row of one PDCluster in the list of all."""
    metadata, status = metadata_of(cluster), status_of(cluster)
    prefill, decode, links = (text_of(status.get(name)) or "–" for name in COUNTS)
    where = text_of(metadata.get("namespace")) or "default", text_of(metadata.get("name"))
    return model.Row(*where, *headline_of(cluster), prefill, decode, links)


def headline_of(cluster: Mapping[str, Any]) -> tuple[model.Mark, str]:
    """Return whether a PDCluster serves, and in one sentence why not."""
    status, metadata = status_of(cluster), metadata_of(cluster)
    ready = find_condition(status, ConditionType.READY)
    serves = find_condition(status, ConditionType.AVAILABLE).get("status") == "True"
    why = ": ".join(filter(None, (text_of(ready.get(part)) for part in ("reason", "message"))))
    if not ready or ready.get("reason") == "NotSeenYet":
        return model.Mark("New", "busy"), (
            "The operator has not written a status yet. If this stays, look whether it runs."
        )
    if _number(metadata.get("generation")) > _number(status.get("observedGeneration")):
        mark = model.Mark("Serves" if serves else "Does not serve", "busy")
        return mark, f"The operator has not seen the newest spec yet. Before, it said: {why}"
    if ready.get("status") == "True":
        return model.Mark("Ready", "good"), "It serves, and KV was seen to move over its links."
    tone = tone_of(ConditionType.READY, ready)
    return model.Mark("Serves, not Ready" if serves else "Does not serve", tone), why


def tone_of(kind: str, condition: Mapping[str, Any]) -> str:
    """Return how a condition looks. Progressing holds while something is still to be done."""
    status = condition.get("status")
    if status == "True" and kind != ConditionType.PROGRESSING:
        return "good"
    unknown = "busy" if status in ("True", "Unknown") else "bad"
    return _tone(text_of(condition.get("reason")), text_of(condition.get("message")), unknown)


def _tone(reason: str, message: str, unknown: str) -> str:
    found = find(reason, message)
    return TONES[found.severity] if found else unknown


def _figures(
    cluster: Mapping[str, Any], engines: Sequence[model.Engine]
) -> Iterator[tuple[str, str]]:
    status, spec = status_of(cluster), as_mapping(cluster.get("spec"))
    for name in COUNTS:
        yield name.capitalize(), text_of(status.get(name)) or "–"
    if gpus := sum(engine.gpus for engine in engines):
        yield "GPUs", str(gpus)
    yield (
        "Model",
        text_of(status.get("model")) or text_of(as_mapping(spec.get("model")).get("name")),
    )
    yield "Endpoint", text_of(status.get("endpoint")) or "–"
    if certificates := text_of(as_mapping(status.get("transfer")).get("certificates")):
        yield "Certificates", certificates


def _conditions(cluster: Mapping[str, Any]) -> Iterator[model.Condition]:
    metadata = metadata_of(cluster)
    where = text_of(metadata.get("name")), text_of(metadata.get("namespace")) or "default"
    for kind in ConditionType:
        if found := find_condition(status_of(cluster), kind):
            reason, message = text_of(found.get("reason")), text_of(found.get("message"))
            tone = tone_of(kind, found)
            yield model.Condition(
                type=kind.value,
                state=model.Mark(text_of(found.get("status")), tone),
                reason=reason,
                message=message[:LONGEST],
                since=seconds(found.get("lastTransitionTime")),
                next="" if tone == "good" else next_step(reason, *where, message=message),
            )


def _engines(facts: model.Facts) -> Iterator[model.Engine]:
    """Yield the wanted engines in the order of the status, then those that still have pods."""
    pods = pod_views.pods_by_engine(facts.pods)
    status = model.entries(status_of(facts.cluster).get("engines"))
    told = {name: one for one in status if (name := text_of(one.get("name")))}
    for name in [*told, *sorted(set(pods) - set(told))]:
        yield _engine(name, told.get(name), pods.get(name, []))


def _engine(
    name: str,
    told: Mapping[str, Any] | None,
    pods: Sequence[Mapping[str, Any]],
) -> model.Engine:
    _, role, revision, index = ["", "", "", *name.rsplit("-", 3)][-4:]
    state, doing = _state(told, pods)
    ends = [end for pod in pods if (end := pod_views.previous_end(pod))]
    if ends and ends[0] not in doing:
        doing = "; ".join(filter(None, (doing, f"its last process ended: {ends[0]}")))
    tone = "quiet" if state == "Leaving" else _tone(state, doing, "busy")
    return model.Engine(
        name=name,
        short=f"{role}/{index}" if index.isdecimal() else name,
        role=text_of((told or {}).get("role")) or role,
        revision=revision,
        state=model.Mark(state, tone),
        step=STEPS.index(state) + 1 if state in STEPS else int(bool(pods)),
        doing=doing[:LONGEST],
        restarts=sum(map(_restarts, pods)),
        gpus=sum(map(pod_views.accelerators, pods)),
        since=min(filter(None, (_made(pod) for pod in pods)), default=None),
        pods=tuple(text_of(metadata_of(pod).get("name")) for pod in pods),
    )


def _state(
    told: Mapping[str, Any] | None,
    pods: Sequence[Mapping[str, Any]],
) -> tuple[str, str]:
    """Return an engine's state and what it does, from the status or its pods."""
    if told is None:
        return "Leaving", "the spec does not want it any more"
    state, doing = text_of(told.get("state")) or "Unknown", text_of(told.get("message"))
    trouble = next(filter(None, map(pod_views.pod_trouble, pods)), None)
    if trouble is not None and state == "Unknown":
        return str(trouble.reason), trouble.message
    return state, doing


def timeline_of(facts: model.Facts) -> tuple[model.Moment, ...]:
    """Return what happened, the newest first: conditions that flipped, events, pods."""
    moments = [*_flips(status_of(facts.cluster)), *_happened(facts.events)]
    for pod in facts.pods:
        moments += _lived(pod)
    newest = sorted(moments, key=lambda one: (one.at, one.subject), reverse=True)
    return tuple(newest[:MOST_MOMENTS])


def _flips(status: Mapping[str, Any]) -> Iterator[model.Moment]:
    for kind in ConditionType:
        found = find_condition(status, kind)
        if (at := seconds(found.get("lastTransitionTime"))) is not None:
            words = f"became {found.get('status')}: {text_of(found.get('reason'))}"
            yield model.Moment(at, kind.value, words, tone_of(kind, found))


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
        count = _number(series.get("count") or event.get("deprecatedCount"))
        words = ": ".join(filter(None, (text_of(event.get("reason")), text_of(event.get("note")))))
        subject = text_of(as_mapping(event.get("regarding")).get("name"))
        tone = "bad" if event.get("type") == "Warning" else "quiet"
        again = f" ({count} times)" if count > 1 else ""
        yield model.Moment(at, subject, words[:LONGEST] + again, tone)


def _lived(pod: Mapping[str, Any]) -> Iterator[model.Moment]:
    """Yield when a pod was made, became ready, and when its processes ended."""
    name = text_of(metadata_of(pod).get("name"))
    if (made := _made(pod)) is not None:
        yield model.Moment(made, name, "the pod was made", "quiet")
    for one in model.entries(status_of(pod).get("conditions")):
        at = seconds(one.get("lastTransitionTime"))
        if one.get("type") == "Ready" and one.get("status") == "True" and at is not None:
            yield model.Moment(at, name, "the pod is ready", "good")
    for container in model.entries(status_of(pod).get("containerStatuses")):
        for part in ("lastState", "state"):
            ended = as_mapping(as_mapping(container.get(part)).get("terminated"))
            if (at := seconds(ended.get("finishedAt"))) is not None:
                words = f"its process ended: {pod_views.describe_end(ended)}"
                yield model.Moment(at, name, words, "bad" if ended.get("exitCode") else "quiet")


def _made(pod: Mapping[str, Any]) -> float | None:
    return seconds(metadata_of(pod).get("creationTimestamp"))


def _restarts(pod: Mapping[str, Any]) -> int:
    statuses = model.entries(status_of(pod).get("containerStatuses"))
    return sum(_number(one.get("restartCount")) for one in statuses)


def _number(value: object) -> int:
    return value if isinstance(value, int) else 0
