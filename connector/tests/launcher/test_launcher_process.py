"""A launcher and a child that behaves in every way an engine can."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from launched import HERE, http, wait_for

import pdcluster_connector
from pdcluster_connector.launcher import inside_vllm

pytestmark = pytest.mark.process

PEER = {"engine": "default.tiny.prefill.r1.1", "side_channel": "127.0.0.1:5600"}


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_engine_gets_its_identity_and_the_connector_of_the_bundle(launch, pyz):
    engine = launch("serve", bundle=pyz)
    readyz = engine.ready()
    told = engine.told()
    config = json.loads(told["arguments"][told["arguments"].index("--kv-transfer-config") + 1])
    assert config["engine_id"] == readyz["engine_id"]
    logical, incarnation = readyz["engine_id"].split("/")
    assert logical == readyz["engine"] == "default.tiny.prefill.r1.0"
    assert len(incarnation) == 16
    assert int(incarnation, 16) >= 0
    # The bundle first, the image's own path behind it.
    assert told["environment"]["PYTHONPATH"] == f"{pyz}{os.pathsep}{HERE}"
    assert told["environment"]["PDCLUSTER_CONTROL_URL"] == engine.url
    assert len(told["environment"]["PDCLUSTER_CONTROL_TOKEN"]) >= 24
    assert readyz["role"] == "prefill"
    assert readyz["state"] == "Ready"
    assert readyz["api"] == engine.api
    assert readyz["side_channel"].startswith("127.0.0.1:")
    assert readyz["versions"]["pdcluster"] == pdcluster_connector.__version__


def test_every_start_is_another_incarnation(launch):
    ids = {launch("serve").ready()["engine_id"] for _ in range(2)}
    assert len(ids) == 2


@pytest.fixture
def work(tmp_path):
    """A file; what the engine does lasts as long as it exists."""
    file = tmp_path / "work"
    file.touch()
    return file


def test_not_ready_before_the_api_answers(launch, work):
    says = "(Worker pid=1) INFO 11-21 03:52:30 [a.py:1] Starting to load model x..."
    engine = launch(f"say:{says};slow:{work};serve")
    wait_for(lambda: engine.state == "LoadingWeights")
    status, document = http(f"{engine.url}/readyz")
    assert (status, document["ready"]) == (503, False)
    assert document["message"] == "loading the model's weights"
    work.unlink()
    engine.ready()


def test_output_passes_unchanged_and_apart(launch):
    engine = launch("say:to stdout äöü \x1b[31mred\x1b[0m;err:to stderr;exit:3")
    assert engine.end() == 3
    assert engine.out.splitlines()[1] == "to stdout äöü \x1b[31mred\x1b[0m"
    assert "to stderr" in engine.err
    assert "to stdout" not in engine.err


@pytest.mark.parametrize("code", [1, 7, 255])
def test_exit_code_is_the_engines(launch, code):
    engine = launch(f"err:ValueError: the tea is cold;exit:{code}")
    assert engine.end() == code
    assert engine.termination == "ValueError: the tea is cold"
    assert engine.err.splitlines()[-1] == "pdcluster: ValueError: the tea is cold"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT])
def test_death_by_signal(launch, number):
    engine = launch(f"signal:{int(number)}")
    assert engine.end() == 128 + number
    assert engine.termination == f"vLLM's API server was killed by {number.name}"


def core_of(engine) -> int:
    return int(wait_for(lambda: re.search(r"^core (\d+)$", engine.out, re.MULTILINE))[1])


def test_a_killed_engine_core_is_named_with_its_signal(launch):
    engine = launch("core:idle")
    os.kill(core_of(engine), signal.SIGKILL)
    assert engine.end() == 1
    assert engine.termination == "vLLM's process EngineCore was killed by SIGKILL"


def test_a_core_that_the_engine_ended_itself_is_not_the_cause(launch):
    engine = launch("core:stopped")
    assert engine.end() == 1
    assert engine.termination == "AsyncLLM output_handler failed."


@pytest.mark.needs("cgroup")
def test_an_engine_core_out_of_memory(launch, small_cgroup):
    engine = launch("core:hungry", cgroup=small_cgroup)
    assert engine.end() == 1
    assert engine.termination.startswith(
        "out of memory: the kernel killed vLLM's process EngineCore; raise the memory limit"
    )


@pytest.mark.needs("cgroup")
def test_an_api_server_out_of_memory(launch, small_cgroup):
    engine = launch("hungry", cgroup=small_cgroup)
    assert engine.end() == 137
    assert engine.termination.startswith(
        "out of memory: the kernel killed vLLM's API server; raise the memory limit"
    )


def test_an_engine_that_ends_unasked_with_zero_has_failed(launch):
    engine = launch("exit:0")
    assert engine.end() == 1
    assert engine.termination == "the engine ended with code 0 and did not say why"


def test_last_words_of_a_real_log(launch):
    engine = launch(f"log:{HERE / 'logs' / 'cut-weights.log'};exit:1")
    assert engine.end() == 1
    assert engine.termination.startswith("SafetensorError: Error while deserializing header")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_an_idle_engine(launch, number):
    engine = launch("serve", "--drain-seconds", "600", "--stop-seconds", "600")
    engine.ready()
    engine.process.send_signal(number)
    assert engine.end() == 0
    assert engine.termination == ""


def test_a_signal_while_loading_stops_at_once(launch):
    engine = launch("slow:600;serve", "--drain-seconds", "600", "--stop-seconds", "600")
    pid = engine.told()["pid"]
    engine.process.send_signal(signal.SIGTERM)
    assert engine.end() == 128 + signal.SIGKILL
    assert not alive(pid)


def test_a_stop_waits_for_requests_and_leases(launch, work):
    engine = launch(f"busy:{work};serve", "--drain-seconds", "600")
    engine.ready()
    engine.process.send_signal(signal.SIGTERM)
    told = "waiting for 1 request and 1 lease"
    wait_for(lambda: http(f"{engine.url}/readyz")[1]["message"] == told)
    assert http(f"{engine.url}/readyz")[0] == 503
    assert engine.state == "Draining"
    work.unlink()
    assert engine.end() == 0


def test_a_stop_does_not_wait_longer_than_told(launch):
    engine = launch("busy:600;serve", "--drain-seconds", "1", "--stop-seconds", "600")
    engine.ready()
    engine.process.send_signal(signal.SIGTERM)
    assert engine.end() == 0


def test_an_engine_deaf_to_sigterm_is_killed(launch):
    engine = launch("deaf;serve", "--drain-seconds", "0", "--stop-seconds", "1")
    engine.ready()
    engine.process.send_signal(signal.SIGTERM)
    assert engine.end() == 128 + signal.SIGKILL


def test_a_second_signal_kills(launch):
    engine = launch("deaf;busy:600;serve", "--drain-seconds", "600")
    engine.ready()
    engine.process.send_signal(signal.SIGINT)
    wait_for(lambda: engine.state == "Draining")
    engine.process.send_signal(signal.SIGINT)
    assert engine.end() == 128 + signal.SIGKILL


def test_an_engine_of_which_a_signal_stops_a_process_is_frozen_until_it_goes_on(launch):
    """The API server answers /health although the engine core, its child, is stopped."""
    engine = launch("children;serve")
    engine.ready()
    core = engine.told()["children"][0]
    os.kill(core, signal.SIGSTOP)
    frozen = wait_for(lambda: (found := http(f"{engine.url}/readyz"))[0] == 503 and found[1])
    assert frozen["state"] == "Frozen"
    words = r"a signal \(SIGSTOP\) has stopped 1 of vLLM's processes \(since 20\d\d-.+Z\)"
    assert re.fullmatch(words, frozen["message"])
    os.kill(core, signal.SIGCONT)
    again = engine.ready()
    assert (again["state"], again["message"]) == ("Ready", "")
    assert again["engine_id"] == frozen["engine_id"]


@pytest.mark.parametrize("behaviour", ["children;slow:0.2;exit:5", "children;signal:9"])
def test_no_descendant_outlives_the_engine(launch, behaviour):
    engine = launch(behaviour)
    children = engine.told()["children"]
    assert len(children) == 3
    assert engine.end() in {5, 137}
    assert [pid for pid in children if alive(pid)] == []


def test_descendants_end_after_a_stop(launch):
    engine = launch("children;serve")
    engine.ready()
    children = engine.told()["children"]
    assert all(alive(pid) for pid in children)
    engine.process.send_signal(signal.SIGTERM)
    assert engine.end() == 0
    assert [pid for pid in children if alive(pid)] == []


def test_orphans_are_reaped_while_the_engine_runs(launch):
    engine = launch("children;serve")
    engine.ready()
    orphan = engine.told()["children"][2]
    os.kill(orphan, signal.SIGKILL)
    wait_for(lambda: not Path(f"/proc/{orphan}").exists())
    assert engine.state == "Ready"


def test_a_closed_terminal_does_not_stop_the_engine(launch):
    read, write = os.pipe()
    os.close(read)
    noisy = "err:" + "x" * 5000
    engine = launch(";".join([noisy] * 20) + ";serve", sink=write)
    os.close(write)
    engine.ready()
    engine.process.send_signal(signal.SIGTERM)
    assert engine.end() == 0


def test_a_launcher_that_is_killed_takes_its_engine_along(launch):
    engine = launch("deaf;serve")
    engine.ready()
    pid = engine.told()["pid"]
    engine.process.kill()
    wait_for(lambda: not alive(pid))


def test_drain_on_request_keeps_the_engine(launch, work):
    engine = launch(f"busy:{work};serve")
    engine.ready()
    assert http(f"{engine.url}/v1/drain", method="POST")[0] == 202
    assert engine.state == "Draining"
    work.unlink()
    wait_for(
        lambda: (
            http(f"{engine.url}/readyz")[1]["message"] == "drained: no request and no lease is left"
        )
    )
    assert http(f"{engine.api}/health")[0] == 200
    engine.process.send_signal(signal.SIGTERM)
    assert engine.end() == 0


# Before the start.


def report(engine, state: str) -> None:
    """Report the one link of a decode engine, as its worker does."""
    link = {"engine": PEER["engine"], "engine_id": f"{PEER['engine']}/aa", "state": state}
    body = {"rank": [0, 0], "of": [1, 1], "links": [{**link, "reason": "PeerRestarted"}]}
    token = engine.told()["environment"]["PDCLUSTER_CONTROL_TOKEN"]
    assert http(f"{engine.url}/v1/reports", body, "POST", token)[0] == 204


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_routers_leave_out_a_decode_engine_whose_links_have_failed(launch, policy):
    """It stays ready, so nobody restarts it, and comes back without a request."""
    engine = launch(role="decode", policy=policy)
    engine.ready()
    environment = engine.told()["environment"]
    left_out = Path(f"{environment[inside_vllm.DOOR_VARIABLE]}-no-link")
    peers = {"generation": 1, "peers": [PEER], "model": "m", "canary_interval_seconds": 3600}
    assert http(f"{engine.url}/v1/peers", peers, "PUT")[0] == 204

    time.sleep(1.5)
    assert not left_out.exists(), "a link that is still made is no failure"
    report(engine, "Failed")
    if policy == "recompute":
        time.sleep(2.5)
        assert not left_out.exists(), "it serves without prefill, too"
        return
    wait_for(left_out.exists)
    assert engine.ready()["ready"]
    report(engine, "Established")
    wait_for(lambda: not left_out.exists())
    report(engine, "Failed")
    wait_for(left_out.exists)
    engine.process.send_signal(signal.SIGTERM)
    engine.end()
    assert not left_out.exists(), "nothing is left behind"


@pytest.mark.parametrize("stall", [0.0, 2.5])
def test_no_canary_runs_before_routers_send_requests_again(launch, tmp_path, stall):
    """A canary that passes makes the status Ready. By then no router may refuse requests.

    ``stall``: for how many seconds the launcher gets no processor when a link has come back.
    """
    place = tmp_path / "door"
    place.mkdir()
    engine = launch(role="decode", TMPDIR=str(place))
    engine.ready()
    environment = engine.told()["environment"]
    left_out = Path(f"{environment[inside_vllm.DOOR_VARIABLE]}-no-link")
    assert left_out.parent == place
    seen = []

    class Prefill(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            # The folder has been changed last when the file was removed.
            seen.append((left_out.exists(), time.time() - place.stat().st_mtime))
            self.send_error(503)

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Prefill) as prefill, ThreadPoolExecutor(1) as pool:
        pool.submit(prefill.serve_forever)
        try:
            peer = {**PEER, "api": f"http://127.0.0.1:{prefill.server_port}"}
            peers = {"generation": 1, "peers": [peer], "model": "m", "canary_interval_seconds": 60}
            assert http(f"{engine.url}/v1/peers", peers, "PUT")[0] == 204
            report(engine, "Failed")
            wait_for(left_out.exists)
            report(engine, "Established")
            if stall:
                engine.process.send_signal(signal.SIGSTOP)
                time.sleep(stall)
                engine.process.send_signal(signal.SIGCONT)
            wait_for(lambda: seen)
        finally:
            prefill.shutdown()
    closed, seconds = seen[0]
    assert not closed
    assert seconds > 1.5, "the canary came before routers, which ask once a second"
    engine.process.send_signal(signal.SIGTERM)
    assert engine.end() == 0


def test_every_obstacle_is_named_at_once(launch, tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        missing = str(tmp_path / "nowhere")
        engine = launch(vllm=(missing, "--host", "127.0.0.1", "--port", str(port)))
        assert engine.end() == 78
    model, busy = engine.termination.splitlines()
    assert missing in model
    assert "does not exist; mount it" in model
    assert f"127.0.0.1:{port} (the engine's API) is in use by another process" in busy
    assert "--port" in busy
    assert "Traceback" not in engine.err


def test_a_wrong_command_line_is_one_sentence(launch, model):
    engine = launch("serve", role="prefill", vllm=(str(model), "--port", "http"))
    assert engine.end() == 2
    assert engine.termination == "--port is 'http'; it must be a number from 1 to 65535"
    assert "Traceback" not in engine.err


def test_too_little_memory(launch):
    engine = launch("serve", VLLM_CPU_KVCACHE_SPACE="900000")
    assert engine.end() == 78
    assert engine.termination.startswith("not enough memory: the KV cache needs 900000.0 GiB")


def test_a_missing_runner_dies_with_its_reason(launch):
    engine = launch("serve", runner="no_such_runner")
    assert engine.end() == 1
    assert "No module named no_such_runner" in engine.err


def test_how_long_the_launcher_takes_to_start_the_engine(launch, pyz, record_property):
    began = time.monotonic()
    engine = launch("serve", bundle=pyz)
    wait_for(lambda: engine.out)
    record_property("start_s", round(time.monotonic() - began, 2))  # 0.5 s on an idle machine
