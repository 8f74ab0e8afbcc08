"""Holds the receives of a real decode engine in a state, and cuts its side channel.

Runs in the engine's process. What is held goes on by itself once it is released.
"""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Callable, Iterable
from typing import Any

import aiohttp
import psutil

from pdcluster_connector.compat.reasons import Reason
from pdcluster_connector.protocol.failure import Failure
from pdcluster_connector.transfer.receive_machine import State

_release: list[Callable[[], None]] = []
_queued: list[Any] = []  # orders that wait in the transfer thread's queue
_mended = threading.Event()
_mended.set()
_request = aiohttp.ClientSession._request


def _receiver() -> Any:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return get_kv_transfer_group()._worker._receiver


def hold(state: str) -> None:
    """Let receives come as far as ``state`` and no further, until :func:`release`."""
    receiver = _receiver()
    if state == State.NEW.name:
        _hold_orders(receiver)
    elif state == State.HANDSHAKE.name:
        _hold_handshakes(receiver)
    elif state == State.FENCE.name:
        _hold_fences(receiver)
    else:
        _hold_landings(receiver)


def _hold_orders(receiver: Any) -> None:
    """Let the transfer thread take nothing from its queue."""
    event, receive = threading.Event(), receiver.receive
    receiver._inbox.put(event.wait)
    _queued.clear()

    def queue(requests: Iterable[Any], *leases: Any) -> None:
        batch = tuple(requests)
        receive(batch, *leases)
        _queued.extend(batch)

    def let_go() -> None:
        receiver.receive = receive
        event.set()

    receiver.receive = queue
    _release.append(let_go)


def _hold_handshakes(receiver: Any) -> None:
    """Disconnect, and ask no peer."""
    _disconnect(receiver)
    peers, waiting = receiver._connections.peers, []
    connect, lock, held = peers.connect, threading.Lock(), [True]

    def ask_later(*args: Any) -> None:
        with lock:
            if held:
                waiting.append(args)
                return
        connect(*args)  # it was released after this call had begun

    def go_on() -> None:
        peers.connect = connect
        with lock:
            held.clear()
        for args in waiting:
            connect(*args)

    peers.connect = ask_later

    _release.append(go_on)


def _hold_fences(receiver: Any) -> None:
    """Plan the reads of lease words, and post none: the connection stays for them."""
    transfers, planned = receiver._executor.transfers, {}
    add = transfers.add

    def keep(job: Any) -> None:
        if _is_in(job, State.FENCE.name):
            planned[job.request.request_id] = job
        else:
            add(job)

    def post_fences() -> None:
        transfers.add = add
        for job in planned.values():
            if _is_in(job, State.FENCE.name):  # it may have failed meanwhile
                add(job)

    transfers.add = keep
    _release.append(lambda: receiver._inbox.put(post_fences))


def _hold_landings(receiver: Any) -> None:
    """See no transfer land while any receive is posted."""
    executor = receiver._executor
    transfers = executor.transfers
    poll = transfers.poll

    def poll_others() -> bool:
        posted = (_is_in(job, State.POSTED.name) for job in executor.jobs.values())
        return not any(posted) and poll()

    transfers.poll = poll_others
    _release.append(lambda: setattr(transfers, "poll", poll))


def _disconnect(receiver: Any) -> None:
    """Close idle connections, so that the next request shakes hands."""
    failure = Failure(Reason.BACKEND_ERROR, "closed by the test")
    done = threading.Event()

    def close() -> None:
        connections = receiver._connections
        for connection in list(connections.by_engine.values()):
            receiver._connections.peers.forget(connection.engine_id, failure)
            connections.break_off(connection, failure)
        done.set()

    receiver._inbox.put(close)
    done.wait(120)


def release() -> None:
    """Let go on what is held."""
    while _release:
        _release.pop()()


def stands(count: int, state: str) -> bool:
    """Whether so many receives have come to ``state``; NEW ones wait in a queue."""
    if state == State.NEW.name:
        return len(_queued) == count
    jobs = list(_receiver()._executor.jobs.values())
    return sum(_is_in(job, state) for job in jobs) == count


def claimed() -> int:
    """Receives under way whose leases prefill has acknowledged for this engine."""
    return sum(job.machine.claimed for job in list(_receiver()._executor.jobs.values()))


def ended() -> int:
    """Receives that have ended, and of which no step has heard."""
    return len(_receiver()._executor.ended)


def _is_in(job: Any, state: str) -> bool:
    return job.machine.state.name == state


def cut(is_cut: bool) -> None:
    """Let nothing through to side channels, or what was held and all that follows."""
    (_mended.clear if is_cut else _mended.set)()

    async def request(self: Any, *args: Any, **kwargs: Any) -> Any:
        async with asyncio.timeout(_seconds(kwargs.get("timeout"))):
            while not _mended.is_set():  # noqa: ASYNC110  it is set by another thread
                await asyncio.sleep(0.01)
        return await _request(self, *args, **kwargs)

    aiohttp.ClientSession._request = request  # type: ignore[method-assign]


def _seconds(timeout: Any) -> float | None:
    return None if timeout is None else timeout.total


def reset_nixl(peer: int, side_channel: int) -> int:
    """Shut this process's TCP connections to NIXL in another process down, in both directions.

    Args:
        peer: the other process.
        side_channel: its port; connections to it stay.

    Returns how many there were.
    """
    theirs = {(c.raddr, c.laddr) for c in psutil.Process(peer).net_connections("tcp")}
    count = 0
    for ours in psutil.Process().net_connections("tcp"):
        if (ours.laddr, ours.raddr) not in theirs or ours.raddr.port == side_channel:
            continue
        with socket.socket(fileno=os.dup(ours.fd)) as connection:
            connection.shutdown(socket.SHUT_RDWR)
            count += 1
    return count
