"""`python -m bench_operator.plots RUNS.json FOLDER`: what was measured, as SVG."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

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
        "Memory of the operator in MB (less is better)",
        (
            Series("highest", lambda found: found["rss_peak_megabytes"]),
            Series("highest after a start", lambda found: found["restart"]["rss_peak_megabytes"]),
        ),
    ),
)


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
        parts.append(_text(middle, HEIGHT - BOTTOM + 18, f"{found['pdclusters']} PDClusters"))
    return "\n".join((*parts, "</svg>\n"))


def _text(x: float, y: float, text: str, size: int = 12) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="middle">{text}</text>'


def main(source: Path, folder: Path) -> None:
    """Write every picture."""
    runs = [json.loads(line) for line in source.read_text().splitlines()]
    folder.mkdir(parents=True, exist_ok=True)
    for plot in PLOTS:
        (folder / plot.file).write_text(svg(plot, runs))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
