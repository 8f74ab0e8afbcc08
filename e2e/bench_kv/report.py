"""The table of a run, and the picture of a hand-over's phases.

``python -m bench_kv.report FILE FOLDER`` makes both from what ``OUTPUT=FILE`` has kept.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from bench_kv.phases import COMPUTED, OURS, WIRE

Found = Mapping[str, Any]
COLORS = {
    "prefill": "#c9d3de", "step": "#c9d3de", "post": "#7fb069", "wire and polls": "#4a8f5a",
    "answer": "#e6aa68", "router": "#d9c9a3", "admission": "#e07a5f", "schedule": "#b56576",
    "connect": "#6d597a", "fence": "#355070", "claim": "#bc4749", "report": "#8d99ae",
    "decode's answer": "#f2cc8f",
}  # fmt: skip
CALM = "calm"
OTHERS = {
    "checkout": "the checkout",
    CALM: "NixlConnector with a progress thread that waits",
}
WIDTH, LEFT, BAR, ROW, TOP = 900, 130, 22, 34, 74


class Row(NamedTuple):
    """One line of the table: medians, and ours as a ratio to the others'."""

    name: str
    ours: str
    stock: str
    raw: str
    ratio: str


def _compared(name: str, found: Found, raw: str = "–") -> Row:
    """Return the line of :func:`bench_kv.figures.compared`."""
    values = {arm: f"{value:.3g}" for arm, value in found["milliseconds"].items()}
    return Row(name, values["ours"], values["stock"], values.get("raw", raw), _ratio(found))


def _compared_to_both(name: str, found: Found) -> Row:
    """Return a line that has NixlConnector twice: with a progress thread that waits, too."""
    row = _compared(name, found)
    stock = f"{row.stock}; {found['milliseconds'][CALM]:.3g} if its thread waits"
    return row._replace(stock=stock, ratio=f"{row.ratio}; {_ratio(found, CALM)}")


def _alone(name: str, found: Found) -> Row:
    """Return a line without a ratio: ours may be 0."""
    ours, stock = (f"{found['milliseconds'][arm]:.3g}" for arm in ("ours", "stock"))
    return Row(name, ours, stock, "–", "")


def _ratio(found: Found, other: str = "stock") -> str:
    low, high = found["interval"][other]
    return f"{found['of'][other]:.2f} [{low:.2f}, {high:.2f}]"


def _moves(found: Found) -> list[Row]:
    if "blocks" not in found:
        return []
    compared = _compared if CALM not in found["blocks"]["of"] else _compared_to_both
    rows = [
        compared(f"16 MiB, {found['blocks']['descriptors']} descriptors in random order, ms",
                  found["blocks"]),
        compared("16 MiB, the same blocks as neighbours, ms", found["neighbours"]),
        compared(f"16 MiB, blocks outermost: {found['outermost']['descriptors']} descriptors in"
                 " random order, ms", found["outermost"]),
    ]  # fmt: skip
    for count, of in found["side_by_side"].items():
        rate = of["megabytes_per_second"]
        rows.append(
            compared(f"{count} at once: all there, ms ({rate['ours']} and {rate['stock']} MB/s)",
                      of["all"])
        )  # fmt: skip
        if int(count) >= 100:  # of fewer, it is the last one
            rows.append(compared(f"{count} at once: p99, ms", of["p99"]))
    many = found["fragmented"]
    rows += [
        compared(f"{many['descriptors']} descriptors: engine's thread, ms", many["step"]),
        compared(f"{many['descriptors']} descriptors: all there, ms", many["whole"]),
        compared("1M tokens, prefill: longest call, ms", found["long"]["prefill"]),
        compared("1M tokens, decode: longest call, ms", found["long"]["decode"]),
    ]
    met = found["handshake"]
    rows += [
        compared(f"lists of {met['descriptors']:,} descriptors for a peer, ms (once)", met["all"]),
        _alone("of these, on the engine's thread of decode, ms", met["on_engine_thread"]),
    ]
    return rows


def _lists(found: Found) -> list[Row]:
    if "lists" not in found:
        return []
    of = found["lists"]
    taken = f"{of['milliseconds']['ours']:.2g}"
    words = f"{of['descriptors']:,} descriptors: the plan of a peer, and NIXL's lists, ms (once)"
    return [Row(words, taken, "–", "–", "")]


def _first_tokens(found: Found, where: str) -> list[Row]:
    """Return the lines of times to the first token."""
    rows = [_compared(f"{where}, {length} tokens, ms", of) for length, of in found["ttft"].items()]
    for other, words in OTHERS.items():
        rows += [
            Row(f"{where}, {length} tokens: {words}, and ours ÷ its",
                "–", f"{of['milliseconds'][other]:.3g}", "–", _ratio(of, other))
            for length, of in found["ttft"].items() if other in of["of"]
        ]  # fmt: skip
    return rows


def _in_process(found: Found) -> list[Row]:
    if "in_process" not in found:
        return []
    return _first_tokens(found["in_process"], "TTFT, one process each")


