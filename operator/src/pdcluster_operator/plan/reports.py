"""What launchers say, read from their JSON: total and bounded.

A launcher may be one version older or newer, so unknown fields are ignored and a value of
the wrong type counts as not given.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

MAX_LINKS = 4096
MAX_TEXT = 1024
MAX_ID = 512
"""As the status holds an engine's id. A longer one counts as not given."""
LONGEST_REVISION = 64
LARGEST_NUMBER = 1e18
LARGEST_SIZE = 1024
LATEST = 253_402_300_800.0
"""The year 10000, which no time in Kubernetes can name. In seconds since the epoch."""
LEAST_PROMPTS = 20
"""With fewer prompts, one of them would be more than five percent."""


class ReportedState(StrEnum):
    """How far a link, or the canary on it, has come."""

    PENDING = "Pending"
    ESTABLISHED = "Established"
    PASSED = "Passed"
    FAILED = "Failed"


@dataclass(frozen=True, slots=True)
class EngineReport:
    """``GET /readyz`` of an engine's leader.

    Attributes:
        engine: logical id.
        engine_id: logical id and incarnation; changes with every restart.
        state: Starting, LoadingWeights, WarmingUp, Ready, Draining or Failed.
        side_channel: host:port of the KV handshake.
        api: base URL of the OpenAI API.
        data_parallel_size: its data-parallel ranks, each with a side channel of its own; None if
            it does not say.
        certificate_expires: when the certificate that it uses expires, in seconds since the epoch;
            None if it has none, or does not say.
        routed: whether it was told that routers may send it requests; None if it cannot be told.
    """

    ready: bool
    engine: str
    engine_id: str
    role: str = ""
    state: str = "Starting"
    message: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    side_channel: str = ""
    api: str = ""
    data_parallel_size: int | None = None
    certificate_expires: float | None = None
    routed: bool | None = None


@dataclass(frozen=True, slots=True)
class CanaryReport:
    """The last canary request over one link."""

    state: ReportedState = ReportedState.PENDING
    bytes: int = 0
    message: str = ""


@dataclass(frozen=True, slots=True)
class ReportedLink:
    """One prefill engine as a decode engine sees it.

    Attributes:
        shards: established of all, e.g. ``2/2``.
        bytes_per_second: measured by the probe read; 0 if not measured.
    """

    prefill: str
    prefill_engine_id: str = ""
    state: ReportedState = ReportedState.PENDING
    reason: str = ""
    message: str = ""
    shards: str = ""
    bytes_per_second: float = 0.0
    canary: CanaryReport = field(default_factory=CanaryReport)


@dataclass(frozen=True, slots=True)
class PromptsReport:
    """The latest prompts of a decode engine that prefill should have computed.

    Attributes:
        percent: those that decode computed itself, rounded up; None if too little is known. It is 0
            only if decode computed none.
        cause: the reason of most of these; empty if there are none.
        prompts: how many there were. As ``local``, it changes all the time, and makes no
            difference between two reports.
        local: how many of them decode computed itself.
    """

    percent: int | None
    cause: str
    prompts: int = field(compare=False)
    local: int = field(compare=False)


@dataclass(frozen=True, slots=True)
class LinksReport:
    """``GET /v1/links`` of a decode engine's leader.

    ``prompts`` is None if the launcher is of a version that does not tell them.
    """

    engine: str
    engine_id: str
    links: tuple[ReportedLink, ...] = ()
    prompts: PromptsReport | None = None


@dataclass(frozen=True, slots=True)
class LauncherNews:
    """``GET /v1/changes``: a launcher's revision, and what it tells since then.

    ``engine`` and ``links`` are None if nothing is new, and if the launcher is of a version that
    has to be asked for them.
    """

    revision: str
    engine: EngineReport | None = None
    links: LinksReport | None = None


def parse_news(document: object) -> LauncherNews | None:
    """Read a ``/v1/changes`` document; None if it is not one."""
    revision = document.get("revision") if isinstance(document, Mapping) else None
    if not isinstance(document, Mapping) or not isinstance(revision, str):
        return None
    if len(revision) > LONGEST_REVISION:
        return None
    engine = parse_engine_report(document.get("readyz"))
    links = parse_links_report(document.get("links"))
    return LauncherNews(revision, engine, links if engine is not None else None)


