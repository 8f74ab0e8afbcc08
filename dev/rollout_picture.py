"""Draw what a test recorded while a PDCluster changed: python dev/rollout_picture.py RECORD SVG.

`e2e/tests/rollout_record.py` writes the record; the tests print its path.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from html import escape
from pathlib import Path
from typing import Any

WIDTH, LEFT, RIGHT, ROW = 900, 210, 20, 22
COLORS = {"starting": "#e3b341", "ready": "#2da44e", "ending": "#8c959f"}
ANSWERED, FAILED, LINK, ENDPOINT = "#0969da", "#cf222e", "#8250df", "#1b7c83"


def picture(record: dict[str, Any]) -> str:
    """Return the SVG of a record: a row for each engine and link, then endpoints and requests."""
    samples = record["samples"]
    end = max(samples[-1]["at"], *(one["ended"] for one in record["requests"]))

    def x(seconds: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * seconds / end

    engines = sorted({name for sample in samples for name in sample["engines"]}, key=_age(samples))
    links = list(dict.fromkeys(tuple(pair) for sample in samples for pair in sample["links"]))
    parts: list[str] = []
    top = 40.0
    for name in engines:
        states = [(sample["at"], sample["engines"].get(name)) for sample in samples]
        parts += [_label(top, name), *_bars(states, top, x, COLORS)]
        top += ROW
    for pair in links:
        short = " → ".join(".".join(name.split(".")[2:]) for name in pair)
        states = [(sample["at"], "up" if list(pair) in sample["links"] else None)
                  for sample in samples]  # fmt: skip
        parts += [_label(top, f"link {short}"), *_bars(states, top, x, {"up": LINK})]
        top += ROW
    numbers = [(sample["at"], str(sample["endpoints"])) for sample in samples]
    shades = {number: ENDPOINT if number != "0" else FAILED for _, number in numbers}
    parts += [_label(top, "endpoints of the Service"), *_bars(numbers, top, x, shades, say=True)]
    top += ROW
    for what, streams in (("streams", True), ("short requests", False)):
        chosen = [one for one in record["requests"] if one["stream"] is streams]
        failed = sum(one["failed"] for one in chosen)
        parts.append(_label(top, f"{len(chosen)} {what}, {failed} failed"))
        parts += [_request(one, top, x) for one in chosen]
        top += ROW
    for moment, what in record["marks"]:
        parts.append(f'<line x1="{x(moment):.1f}" x2="{x(moment):.1f}" y1="26" y2="{top:.0f}" '
                     'stroke="#57606a" stroke-dasharray="3 3"/>')  # fmt: skip
        parts.append(f'<text x="{x(moment):.1f}" y="20" text-anchor="middle">{escape(what)}</text>')
    parts += _axis(end, top, x)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{top + 40:.0f}" '
        'font-family="sans-serif" font-size="11" fill="#24292f">\n'
        '<rect width="100%" height="100%" fill="white"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def _age(samples: list[dict[str, Any]]) -> Callable[[str], tuple[int, str]]:
    first = {}
    for number, sample in enumerate(samples):
        for name in sample["engines"]:
            first.setdefault(name, number)
    return lambda name: (first[name], name)


def _bars(
    states: list[tuple[float, str | None]],
    top: float,
    x: Callable[[float], float],
    colors: dict[str, str],
    *,
    say: bool = False,
) -> Iterator[str]:
    """Yield one bar for each stretch of samples in the same state; none where there is no state."""
    began, state = states[0]
    for at, found in [*states[1:], (states[-1][0], None)]:
        if found == state:
            continue
        if state is not None:
            yield (f'<rect x="{x(began):.1f}" y="{top:.0f}" width="{x(at) - x(began):.1f}" '
                   f'height="{ROW - 6}" fill="{colors[state]}"/>')  # fmt: skip
            if say:
                yield f'<text x="{x(began) + 4:.1f}" y="{top + 12:.0f}" fill="white">{state}</text>'
        began, state = at, found


def _request(one: dict[str, Any], top: float, x: Callable[[float], float]) -> str:
    color = FAILED if one["failed"] else ANSWERED
    width = max(1.0, x(one["ended"]) - x(one["began"]) - 1)
    return (f'<rect x="{x(one["began"]):.1f}" y="{top:.0f}" width="{width:.1f}" '
            f'height="{ROW - 6}" fill="{color}" fill-opacity="0.6"/>')  # fmt: skip


def _label(top: float, text: str) -> str:
    return f'<text x="{LEFT - 8}" y="{top + 12:.0f}" text-anchor="end">{escape(text)}</text>'


def _axis(end: float, top: float, x: Callable[[float], float]) -> Iterator[str]:
    for second in range(0, int(end) + 1, 10):
        yield (f'<text x="{x(second):.1f}" y="{top + 16:.0f}" text-anchor="middle">'
               f"{second} s</text>")  # fmt: skip
    shown = LEFT
    for state, color in COLORS.items():
        yield f'<rect x="{shown}" y="{top + 24:.0f}" width="10" height="10" fill="{color}"/>'
        yield f'<text x="{shown + 14}" y="{top + 33:.0f}">engine {state}</text>'
        shown += 110


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(picture(json.loads(Path(sys.argv[1]).read_text())))
