"""Finds out why an engine died, from vLLM's last lines of output. Pure.

Each process of a dying engine prints a traceback. The worker's traceback has the cause. Then come
wrappers of the engine core and of the API server ("See root cause above"), and warnings about
leaks. A user needs the last exception that does not wrap another one.
"""

import re
import signal
from collections.abc import Sequence
from contextlib import suppress
from enum import IntEnum
from typing import Final

# A worker's traceback has some 60 lines, and sixteen workers may die of the same cause.
MAX_LINES: Final = 1500
MAX_LINE: Final = 1000
MAX_WORDS: Final = 1500

_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_PROCESS = re.compile(r"^\([\w.\- ]+ pid=\d+\) ?")
_LEVEL = re.compile(
    r"^(?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL) \d\d-\d\d \d\d:\d\d:\d\d \[[^\]]*\] ?"
)
_EXCEPTION = re.compile(
    r"^(?:[A-Za-z_]\w*\.)*(?P<name>[A-Z]\w*(?:Error|Exception|Exit|Fault|Died|Failure)|Exception)"
    r"(?:: (?P<text>.*))?$"
)
_USAGE = re.compile(r"^[\w.\-]+(?: [\w\-]+)?: error: (?P<text>.+)$")
_FATAL = re.compile(
    r"^(?:Fatal Python error: |terminate called after |\s*what\(\):\s+)(?P<text>.+)$"
)
_QUOTED = re.compile(r"^Worker failed with error '(?P<text>.+?)',? please check")
_WORKER_DIED = re.compile(
    r"Worker proc (?P<who>\S+) died unexpectedly \(exit code: (?P<code>[^)]+)\)"
)
_CORE_DIED = re.compile(r"Failed core proc\(s\): \{'(?P<who>\w+)': (?P<code>-\d+)")
# The line that ``launcher/inside_vllm.py`` prints. A SIGKILL comes from outside, so no other line
# explains it.
KILLED = re.compile(
    r"^pdcluster: (?P<text>vLLM's process \S+) \(pid (?P<pid>\d+)\) was killed by (?P<how>.+)$"
)
# vLLM prints this before it kills a process that hangs during a stop. That is not why it stopped.
_FORCED = re.compile(r"^\[shutdown\] .*\bforce killing .+ pid (?P<pid>\d+)$")
_SEVERAL = re.compile(r"^\d+ validation errors? for ")  # pydantic's: the errors follow
_DETAIL_TAIL = re.compile(r" \[type=\w+, input_value=.*$")

_WRAPPERS: Final = re.compile(
    r"[Ss]ee root cause above|[Ss]ee stack trace|check the stack trace|EngineCore encountered an "
    r"issue|died unexpectedly|Executor failed|cancelled|[Cc]onnection closed by peer|"
    r"[Cc]onnection reset|[Bb]roken pipe|Socket closed|ran out of input"
)
_WRAPPER_NAMES: Final = frozenset({
    "EngineDeadError", "CancelledError", "BrokenPipeError", "ConnectionResetError", "EOFError",
    "SystemExit", "ConnectionRefusedError", "DistBackendError",
})  # fmt: skip


class _Worth(IntEnum):
    """How much a line explains. The last line with the highest worth is chosen."""

    WRAPPER = 1
    LOGGED = 2
    QUOTED = 3
    DEATH = 4
    CAUSE = 5
    KILLED = 6


def choose(lines: Sequence[str]) -> str | None:
    """Choose the line that says why the engine died, without log prefixes; None if there is none.

    In order of preference: a SIGKILL that is not vLLM's own; an exception (or usage error, or fatal
    message of the runtime) that is not a wrapper; the death of one of vLLM's processes; what a
    wrapper quotes; a line logged as an error; a wrapper.
    """
    bare = [_bare(line) for line in lines]
    forced = {match["pid"] for _, text in bare if (match := _FORCED.match(text))}
    best: tuple[_Worth, str] | None = None
    for index, (level, text) in enumerate(bare):
        if (killed := KILLED.match(text)) and killed["pid"] in forced:
            continue
        told = _told(level, text, [follower for _, follower in bare[index + 1 : index + 4]])
        if told is not None and (best is None or told[0] >= best[0]):
            best = told
    return best[1][:MAX_WORDS] if best else None


