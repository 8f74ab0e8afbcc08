"""Each contract about imports is broken by each import that it forbids."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from grimp import ImportGraph, build_graph
from importlinter import configuration
from importlinter.contracts.forbidden import ForbiddenContract
from importlinter.contracts.layers import LayersContract

ROOT = Path(__file__).parents[2]
configuration.configure()
OPTIONS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
CLASSES = {"layers": LayersContract, "forbidden": ForbiddenContract}


@pytest.fixture(scope="module")
def graph() -> ImportGraph:
    return build_graph(*OPTIONS["root_packages"], include_external_packages=True, cache_dir=None)


def forbidden(contract: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield one import for each rule of a contract: (importer, imported)."""
    if contract["type"] == "forbidden":
        for source in contract["source_modules"]:
            for target in contract["forbidden_modules"]:
                yield source, target
        return
    [container] = contract.get("containers", [""])
    prefix = f"{container}." if container else ""
    layers = [re.split(r"\s*\|\s*", layer) for layer in contract["layers"]]
    for number, layer in enumerate(layers):
        for module in layer:
            for higher in [*(one for above in layers[:number] for one in above), *layer]:
                if higher != module:
                    yield prefix + module, prefix + higher


def kept(contract: dict[str, Any], graph: ImportGraph) -> bool:
    options = {name: str(one) if isinstance(one, bool) else one for name, one in contract.items()}
    made = CLASSES[contract["type"]](
        name=contract["name"], session_options=OPTIONS, contract_options=options
    )
    return bool(made.check(deepcopy(graph), verbose=False).kept)


@pytest.mark.parametrize("contract", OPTIONS["contracts"], ids=lambda one: one["name"])
def test_a_contract_is_kept_and_each_import_that_it_forbids_breaks_it(
    contract: dict[str, Any], graph: ImportGraph
) -> None:
    assert kept(contract, graph)
    unnoticed = []
    for importer, imported in forbidden(contract):
        broken = deepcopy(graph)
        if imported not in broken.modules:
            broken.add_module(imported, is_squashed=True)
        broken.add_import(importer=importer, imported=imported)
        if kept(contract, broken):
            unnoticed.append(f"{importer} -> {imported}")
    assert not unnoticed


def test_every_part_of_the_connector_but_one_is_kept_from_vllm(graph: ImportGraph) -> None:
    kept_from: set[str] = set()
    for contract in OPTIONS["contracts"]:
        if {"vllm", "torch"} <= set(contract.get("forbidden_modules", ())):
            kept_from |= set(contract["source_modules"])
    parts = graph.find_children("pdcluster_connector")
    assert parts - kept_from == {"pdcluster_connector.vllm"}
