"""A pod without an IPv4 address but loopback: the launcher, the side channel, a handshake, NIXL."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import machine

SIDE_CHANNEL = Path(__file__).parents[1] / "sidechannel"
ADDRESS = "fd00:5::7"
# As in a pod of a cluster that has only IPv6: the kernel itself gives loopback both addresses.
NETWORK = f"""
ip link set lo up
ip link add eth0 type veth peer name eth1
ip addr add {ADDRESS}/64 dev eth0 nodad
ip link set eth1 up
ip link set eth0 up
exec "$@"
"""


def inside(*command: str) -> str:
    """Run a command in such a network; return what it printed."""
    done = subprocess.run(
        [*machine.unshared("--net"), "sh", "-c", NETWORK, "sh", *command],
        env={**os.environ, "PYTHONPATH": ":".join([*sys.path, str(SIDE_CHANNEL)]),
             "UCX_TLS": "tcp", "UCX_NET_DEVICES": "eth0"},
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


LAUNCHER = """
import json, os, subprocess, sys, tempfile, time
from pathlib import Path
from launched import CONFIG, http, wait_for
address, folder = sys.argv[1], Path(tempfile.mkdtemp())
(folder / "config.json").write_text("{}")
(folder / "model.safetensors").write_bytes(b"weights")
extra = {"side_channel_host": address, "side_channel_port": 5600, "allow_insecure": True}
config = {**CONFIG, "kv_role": "kv_producer", "kv_connector_extra_config": extra}
words = [sys.executable, "-m", "pdcluster_connector.launcher",
         "--engine", "default.tiny.prefill.r1.0", "--role", "prefill",
         "--host", "0.0.0.0", "--port", "5590", "--metrics-port", "5591",
         "--runner", "stand_in_engine", "--", str(folder), "--host", "0.0.0.0", "--port", "8000",
         "--kv-transfer-config", json.dumps(config)]
environment = {**os.environ, "STAND_IN": "serve", "PDCLUSTER_ANY_VERSION": "1"}
launcher = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
                            env=environment)
try:
    told = json.loads(launcher.stdout.readline())
    urls = [f"http://[{address}]:5590/readyz", "http://127.0.0.1:5590/readyz"]
    ready = wait_for(lambda: (answer := http(urls[0]))[0] == 200 and answer[1])
    print(json.dumps({
        "report": ready, "arguments": told["arguments"],
        "statuses": [http(url)[0] for url in urls],
        "metrics": http(f"http://[{address}]:5591/metrics")[0],
    }))
finally:
    launcher.kill()
    launcher.wait()
"""


@pytest.mark.process
@pytest.mark.needs("network")
def test_a_launcher_answers_and_gives_vllm_an_address_of_both_families() -> None:
    said = json.loads(inside(sys.executable, "-c", LAUNCHER, ADDRESS))
    assert said["statuses"] == [200, 200], "a port forward comes over loopback"
    assert said["metrics"] == 200
    assert said["report"]["side_channel"] == f"[{ADDRESS}]:5600"
    assert said["report"]["api"] == f"http://[{ADDRESS}]:8000"
    words = said["arguments"]
    assert words[len(words) - 1 - words[::-1].index("--host") + 1] == "::"


EVERY = "from pdcluster_connector import listening; print(listening.every_address())"


@pytest.mark.process
@pytest.mark.needs("network")
@pytest.mark.parametrize(("alone", "address"), [(0, "::"), (1, "0.0.0.0")])
def test_ipv6_leaves_nobody_out_where_it_stands_alone_by_default(alone: int, address: str) -> None:
    script = f'echo {alone} > /proc/sys/net/ipv6/bindv6only && exec "$@"'
    assert inside("sh", "-c", script, "sh", sys.executable, "-c", EVERY).strip() == address


HANDSHAKE = """
import asyncio, sys, aiohttp
from loopback_engines import DECODE, PREFILL, SHAPE, shards_of
from pdcluster_connector.protocol import host_port, messages as m
from pdcluster_connector.sidechannel import lease_desk
from pdcluster_connector.sidechannel.handshake import shake_hands
from pdcluster_connector.sidechannel.server import SideChannelServer
host = sys.argv[1]
server = SideChannelServer(host, 0, PREFILL, SHAPE, shards=shards_of(PREFILL),
                           leases=lease_desk.LeaseDesk(10.0), allow_insecure=True)
server.start()

async def ask():
    host, port = host_port.split_address(host_port.join_address(sys.argv[1], server.port))
    async with aiohttp.ClientSession() as session:
        asked = m.HandshakeRequest((1, 99), DECODE, SHAPE)
        return await shake_hands(session, asked, PREFILL, host, port)

print(type(asyncio.run(ask())).__name__)
server.stop()
"""


@pytest.mark.process
@pytest.mark.needs("network")
def test_engines_shake_hands() -> None:
    assert inside(sys.executable, "-c", HANDSHAKE, ADDRESS).strip() == "EngineMetadata"


PROBE = """
import subprocess, sys
probe = [sys.executable, "-m", "pdcluster_connector.vllm.fabric_probe"]
served = subprocess.Popen([*probe, "serve", "--mib", "4"], stdout=subprocess.DEVNULL)
try:
    reader = [*probe, "read", "--peer", f"[{sys.argv[1]}]:5600", "--mib", "4", "--seconds", "0.2"]
    done = subprocess.run(reader, stdout=subprocess.PIPE, text=True)
    print(done.stdout.splitlines()[-1])
    served.wait(60)
finally:
    served.kill()
"""


@pytest.mark.nixl
@pytest.mark.needs("network")
def test_nixl_moves_bytes() -> None:
    found = json.loads(inside(sys.executable, "-c", PROBE, ADDRESS).splitlines()[-1])
    assert found["bytes"] == 4 << 20, found
    assert found["transports"] == ["tcp/eth0"]
