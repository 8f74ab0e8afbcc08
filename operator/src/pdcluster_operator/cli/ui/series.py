"""What the metrics of engines say over the last minutes, as numbers and as paths of an SVG. Pure.

The metrics are those of docs/metrics.md and vLLM's own. Counters of one engine are compared with
its own earlier ones: a restart begins at 0 and counts as no change.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from pdcluster_operator.cli.engine_metrics import samples

KEPT = 90
"""So many readings of each engine are kept: three minutes, at one in two seconds."""
WIDTH, HEIGHT = 120, 28
FAMILIES = (
    "pdcluster_kv_",
    "vllm:generation_tokens",
    "vllm:num_requests_",
    "vllm:kv_cache_usage_perc",
    "vllm:time_to_first_token_seconds",
    "vllm:inter_token_latency_seconds",
    "vllm:request_queue_time_seconds",
    "vllm:request_prefill_time_seconds",
)
BUCKETS = "_bucket{"
RECEIVE = "pdcluster_kv_receive_seconds"
PHASES = ("handshake", "post", "transfer", "fence", "total")


class Sample(NamedTuple):
    """The name of a sample, and the labels that tell samples apart here."""

    name: str
    label: str = ""


Numbers = list[float | None]
"""One for each moment, the newest last; None where nothing is known."""
Reading = Mapping[Sample, float]
"""One engine's samples at one moment, summed over its ranks."""


def is_read(line: str) -> bool:
    """Whether a line of a metrics page holds a sample that is shown."""
    return line.startswith(FAMILIES) and BUCKETS not in line


def reading_of(lines: Iterable[str]) -> Reading:
    """Return the samples of a page's lines; none if they are not in Prometheus' format."""
    found: dict[Sample, float] = {}
    for one in samples(lines):
        label = "/".join(
            one.labels[name] for name in ("phase", "outcome", "reason") if name in one.labels
        )
        key = Sample(one.name, label)
        found[key] = found.get(key, 0.0) + one.value
    return found


@dataclass(frozen=True)
class Spark:
    """One small picture with its newest number.

    Attributes:
        value: the newest number with its unit.
        path: of an SVG, in a box of WIDTH × HEIGHT; empty with fewer than two numbers.
        most: the largest number, which is at the top.
    """

    title: str
    value: str
    path: str
    most: str


@dataclass(frozen=True)
class Phase:
    """The mean of one phase of requests. ``share`` is that of the longest phase, from 0 to 1."""

    title: str
    count: int
    milliseconds: float
    share: float


@dataclass(frozen=True)
class Traffic:
    """What the metrics of one PDCluster's engines say.

    Attributes:
        engines: how many engines were read.
        outcomes: prompts of decode by what became of them, since their engines started.
    """

    engines: int
    seconds: int
    sparks: tuple[Spark, ...]
    phases: tuple[Phase, ...]
    outcomes: tuple[tuple[str, int], ...]