def death(
    code: int, words: str | None, *, out_of_memory: bool, process: str = "vLLM's API server"
) -> str:
    """Describe, in one sentence, an end of the engine that nobody asked for.

    Args:
        code: the exit code of the engine's first process, as a shell shows it.
        words: what :func:`choose` found.
        out_of_memory: whether the kernel killed processes since the start, because memory ran out.
        process: the name of the engine's first process.
    """
    killed = _killed(code)
    said = f"; its last words: {words}" if words and killed else ""
    victim = process if killed == "SIGKILL" else _victim(words)
    if out_of_memory and victim:
        return (
            f"out of memory: the kernel killed {victim}; raise the memory limit, or lower the KV "
            "cache (--kv-cache-memory-bytes or VLLM_CPU_KVCACHE_SPACE) or --max-model-len"
        )
    if killed:
        return f"{process} was killed by {killed}{said}"
    return words or f"the engine ended with code {code} and did not say why"


def _killed(code: int) -> str:
    """Return the signal of an exit code; empty if there is none."""
    with suppress(ValueError):
        return signal.Signals(code - 128).name
    return ""


def _victim(words: str | None) -> str:
    """Return the process that was killed by SIGKILL in what :func:`choose` found."""
    name, killed, _ = (words or "").partition(" was killed by SIGKILL")
    return name if killed and name.startswith("vLLM's process ") else ""


def _bare(line: str) -> tuple[str, str]:
    """(log level or '', the line without process and log prefix)."""
    text = _PROCESS.sub("", _ANSI.sub("", line).rstrip("\r\n"))
    match = _LEVEL.match(text)
    if match is None:
        return "", text.rstrip()
    return match["level"], text[match.end() :].rstrip()


def _told(level: str, text: str, following: Sequence[str]) -> tuple[_Worth, str] | None:
    if match := KILLED.match(text):
        worth = _Worth.KILLED if match["how"] == "SIGKILL" else _Worth.DEATH
        return worth, f"{match['text']} was killed by {match['how']}"
    for pattern in (_USAGE, _FATAL):
        if match := pattern.match(text):
            return _Worth.CAUSE, match["text"]
    for pattern in (_WORKER_DIED, _CORE_DIED):
        if match := pattern.search(text):
            return _Worth.DEATH, f"vLLM's process {match['who']} {_death(match['code'])}"
    if match := _EXCEPTION.match(text):
        return _exception(match["name"], match["text"] or "", following)
    if level in {"ERROR", "CRITICAL"} and text[:1].strip() and not text.startswith("Traceback "):
        return (_Worth.WRAPPER if _WRAPPERS.search(text) else _Worth.LOGGED), text
    return None


def _exception(name: str, message: str, following: Sequence[str]) -> tuple[_Worth, str]:
    if match := _QUOTED.match(message):
        return _Worth.QUOTED, match["text"]
    for line in following if _SEVERAL.match(message) else ():
        if not line.startswith("  ") or line.startswith('  File "'):
            break
        if "For further information visit" not in line:
            message = f"{message}: {_DETAIL_TAIL.sub('', line.strip())}"
    wraps = name in _WRAPPER_NAMES or _WRAPPERS.search(message) is not None
    return (_Worth.WRAPPER if wraps else _Worth.CAUSE), f"{name}: {message}" if message else name


def _death(code: str) -> str:
    try:
        return f"was killed by {signal.Signals(-int(code)).name}"
    except ValueError:
        return "died" if code == "None" else f"ended with exit code {code}"
