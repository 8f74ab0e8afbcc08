"""What engines' metrics say of the requests between two looks at them. Pure.

vLLM's histograms hold a sum and a count. If exactly one request ended between two looks, the
differences are that request's own times. If others ended, too, they are means, and say of how many.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from pdcluster_connector.protocol.prompt_outcomes import PROMPTS_METRIC

PREFILL_SECONDS = "vllm:request_prefill_time_seconds"
QUEUE_SECONDS = "vllm:request_queue_time_seconds"
DECODE_SECONDS = "vllm:request_decode_time_seconds"
FIRST_SECONDS = "vllm:time_to_first_token_seconds"
REQUEST_SECONDS = "vllm:e2e_request_latency_seconds"
RECEIVE_SECONDS = "pdcluster_kv_receive_seconds"
RECEIVED_BYTES = "pdcluster_kv_received_bytes_total"
NAMES = (
    PREFILL_SECONDS,
    QUEUE_SECONDS,
    DECODE_SECONDS,
    FIRST_SECONDS,
    REQUEST_SECONDS,
    RECEIVE_SECONDS,
)

MOST_VALUE = 1e18
"""No count, size or time of an engine gets there."""

Page = Mapping[tuple[str, str], float]
"""Values by name and ``phase`` (empty for most), over all data-parallel ranks."""


@dataclass(frozen=True, slots=True)
class Mean:
    """A duration in seconds, as the mean of so many requests (of so many ranks for transfers)."""

    seconds: float
    count: int


def read_page(text: str) -> dict[tuple[str, str], float]:
    """Return the values that are of use here; those of a page that cannot be read are none."""
    page: dict[tuple[str, str], float] = {}
    wanted = {RECEIVED_BYTES, *(f"{name}_{part}" for name in NAMES for part in ("sum", "count"))}
    for sample in _samples(text, wanted):
        key = sample.name, sample.labels.get("phase", "")
        page[key] = page.get(key, 0.0) + sample.value
    return page


def read_outcomes(text: str) -> Counter[str]:
    """Return how many prompts a decode engine has counted, by ``outcome`` or ``outcome/reason``."""
    found: Counter[str] = Counter()
    for sample in _samples(text, {PROMPTS_METRIC}):
        name = "/".join(filter(None, (sample.labels.get("outcome"), sample.labels.get("reason"))))
        found[name] += int(sample.value)
    return found


def _samples(text: str, wanted: set[str]) -> list[Sample]:
    return samples(
        line for line in text.splitlines() if line.partition("{")[0].split(" ")[0] in wanted
    )


def samples(lines: Iterable[str]) -> list[Sample]:
    """Return the samples of lines in Prometheus' format; none if they are in another one.

    NaN, and what is too large to be summed, is left out.
    """
    try:
        families = list(text_string_to_metric_families("\n".join(lines) + "\n"))
    except (ValueError, KeyError, IndexError):
        return []
    return [one for family in families for one in family.samples if abs(one.value) < MOST_VALUE]


def between(before: Page, after: Page, name: str, phase: str = "") -> Mean | None:
    """Return the mean of what ended between two looks; None if nothing did."""
    count = _grown(before, after, (f"{name}_count", phase))
    if count < 1:  # an engine that restarted begins at 0
        return None
    return Mean(_grown(before, after, (f"{name}_sum", phase)) / count, int(count))


def added(pages: Iterable[Page]) -> dict[tuple[str, str], float]:
    """Return the sum of several engines' pages."""
    total: dict[tuple[str, str], float] = {}
    for page in pages:
        for key, value in page.items():
            total[key] = total.get(key, 0.0) + value
    return total


def received(before: Page, after: Page) -> int:
    """Return the bytes of KV that came between two looks."""
    return max(0, int(_grown(before, after, (RECEIVED_BYTES, ""))))


def busy(before: Mapping[str, Page], after: Mapping[str, Page]) -> list[str]:
    """Return the engines on which a request ended between two looks."""
    both = [name for name in before if name in after]
    return [name for name in both if between(before[name], after[name], REQUEST_SECONDS)]


def _grown(before: Page, after: Page, key: tuple[str, str]) -> float:
    return after.get(key, 0.0) - before.get(key, 0.0)
