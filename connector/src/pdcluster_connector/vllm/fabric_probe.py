"""Moves bytes between two pods before there is an engine, and says how fast and over what.

``serve`` offers memory with a pattern to one client. ``read`` reads it as a decode engine reads KV:
with the agent, the settings and the kind of memory of one. It ends with one JSON document, which
``pdcluster doctor --probe`` reads as the pod's last words.
"""

import argparse
import base64
import ctypes
import json
import os
import re
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pdcluster_connector import listening
from pdcluster_connector.compat import supported
from pdcluster_connector.compat.shape import Memory
from pdcluster_connector.nixl_io.interface import AgentInterface, NixlError
from pdcluster_connector.nixl_io.probe_memory import Buffer, HostMemory
from pdcluster_connector.nixl_io.serving_agent import describe_difference, one_row, pattern

DESCRIPTOR = 1 << 20
MOST_LINE = 1 << 20
LOOK_SECONDS = 0.0002
RANK = (0, 0)
_LANE = re.compile(r"\b([a-z]\w*/[\w.:-]+)")


class ProbeError(Exception):
    """The probe cannot go on; the message says why."""


def transports_in(log: str) -> list[str]:
    """Return the transports of large reads in UCX's tables (``UCX_PROTO_INFO``)."""
    found: dict[str, None] = {}
    of_peer = reading = False
    for line in log.splitlines():
        if "cfg#" in line:
            of_peer = " self cfg#" not in line
        elif " by ucp_" in line:
            reading = of_peer and "remote memory read" in line
        elif reading and "..inf" in line:
            found |= dict.fromkeys(_LANE.findall(line.split("|")[-2]))
    return list(found)


def serve(agent: AgentInterface, buffer: Buffer, listener: socket.socket) -> None:
    """Offer the buffer to one client, until that client has gone."""
    memory = buffer.memory
    agent.register([memory])
    buffer.write(pattern(agent.name, RANK, memory.length))
    offer = {
        "name": agent.name,
        "agent": base64.b64encode(agent.metadata()).decode(),
        "memory": [memory.address, memory.length, memory.device, memory.memory.value],
    }
    connection, _ = listener.accept()
    with connection:
        connection.settimeout(listener.gettimeout())
        connection.sendall(json.dumps(offer).encode() + b"\n")
        connection.recv(1)  # returns when the client has ended


def read(
    agent: AgentInterface, buffer: Buffer, connection: socket.socket, seconds: float
) -> dict[str, Any]:
    """Read the peer's memory again and again for some seconds; return bytes, rounds and GB/s.

    Raises:
        ProbeError: the peer is no probe, wrong bytes arrive, or a read does not end.
        NixlError: NIXL failed.
    """
    try:
        with connection.makefile("rb") as stream:
            offer = json.loads(stream.readline(MOST_LINE))
        address, length, device, kind = offer["memory"]
        metadata, name = base64.b64decode(offer["agent"]), str(offer["name"])
        theirs = Memory(kind)
    except (ValueError, TypeError, KeyError) as error:
        raise ProbeError("the peer says nothing that can be read") from error
    ours = buffer.memory
    count = min(length, ours.length) // DESCRIPTOR
    agent.register([ours])
    remote = agent.prepare(
        agent.add_peer(metadata), one_row(address, DESCRIPTOR, device, count), theirs
    )
    local = agent.prepare(None, one_row(ours.address, DESCRIPTOR, ours.device, count), ours.memory)
    indices = np.arange(count, dtype=np.int32)
    took: list[float] = []
    deadline = time.monotonic() + seconds
    while len(took) < 2 or time.monotonic() < deadline:  # the first round connects
        began = time.monotonic()
        handle = agent.read(local, indices, remote, indices)
        while agent.state(handle) != "DONE":
            if time.monotonic() > deadline + seconds:
                raise ProbeError(f"a read of {count * DESCRIPTOR:,} bytes does not end")
            time.sleep(LOOK_SECONDS)
        took.append(time.monotonic() - began)
        agent.release(handle)
    nbytes = count * DESCRIPTOR
    if wrong := describe_difference(pattern(name, RANK, nbytes), buffer.read(0, nbytes), RANK):
        raise ProbeError(wrong)
    rate = nbytes / statistics.median(took[1:]) / 1e9
    return {"gigabytesPerSecond": round(rate, 3), "bytes": nbytes, "rounds": len(took) - 1}


def _buffer(device: str, nbytes: int) -> Buffer:
    if device == "cpu":
        return HostMemory().allocate(nbytes)
    import torch

    from pdcluster_connector.vllm.worker_side.device_memory import DeviceMemory

    torch.cuda.set_device(0)
    return DeviceMemory(torch.device("cuda", 0)).allocate(nbytes)


def _connected(peer: str, seconds: float) -> socket.socket:
    host, _, port = peer.rpartition(":")
    deadline = time.monotonic() + seconds
    while True:
        try:
            return socket.create_connection((host.strip("[]"), int(port)), timeout=seconds)
        except OSError as error:
            if time.monotonic() > deadline:
                raise ProbeError(f"{peer} cannot be reached: {error}") from error
            time.sleep(1)


def _run(options: argparse.Namespace, log: Path) -> dict[str, Any]:
    from pdcluster_connector.nixl_io.nixl_agent import NixlAgent

    os.environ.update(UCX_PROTO_INFO="y", UCX_LOG_FILE=str(log), UCX_LOG_LEVEL="info")
    agent = NixlAgent("probe", backends=(options.backend,))
    buffer = _buffer(options.device, options.mib << 20)
    if options.side == "serve":
        with listening.open_port(options.host, options.port) as listener:
            listener.settimeout(options.patience)
            serve(agent, buffer, listener)
        return {}
    with _connected(options.peer, options.patience) as connection:
        result = read(agent, buffer, connection, options.seconds)
    ctypes.CDLL(None).fflush(None)  # UCX's log is buffered
    if options.backend != "UCX":  # it does not say which device it took
        return {**result, "transports": [options.backend]}
    return {**result, "transports": transports_in(log.read_text(errors="replace"))}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one side; return the exit code. Errors are in the document, too."""
    parser = argparse.ArgumentParser(prog="fabric_probe")
    parser.add_argument("side", choices=("serve", "read"))
    parser.add_argument("--host", default="0.0.0.0", help="to listen on")  # noqa: S104 (a pod's own)
    parser.add_argument("--port", type=int, default=5600, help="to listen on")
    parser.add_argument("--peer", help="HOST:PORT of the other side")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cpu")
    parser.add_argument("--backend", choices=sorted(supported.CARRIES), default="UCX")
    parser.add_argument("--mib", type=int, default=256, help="bytes of a round")
    parser.add_argument("--seconds", type=float, default=5.0, help="how long to read")
    parser.add_argument("--patience", type=float, default=60.0, help="seconds to wait for the peer")
    parser.add_argument("--last-words", default=os.devnull, help="file for the document")
    options = parser.parse_args(arguments)
    try:
        with tempfile.TemporaryDirectory(prefix="pdcluster-") as folder:
            document = _run(options, Path(folder, "ucx.log"))
    except (ProbeError, NixlError, OSError, ImportError, RuntimeError) as error:
        document = {"error": " ".join(f"{type(error).__name__}: {error}".split())[:1000]}
    print(text := json.dumps(document))
    Path(options.last_words).write_text(text)
    return 1 if "error" in document else 0


if __name__ == "__main__":
    sys.exit(main())