def parse_engine_report(document: object) -> EngineReport | None:
    """Read a ``/readyz`` document; None if it is not one."""
    if not isinstance(document, Mapping) or not _text(document, "engine"):
        return None
    versions = document.get("versions")
    known = versions if isinstance(versions, Mapping) else {}
    return EngineReport(
        ready=document.get("ready") is True,
        engine=_text(document, "engine"),
        engine_id=_id(document, "engine_id"),
        role=_text(document, "role"),
        state=_text(document, "state") or "Starting",
        message=_text(document, "message"),
        versions={str(key)[:64]: str(value)[:64] for key, value in list(known.items())[:16]},
        side_channel=_text(document, "side_channel"),
        api=_text(document, "api"),
        data_parallel_size=_size(document, "data_parallel_size"),
        certificate_expires=_moment(document, "certificate_expires"),
        routed=routed if isinstance(routed := document.get("routed"), bool) else None,
    )


def parse_links_report(document: object) -> LinksReport | None:
    """Read a ``/v1/links`` document; None if it is not one."""
    if not isinstance(document, Mapping) or not isinstance(document.get("links"), list):
        return None
    links = [_link(entry) for entry in document["links"][:MAX_LINKS] if isinstance(entry, Mapping)]
    return LinksReport(
        engine=_text(document, "engine"),
        engine_id=_id(document, "engine_id"),
        links=tuple(link for link in links if link.prefill),
        prompts=_prompts(document["prompts"]) if "prompts" in document else None,
    )


def local_share(reports: Iterable[LinksReport]) -> float | None:
    """Return which share (0 to 1) of a cluster's prompts decode computed; None without prompts."""
    told = [report.prompts for report in reports if report.prompts is not None]
    prompts = sum(report.prompts for report in told)
    return sum(report.local for report in told) / prompts if prompts else None


def _prompts(entry: object) -> PromptsReport:
    if not isinstance(entry, Mapping):
        return PromptsReport(None, "", 0, 0)  # the engine was not asked yet, or did not answer
    prompts = int(_number(entry, "prompts"))
    local = min(int(_number(entry, "local")), prompts)
    told = prompts >= LEAST_PROMPTS or not local
    percent = -(-100 * local // prompts) if prompts else 0
    cause = _text(entry, "cause") if local else ""
    return PromptsReport(percent if told else None, cause, prompts, local)


def _link(entry: Mapping[str, Any]) -> ReportedLink:
    canary = entry.get("canary")
    return ReportedLink(
        prefill=_text(entry, "prefill"),
        prefill_engine_id=_id(entry, "prefill_engine_id"),
        state=_state(entry),
        reason=_text(entry, "reason"),
        message=_text(entry, "message"),
        shards=_text(entry, "shards"),
        bytes_per_second=_number(entry, "bytes_per_second"),
        canary=_canary(canary) if isinstance(canary, Mapping) else CanaryReport(),
    )


def _canary(entry: Mapping[str, Any]) -> CanaryReport:
    return CanaryReport(_state(entry), int(_number(entry, "bytes")), _text(entry, "message"))


def _state(entry: Mapping[str, Any]) -> ReportedState:
    text = _text(entry, "state")
    return ReportedState(text) if text in set(ReportedState) else ReportedState.PENDING


def _text(entry: Mapping[str, Any], key: str) -> str:
    value = entry.get(key)
    return value[:MAX_TEXT] if isinstance(value, str) else ""


def _id(entry: Mapping[str, Any], key: str) -> str:
    value = entry.get(key)
    return value if isinstance(value, str) and len(value) <= MAX_ID else ""


def _size(entry: Mapping[str, Any], key: str) -> int | None:
    value = entry.get(key)
    if not isinstance(value, int) or isinstance(value, bool):
        return None
    return value if 1 <= value <= LARGEST_SIZE else None


def _moment(entry: Mapping[str, Any], key: str) -> float | None:
    value = _number(entry, key)
    return value if 0 < value < LATEST else None


def _number(entry: Mapping[str, Any], key: str) -> float:
    value = entry.get(key)
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return 0.0
    # NaN and the infinities lie in no interval.
    return float(value) if 0 <= value <= LARGEST_NUMBER else 0.0
