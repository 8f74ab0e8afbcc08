"""How far an engine's start has come, read from the lines that vLLM prints. Pure.

A line can only move the state forward. No line makes an engine ready: only its ``/health`` does.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from pdcluster_connector.compat.counted import counted
from pdcluster_connector.protocol.launcher_documents import EngineState

_ORDER: Final = {state: place for place, state in enumerate(EngineState)}


@dataclass(frozen=True, slots=True)
class Progress:
    """A state and one sentence for people who wait for the engine."""

    state: EngineState
    message: str


_Message = Callable[[re.Match[str]], str]


def _rule(
    pattern: str, state: EngineState, message: _Message
) -> tuple[re.Pattern[str], EngineState, _Message]:
    return re.compile(pattern), state, message


_RULES: Final = (
    _rule(
        r"Initializing a V1 LLM engine",
        EngineState.STARTING,
        lambda _: "the engine core has started and imports the model's code",
    ),
    _rule(
        r"Fetching (\d+) files:\s+(\d+)%",
        EngineState.LOADING_WEIGHTS,
        lambda m: f"downloading {counted(int(m[1]), 'file')} of the model: {m[2]} %",
    ),
    _rule(
        r"Starting to load model",
        EngineState.LOADING_WEIGHTS,
        lambda _: "loading the model's weights",
    ),
    _rule(
        r"Loading \w+ checkpoint shards:.*?\| (\d+)/(\d+) \[",
        EngineState.LOADING_WEIGHTS,
        lambda m: f"loading the model's weights: shard {m[1]} of {m[2]}",
    ),
    _rule(
        r"Loading weights took",
        EngineState.WARMING_UP,
        lambda _: "weights loaded; measuring memory for the KV cache",
    ),
    _rule(
        r"KV cache size: ([\d,]+) tokens",
        EngineState.WARMING_UP,
        lambda m: f"KV cache for {m[1]} tokens allocated; warming up",
    ),
    _rule(
        r"Capturing CUDA graphs.*?\| (\d+)/(\d+) \[",
        EngineState.WARMING_UP,
        lambda m: f"capturing CUDA graphs: {m[1]} of {m[2]}",
    ),
    _rule(
        r"[Cc]ompil(?:ing|ation).*graph",
        EngineState.WARMING_UP,
        lambda _: "compiling the model",
    ),
    _rule(
        r"Starting vLLM (?:API )?server",
        EngineState.WARMING_UP,
        lambda _: "starting the API server",
    ),
)


def advance(current: Progress, line: str) -> Progress:
    """Progress after one more line of vLLM's output; ``current`` if the line says nothing new."""
    for pattern, state, message in _RULES:
        match = pattern.search(line)
        if match:
            if _ORDER[state] < _ORDER[current.state]:
                return current
            return Progress(state, message(match))
    return current
