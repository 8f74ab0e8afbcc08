from __future__ import annotations

import asyncio
import itertools
import json
import os
import socket
import time
import urllib.request
from pathlib import Path

import pytest
from pods import (
    SERVER,
    alive,
    carrying,
    container_status,
    pod,
    pod_ready,
    python_pod,
    running_kubelet,
    until,
)

from loopback import free_network, free_port
from pdcluster_operator.local.addresses import AddressBook, PortBusyError
from pdcluster_operator.local.kubelet import CONFIG

pytestmark = pytest.mark.process

PORT = free_port()


def server_pod(name: str, code_file: Path, **container: object) -> dict:
    made = python_pod(name, SERVER, "0.0.0.0", str(PORT), str(code_file), **container)
    made["spec"]["containers"][0].setdefault(
        "readinessProbe",
        {
            "httpGet": {"path": "/readyz", "port": "http"},
            "periodSeconds": 0.05,
            "failureThreshold": 2,
        },
    )
    made["spec"]["containers"][0]["ports"] = [{"name": "http", "containerPort": PORT}]
    return made


async def fetch(address: str) -> dict:
    def get() -> dict:
        with urllib.request.urlopen(f"http://{address}:{PORT}/", timeout=60) as answer:
            return json.load(answer)

    return await asyncio.to_thread(get)


async def test_pods_serve_the_same_port_on_addresses_of_their_own(tmp_path: Path) -> None:
    async with running_kubelet(tmp_path, (PORT,)) as kubelet:
        for name in ("a", "b"):
            kubelet.api.apply(server_pod(name, tmp_path / "no"))
        await until(lambda: pod_ready(kubelet.api, "a") and pod_ready(kubelet.api, "b"))
        addresses = [kubelet.api.get("Pod", "ns", name)["status"]["podIP"] for name in ("a", "b")]
        assert len(set(addresses)) == 2
        answers = [await fetch(address) for address in addresses]
        assert [answer["argv"][1] for answer in answers] == addresses


async def test_readiness_follows_the_probe_both_ways(tmp_path: Path) -> None:
    code = tmp_path / "code"
    code.write_text("503")
    async with running_kubelet(tmp_path, (PORT,)) as kubelet:
        kubelet.api.apply(server_pod("a", code))
        await until(lambda: "running" in container_status(kubelet.api, "a").get("state", {}))
        await asyncio.sleep(0.5)
        assert not pod_ready(kubelet.api, "a")
        code.write_text("200")
        await until(lambda: pod_ready(kubelet.api, "a"))
        code.write_text("500")
        await until(lambda: not pod_ready(kubelet.api, "a"))


async def test_a_container_that_ends_comes_back_later_each_time_with_its_last_words(
    tmp_path: Path,
) -> None:
    starts = tmp_path / "starts"
    code = """
        import sys, time
        open(sys.argv[1], "a").write(f"{time.time()}\\n")
        open(sys.argv[2], "w").write("weights of layer 3 are missing")
        print("noise", file=sys.stderr)
        sys.exit(7)
    """
    async with running_kubelet(tmp_path) as kubelet:
        kubelet.api.apply(python_pod("a", code, str(starts), "/dev/termination-log"))
        await until(lambda: container_status(kubelet.api, "a").get("restartCount") == 2)
        status = container_status(kubelet.api, "a")
        times = [float(line) for line in starts.read_text().split()]
        gaps = [after - before for before, after in itertools.pairwise(times)]
    ended = status["lastState"]["terminated"]
    assert (ended["exitCode"], ended["reason"]) == (7, "Error")
    assert ended["message"] == "weights of layer 3 are missing"
    assert gaps[0] >= 1.0
    assert gaps[1:] == [] or gaps[1] >= 2.0
    assert not os.access("/dev/termination-log", os.F_OK)


