"""Real NIXL over TCP through a network that drops every packet for a while, or grows slow."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import nixl_prefill
import pytest
from msgspec import UNSET
from nixl_prefill import Agents, PrefillProcess
from transfer_rig import Decode, FakePeers, eventually

from pdcluster_connector.compat.reasons import Reason
from pdcluster_connector.nixl_io.reading_agent import ProbeResult
from pdcluster_connector.transfer.measures import LARGE_BYTES, LEAST_MEASUREMENTS, MEASUREMENTS
from pdcluster_connector.transfer.options import ReceiverOptions

pytestmark = [pytest.mark.nixl, pytest.mark.needs("network")]
CACHE = {"kv_heads": 4, "layers": 2, "num_blocks": 64, "block_tokens": 16, "token_bytes": 32}
NEW_NETWORK = 0x40000000
# Each process of the test run has a network of its own.
NETWORK = 4 * (os.getpid() % (1 << 14))
NEAR, FAR = (f"10.213.{(NETWORK + n) >> 8}.{(NETWORK + n) & 255}" for n in (1, 2))
serve_outside = nixl_prefill.serve


def serve_inside(pipe: Connection, engines: dict[str, int], cache: dict[str, Any]) -> None:
    space = os.open(f"/run/netns/pd{os.getppid()}", os.O_RDONLY)
    assert ctypes.CDLL(None).setns(space, NEW_NETWORK) == 0
    serve_outside(pipe, engines, cache)


def run(line: str) -> None:
    subprocess.run(line.split(), check=True)


@pytest.fixture(scope="module")
def cable() -> Iterator[str]:
    """A network namespace; both ends of its cable have one name, since UCX looks it up in /sys.

    One for all tests here: UCX reads the table of routes once in a process.
    """
    space = device = f"pd{os.getpid()}"
    run(f"ip netns add {space}")
    try:
        run(f"ip link add {device} type veth peer name {device} netns {space}")
        run(f"ip addr add {NEAR}/30 dev {device}")
        run(f"ip link set {device} up")
        run(f"ip -n {space} addr add {FAR}/30 dev {device}")
        run(f"ip -n {space} link set {device} up")
        yield space
    finally:
        run(f"ip netns del {space}")


@pytest.fixture
def space(cable: str, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("UCX_TLS", "tcp")
    monkeypatch.setenv("UCX_NET_DEVICES", cable)
    return cable


def cut(space: str) -> None:
    """Each side sends its packets to a station that is not there."""
    for there, other in ((f"-n {space}", NEAR), ("", FAR)):
        nobody = "lladdr 02:00:00:00:00:01 nud permanent"
        run(f"ip {there} neigh replace {other} dev {space} {nobody}")


def mend(space: str) -> None:
    for there, other in ((f"-n {space}", NEAR), ("", FAR)):
        run(f"ip {there} neigh del {other} dev {space}")


def test_a_peer_that_is_cut_off_costs_no_other_peer_and_comes_back(
    space: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    near = PrefillProcess({"near/1": 1}, CACHE)
    with monkeypatch.context() as patch:
        patch.setattr(nixl_prefill, "serve", serve_inside)
        far = PrefillProcess({"far/1": 1}, CACHE)
    peers = FakePeers()
    peers.table.update(near.metadata | far.metadata)
    options = ReceiverOptions(drain_deadline_seconds=1.0, probe_seconds=4.0, check_seconds=2.0)
    decode = Decode(Agents(), peers, options=options, **CACHE)
    receiver, metadata = decode.receiver, far.metadata["far/1"]

    def near_works(request_id: str) -> None:
        ticket = near.ticket("near/1", 5, [3, 1, 2], 48)
        decode.receive(decode.request(request_id, ticket, [51, 52, 53]))
        assert request_id in decode.wait(request_id).received

    def far_works() -> bool:
        return receiver.probe(metadata).result(timeout=60).failure is None

    try:
        eventually(far_works)
        near_works("before")
        cut(space)
        failure = receiver.probe(metadata, check=True).result(timeout=60).failure
        assert failure is not None
        assert failure.reason is Reason.TRANSFER_STALLED
        eventually(
            lambda: receiver._connections.by_engine.get("far/1") is None
        )  # the agent was rebuilt
        opening = receiver.probe(metadata)  # into the black hole
        near_works("beside")
        failure = opening.result(timeout=60).failure
        assert failure is not None
        assert failure.reason is Reason.TRANSFER_STALLED
        mend(space)
        eventually(far_works)
        near_works("after")
    finally:
        assert receiver.close()
        near.end()
        far.end()


def test_a_link_that_grows_slow_after_its_probe_is_found_by_its_receives(
    space: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight receives of 8 MiB through 50 MB/s, and as many when the wire is fast again."""
    large = CACHE | {"token_bytes": 2048}
    blocks = LARGE_BYTES // (4 * 2 * 16 * 2048)
    with monkeypatch.context() as patch:
        patch.setattr(nixl_prefill, "serve", serve_inside)
        far = PrefillProcess({"far/1": 1}, large)
    peers = FakePeers()
    peers.table.update(far.metadata)
    decode = Decode(Agents(), peers, options=nixl_prefill.patient(), **large)
    ticket = far.ticket("far/1", 5, range(1, 1 + blocks), 16 * blocks)

    def probed(*, check: bool = True) -> ProbeResult:
        result = decode.receiver.probe(far.metadata["far/1"], check=check).result(timeout=120)
        assert result.failure is None
        return result

    def receive(name: str, count: int) -> None:
        for number in range(count):
            request_id = f"{name}{number}"
            decode.receive(decode.request(request_id, ticket, range(1, 1 + blocks)))
            assert decode.wait(request_id).received[request_id].nbytes == LARGE_BYTES

    try:
        assert probed(check=False).receives is UNSET
        run(f"tc -n {space} qdisc add dev {space} root tbf rate 400mbit burst 256kb latency 50ms")
        receive("slow", LEAST_MEASUREMENTS)
        slow = probed().receives
        assert slow is not UNSET
        assert (slow.count, slow.bytes) == (LEAST_MEASUREMENTS, LEAST_MEASUREMENTS * LARGE_BYTES)
        assert slow.best < 53e6, "faster than the wire: some of it did not move in this time"
        run(f"tc -n {space} qdisc del dev {space} root")
        receive("fast", MEASUREMENTS)
        fast = probed().receives
        assert fast is UNSET or fast.best > 53e6
    finally:
        assert decode.receiver.close()
        far.end()
