"""One hand-over in phases: which part of the time from the prompt to decode's token is whose.

``noted.py`` writes the moments, each with the monotonic clock of the machine, which all processes
share. A phase lies between two of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

Moments = Mapping[str, float]


class Phase(NamedTuple):
    """From the moment before to the moment ``until``."""

    name: str
    until: str


OURS = (
    Phase("prefill", "prefilled"),
    Phase("answer", "ticket"),
    Phase("router", "sent"),
    Phase("admission", "arrived"),
    Phase("schedule", "ordered"),
    Phase("connect", "connected"),
    Phase("post", "posted"),
    Phase("wire and polls", "landed"),
    Phase("fence", "fenced"),
    Phase("claim", "done"),
    Phase("report", "reported"),
    Phase("step", "decoded"),
    Phase("decode's answer", "answered"),
)
# Stock posts on the engine's thread, and polls in its steps. It has no fence and no claim.
STOCK = tuple(
    phase for phase in OURS if phase.until not in {"connected", "landed", "fenced", "done"}
)
PHASES = {"ours": OURS, "stock": STOCK}
COMPUTED = ("prefill", "step")
"""What the model takes: the rest is the hand-over's."""
WIRE = ("post", "wire and polls")


def split(moments: Moments, began: float, phases: Iterable[Phase]) -> dict[str, float]:
    """Return the seconds of each phase. A moment that is not there was that of the phase before.

    A claim that came before the end of the fence leaves no moment ``fenced``, because nothing
    waited for it.
    """
    seconds, last = {}, began
    for phase in phases:
        if phase.until == "fenced" and phase.until not in moments:
            at = moments["done"]
        else:
            at = moments.get(phase.until, last)
        seconds[phase.name] = max(0.0, at - last)
        last = max(last, at)
    return seconds


def read(lines: Iterable[str], began: float, ended: float) -> dict[str, float]:
    """Return the last moment of each name between two times; requests came one after another."""
    moments: dict[str, float] = {}
    for line in lines:
        at, _, name = line.partition(" ")
        if began <= float(at) <= ended:
            moments[name.strip()] = float(at)
    return moments


def of_the_hand_over(seconds: Mapping[str, float]) -> float:
    """Return what is neither the model's nor the wire's."""
    return sum(value for name, value in seconds.items() if name not in (*COMPUTED, *WIRE))
