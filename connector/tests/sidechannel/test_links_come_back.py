"""Routers leave out a decode engine whose links have failed, so no request can mend a link.

Links are checked and made again without requests. The hosts, the network and the time are virtual.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
from own_loop import now
from virtual_engines import (
    Network,
    Session,
    end_decode,
    install,
    start_decode,
    start_prefill,
    turns,
)

import virtual_time
from pdcluster_connector.launcher.links.link_table import LinkTable
from pdcluster_connector.nixl_io.interface import NixlErrorKind
from pdcluster_connector.protocol import launcher_documents as documents
from pdcluster_connector.testing.engines import Size
from pdcluster_connector.testing.nixl import Behaviour, Fabric
from pdcluster_connector.transfer.options import ReceiverOptions
from pdcluster_connector.vllm.worker_side import link_keeper

TOKENS, STEP, LEASE = 10, 0.05, 60.0
PREFILL, DECODE = "ns.c.prefill.P1/0000000000000001", "ns.c.decode.D1/0000000000000002"
BACK_SECONDS = 60.0


class World:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fabric = Fabric()
        self.network = Network(self.fabric, random.Random(1))
        self.next: list[Behaviour] = []  # of the next reads of KV
        self.network.behave = self._behave  # type: ignore[method-assign]
        self.resets = False
        self.serial = 0
        install(monkeypatch, self.network, random.Random(2))
        answered = self.network.request

        async def request(*arguments: Any, **options: Any) -> Any:
            if self.resets:
                raise ConnectionResetError(104, "reset")
            return await answered(*arguments, **options)

        monkeypatch.setattr("pdcluster_connector.sidechannel.handshake.request", request)

    def start(self) -> None:
        self.prefill = start_prefill(self.fabric, PREFILL, Size(), lease_seconds=LEASE)
        options = ReceiverOptions(fatal=lambda _: None)
        self.decode = start_decode(
            self.fabric, DECODE, Size(), lease_seconds=LEASE, options=options
        )
        entry = documents.PeerEntry("ns.c.prefill.P1", f"127.0.0.1:{self.prefill.server.port}")
        book = self.decode._peers[0]

        def probe(metadata: Any, *, check: bool = False) -> Future[Any]:
            return self.decode.receivers[0, 0].probe(metadata, check=check)

        self.keeper = link_keeper.LinkKeeper(entry, 0, book, probe, lambda: None)
        book.listen(self.keeper.gone, silence=True)
        self.task = asyncio.create_task(self.keeper.keep(Session(DECODE)))

    def _behave(self, transfer: Any) -> Behaviour:
        of_kv = len(transfer.copies) > 1
        return self.next.pop(0) if of_kv and self.next else Behaviour(hang=True)

    async def run(self, until: Callable[[], bool], most: float) -> None:
        end = now() + most
        while not until() and now() < end:
            self.prefill.step()
            self.network.carry()
            turns(self.decode)
            self.decode.step()
            await asyncio.sleep(STEP)

    def send(self) -> Any:
        self.serial += 1
        ticket = self.prefill.compute(self.serial, TOKENS)
        return self.decode.fetch(f"r{self.serial}", ticket, self.serial, TOKENS)

    @property
    def left_out(self) -> bool:
        """Whether routers send it no request, as the launcher judges its links."""
        table = LinkTable((1, 1))
        table.set_peers(documents.PeersDocument(1, (self.keeper.entry,)))
        table.add(documents.RankReport((0, 0), (1, 1), (self.keeper.reported(),), 0), 0.0)
        return bool(table.why_none_works(0.0))


async def story(world: World, how: str) -> None:
    world.start()
    await world.run(lambda: False, 3.0)
    first = world.send()
    await world.run(lambda: first.ended, 5.0)
    assert first.failure is None
    world.next = [Behaviour(hang=True, delay=1e6)]
    hangs = world.send()
    await world.run(lambda: False, 1.0)
    if how == "another read gets an error":
        world.next = [Behaviour(hang=True, poll_error=NixlErrorKind.TRANSPORT)]
        failed = world.send()
        await world.run(lambda: failed.ended, 5.0)
        assert failed.failure is not None
    else:
        world.resets = True
        await world.run(lambda: world.left_out, 30.0)
        world.resets = False
    await world.run(lambda: world.left_out, 5.0)
    assert world.left_out
    assert not hangs.ended
    began = now()
    await world.run(lambda: not world.left_out, 2 * LEASE)
    assert now() - began < BACK_SECONDS, world.keeper.report
    last = world.send()
    await world.run(lambda: last.ended, 10.0)
    assert last.failure is None
    world.task.cancel()
    end_decode(world.decode)


@pytest.mark.parametrize(
    "how", ["another read gets an error", "the side channel was reset for a while"]
)
def test_a_link_comes_back_without_a_request(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    virtual_time.run(story(World(monkeypatch), how))
