"""The probe of a fabric: what it moves, what it says of UCX's choice, and what it refuses."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from loopback import free_ports
from pdcluster_connector.nixl_io.probe_memory import HostMemory
from pdcluster_connector.testing.nixl import Behaviour, Fabric
from pdcluster_connector.vllm.fabric_probe import ProbeError, read, serve, transports_in

MIB = 1 << 20
# What UCX 1.23 wrote of reads between two processes of a node, shortened, and of its own agent.
TABLES = """\
| probe#d988c3c2 self cfg#0                                |
| remote memory read by ucp_get* into host memory from host |
| 0..inf | zero-copy   | posix/memory                        |
| probe#d988c3c2 inter-node cfg#1                                  |
| remote memory write by ucp_put*(multi) from host memory to host |
| 0..inf | zero-copy   | tcp/eth9                                  |
| probe#d988c3c2 inter-node cfg#1                                  |
| remote memory read by ucp_get*(multi) into host memory from host |
|  Range  | Description |                  Config                   |
| 0..2047 | copy-out    | rc_verbs/mlx5_0:1                         |
| 2048..inf | zero-copy | 50% on rc_mlx5/mlx5_0:1 and 50% on rc_mlx5/mlx5_1:1 |
"""


def test_only_large_reads_from_a_peer_name_the_transport() -> None:
    assert transports_in(TABLES) == ["rc_mlx5/mlx5_0:1", "rc_mlx5/mlx5_1:1"]
    assert transports_in("") == []


@pytest.fixture
def fabric() -> Fabric:
    return Fabric()


def moved(fabric: Fabric) -> dict[str, object]:
    """Serve and read in one process; return what the reader says."""
    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(30)
    ours = fabric.agent("serve"), HostMemory().allocate(3 * MIB)
    thread = threading.Thread(target=serve, args=(*ours, listener))
    thread.start()
    with listener, socket.create_connection(listener.getsockname()) as connection:
        try:
            return read(fabric.agent("read"), HostMemory().allocate(2 * MIB), connection, 0.1)
        finally:
            connection.close()
            thread.join(30)


def test_it_reads_as_much_as_both_sides_have(fabric: Fabric) -> None:
    found = moved(fabric)
    assert found["bytes"] == 2 * MIB
    assert float(str(found["gigabytesPerSecond"])) > 0
    assert int(str(found["rounds"])) >= 1


def test_a_wrong_byte_is_told(fabric: Fabric) -> None:
    fabric.behave = lambda _: Behaviour(corrupt=True)
    with pytest.raises(ProbeError, match="1 of 2097152 probe bytes"):
        moved(fabric)


def test_a_read_that_hangs_ends(fabric: Fabric) -> None:
    fabric.behave = lambda _: Behaviour(hang=True)
    with pytest.raises(ProbeError, match="does not end"):
        moved(fabric)


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"\n",
        b"[]\n",
        b'{"name": 1}\n',
        b'{"name": "x", "agent": "!", "memory": [1, 2, 3]}\n',
        b'{"name": "x", "agent": "", "memory": [1, 2, 3, "TAPE"]}\n',
        b"x" * (2 * MIB),
    ],
)
def test_a_peer_that_is_no_probe_is_refused(fabric: Fabric, said: bytes) -> None:
    one, other = socket.socketpair()

    def speak() -> None:
        with one, contextlib.suppress(OSError):  # the reader has heard enough
            one.sendall(said)

    thread = threading.Thread(target=speak)
    thread.start()
    with other, pytest.raises(ProbeError, match="nothing that can be read"):
        read(fabric.agent("read"), HostMemory().allocate(MIB), other, 0.1)
    other.close()
    thread.join(30)


def program(*arguments: str) -> list[str]:
    """Return a command line: the probe sets UCX's variables for its own process alone."""
    return [sys.executable, "-m", "pdcluster_connector.vllm.fabric_probe", *arguments]


def environment() -> dict[str, str]:
    sources = str(Path(sys.modules[read.__module__].__file__ or "").parents[2])
    return {**os.environ, "UCX_TLS": "tcp", "PYTHONPATH": sources}


@pytest.mark.nixl
def test_two_processes_move_bytes_over_the_transport_that_is_allowed(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    common = ("--mib", "4")
    served = subprocess.Popen(
        program("serve", "--host", "127.0.0.1", "--port", str(port), *common), env=environment()
    )
    words = tmp_path / "words"
    reader = program("read", "--peer", f"127.0.0.1:{port}", "--seconds", "0.2", *common)
    with served:
        try:
            done = subprocess.run(
                [*reader, "--last-words", str(words)],
                env=environment(), capture_output=True, text=True, timeout=120, check=False,
            )  # fmt: skip
            assert served.wait(60) == 0
        finally:
            served.kill()
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(words.read_text())
    assert found["bytes"] == 4 * MIB
    assert found["gigabytesPerSecond"] > 0
    assert [one.partition("/")[0] for one in found["transports"]] == ["tcp"]


@pytest.mark.nixl
def test_libfabric_moves_bytes_or_the_pod_says_what_it_lacks(tmp_path: Path) -> None:
    """NIXL's wheel does not hold libfabric. With one that fits, this moves bytes over its TCP."""
    (port,) = free_ports(1)
    common = ("--mib", "4", "--backend", "LIBFABRIC")
    allowed = {**environment(), "FI_PROVIDER": "tcp"}
    served = subprocess.Popen(
        program("serve", "--host", "127.0.0.1", "--port", str(port), *common), env=allowed
    )
    words = tmp_path / "words"
    reader = program("read", "--peer", f"127.0.0.1:{port}", "--seconds", "0.2", *common)
    with served:
        try:
            done = subprocess.run(
                [*reader, "--last-words", str(words)],
                env=allowed, capture_output=True, text=True, timeout=120, check=False,
            )  # fmt: skip
            served.wait(60)
        finally:
            served.kill()
    found = json.loads(words.read_text())
    assert (done.returncode, served.returncode) == ((1, 1) if "error" in found else (0, 0))
    if "error" in found:
        assert found["error"].startswith("NixlError: NIXL makes no backend LIBFABRIC (")
        assert ".so" in found["error"], "the linker's own words"
        assert "a libfabric that fits this NIXL" in found["error"]
    else:
        assert (found["bytes"], found["transports"]) == (4 * MIB, ["LIBFABRIC"])


@pytest.mark.nixl
def test_a_peer_that_does_not_answer_is_named(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    words = tmp_path / "words"
    told = ("--last-words", str(words), "--mib", "1", "--patience", "0.1")
    done = subprocess.run(
        program("read", "--peer", f"127.0.0.1:{port}", *told),
        env=environment(), capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert f"127.0.0.1:{port} cannot be reached" in json.loads(words.read_text())["error"]
    assert "cannot be reached" in done.stdout
