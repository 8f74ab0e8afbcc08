"""A grid of rank processes, and one request's way through two engines of them."""

from __future__ import annotations

import itertools
import multiprocessing
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from grid_rank import SLOT, TOKEN, Rank, Received, play, without_rules
from layout_cases import Case
from modelled_engine import Modelled

from pdcluster_connector.protocol.ticket import Ticket, encode
from pdcluster_connector.sidechannel.server import SideChannelServer
from ticket_key import KEYS

ANSWER_SECONDS = 200


class RankProcess:
    """The handle of one process."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=play, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()

    def ask(self, name: str, *arguments: Any) -> None:
        self._pipe.send((name, arguments))

    def answer(self) -> Any:
        assert self._pipe.poll(ANSWER_SECONDS), "a rank does not answer"
        answer = self._pipe.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def end(self) -> None:
        self._pipe.close()
        self._process.join(5)
        if self._process.is_alive():
            self._process.kill()
            self._process.join(10)


@dataclass(frozen=True)
class Outcome:
    """What became of one request on all decode ranks."""

    ranks: list[Received]

    @property
    def failures(self) -> set[str]:
        return {rank.failure for rank in self.ranks}

    @property
    def nbytes(self) -> int:
        """Bytes that the ranks received; what NIXL was asked for is the same."""
        assert [rank.posted for rank in self.ranks] == [rank.nbytes for rank in self.ranks]
        return sum(rank.nbytes for rank in self.ranks)

    @property
    def faults(self) -> tuple[int, int, int]:
        """Wrong bytes, changed bytes that are none of the request's, bytes not written once."""
        return (
            sum(rank.wrong for rank in self.ranks),
            sum(rank.changed for rank in self.ranks),
            sum(rank.uneven for rank in self.ranks),
        )


class ProcessGrid:
    """Processes that are ranks, started when the first layout needs them."""

    def __init__(self) -> None:
        self._processes: dict[tuple[str, int], RankProcess] = {}
        self._incarnations = itertools.count(1)

    def run(
        self,
        case: Case,
        *,
        without: Collection[str] = (),
        spoil: str = "",
        missing: Collection[Rank] = (),
        decode: Case | None = None,
    ) -> Outcome:
        """Prefill, handshake, receive; returns what decode's ranks found in their memory.

        Args:
            without: ids of rules that are not applied.
            spoil: name of a fault in the plan.
            missing: prefill ranks that publish nothing.
            decode: the case as decode's ranks see it, if their model differs from prefill's.
        """
        engine_id = f"grid.c.prefill.r.0/{next(self._incarnations):016x}"
        prefill = Modelled(case.model, case.prefill, 0)
        serving = self._ranks("prefill", case.prefill.pipeline, case.prefill.tensor)
        for rank, process in serving.items():
            process.ask("serve", case, rank, engine_id)
        shards = [process.answer() for process in serving.values()]
        published = [shard for shard in shards if shard.rank not in missing]
        server = SideChannelServer("127.0.0.1", 0, engine_id, prefill.shape(), shards=published)
        with without_rules(without):
            server.start()
            handed_over = encode(self._ticket(case, prefill, engine_id, server.port), KEYS)
            seen = decode or case
            reading = self._ranks("decode", seen.decode.pipeline, seen.decode.tensor)
            for rank, process in reading.items():
                process.ask("receive", seen, rank, handed_over, spoil, set(without))
            received = [process.answer() for process in reading.values()]
            server.stop()
        for process in serving.values():
            process.ask("stop")
        for process in serving.values():
            process.answer()
        return Outcome(received)

    def _ticket(self, case: Case, prefill: Modelled, engine_id: str, port: int) -> Ticket:
        held = prefill.blocks(case.prefill_blocks)
        return Ticket(
            engine_id=engine_id,
            host="127.0.0.1",
            port=port,
            request_id="p",
            token=TOKEN,
            fence_slot=SLOT,
            blocks=tuple(tuple(group.blocks) for group in held.blocks),
            block_size=prefill.shape().block_size,
            tokens=case.tokens,
            prompt_digest=bytes(16),
            expires_at=0.0,
        )

    def _ranks(self, role: str, pipeline: int, tensor: int) -> dict[Rank, RankProcess]:
        ranks = list(itertools.product(range(pipeline), range(tensor)))
        for number in range(len(ranks)):
            if (role, number) not in self._processes:
                self._processes[role, number] = RankProcess()
        return {rank: self._processes[role, number] for number, rank in enumerate(ranks)}

    def end(self) -> None:
        for process in self._processes.values():
            process.end()
