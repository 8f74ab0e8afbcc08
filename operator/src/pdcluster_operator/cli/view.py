"""What ``pdcluster up`` prints: the state of its cluster as a live table or as lines."""

import time
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import msgspec
from rich.console import Console, Group
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

from pdcluster_connector.protocol.launcher_documents import EngineReport, LinkReport
from pdcluster_operator.api.object_names import CLUSTER_LABEL, EngineName, engine_of, short
from pdcluster_operator.cli.columns import Columns
from pdcluster_operator.local.cluster import LocalCluster
from pdcluster_operator.plan.observed.pods import describe_end, is_pod_ready
from pdcluster_operator.runtime.interfaces import Key

WAITS_FOR_ENGINES = "waits until every engine answers"
WAITING = "WaitingForEngines"


@dataclass(frozen=True, slots=True)
class PodLine:
    """One pod, as ``up`` shows it.

    Attributes:
        state: one CamelCase word.
        doing: a sentence: the launcher's message, or why the pod waits.
        log: the file that its output goes to; None before its first start.
        restarts: how often its container was started again.
        end: how its last process ended; empty if none has.
        serves: whether its readiness probe passes; ``state`` may be of the process before.
    """

    name: str
    role: str
    address: str
    state: str
    doing: str
    log: Path | None
    restarts: int
    end: str = ""
    serves: bool = False


@dataclass(frozen=True, slots=True)
class Condition:
    """One condition of the cluster."""

    type: str
    status: str
    reason: str
    message: str = ""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A cluster at one moment. ``links`` are (decode engine, link) pairs."""

    pods: tuple[PodLine, ...]
    conditions: tuple[Condition, ...]
    links: tuple[tuple[str, LinkReport], ...]

    @property
    def ready(self) -> bool:
        """Whether the Ready condition is True."""
        return any(c.type == "Ready" and c.status == "True" for c in self.conditions)

    @property
    def missing(self) -> tuple[Condition, ...]:
        """Conditions other than Ready that do not hold: the cluster waits for them."""
        return tuple(c for c in self.conditions if c.status != "True" and c.type != "Ready")


def take_snapshot(local: LocalCluster, key: Key) -> Snapshot:
    """Read everything. It is cheap enough to be called several times a second."""
    status = local.cluster(key).get("status") or {}
    conditions = msgspec.convert(status.get("conditions") or (), tuple[Condition, ...])
    reports, logs = local.loop.monitor.engines(key), local.kubelet.logs()
    stopped = local.kubelet.stopped()
    pods = tuple(
        _pod_line(pod, reports, logs, stopped.get(pod["metadata"]["name"], ()))
        for pod in local.api.list("Pod", key.namespace)
        if (pod["metadata"].get("labels") or {}).get(CLUSTER_LABEL) == key.name
    )
    links = tuple(
        (decode, link)
        for decode, report in sorted(local.loop.monitor.links(key).items())
        for link in report.links
    )
    return Snapshot(pods, conditions, links)


def _pod_line(
    pod: Mapping[str, Any],
    reports: Mapping[str, EngineReport],
    logs: Mapping[str, Path],
    stopped: Sequence[int],
) -> PodLine:
    metadata, status, engine = pod["metadata"], pod.get("status") or {}, engine_of(pod)
    container = (status.get("containerStatuses") or [{}])[0]
    ended = (container.get("lastState") or {}).get("terminated")
    end = describe_end(ended) if ended else ""
    report = reports.get(engine.logical) if engine else None
    state, doing = _state(pod, container, end, engine, report)
    if stopped and state != "Terminating":
        pids = " ".join(map(str, stopped))
        state = "Frozen"
        doing = (
            f"a signal (SIGSTOP) has stopped {len(stopped)} of its processes, so nothing answers; "
            f"kill -CONT {pids} lets it go on"
        )
    return PodLine(
        name=metadata["name"],
        role=str(metadata["labels"].get("app.kubernetes.io/component", "")),
        address=status.get("podIP", ""),
        state=state,
        doing=doing,
        log=logs.get(metadata["name"]),
        restarts=container.get("restartCount", 0),
        end=end,
        serves=is_pod_ready(pod),
    )


def _state(
    pod: Mapping[str, Any],
    container: Mapping[str, Any],
    end: str,
    engine: EngineName | None,
    report: EngineReport | None,
) -> tuple[str, str]:
    if "deletionTimestamp" in pod["metadata"]:
        return "Terminating", ""
    waiting = container.get("state", {}).get("waiting")
    if waiting is not None:
        if waiting["reason"] == "CrashLoopBackOff":
            return "Died", f"{end}; {waiting['message']}"
        return waiting["reason"], waiting.get("message", "")
    for condition in pod.get("status", {}).get("conditions") or ():
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return condition["reason"], condition["message"]
    if report is not None:
        return ("Ready" if report.ready else report.state), report.message
    # A pod without a launcher is a router's, and that one listens last.
    starts = "Starting", "" if engine else WAITS_FOR_ENGINES
    return ("Ready", "") if is_pod_ready(pod) else starts


STYLES = {
    **dict.fromkeys(("True", "Ready", "Established", "Passed"), "green"),
    **dict.fromkeys(("False", "Died", "Failed", "Frozen"), "red"),
    **dict.fromkeys(("Unknown", "Pending"), "yellow"),
}


def pods_table(pods: Iterable[PodLine]) -> Columns:
    """Return one row a pod."""
    table = Columns("POD", "ROLE", "ADDRESS", "STATE", "DOING", one_line=True)
    for pod in pods:
        again = f" (start {pod.restarts + 1})" if pod.restarts else ""
        state = _styled(pod.state + again, pod.state)
        table.add(pod.name, pod.role, pod.address, state, pod.doing)
    return table


def links_table(links: Iterable[tuple[str, LinkReport]]) -> Columns:
    """Return one row a link: whether KV can move, how fast, and whether a canary passed."""
    table = Columns("PREFILL", "DECODE", "STATE", "SHARDS", "GB/s", "CANARY", "REASON")
    for decode, link in links:
        canary = link.canary.state.value
        reason = link.canary.message or " ".join(filter(None, (link.reason, link.message)))
        speed = f"{link.bytes_per_second / 1e9:.2f}" if link.bytes_per_second else ""
        table.add(
            short(link.prefill),
            short(decode),
            _styled(link.state.value, link.state),
            link.shards,
            speed,
            _styled(canary, canary),
            reason,
        )
    return table


def conditions_table(conditions: Iterable[Condition]) -> Columns:
    """Return the cluster's conditions, as ``kubectl describe`` shows them."""
    table = Columns("CONDITION", "STATUS", "REASON", "MESSAGE")
    for one in conditions:
        table.add(one.type, _styled(one.status, one.status), one.reason, one.message)
    return table