async def test_without_last_words_the_logs_last_line_is_the_message(tmp_path: Path) -> None:
    async with running_kubelet(tmp_path) as kubelet:
        kubelet.api.apply(python_pod("a", "raise SystemExit('no such quantization: int3')"))
        await until(lambda: "waiting" in container_status(kubelet.api, "a").get("state", {}))
        status = container_status(kubelet.api, "a")
        assert status["lastState"]["terminated"]["message"] == "no such quantization: int3"
        assert status["state"]["waiting"]["reason"] == "CrashLoopBackOff"


async def test_a_signal_shows_as_128_plus_n(tmp_path: Path) -> None:
    async with running_kubelet(tmp_path) as kubelet:
        kubelet.api.apply(python_pod("a", "import os; os.kill(os.getpid(), 9)"))
        await until(lambda: "lastState" in container_status(kubelet.api, "a"))
        assert container_status(kubelet.api, "a")["lastState"]["terminated"]["exitCode"] == 137


FAMILY = """
    import os, signal, subprocess, sys, time
    if (child := os.fork()) == 0:
        os.setsid()                       # a daemon that its parent forgot
        if os.fork() == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(600)
        os._exit(0)
    os.waitpid(child, 0)                  # from now on the daemon is there
    if len(sys.argv) > 2: signal.signal(signal.SIGTERM, signal.SIG_IGN)
    open(sys.argv[1], "w").write("up")
    while not (len(sys.argv) > 3 and os.path.exists(sys.argv[3])): time.sleep(0.05)
"""


def marked(made: dict, mark: str) -> dict:
    made["spec"]["containers"][0]["env"] = [{"name": "MARK", "value": mark}]
    return made


async def test_what_a_container_leaves_behind_goes_with_it(tmp_path: Path) -> None:
    up, over = tmp_path / "up", tmp_path / "over"
    async with running_kubelet(tmp_path) as kubelet:
        made = python_pod("a", FAMILY, str(up), "stubborn", str(over))
        kubelet.api.apply(marked(made, f"mark-{tmp_path}"))
        await until(up.exists)
        assert len(carrying(f"mark-{tmp_path}")) >= 3
        over.touch()
        await until(lambda: "lastState" in container_status(kubelet.api, "a"))
        assert carrying(f"mark-{tmp_path}") == []


async def test_deleting_a_pod_ends_all_of_it_and_a_stubborn_one_after_its_grace(
    tmp_path: Path,
) -> None:
    async with running_kubelet(tmp_path) as kubelet:
        for name, stubborn, grace in (("polite", (), 600), ("stubborn", ("stubborn",), 2)):
            up = tmp_path / f"{name}-is-up"
            made = marked(python_pod(name, FAMILY, str(up), *stubborn), f"{tmp_path}")
            made["spec"]["terminationGracePeriodSeconds"] = grace
            kubelet.api.apply(made)
            await until(up.exists)
            began = time.monotonic()
            kubelet.api.delete("Pod", "ns", name)
            await until(lambda name=name: kubelet.api.get("Pod", "ns", name) is None)
            if stubborn:
                assert time.monotonic() - began > 1.9, "the grace of the pod is 2 s"
            assert carrying(f"{tmp_path}") == []


async def test_a_pod_made_anew_under_its_name_keeps_its_address(tmp_path: Path) -> None:
    async with running_kubelet(tmp_path) as kubelet:
        seen = []
        for _ in range(2):
            kubelet.api.apply(python_pod("a", "import time; time.sleep(600)"))
            await until(lambda: container_status(kubelet.api, "a"))
            seen.append(kubelet.api.get("Pod", "ns", "a")["status"]["podIP"])
            kubelet.api.delete("Pod", "ns", "a")
            await until(lambda: kubelet.api.get("Pod", "ns", "a") is None)
        assert seen[0] == seen[1]


async def test_a_startup_probe_that_never_passes_restarts_the_container(tmp_path: Path) -> None:
    probe = {"tcpSocket": {"port": PORT}, "periodSeconds": 0.05, "failureThreshold": 3}
    made = python_pod("a", "import time; time.sleep(600)", startupProbe=probe)
    async with running_kubelet(tmp_path) as kubelet:
        kubelet.api.apply(made)
        await until(lambda: "lastState" in container_status(kubelet.api, "a"))
        message = container_status(kubelet.api, "a")["lastState"]["terminated"]["message"]
        assert "startup probe" in message
        assert str(PORT) in message


