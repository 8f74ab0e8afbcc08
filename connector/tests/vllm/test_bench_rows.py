"""The rows of `make bench`, short, on forked engines: both connectors move the right bytes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fork_host import Engine

pytest.importorskip("vllm")

from engine_pair import connector_config

from bench_kv import as_served, in_process, moves
from loopback import free_port
from models.tiny import model_path

pytestmark = pytest.mark.engine
SIZE = dataclasses.replace(moves.SMALL, blocks=250)


class Handle:
    """What a row asks of an engine."""

    def __init__(self, engine: Engine, how: str) -> None:
        self._engine = engine
        self._how = how

    def ask(self, *message: Any) -> Any:
        return self._engine.ask(self._how, *message)


def stock(role: str) -> dict[str, Any]:
    return {
        "kv_connector": "NixlConnector",
        "kv_role": role,
        "engine_id": f"stock-{role}",
        "kv_buffer_device": "cpu",
    }


def test_both_connectors_are_measured(engines: Callable[..., Engine], tmp_path: Path) -> None:
    """A row ends with an error if bytes are wrong, or something was not received."""
    made = {
        kind: [
            engines(
                f"{kind}{role}",
                config(role),
                model=str(model_path("llama")),
                environment={"VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())},
            )
            for role in ("kv_producer", "kv_consumer")
        ]
        for kind, config in (("ours", connector_config), ("stock", stock))
    }
    taken, prompt = {}, list(range(3, 103))
    for (kind, both), arm in zip(made.items(), as_served.ARMS, strict=True):
        for engine in both:
            engine.wait_ready()
        prefill, decode = (Handle(engine, "complete") for engine in both)
        way = in_process.Pair(arm, prefill, decode, tmp_path).first_token(prompt)
        assert way["began"] < way["ticket"] <= way["sent"] < way["answered"]
        prefill, decode = (Handle(engine, "drive") for engine in both)
        rows = moves.Rows(prefill, decode, SIZE, SIZE.rounds, 1)
        # These engines' caches have layers outermost. What is tested is that the row is measured.
        taken[kind] = rows.outermost() | rows.measure()
        taken[kind]["handshake/all"] = [1.0]
    found = moves.found(taken, SIZE, [SIZE.rounds])
    for row in (
        found["blocks"], found["neighbours"], found["outermost"], found["side_by_side"]["8"]["p99"],
        found["fragmented"]["step"], found["long"]["decode"],
    ):  # fmt: skip
        assert row["rounds"] == SIZE.rounds
        assert set(row["milliseconds"]) == {"ours", "stock"}
        assert all(value > 0 for value in row["milliseconds"].values())
        assert row["of"].keys() == {"stock"}
    for prefill, decode in made.values():
        for engine in (prefill, decode):
            assert engine.held() == 0
            engine.kill()  # stock's would take seconds to end
