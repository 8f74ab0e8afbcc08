"""`python -m bench_operator.report RUNS.json FOLDER`: what was measured, as SVG and as a table."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from bench_operator.thresholds import written

Found = dict[str, Any]
WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 640, 300, 60, 40, 50
COLORS = ("#326ce5", "#e07b39", "#4a9b5e")


class Series(NamedTuple):
    """One bar of each group."""

    name: str
    read: Callable[[Found], float]


class Plot(NamedTuple):
    """One picture: a group of bars for each number of PDClusters."""

    file: str
    title: str
    series: tuple[Series, ...]


def _mean_raw(found: Found) -> float:
    first, second = found["raw_objects_per_second"]
    return 2 / (1 / first + 1 / second)


PLOTS = (
    Plot(
        "operator-objects.svg",
        "Objects a second (more is better)",
        (
            Series("raw server-side apply", _mean_raw),
            Series("the operator", lambda found: found["objects_per_second"]),
        ),
    ),
    Plot(
        "operator-requests.svg",
        "Requests for one PDCluster (fewer is better)",
        (
            Series("children", lambda found: found["children"]),
            Series("writes", lambda found: found["writes_of_one"]),
            Series("reads", lambda found: found["reads_of_one"]),
        ),
    ),
    Plot(
        "operator-memory.svg",
        "Highest memory of the operator in MB (less is better)",
        (
            Series("of the process that made them", lambda found: found["rss_peak_megabytes"]),
            Series(
                "of one that starts when all are there",
                lambda found: found["restart"]["rss_peak_megabytes"],
            ),
        ),
    ),
)


COLUMNS: tuple[tuple[str, Callable[[Found], object]], ...] = (
    ("PDClusters", lambda found: found["pdclusters"]),
    ("commit, date", lambda found: f"{found.get('commit', '')}, {found.get('date', '')}"),
    ("TLS", lambda found: "yes" if found.get("tls") else "no"),
    (
        "raw objects/s (before, after)",
        lambda found: " ".join(map(str, found["raw_objects_per_second"])),
    ),
    ("objects/s", lambda found: found["objects_per_second"]),
    ("share of raw, objects", lambda found: found["share_of_raw_objects"]),
    ("share of raw, clusters", lambda found: found["share_of_raw_clusters"]),
    ("reads", lambda found: found["reads_of_one"]),
    ("writes (children)", lambda found: f"{found['writes_of_one']} ({found['children']})"),
    (
        "of these, status and events",
        lambda found: ", ".join(
            str(round(found["writes"].get(one, 0) / found["pdclusters"], 1))
            for one in ("pdclusters/status", "events")
        ),
    ),
    ("processor ms a cluster", lambda found: found["processor_milliseconds_of_one"]),
    ("seconds until all are Ready", lambda found: round(found["seconds_until_all_are_ready"])),
    ("reaction p50, p99 (s)", lambda found: "{p50}, {p99}".format(**found["reaction_seconds"])),
    (
        "at rest: core, writes",
        lambda found: f"{found['rest']['core']}, {written(found['rest']['writes'])}",
    ),
    (
        "RSS peak, after a start (MB)",
        lambda found: f"{found['rss_peak_megabytes']}, {found['restart']['rss_peak_megabytes']}",
    ),
    ("writes after a start", lambda found: written(found["restart"]["writes"])),
    *(
        (
            f"a plan at rest, {size.upper()}: least, p50 (ms)",
            # Runs of before had no such part.
            lambda found, size=size: ", ".join(
                str(number)
                for number in found.get("plan_at_rest", {}).get(f"milliseconds_{size}", {}).values()
            ),
        )
        for size in ("1p1d", "64p64d")
    ),
)


def table(runs: list[Found]) -> str:
    """Return the numbers in Markdown: a column for each run."""
    rows = [(name, *(read(found) for found in runs)) for name, read in COLUMNS]
    lines = ["| " + " | ".join(map(str, row)) + " |" for row in rows]
    return "\n".join((lines[0], "|---" * (1 + len(runs)) + "|", *lines[1:]))


def svg(plot: Plot, runs: list[Found]) -> str:
    """Return one picture."""
    values = [[series.read(found) for series in plot.series] for found in runs]
    most = max(max(row) for row in values)
    group = (WIDTH - LEFT) / len(runs)
    bar = 0.8 * group / len(plot.series)
    room = HEIGHT - TOP - BOTTOM
    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
            'font-family="sans-serif" font-size="12">'
        ),
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        _text(WIDTH / 2, 18, plot.title, 14),
    ]
    for number, series in enumerate(plot.series):
        x = LEFT + number * (WIDTH - LEFT) / len(plot.series)
        parts.append(f'<rect x="{x:.0f}" y="27" width="10" height="10" fill="{COLORS[number]}"/>')
        parts.append(f'<text x="{x + 15:.0f}" y="36">{series.name}</text>')
    for place, (found, row) in enumerate(zip(runs, values, strict=True)):
        start = LEFT + place * group
        for number, value in enumerate(row):
            height = room * value / most * 0.92
            x, y = start + number * bar, HEIGHT - BOTTOM - height
            parts.append(
                f'<rect x="{x:.1f}" y="{y:.1f}" width="{bar - 4:.1f}" height="{height:.1f}" '
                f'fill="{COLORS[number]}"/>'
            )
            parts.append(_text(x + bar / 2 - 2, y - 3, f"{value:.3g}"))
        middle = start + 0.4 * group
        name = f"{found['pdclusters']} PDClusters{', TLS' if found.get('tls') else ''}"
        parts.append(_text(middle, HEIGHT - BOTTOM + 18, name))
    return "\n".join((*parts, "</svg>\n"))


def _text(x: float, y: float, text: str, size: int = 12) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="middle">{text}</text>'


def main(source: Path, folder: Path) -> None:
    """Write every picture."""
    runs = [json.loads(line) for line in source.read_text().splitlines()]
    folder.mkdir(parents=True, exist_ok=True)
    print(table(runs))
    for plot in PLOTS:
        (folder / plot.file).write_text(svg(plot, runs))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
