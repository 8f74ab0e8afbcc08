"""What ``pdcluster bench`` found: figures of each arm, and a picture of them. Pure."""

import io
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple
from xml.sax.saxutils import escape, quoteattr

import msgspec

PD, AGGREGATED = "P/D", "aggregated"
ARMS = (PD, AGGREGATED)
MOST_PERCENT = 0.99


class Spread(msgspec.Struct, rename="camel", kw_only=True):
    """A figure: the median of the rounds, and the lowest and the highest round."""

    median: float
    low: float
    high: float
    rounds: list[float]


class Arm(msgspec.Struct, rename="camel", kw_only=True):
    """One way to serve the same requests. Times are milliseconds; each round has its own median.

    ``ttft``: until the first token. ``itl``: between two tokens. ``throughput``: generated tokens a
    second. The 99th percentiles are over all rounds.
    """

    name: str
    engines: int
    requests: int
    failed: int
    ttft: Spread
    itl: Spread
    throughput: Spread
    ttft_p99: float
    itl_p99: float


class Bench(msgspec.Struct, rename="camel", kw_only=True):
    """The whole result. ``prompts``: what became of them on decode, by outcome and reason.

    They are null if the metrics of a decode engine were not read.
    """

    name: str
    namespace: str
    way: str
    vllm: str
    rounds: int
    requests: int
    concurrency: int
    rate: float | None
    input_tokens: int
    output_tokens: int
    arms: list[Arm]
    prompts: dict[str, int] | None
    problem: str = ""


def arm(name: str, engines: int, runs: Sequence[Mapping[str, Any]]) -> Arm | None:
    """Return the figures of one arm; None if no request of a round succeeded.

    Args:
        runs: what the client told of each round.
    """
    runs = [run for run in runs if run["ttfts"]]
    if not runs:
        return None
    ttfts, itls = ([value for run in runs for value in run[key]] for key in ("ttfts", "itls"))
    return Arm(
        name=name,
        engines=engines,
        requests=len(ttfts) + sum(run["failed"] for run in runs),
        failed=sum(run["failed"] for run in runs),
        ttft=_spread([1e3 * statistics.median(run["ttfts"]) for run in runs]),
        itl=_spread([1e3 * statistics.median(run["itls"] or [0.0]) for run in runs]),
        throughput=_spread([run["tokens"] / run["seconds"] for run in runs]),
        ttft_p99=1e3 * percentile(ttfts, MOST_PERCENT),
        itl_p99=1e3 * percentile(itls or [0.0], MOST_PERCENT),
    )


def _spread(values: list[float]) -> Spread:
    return Spread(
        median=statistics.median(values), low=min(values), high=max(values), rounds=values
    )


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least this share of the values does not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


class Rect(NamedTuple):
    """A filled rectangle."""

    x: float
    y: float
    width: float
    height: float
    fill: str


class Label(NamedTuple):
    """Text; ``x`` is its middle, or its beginning if it is not centred."""

    x: float
    y: float
    text: str
    size: int = 13
    centred: bool = True
    fill: str = "#1f2933"


Shape = Rect | Label
WIDTH, HEIGHT, TOP, FLOOR = 780, 400, 110, 330
PANEL, BAR, GAP = 260, 74, 24
COLOURS = {PD: "#2563eb", AGGREGATED: "#9ca3af"}
INK, PAPER = "#1f2933", "#ffffff"
HALF = 0.75  # of a line's width


def picture(found: Bench) -> list[Shape]:
    """Return the picture: one panel a figure, one bar an arm, one line from lowest to highest."""
    load = f"{found.requests} requests a round, {found.concurrency} at once"
    tokens = f"{found.input_tokens} tokens in, {found.output_tokens} out"
    shapes: list[Shape] = [
        Rect(0, 0, WIDTH, HEIGHT, PAPER),
        Label(
            20,
            30,
            f"{found.namespace}/{found.name}: P/D and the same engines aggregated",
            17,
            False,
        ),
        Label(
            20,
            52,
            f"{load}, {tokens}; median of {found.rounds} rounds, lowest to highest",
            13,
            False,
        ),
    ]
    panels: Sequence[tuple[str, Callable[[Arm], Spread]]] = (
        ("time to the first token, ms", lambda one: one.ttft),
        ("between two tokens, ms", lambda one: one.itl),
        ("tokens a second", lambda one: one.throughput),
    )
    for number, (title, figure) in enumerate(panels):
        left = number * PANEL
        shapes.append(Label(left + PANEL / 2, TOP - 24, title))
        shapes += _bars(left, {one.name: figure(one) for one in found.arms})
        shapes.append(Rect(left + 20, FLOOR, PANEL - 40, 1, INK))
    return shapes


def _bars(left: float, figures: Mapping[str, Spread]) -> list[Shape]:
    most = max((one.high for one in figures.values()), default=0.0) or 1.0
    scale = (FLOOR - TOP - 30) / most
    shapes: list[Shape] = []
    start = left + (PANEL - len(figures) * BAR - (len(figures) - 1) * GAP) / 2
    for number, (name, one) in enumerate(figures.items()):
        x, middle = start + number * (BAR + GAP), start + number * (BAR + GAP) + BAR / 2
        shapes += [
            Rect(x, FLOOR - one.median * scale, BAR, one.median * scale, COLOURS[name]),
            Rect(
                middle - HALF, FLOOR - one.high * scale, 2 * HALF, (one.high - one.low) * scale, INK
            ),
            Label(middle, FLOOR - one.high * scale - 8, number_text(one.median)),
            Label(middle, FLOOR + 20, name),
        ]
    return shapes


def number_text(value: float) -> str:
    """Return a figure with three digits that count."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def svg(shapes: Sequence[Shape]) -> str:
    """Return the picture as SVG."""
    lines = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
            f'width="{WIDTH}" height="{HEIGHT}" font-family="system-ui, sans-serif" role="img">'
        )
    ]
    for one in shapes:
        if isinstance(one, Rect):
            place = f'x="{one.x:.1f}" y="{one.y:.1f}" width="{one.width:.1f}"'
            lines.append(f'<rect {place} height="{one.height:.1f}" fill={quoteattr(one.fill)}/>')
        else:
            anchor = ' text-anchor="middle"' if one.centred else ""
            place = f'x="{one.x:.1f}" y="{one.y:.1f}" font-size="{one.size}"'
            lines.append(
                f"<text {place} fill={quoteattr(one.fill)}{anchor}>{escape(one.text)}</text>"
            )
    return "\n".join([*lines, "</svg>", ""])


def png(shapes: Sequence[Shape]) -> bytes:
    """Return the picture as PNG, at twice the size.

    Raises:
        ImportError: Pillow is missing. vLLM needs it, too.
    """
    from PIL import Image, ImageDraw, ImageFont

    image = Image.new("RGB", (2 * WIDTH, 2 * HEIGHT), PAPER)
    draw = ImageDraw.Draw(image)
    for one in shapes:
        if isinstance(one, Rect):
            ends = (2 * one.x, 2 * one.y, 2 * (one.x + one.width), 2 * (one.y + one.height))
            draw.rectangle(ends, fill=one.fill)
        else:
            font = ImageFont.load_default(2 * one.size)
            anchor = "ms" if one.centred else "ls"
            draw.text((2 * one.x, 2 * one.y), one.text, one.fill, font, anchor)
    data = io.BytesIO()
    image.save(data, "PNG")
    return data.getvalue()
