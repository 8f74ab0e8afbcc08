"""How many transfers a turn looks at, in which order, and how late one that has landed is seen."""

from __future__ import annotations

import math
import random

import pytest
from transfer_rig import Prefill
from turn_by_turn import CACHE, Bench

from pdcluster_connector.plan.block_pairs import GroupBlocks
from pdcluster_connector.protocol.receive_order import ReceiveOrder
from pdcluster_connector.testing.nixl import Behaviour, Transfer
from pdcluster_connector.transfer.options import ReceiverOptions
from pdcluster_connector.transfer.posting import LOOKS, Looks

MANY = 8192
LATEST = math.ceil(2 * MANY / LOOKS)  # turns


def looks_at(links: int, flights: int = MANY) -> tuple[Looks, set[int]]:
    under_way = set(range(flights))
    looks = Looks(under_way)
    for number in under_way:
        looks.add(number, number % links)
    return looks, under_way


@pytest.mark.parametrize("links", [1, 7, 300, MANY])
def test_none_starves_while_nothing_lands(links: int) -> None:
    looks, under_way = looks_at(links)
    seen = set[int]()
    for _ in range(LATEST):
        turn = list(looks.turn())
        assert len(turn) == len(set(turn)) == LOOKS
        seen.update(turn)
    assert seen == under_way


def test_the_oldest_of_each_link_is_seen_in_each_turn() -> None:
    links = 40
    looks, under_way = looks_at(links)
    for _ in range(3):
        assert set(range(links)) <= set(looks.turn())
    under_way -= set(range(links))
    assert set(range(links, 2 * links)) <= set(looks.turn())


def test_what_lands_in_order_is_seen_at_once_however_many_wait_behind_it() -> None:
    looks, under_way = looks_at(links=4)
    assert len(list(looks.turn())) == LOOKS  # now others are next in turn
    seen = []
    for number in looks.turn():
        if number < 200:
            under_way.remove(number)
            seen.append(number)
    assert seen[:200] == list(range(200)), "link by link, one each"


def test_links_take_turns_when_they_are_more_than_a_turn_has_looks() -> None:
    links = 2 * LOOKS
    looks, _ = looks_at(links)
    firsts = [list(looks.turn())[: LOOKS // 2] for _ in range(4)]
    assert sorted(number for turn in firsts for number in turn) == list(range(links))


@pytest.mark.parametrize("seed", range(4))
def test_one_that_lands_out_of_order_is_seen_within_a_bounded_number_of_turns(seed: int) -> None:
    """Behind hanging ones, and while others are posted all the time."""
    dice = random.Random(seed)
    looks, under_way = looks_at(links=1 + dice.randrange(20))
    landed = set(dice.sample(sorted(under_way), 500))
    news = MANY
    for _ in range(LATEST):
        for number in looks.turn():
            if number in landed:
                landed.remove(number)
                under_way.remove(number)
        for _ in range(dice.randrange(LOOKS)):
            under_way.add(news)
            looks.add(news, dice.randrange(20))
            news += 1
    assert not landed


def test_few_are_all_looked_at_in_each_turn() -> None:
    looks, under_way = looks_at(links=3, flights=LOOKS)
    assert sorted(looks.turn()) == sorted(looks.turn()) == sorted(under_way)
    under_way.clear()
    assert list(looks.turn()) == []


def hand_over(bench: Bench, prefill: Prefill, count: int) -> list[str]:
    """Hand over ``count`` requests of 28 blocks in two layers, each descriptor one transfer."""
    ticket = prefill.ticket(1, range(1, 29), 112)
    blocks = GroupBlocks(list(range(1, 29)))
    bench.receive(
        *(ReceiveOrder(f"r{one}", ticket, (blocks,), 0, 112, 60.0, True) for one in range(count))
    )
    return [f"r{one}" for one in range(count)]


def test_calls_of_nixl_are_bounded_at_8192_transfers_and_all_end() -> None:
    bench = Bench(ReceiverOptions(descriptors_per_transfer=1))
    prefill = bench.prefill("p/1")
    assert bench.send(prefill) in bench.take().received
    transfers: list[Transfer] = []

    def behave(transfer: Transfer) -> Behaviour:
        transfers.append(transfer)
        return Behaviour(hang=True)

    bench.fabric.behave = behave
    per_request = 28 * CACHE["layers"]
    sent = hand_over(bench, prefill, -(-MANY // per_request))
    bench.executor.turn()
    assert len(transfers) >= MANY, "all are posted before the first look"
    for turn in range(1, 4):
        assert sum(one.polls for one in transfers) == turn * LOOKS
        bench.executor.turn()
    assert not bench.take().finished
    bench.fabric.behave = lambda _: Behaviour()
    bench.fabric.land()
    received = set[str]()
    for _ in range(2 * LATEST):  # the KV, and then its lease words
        bench.executor.turn()
        received |= set(bench.take().received)
    assert received == set(sent)