class History:
    """The last readings of each engine of one PDCluster."""

    def __init__(self) -> None:
        self._readings: deque[tuple[float, dict[tuple[str, str], Reading]]] = deque(maxlen=KEPT)

    def add(self, moment: float, readings: Mapping[tuple[str, str], Reading]) -> None:
        """Keep the readings of one moment, by (role, engine)."""
        self._readings.append((moment, dict(readings)))

    def traffic(self) -> Traffic | None:
        """Return what the readings say; None if there are none."""
        if not self._readings or not self._readings[-1][1]:
            return None
        (first, _), (last, newest) = self._readings[0], self._readings[-1]
        return Traffic(
            len(newest), round(last - first), tuple(self._sparks()), tuple(self._phases()),
            tuple(_outcomes(newest)),
        )  # fmt: skip

    def _sparks(self) -> Iterator[Spark]:
        """Yield the pictures of what was measured."""
        for title, numbers, words in self._measured():
            known = [n for n in numbers if n is not None]
            if known:
                yield Spark(title, words(known[-1]), _path(numbers, max(known)), words(max(known)))

    def _measured(self) -> Iterator[tuple[str, Numbers, Callable[[float], str]]]:
        received = self._rates("decode", "pdcluster_kv_received_bytes_total")
        yield ("KV received", received, _bandwidth)
        tokens = self._rates("decode", "vllm:generation_tokens_total")
        yield ("Tokens generated", tokens, lambda n: f"{n:,.0f} /s")
        for title, name in (
            ("Time to first token", "vllm:time_to_first_token_seconds"),
            ("Time between tokens", "vllm:inter_token_latency_seconds"),
        ):
            yield (title, self._means("decode", name), lambda n: f"{n * 1e3:,.1f} ms")
        for title, outcome in (("Prompts with KV", "transferred"), ("Computed by decode", "local")):
            prompts = self._rates("decode", "pdcluster_kv_prompts_total", outcome)
            yield (title, prompts, lambda n: f"{n:,.2f} /s")
        for role in ("prefill", "decode"):
            waiting = self._sums(role, "vllm:num_requests_waiting")
            yield (f"Waiting in {role}", waiting, lambda n: f"{n:,.0f}")
        failures = self._rates("decode", "pdcluster_kv_failures_total")
        yield ("Failed receives", failures, lambda n: f"{n:,.2f} /s")
        leases = self._sums("prefill", "pdcluster_kv_leases_held")
        yield ("Leases held", leases, lambda n: f"{n:,.0f}")

    def _phases(self) -> Iterator[Phase]:
        """Yield the phases of the requests in these minutes that had any."""
        asked = [
            ("wait in prefill", "prefill", "vllm:request_queue_time_seconds", ""),
            ("compute in prefill", "prefill", "vllm:request_prefill_time_seconds", ""),
            *((f"KV: {phase}", "decode", RECEIVE, phase) for phase in PHASES),
            ("hand over to decode", "prefill", "pdcluster_kv_handover_seconds", ""),
            ("first token of decode", "decode", "vllm:time_to_first_token_seconds", ""),
        ]
        found = []
        for title, role, name, label in asked:
            seconds, count = (
                sum(n for n in self._changes(role, name + part, label) if n)
                for part in ("_sum", "_count")
            )
            if count:
                found.append((title, round(count), seconds / count * 1e3))
        longest = max((ms for _, _, ms in found), default=0.0) or 1.0
        for title, count, ms in found:
            yield Phase(title, count, ms, ms / longest)

    def _changes(self, role: str, name: str, label: str = "") -> Iterator[float | None]:
        """Yield by how much a counter of a role's engines grew between readings."""
        readings = list(self._readings)
        for (_, before), (_, after) in pairwise(readings):
            grown = [
                max(0.0, _of(reading, name, label) - _of(before[engine], name, label))
                for engine, reading in after.items()
                if engine[0] == role and engine in before
            ]
            yield sum(grown) if grown else None

    def _rates(self, role: str, name: str, label: str = "") -> Numbers:
        readings = list(self._readings)
        spans = [b - a for (a, _), (b, _) in pairwise(readings)]
        return [
            None if n is None or span <= 0 else n / span
            for n, span in zip(self._changes(role, name, label), spans, strict=True)
        ]

    def _means(self, role: str, name: str) -> Numbers:
        pairs = zip(
            self._changes(role, f"{name}_sum"), self._changes(role, f"{name}_count"), strict=True
        )
        return [total / count if total is not None and count else None for total, count in pairs]

    def _sums(self, role: str, name: str) -> Numbers:
        ours = [
            [one for (of, _), one in readings.items() if of == role]
            for _, readings in self._readings
        ]
        return [sum(_of(one, name, "") for one in some) if some else None for some in ours]


def _of(reading: Reading, name: str, label: str) -> float:
    """Return the sum of the samples whose labels begin with one."""
    return sum(
        value
        for key, value in reading.items()
        if key.name == name and (not label or key.label.split("/")[0] == label)
    )


def _outcomes(newest: Mapping[tuple[str, str], Reading]) -> Iterator[tuple[str, int]]:
    counts: dict[str, float] = {}
    for (role, _), reading in newest.items():
        for key, value in reading.items():
            if role == "decode" and key.name == "pdcluster_kv_prompts_total" and value:
                words = ": ".join(filter(None, key.label.split("/")))
                counts[words] = counts.get(words, 0.0) + value
    for words, count in sorted(counts.items(), key=lambda one: -one[1])[:12]:
        yield words, round(count)


def _bandwidth(n: float) -> str:
    return f"{n / 1e9:,.2f} GB/s" if n >= 1e9 else f"{n / 1e6:,.1f} MB/s"


def _path(numbers: Numbers, most: float) -> str:
    """Return a line through the numbers, the newest at the right; a gap where there is none."""
    step, words, pen = WIDTH / (KEPT - 1), [], "M"
    left = WIDTH - step * (len(numbers) - 1)
    for place, number in enumerate(numbers):
        if number is None:
            pen = "M"
            continue
        y = HEIGHT - 1 - (number / most if most > 0 else 0.0) * (HEIGHT - 2)
        words.append(f"{pen}{left + place * step:.1f} {y:.1f}")
        pen = "L"
    return " ".join(words) if len(words) > 1 else ""