async def test_a_program_that_is_not_installed_is_the_containers_last_word(tmp_path: Path) -> None:
    async with running_kubelet(tmp_path) as kubelet:
        kubelet.api.apply(pod("a", "vllm-ruter"))
        await until(lambda: "lastState" in container_status(kubelet.api, "a"))
        ended = container_status(kubelet.api, "a")["lastState"]["terminated"]
    assert (ended["exitCode"], ended["message"]) == (127, "vllm-ruter: No such file or directory")


async def test_a_folder_that_appears_lets_the_pod_start(tmp_path: Path) -> None:
    made = python_pod("a", "import time; time.sleep(600)")
    made["spec"]["volumes"] = [{"name": "m", "hostPath": {"path": f"{tmp_path}/model"}}]
    async with running_kubelet(tmp_path) as kubelet:
        kubelet.api.apply(made)
        await until(lambda: "waiting" in container_status(kubelet.api, "a").get("state", {}))
        waiting = container_status(kubelet.api, "a")["state"]["waiting"]
        assert waiting["reason"] == CONFIG
        assert waiting["message"].startswith(f"{tmp_path}/model: No such file or directory")
        (tmp_path / "model").mkdir()
        (tmp_path / "model/config.json").write_text("{}")
        await until(lambda: "running" in container_status(kubelet.api, "a")["state"])


def test_a_busy_address_is_passed_over_and_said() -> None:
    said: list[str] = []
    with socket.socket() as taken:
        network = free_network()
        taken.bind((f"{network}.2", PORT))
        taken.listen(1)
        book = AddressBook((PORT,), said.append, first=f"{network}.2")
        assert book.address("a") == f"{network}.3"
        assert book.address("a") == f"{network}.3"
        assert book.address("b") == f"{network}.4"
        other = AddressBook((PORT,), said.append, first=f"{network}.2")
        assert other.address("x") == f"{network}.5", "two local clusters never share an address"
        book.close()
        other.close()
    assert f"port {PORT} of {network}.2 is taken by" in said[0]


def test_a_port_taken_on_every_address_is_named_with_its_holder() -> None:
    port = free_port()
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", port))
        taken.listen(1)
        book = AddressBook((port,), print, first=f"{free_network()}.2")
        words = rf"port {port} of every address \(0\.0\.0\.0\) .*\(pid {os.getpid()}\)"
        with pytest.raises(PortBusyError, match=words):
            book.address("a")


async def test_killing_the_kubelet_kills_all(tmp_path: Path) -> None:
    async with running_kubelet(tmp_path) as kubelet:
        up = tmp_path / "up"
        made = marked(python_pod("a", FAMILY, str(up), "stubborn"), f"{tmp_path}")
        made["spec"]["terminationGracePeriodSeconds"] = 600
        kubelet.api.apply(made)
        await until(up.exists)
        pids = carrying(f"{tmp_path}")
        kubelet.kill()
        await until(lambda: not any(alive(pid) for pid in pids))


async def test_the_api_key_of_this_shell_reaches_only_containers_that_ask_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another cluster's key must not make an engine ask for one that nobody sends."""
    named = [{"name": "VLLM_API_KEY", "valueFrom": {"secretKeyRef": {"name": "s", "key": "token"}}}]
    async with running_kubelet(tmp_path, (PORT,)) as kubelet:
        kubelet.environment = {**kubelet.environment, "VLLM_API_KEY": "sk-1"}
        kubelet.api.apply(server_pod("asks", tmp_path / "no", env=named))
        kubelet.api.apply(server_pod("plain", tmp_path / "no"))
        seen = {}
        for name in ("asks", "plain"):
            await until(lambda name=name: pod_ready(kubelet.api, name))
            address = kubelet.api.get("Pod", "ns", name)["status"]["podIP"]
            seen[name] = (await fetch(address))["env"].get("VLLM_API_KEY")
        assert seen == {"asks": "sk-1", "plain": None}
