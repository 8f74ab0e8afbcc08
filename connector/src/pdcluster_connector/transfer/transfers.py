"""The transfers under way: posted piece by piece, polled, and never forgotten.

A transfer leaves in one of three ways: it landed, the transport broke it, or it became
*unseen*: still able to write, but NIXL no longer tells how it is. Only destroying the agent
ends an unseen one.
"""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Callable

from pdcluster_connector.compat.reasons import Reason
from pdcluster_connector.nixl_io.interface import Handle, NixlError
from pdcluster_connector.nixl_io.reading_agent import Link, Source
from pdcluster_connector.protocol.failure import Failure
from pdcluster_connector.protocol.receive import Broken, Event, Failed, Landed, Opened, Posted
from pdcluster_connector.transfer.connections import Links
from pdcluster_connector.transfer.receive_job import Job

logger = logging.getLogger(__name__)

POST_SECONDS = 0.002  # posting for longer would leave what has landed unnoticed


class Flights:
    """Posts and polls for all jobs; ``tell`` takes what happened to a job's machine.

    Attributes:
        unseen: transfers that may still write and that nobody can observe.
    """

    def __init__(
        self,
        links: Links,
        tell: Callable[[Job, Event], None],
        link_broken: Callable[[Link, Failure], None],
        clock: Callable[[], float],
    ) -> None:
        self.unseen = 0
        self._links = links
        self._tell = tell
        self._link_broken = link_broken
        self._clock = clock
        self._numbers = itertools.count()
        self._posting: deque[Job] = deque()
        self._flying: dict[int, tuple[Job, Link, Source, Handle]] = {}

    def __bool__(self) -> bool:
        """Whether there is anything to post or to poll."""
        return bool(self._posting or self._flying)

    def add(self, job: Job) -> None:
        """Post ``job``'s pieces when their turn comes."""
        self._posting.append(job)

    def clear(self) -> None:
        """Forget everything: the agent is destroyed."""
        self._posting.clear()
        self._flying.clear()
        self.unseen = 0

    def post_some(self) -> bool:
        """Post for a while, one piece of each job in turn; returns whether there was any."""
        if not self._posting:
            return False
        until = self._clock() + POST_SECONDS
        while self._posting:
            job = self._posting.popleft()
            if not job.machine.may_post or job.link is None:
                continue  # it failed meanwhile: no sibling follows
            if job.link.broken is not None:
                self._tell(job, Failed(job.link.broken))
                continue
            self._post(job, job.link)
            if not job.machine.may_post:
                continue
            if job.pieces:
                self._posting.append(job)
            else:
                self._tell(job, Posted())
            if self._clock() >= until:
                break
        return True

    def _post(self, job: Job, link: Link) -> None:
        piece = job.pieces.popleft()
        number = next(self._numbers)
        # Before the call: whatever it does, the transfer counts as able to write.
        self._tell(job, Opened(number))
        if number not in job.machine.open:
            return  # the lease has just ended
        link.flying += 1
        try:
            source = link.sources[piece.source]
            handle = self._links.agent.read(source, piece.decode, piece.prefill)
        except NixlError as error:
            self._broke(number, job, link, error)
        except BaseException as error:  # noqa: BLE001 - it may have been posted, so it is unseen
            self._lost(job, f"posting failed: {type(error).__name__}: {error}")
        else:
            self._flying[number] = (job, link, source, handle)

    def poll(self) -> bool:
        """Look at every transfer under way; returns whether any ended."""
        moved = False
        for number, (job, link, source, handle) in list(self._flying.items()):
            if number not in self._flying:
                continue  # the agent was destroyed while telling
            try:
                if not self._links.agent.landed(handle):
                    continue
            except NixlError as error:
                del self._flying[number]
                if not error.flying:
                    self._links.agent.release(handle)
                self._broke(number, job, link, error)
            except BaseException as error:  # noqa: BLE001 - nobody knows how it is
                del self._flying[number]
                self._lost(job, f"polling failed: {type(error).__name__}: {error}")
            else:
                del self._flying[number]
                self._links.agent.release(handle)
                source.moved_at = self._clock()
                self._ended(link)
                self._tell(job, Landed(number))
            moved = True
        return moved

    def _broke(self, number: int, job: Job, link: Link, error: NixlError) -> None:
        if error.flying:
            self._lost(job, str(error))
            return
        failure = Failure(Reason.BACKEND_ERROR, f"reading {link.engine_id}: {error}")
        if error.kind.of_peer:
            self._link_broken(link, failure)
        self._ended(link)
        self._tell(job, Broken(number, failure))

    def _lost(self, job: Job, message: str) -> None:
        self.unseen += 1
        logger.error(
            "request %s: %s; its blocks stay until the agent is rebuilt",
            job.request.request_id,
            message,
        )
        self._tell(job, Failed(Failure(Reason.BACKEND_ERROR, message)))

    def _ended(self, link: Link) -> None:
        link.flying -= 1
        self._links.settle(link)