def waiting_for(snapshot: Snapshot) -> str:
    """Return the conditions that do not hold, in one line."""
    # Progressing and Available only repeat the other conditions.
    parts = [
        f"{c.type}={c.status} {c.reason}{': ' if c.message else ''}{c.message}"
        for c in snapshot.missing
        if c.type not in {"Progressing", "Available"} and c.reason != WAITING
    ]
    return "; ".join(parts) or next(
        (f"{c.type}={c.status} {c.reason}: {c.message}" for c in snapshot.missing),
        "the operator's first status",
    )


def _short(text: str) -> str:
    return text if len(text) <= LONGEST_LINE else text[: LONGEST_LINE - 1] + "…"


def _styled(text: str, key: str) -> Text:
    return Text(text, style=STYLES.get(key, ""))


SPINNER_WIDTH = 2
QUIET_SECONDS = 15.0
"""After this time without a line, the plain view says what it waits for, if that is new."""
LONGEST_LINE = 200


class View:
    """Shows snapshots. Use as a context manager; ``say`` prints a line that stays."""

    def __init__(self, console: Console, *, plain: bool) -> None:
        self.console = console
        self._live = (
            None
            if plain or not console.is_terminal
            else Live(console=console, transient=True, auto_refresh=True, refresh_per_second=4)
        )
        self._began = self._spoken = time.monotonic()
        self._last: dict[str, str] = {}

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.finish()

    def finish(self) -> None:
        """Remove the live table. Later lines are printed below the earlier ones."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def say(self, text: str) -> None:
        """One line that stays, with the seconds since the start."""
        self._spoken = time.monotonic()
        stamp = Text(f"[{self._spoken - self._began:6.1f} s] ", style="dim")
        self.console.print(stamp.append(Text(text, style="not dim")), soft_wrap=True)

    def show(self, snapshot: Snapshot) -> None:
        """Show a snapshot. Changes of pods are printed as lines; a live table shows everything."""
        for pod in snapshot.pods:
            self._print_change(pod)
        waiting = waiting_for(snapshot)
        if self._live is not None:
            elapsed = time.monotonic() - self._began
            line = Text(f"{elapsed:.0f} s, waiting for {waiting}", style="dim")
            first, *more = line.wrap(self.console, max(1, self.console.width - SPINNER_WIDTH))
            pods = pods_table(snapshot.pods)
            self._live.update(Group(pods, Spinner("dots", first), *more))
        elif not snapshot.ready and time.monotonic() - self._spoken > QUIET_SECONDS:
            self._say_new("waiting", f"waiting for {waiting}")

    def show_conditions(self, snapshot: Snapshot, types: Container[str]) -> None:
        """Print conditions whose status or reason changed since the last call."""
        for condition in snapshot.conditions:
            subject = f"condition {condition.type}"
            state = f"{condition.status} {condition.reason}"
            if condition.type not in types or self._last.get(subject) == state:
                continue
            self._last[subject] = state
            # The lines of the pods say why engines are not ready, and lint what is unchecked.
            if condition.reason != WAITING:
                detail = "" if condition.status == "True" else condition.message
                self.say(_short(f"{condition.type}: {' - '.join(filter(None, (state, detail)))}"))

    def mark_as_shown(self, snapshot: Snapshot) -> None:
        """Remember that these conditions were shown: another output has printed them."""
        for condition in snapshot.conditions:
            self._last[f"condition {condition.type}"] = f"{condition.status} {condition.reason}"

    def _say_new(self, subject: str, text: str) -> None:
        if self._last.get(subject) != text:
            self._last[subject] = text
            self.say(_short(text))

    def _print_change(self, pod: PodLine) -> None:
        # A live table shows messages as they change; lines are for changes of state.
        detail = f" - {pod.doing}" if pod.doing else ""
        key = pod.state if self._live is not None else f"{pod.state}{detail}"
        if self._last.get(pod.name) != key:
            self._last[pod.name] = key
            self.say(f"{pod.name}: {pod.state}{detail}")
