"""The rows of `make bench`, short, on forked engines: both connectors move the right bytes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from fork_host import Engine

pytest.importorskip("vllm")

from engine_pair import connector_config

from bench_kv import moves
from loopback import free_port
from models.tiny import model_path

pytestmark = pytest.mark.engine
SIZE = dataclasses.replace(moves.SMALL, blocks=250)


class Handle:
    """What a row asks of an engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def ask(self, *message: Any) -> Any:
        return self._engine.ask("drive", *message)


def stock(role: str) -> dict[str, Any]:
    return {
        "kv_connector": "NixlConnector",
        "kv_role": role,
        "engine_id": f"stock-{role}",
        "kv_buffer_device": "cpu",
    }


def test_both_connectors_are_measured_in_the_same_rounds(engines: Callable[..., Engine]) -> None:
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
    pairs: Any = {}
    for kind, both in made.items():
        prefill, decode = (Handle(engine.wait_ready()) for engine in both)
        prefill.ask("fill", 7)
        pairs[kind] = prefill, decode
    rows = moves.Rows(pairs, SIZE)
    rows.connect()
    found = [
        rows.random_blocks(),
        rows.side_by_side(8)["p99"],
        rows.fragmented()["step"],
        rows.long_prompt()["decode"],
    ]
    for row in found:
        assert row["rounds"] == SIZE.rounds
        assert set(row["milliseconds"]) == {"ours", "stock"}
        assert all(value > 0 for value in row["milliseconds"].values())
        assert row["of"].keys() == {"stock"}
    for prefill, decode in made.values():
        for engine in (prefill, decode):
            assert engine.held() == 0
            engine.kill()  # stock's would take seconds to end
