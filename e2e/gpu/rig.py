"""Prefill engines in a process of their own and a decode rank here, on one device."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from typing import Any
from unittest import mock

import torch
from transfer_rig import Decode, FakePeers, Prefill

from gpu import PREFILL_DEVICE
from gpu.device_cache import DeviceCache, probe_memory
from pdcluster_connector.nixl_io import nixl_agent
from pdcluster_connector.nixl_io.nixl_agent import NixlAgent
from pdcluster_connector.nixl_io.serving_agent import PROBE_BYTES
from pdcluster_connector.protocol.messages import EngineMetadata
from pdcluster_connector.transfer.options import ReceiverOptions

ENGINE = "prefill/1"


class Agents:
    """Makes agents of real NIXL. ``threads`` and ``split`` are options of its UCX backend.

    ``pause`` is what their progress threads are told, in microseconds; ours without it.
    """

    def __init__(self, threads: int = 0, split: int = 0, pause: int = 0) -> None:
        self._threads, self._pause = threads, pause
        self._options = [("UCX", "split_batch_size", str(split))] if split else []

    def agent(self, name: str) -> NixlAgent:
        """Make an agent."""
        make = partial(NixlAgent, name, num_threads=self._threads, backend_options=self._options)
        if not self._pause:
            return make()
        with mock.patch.object(nixl_agent, "progress_delay", return_value=self._pause):
            return make()


def select(device: str) -> None:
    """Make the device this thread's; without one, UCX turns cuda_ipc off."""
    if device != "cpu":
        torch.cuda.set_device(device)


def _serve(pipe: Connection, tensor: int, cache: dict[str, Any], agents: Agents) -> None:
    cache = cache | {"device": os.environ.get(PREFILL_DEVICE, cache["device"])}
    select(cache["device"])
    prefill = Prefill(
        agents,  # type: ignore[arg-type]
        ENGINE,
        tensor,
        make_cache=DeviceCache,
        probe_memory=probe_memory(cache["device"]),
        probe_bytes=PROBE_BYTES,
        **cache,
    )
    pipe.send(prefill.metadata)
    while True:
        try:
            command, *args = pipe.recv()
        except EOFError:
            return
        if command == "fill_random":
            for rank, one in enumerate(prefill.caches):
                one.fill_random(args[0] + rank)
            pipe.send(None)
        else:
            pipe.send(getattr(prefill, command)(*args))


class PrefillProcess:
    """A prefill engine of ``tensor`` ranks in a process of its own."""

    def __init__(self, tensor: int, cache: dict[str, Any], agents: Agents | None = None) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        arguments = (theirs, tensor, cache, agents or Agents())
        self._process = context.Process(target=_serve, args=arguments, daemon=True)
        self._process.start()
        theirs.close()
        self.metadata: EngineMetadata = self._answer()

    @property
    def pid(self) -> int | None:
        """Return the process's id."""
        return self._process.pid

    def ask(self, *message: Any) -> Any:
        """Have it call one of its methods."""
        self._pipe.send(message)
        return self._answer()

    def _answer(self) -> Any:
        if not self._pipe.poll(200):
            raise TimeoutError("the prefill process does not answer")
        return self._pipe.recv()

    def end(self) -> None:
        """End the process."""
        self._pipe.close()
        self._process.join(5)
        self._process.kill()


@contextmanager
def pair(
    cache: dict[str, Any],
    prefill_tensor: int = 1,
    decode_tensor: int = 1,
    *,
    agents: Agents | None = None,
    options: dict[str, Any] | None = None,
) -> Iterator[tuple[PrefillProcess, Decode]]:
    """Start both; the decode rank is the first one of ``decode_tensor``."""
    prefill = PrefillProcess(prefill_tensor, cache)
    with decode_of(prefill, cache, decode_tensor, agents=agents, options=options) as decode:
        yield prefill, decode
    prefill.end()


@contextmanager
def decode_of(
    prefill: PrefillProcess,
    cache: dict[str, Any],
    tensor: int = 1,
    *,
    rank: int = 0,
    agents: Agents | None = None,
    options: dict[str, Any] | None = None,
) -> Iterator[Decode]:
    """Start a decode rank that knows the prefill engine."""
    peers = FakePeers()
    peers.table[ENGINE] = prefill.metadata
    limits = {"probe_seconds": 60.0, "check_seconds": 60.0, **(options or {})}
    decode = Decode(
        agents or Agents(),  # type: ignore[arg-type]
        peers,
        rank=rank,
        tensor=tensor,
        options=ReceiverOptions(**limits),
        make_cache=DeviceCache,
        probe_memory=probe_memory(cache["device"]),
        prepare_thread=partial(select, cache["device"]),
        **cache,
    )
    try:
        yield decode
    finally:
        decode.receiver.close()