def _served(found: Found) -> list[Row]:
    if "ttft" not in found:
        return []
    rows = _first_tokens(found, "TTFT")
    speed = found["velocity"]
    for words, name in (
        ("prefill, tokens/s through both engines", "tokens_per_second"),
        ("prefill, tokens/s of the same engine alone", "alone"),
    ):
        of = speed[name]
        rows.append(
            Row(words, f"{of['ours']:.0f}", f"{of['stock']:.0f}", "–",
                f"{of['ours'] / of['stock']:.2f}")
        )  # fmt: skip
    for words, of, scale in (
        ("prefill velocity: of the same engine alone", speed["of_alone"], 1),
        ("idle decode engine, % of a core", found["idle"], 100),
    ):
        rows.append(Row(words, f"{scale * of['ours']:.2f}", f"{scale * of['stock']:.2f}", "–", ""))
    if CALM in found["idle"]:
        rows.append(
            Row(f"of {OTHERS[CALM]}: velocity, % of a core", "–",
                f"{speed['of_alone'][CALM]:.2f}, {100 * found['idle'][CALM]:.2f}", "–", "")
        )  # fmt: skip
    return rows


PARTS = (_moves, _in_process, _served)


def table(found: Found) -> str:
    """Return the numbers in Markdown, the phases in a table of their own."""
    loads = " to ".join(str(one) for one in found["load"])
    lines = [
        f"Commit {found['commit']}, {found['date']}, {found['cores']} cores, load average {loads}.",
        "",
        "| what | pdcluster | NixlConnector | raw NIXL | ours ÷ NixlConnector's [95 %] |",
        "|---|---|---|---|---|",
        *(
            "| " + " | ".join(row) + " |"
            for row in (*_moves(found), *_lists(found), *_in_process(found), *_served(found))
        ),
    ]
    alone = found.get("in_process", {}).get("phases", {})
    lines += _phases(alone, "phase, one process each, ms")
    return "\n".join((*lines, *_phases(found.get("phases", {}), "phase, ms")))


def _phases(found: Found, title: str) -> list[str]:
    if not found:
        return []
    columns = [(length, arm) for length, arms in found.items() for arm in arms]
    lines = [
        "",
        f"| {title} | " + " | ".join(f"{arm}, {length} tokens" for length, arm in columns) + " |",
        "|---" * (1 + len(columns)) + "|",
    ]
    for phase in OURS:
        cells = [found[length][arm].get(phase.name) for length, arm in columns]
        shown = ("–" if cell is None else f"{cell:.2f}" for cell in cells)
        lines.append(f"| {phase.name} | " + " | ".join(shown) + " |")
    others = [
        sum(value for name, value in found[length][arm].items() if name not in {*COMPUTED, *WIRE})
        for length, arm in columns
    ]
    lines.append("| all but model and wire | " + " | ".join(f"{one:.2f}" for one in others) + " |")
    return lines


def svg(found: Found) -> str:
    """Return the picture of the phases: a bar for each connector and length of a prompt."""
    bars = [(length, arm, found[length][arm]) for length in found for arm in found[length]]
    longest = max(sum(of.values()) for *_, of in bars)
    height = TOP + ROW * len(bars) + 10
    title = "From the prompt to decode's first token, by phase, in ms (less is better)"
    start = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}"'
    parts = [
        f'{start} font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        f'<text x="{WIDTH / 2}" y="18" font-size="14" text-anchor="middle">{title}</text>',
    ]
    x = y = 0
    for phase in OURS:
        width = 22 + 7 * len(phase.name)
        if x + width > WIDTH - 10:
            x, y = 0, y + 18
        parts.append(
            f'<rect x="{10 + x}" y="{27 + y}" width="10" height="10" fill="{COLORS[phase.name]}"/>'
            f'<text x="{24 + x}" y="{36 + y}">{phase.name}</text>'
        )
        x += width
    for number, (length, arm, of) in enumerate(bars):
        top, left = TOP + number * ROW, float(LEFT)
        scale = (WIDTH - LEFT - 60) / longest
        parts.append(f'<text x="10" y="{top + 15}">{arm}, {length} tokens</text>')
        for phase in OURS:
            if (value := of.get(phase.name, 0.0)) > 0:
                width, color = value * scale, COLORS[phase.name]
                parts.append(
                    f'<rect x="{left:.1f}" y="{top}" width="{width:.1f}" height="{BAR}" '
                    f'fill="{color}"><title>{phase.name}: {value:.2f} ms</title></rect>'
                )
                left += width
        parts.append(f'<text x="{left + 5:.1f}" y="{top + 15}">{sum(of.values()):.1f}</text>')
    return "\n".join((*parts, "</svg>\n"))


def main(source: Path, folder: Path) -> None:
    """Print the table of the last run, and write the picture."""
    read: Callable[[str], Found] = json.loads
    found = read(source.read_text().splitlines()[-1])
    print(table(found))
    (folder / "hand-over.svg").write_text(svg(found["phases"]))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
