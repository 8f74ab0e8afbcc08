"""How ``pdcluster status`` looks: a sentence, the facts, tables, and the next command."""

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.text import Text

from pdcluster_connector.compat.findings import counted
from pdcluster_operator.api.conditions import seconds
from pdcluster_operator.api.remedies import Severity
from pdcluster_operator.api.spec.pod_templates import as_mapping
from pdcluster_operator.cli.columns import Columns
from pdcluster_operator.cli.output import plain
from pdcluster_operator.cli.status_document import Status
from pdcluster_operator.cli.status_facts import duration

STYLES: dict[str, str] = {
    **dict.fromkeys(("True", "Ready"), "green"),
    **dict.fromkeys(("False",), "red"),
    **dict.fromkeys(("Unknown",), "yellow"),
    **dict.fromkeys((Severity.FAULT, Severity.WAITS), "red"),
    **dict.fromkeys((Severity.PROGRESS, Severity.ADVICE), "yellow"),
}
MOST_STEPS = 5


def status_view(facts: Status, now: float) -> RenderableType:
    """Return the whole, for :meth:`rich.console.Console.print`.

    Args:
        now: seconds since the epoch; the ages count from then.
    """
    return Group(*_parts(facts, now))


def print_status(console: Console, facts: Status, now: float) -> None:
    """Print it."""
    console.print(status_view(facts, now))


def _parts(facts: Status, now: float) -> Iterator[RenderableType]:
    colour = "green" if facts.ready else "yellow" if facts.serves else "red"
    yield Text(plain(facts.summary), f"bold {colour}")
    for line in facts.diagnosis:
        yield Text(line, "bold")
    for name, value in _facts(facts):
        yield Text(f"{name:10}", "dim").append(plain(value), "not dim")
    if facts.engines:
        yield Text()
        yield _engines(facts)
        if facts.not_shown:
            yield Text(f"{counted(facts.not_shown, 'more engine')}: not in the status", "dim")
    if facts.conditions:
        yield Text()
        yield _conditions(facts, now)
    if facts.failures:
        yield Text()
        table = Columns("FAILED", "AGO", "REASON", "MESSAGE")
        for one in facts.failures:
            table.add(one.about, _ago(one.time, now), one.reason, one.message)
        yield table
    yield from _steps(facts)


def _steps(facts: Status) -> Iterator[Text]:
    for step in facts.next[:MOST_STEPS]:
        yield Text()
        head = Text(step.reason, f"bold {STYLES.get(step.severity, '')}")
        yield head.append(f": {step.means} {step.remedy}".rstrip(), "not bold default")
        if step.command:
            # The terminal breaks the line, so that it can be copied whole.
            command = Text("  next: ", "dim", no_wrap=True, overflow="ignore")
            yield command.append(step.command, "not dim cyan")
        yield Text(f"  more: docs/{step.page}", "dim", no_wrap=True, overflow="ignore")
    if left := facts.next[MOST_STEPS:]:
        yield Text(f"and: {', '.join(step.reason for step in left)}", "dim")


def _facts(facts: Status) -> Iterator[tuple[str, str]]:
    yield "operator", facts.operator.message
    cause, _, message = facts.rollout.partition(": ")
    yield "rollout", cause if message and message in facts.summary else facts.rollout
    for role in facts.roles:
        old = f", and {counted(role.old, 'older engine')}" if role.old else ""
        yield role.role, f"{role.ready} ready{old}"
    if facts.links:
        yield "links", f"{facts.links} established"
    if facts.gpus.held or facts.gpus.waited_for:
        waits = f", and pods wait for {facts.gpus.waited_for}" if facts.gpus.waited_for else ""
        yield "GPUs", f"{facts.gpus.held} held by engines{waits}"
    if facts.scaling:
        yield "needed", _needed(facts.scaling)
    if facts.endpoint:
        yield "endpoint", facts.endpoint


MEASURED = {
    "ttftMs": "first token after {} ms",
    "itlMs": "{} ms between tokens",
    "prefillBusyPercent": "prefill busy for {} %",
    "prefillTokensPerSecond": "{} prompt tokens/s",
    "linkMBps": "{} MB/s a link",
    "decodeTokensPerSecond": "{} tokens/s",
    "waitingRequests": "{} waiting",
}


def _needed(scaling: Mapping[str, Any]) -> str:
    prefill, decode = (scaling.get(role, 0) for role in ("prefill", "decode"))
    limit, measured = scaling.get("limit"), as_mapping(scaling.get("measured"))
    at_limit = "" if limit in ("None", "Unknown", None) else f", because of {str(limit).lower()}"
    values = (words.format(measured[name]) for name, words in MEASURED.items() if name in measured)
    said = f"{prefill} prefill and {counted(decode, 'decode engine')}{at_limit}"
    return "; ".join((said, *filter(None, [", ".join(values)])))


def _engines(facts: Status) -> Columns:
    table = Columns("ENGINE", "STATE", "RESTARTS", "DOING")
    for one in facts.engines:
        doing = one.message
        if one.ended and one.ended not in doing:
            doing = f"{doing}; last end: {one.ended}" if doing else f"last end: {one.ended}"
        if not one.wanted:
            doing = f"an older engine{f': {doing}' if doing else ''}"
        table.add(one.name, _styled(one.state), str(one.restarts), doing)
    return table


def _conditions(facts: Status, now: float) -> Columns:
    table = Columns("CONDITION", "STATUS", "SINCE", "REASON", "MESSAGE")
    said = facts.summary  # several conditions have the same message
    for one in facts.conditions:
        since = _ago(one.since, now)
        # What is accepted, and what is not checked yet, is long and helps nobody at night.
        told = (one.type, one.status) == ("Accepted", "True") or one.message in said
        said += f" {one.message}"
        done = (one.type, one.reason) == ("Progressing", "Complete")
        status = Text(one.status) if done else _styled(one.status)
        table.add(one.type, status, since, one.reason, "" if told else one.message)
    return table


def _ago(moment: str, now: float) -> str:
    then = seconds(moment)
    return duration(max(0.0, now - then)) if then else ""


def _styled(word: str) -> Text:
    return Text(word, STYLES.get(word, "yellow"))
