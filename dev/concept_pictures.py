"""Draws the pictures of docs/concepts.md: ``python -m dev.concept_pictures NAME``.

Each picture is a sequence: who takes part, and what each sends or does, from top to bottom. The
words are those of the glossary in docs/design.md.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

COLUMN, ROW, TOP, SIDE = 225, 46, 64, 125
STYLE = """\
<style>
  text { font: 13px system-ui, sans-serif; fill: #1f2933; }
  .who { font-weight: 600; }
  .back { fill: #ffffff; }
  .box { fill: #e6f2f1; stroke: #0f766e; }
  .life { stroke: #9aa5b1; stroke-dasharray: 3 4; }
  .line { stroke: #0f766e; stroke-width: 1.6; fill: none; }
  .kv { stroke: #b45309; stroke-width: 5; fill: none; }
  .note { fill: #fff7e6; stroke: #b45309; }
  .head { fill: #0f766e; }
  .kvhead { fill: #b45309; }
  @media (prefers-color-scheme: dark) {
    text { fill: #e4e7eb; }
    .back { fill: #10181c; }
    .box { fill: #134e4a; stroke: #5eead4; }
    .line { stroke: #5eead4; }
    .head { fill: #5eead4; }
    .note { fill: #3f2d10; stroke: #fbbf24; }
    .kv { stroke: #fbbf24; }
    .kvhead { fill: #fbbf24; }
  }
</style>"""


@dataclass(frozen=True)
class Send:
    """An arrow. ``kv`` draws bytes of the KV cache, which go without the engines' processors."""

    source: int
    target: int
    words: str
    kv: bool = False


@dataclass(frozen=True)
class Note:
    """What one does by itself."""

    who: int
    words: str


@dataclass(frozen=True)
class Picture:
    """``title`` is what a screen reader says."""

    title: str
    who: tuple[str, ...]
    steps: tuple[Send | Note, ...]


PICTURES = {
    "request": Picture(
        "One request: the router asks prefill, then decode; decode reads the KV from prefill",
        ("client", "router", "prefill engine", "decode engine"),
        (
            Send(0, 1, "prompt"),
            Send(1, 2, "prompt, one token"),
            Note(2, "computes the KV cache"),
            Send(2, 1, "ticket: which blocks, until when"),
            Send(1, 3, "prompt and ticket"),
            Note(3, "judges the ticket"),
            Send(3, 2, "claim of the lease"),
            Send(2, 3, "KV blocks (NIXL READ)", kv=True),
            Send(2, 3, "lease words: the fence"),
            Send(3, 2, "release"),
            Send(3, 0, "tokens"),
        ),
    ),
    "link": Picture(
        "A link: decode shakes hands with prefill, checks, probes, and a canary proves it",
        ("operator", "decode engine", "prefill engine"),
        (
            Send(0, 1, "peers: who prefill is"),
            Send(1, 2, "handshake"),
            Send(2, 1, "layout, dtypes, weights"),
            Note(1, "each rule: may they exchange KV?"),
            Send(2, 1, "probe: first bytes", kv=True),
            Send(1, 0, "link Established"),
            Send(0, 1, "canary: one prompt"),
            Send(2, 1, "its KV", kv=True),
            Note(1, "counts the bytes that came"),
            Send(1, 0, "canary Passed"),
            Note(0, "KVPathVerified, then Ready"),
        ),
    ),
    "lease": Picture(
        "A lease and its fence: prefill keeps blocks until decode has read them and checked that",
        ("prefill's scheduler", "prefill's memory", "decode engine"),
        (
            Note(0, "arms a lease for the request"),
            Send(0, 1, "writes the lease words"),
            Send(0, 2, "ticket, with the lease's end"),
            Send(2, 0, "renewal, while the request waits"),
            Send(1, 2, "KV blocks", kv=True),
            Send(1, 2, "lease words, read after the KV"),
            Note(2, "words unchanged: the KV was right"),
            Send(2, 0, "release"),
            Send(0, 1, "clears the words, frees blocks"),
            Note(2, "words changed: LeaseLost"),
        ),
    ),
}


def draw(picture: Picture) -> str:
    """Return the SVG of a picture."""
    width = COLUMN * (len(picture.who) - 1) + 2 * SIDE
    height = TOP + ROW * len(picture.steps) + 24
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" {size}>',
        f"<title>{escape(picture.title)}</title>",
        STYLE,
        f'<rect class="back" width="{width}" height="{height}"/>',
        *columns(picture.who, height),
    ]
    for number, step in enumerate(picture.steps):
        y = TOP + ROW * number + 26
        lines += arrow(step, y) if isinstance(step, Send) else note(step, y, width)
    return "\n".join([*lines, "</svg>", ""])


def columns(who: Sequence[str], height: int) -> Iterator[str]:
    for number, name in enumerate(who):
        x = SIDE + COLUMN * number
        yield f'<line class="life" x1="{x}" y1="48" x2="{x}" y2="{height - 8}"/>'
        yield f'<rect class="box" x="{x - 80}" y="14" width="160" height="34" rx="6"/>'
        yield f'<text class="who" x="{x}" y="36" text-anchor="middle">{escape(name)}</text>'


def arrow(step: Send, y: int) -> Iterator[str]:
    start, end = (SIDE + COLUMN * one for one in (step.source, step.target))
    way = 1 if end > start else -1
    kind, tip = ("kv", 12) if step.kv else ("line", 8)
    yield f'<line class="{kind}" x1="{start}" y1="{y}" x2="{end - way * tip}" y2="{y}"/>'
    points = f"{end},{y} {end - way * tip},{y - tip // 2} {end - way * tip},{y + tip // 2}"
    yield f'<polygon class="{"kvhead" if step.kv else "head"}" points="{points}"/>'
    middle = (start + end) / 2
    yield f'<text x="{middle:g}" y="{y - 7}" text-anchor="middle">{escape(step.words)}</text>'


def note(step: Note, y: int, whole: int) -> Iterator[str]:
    x, width = SIDE + COLUMN * step.who, 8 * len(step.words) + 12
    left = min(max(4, x - width / 2), whole - width - 4)
    yield f'<rect class="note" x="{left:g}" y="{y - 19}" width="{width}" height="26" rx="4"/>'
    middle = left + width / 2
    yield f'<text x="{middle:g}" y="{y - 2}" text-anchor="middle">{escape(step.words)}</text>'


if __name__ == "__main__":
    print(draw(PICTURES[sys.argv[1]]), end="")
