"""Equal parts of documents are held once, and a document stays what it was."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import pytest
from hypothesis import given, strategies as st
from simulated_cluster import SimulatedCluster, manifest

from pdcluster_operator.plan.objects import shared_parts
from pdcluster_operator.plan.objects.shared_parts import LEVELS, SHORT, SMALL, with_shared_parts

LEAVES = st.sampled_from(
    [True, False, 1, 0, 1.0, 0.0, -0.0, None, "", "a", "b", "x" * (SHORT + 1), 10**30, {}, []]
)
DOCUMENTS = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("ab1"), inner, max_size=3)
    ),
    max_leaves=12,
)


def parts(value: Any) -> Iterator[Any]:
    """Yield every dict and list that is not empty, every key and every short string."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from (key, *parts(item))
    elif isinstance(value, list):
        for item in value:
            yield from parts(item)
    if value and (isinstance(value, dict | list) or (type(value) is str and len(value) <= SHORT)):
        yield value


def test_what_two_documents_have_is_held_once() -> None:
    world = SimulatedCluster(manifest())
    world.settle()
    texts = [json.dumps(child) for child in world.children.values()]
    ones, others = ([with_shared_parts(json.loads(text)) for text in texts] for _ in range(2))
    assert ones == others == list(world.children.values())
    pairs = list(zip(parts(ones), parts(others), strict=True))
    assert len(pairs) > 1000
    # A part that holds a long string, such as an engine's arguments, is nobody else's.
    assert sum(one is other for one, other in pairs) > 0.9 * len(pairs)


def test_another_cluster_shares_parts() -> None:
    kept = []
    for name in ("some", "other"):
        world = SimulatedCluster(manifest(name=name))
        world.settle()
        kept.append([with_shared_parts(child) for child in world.children.values()])
    ones, others = ({id(part) for part in parts(one) if type(part) is not str} for one in kept)
    assert len(ones & others) > len(others) / 4


@given(st.lists(DOCUMENTS, min_size=2, max_size=30))
def test_a_document_stays_what_it_was(documents: list[Any]) -> None:
    """Also while parts are forgotten: a new object may then get the id of one that is gone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_parts, "_parts", lru_cache(4)(lambda _: []))
        texts = [repr(document) for document in documents]
        found = []
        for text in texts:
            found.append(with_shared_parts(eval(text)))
            if len(found) % 3 == 0:
                found[-2] = with_shared_parts(eval(texts[len(found) - 2]))
        assert [repr(one) for one in found] == texts


def test_parts_with_equal_values_under_other_keys_stay_apart() -> None:
    documents = [{"a": "x"}, {"b": "x"}, {"a": ["x"]}, {"a": "x", "b": "x"}, ["a", "x"], ["x"]]
    for _ in range(2):
        assert [with_shared_parts(document) for document in documents] == documents


@pytest.mark.parametrize(
    "large",
    [
        {"a": "x" * SMALL},
        {"x" * SMALL: "a"},
        {str(number): "" for number in range(SMALL // 4)},
        [str(number) for number in range(SMALL // 4)],
    ],
    ids=["a long string", "a long key", "many keys", "many items"],
)
def test_nothing_large_is_kept(large: Any) -> None:
    """Else everybody who may write annotations could fill the operator's memory."""
    known: dict[bytes, list[Any]] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_parts, "_parts", lambda text: known.setdefault(text, []))
        document = {"metadata": {"annotations": large}, "items": [[large]]}
        assert with_shared_parts(document) == document
        assert known == {}


def test_no_more_parts_are_held_than_said() -> None:
    for number in range(shared_parts.MOST_PARTS + 100):
        with_shared_parts({"a": str(number)})
    assert shared_parts._parts.cache_info().currsize == shared_parts.MOST_PARTS


@pytest.mark.parametrize(
    "around",
    [lambda one: {"a": {"b": one}}, lambda one: [[one]], lambda one: {"a": [one]}],
    ids=["dicts", "lists", "both"],
)
def test_a_document_may_be_deep(around: Callable[[Any], Any]) -> None:
    deep: Any = "x" * 2
    for _ in range(300):
        deep = around(deep)
    assert json.dumps(with_shared_parts(deep)) == json.dumps(deep)


def test_half_of_a_character_is_no_error() -> None:
    document = {"a": ["\ud83d"], "b": {"c": "d"}}
    assert with_shared_parts(document) == document


def test_what_lies_deep_in_a_pod_template_is_held_once() -> None:
    def deep() -> Any:
        part: Any = {"deepest": "part"}
        for number in range(LEVELS // 2 - 1):
            part = {"dict": [part, str(number)]}
        return part

    found = parts(with_shared_parts(deep())), parts(with_shared_parts(deep()))
    pairs = list(zip(*found, strict=True))
    assert all(one is other for one, other in pairs)
