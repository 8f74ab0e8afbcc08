"""One local pair with the troubles of production: odd requests, pauses, abuse, dead engines."""

from __future__ import annotations

import json
import random
import re
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest
from kv_load import Load, moved, text
from local_run import BLOCK_TOKENS, KV_BYTES_PER_TOKEN, LocalRun, condition, manifest
from reply import Reply
from scraped_pair import asked, prometheus
from sicknesses import RECOVERY_SECONDS, SICKNESSES, Sickness, said_by_status

import span_collector
from loopback import free_port
from metrics_page import documented
from monitoring_files import expressions
from pdcluster_connector.compat.reasons import Reason
from pdcluster_connector.protocol.engine_id import engine_name
from pdcluster_operator.api.object_names import (
    ENGINE_METRICS_PORT,
    HTTP_PORT,
    LAUNCHER_PORT,
    ROUTER_METRICS_PORT,
)

pytestmark = [pytest.mark.local, pytest.mark.timeout(900)]

# /pause needs vLLM's developer mode. Over TCP, a read waits for a prefill that is stopped.
ENVIRONMENT = [
    {"name": "VLLM_SERVER_DEV_MODE", "value": "1"},
    {"name": "UCX_TLS", "value": "tcp"},
    *span_collector.ENVIRONMENT,
]
COLLECTOR = free_port()
ROLE = {
    "podTemplate": {"spec": {"containers": [{"name": "engine", "env": ENVIRONMENT}]}},
    "engine": {"extraArgs": ["--otlp-traces-endpoint", span_collector.url(COLLECTOR)]},
}


@pytest.fixture(scope="module")
def spans() -> Iterator[span_collector.Collector]:
    with span_collector.collecting(COLLECTOR) as collector:
        yield collector


@pytest.fixture(scope="module")
def run(
    tmp_path_factory: pytest.TempPathFactory, spans: span_collector.Collector
) -> Iterator[LocalRun]:
    folder: Path = tmp_path_factory.mktemp("local")
    document = manifest(prefill=ROLE, decode=ROLE, transfer={"tls": "Enabled"})
    with LocalRun(document, folder) as run:
        run.wait_ready()
        yield run


def only_link(run: LocalRun) -> dict[str, Any]:
    [link] = json.loads(run.get("decode", LAUNCHER_PORT, "/v1/links"))["links"]
    return link


def test_tokens_are_prefills_own_and_bytes_are_the_computed_ones(run: LocalRun) -> None:
    for seed in range(4):
        moved(run, text(60, seed))


def test_clients_learn_neither_addresses_nor_engine_ids(run: LocalRun) -> None:
    """Check everything that the router and the engines answer: bodies, headers and streams."""
    secret = [run.address(role) for role in ("prefill", "decode")]
    secret += [run.engine_id(role).partition("/")[0] for role in ("prefill", "decode")]
    for stream in (False, True):
        asked = {"model": "tiny", "prompt": text(60, 40), "max_tokens": 8, "stream": stream}
        request = urllib.request.Request(
            f"http://{run.address('router')}:{HTTP_PORT}/v1/completions",
            data=json.dumps(asked).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            body, headers = answer.read().decode(), str(answer.headers)
        print(headers, body[:1000])
        assert not [name for name in secret if name in body + headers]
        assert "_addr_" not in body + headers
        if stream:
            assert body.count("data: {") > 1, "still a stream"
        else:
            path = json.loads(body)["kv_transfer_params"]["kv_path"]
            assert path["outcome"] == "transferred"
            assert path["bytes"] > 0
            assert {"prefill", "decode", "message"}.isdisjoint(path)


def test_each_engine_shows_its_metrics_on_a_port_of_their_own(run: LocalRun) -> None:
    moved(run, text(60, 41))
    received = "pdcluster_kv_received_bytes_total"
    page = run.get("decode", ENGINE_METRICS_PORT, "/metrics")
    assert [line for line in page.splitlines() if line.startswith(f"{received}{{")]
    # Prefill's page has the same names, and the metrics that only prefill counts.
    assert "pdcluster_kv_leases_held{" in run.get("prefill", ENGINE_METRICS_PORT, "/metrics")
    # docs/metrics.md also names metrics of vLLM and of the router, of the versions in use.
    for begins, role, port in (
        ("pdcluster_kv_", "decode", ENGINE_METRICS_PORT),
        ("vllm:", "decode", ENGINE_METRICS_PORT),
        ("vllm_router_", "router", ROUTER_METRICS_PORT),
    ):
        shown = re.findall(r"^# TYPE (\S+)", run.get(role, port, "/metrics"), re.MULTILINE)
        assert documented(begins) <= set(shown)
        assert documented(begins)
    for path in ("/v1/completions", "/v1/models", "/pause"):
        with pytest.raises(urllib.error.HTTPError, match="404"):
            run.get("decode", ENGINE_METRICS_PORT, path)


def test_the_link_tells_what_its_canary_moved(run: LocalRun) -> None:
    run.wait_ready()
    link = only_link(run)
    assert (link["state"], link["shards"]) == ("Established", "1/1")
    assert link["prefill_engine_id"] == run.engine_id("prefill")
    assert link["bytes_per_second"] > 0
    assert link["canary"]["state"] == "Passed"
    assert link["canary"]["bytes"] > 0
    assert link["canary"]["bytes"] % (BLOCK_TOKENS * KV_BYTES_PER_TOKEN) == 0, "whole blocks"


def test_check_finds_the_kv_and_the_same_tokens(run: LocalRun) -> None:
    code, said = run.command("check")
    assert code == 0, said
    way = "KV moved from prefill/0 to decode/0, and decode alone generates the same tokens"
    assert said.startswith(f"default/tiny: {way}\n")
    [blocks, size] = re.findall(
        r"^KV path: .*: (\d+) blocks .*, ([\d,]+) bytes", said, re.MULTILINE
    )[0]
    assert int(size.replace(",", "")) == int(blocks) * BLOCK_TOKENS * KV_BYTES_PER_TOKEN
    assert re.search(r"^tokens: +equal to those of decode/0 alone: 16 of 16;", said, re.MULTILINE)


def test_bench_compares_both_arms_and_draws_them(run: LocalRun, tmp_path: Path) -> None:
    few = (
        "--requests=4",
        "--rounds=1",
        "--concurrency=2",
        "--input-tokens=64",
        "--output-tokens=4",
    )
    code, said = run.command("bench", *few, f"--picture={tmp_path / 'bench.svg'}")
    assert code == 0, said
    for measured in ("TTFT", "ITL"):
        [row] = re.findall(rf"^.*{measured}.*$", said, re.MULTILINE)[:1]
        assert len(re.findall(r"\d+\.\d", row)) >= 2, "a number of each arm"
    drawn = ET.fromstring((tmp_path / "bench.svg").read_text())
    assert drawn.tag.endswith("}svg")


def test_logprobs_are_prefills_own(run: LocalRun) -> None:
    prompt = text(60, 50)
    reply, own = (run.complete(prompt, role=role, logprobs=3) for role in ("router", "prefill"))
    assert reply.kv_path["outcome"] == "transferred"
    assert reply.completion == own.completion
    ours, theirs = (answer.document["choices"][0]["logprobs"] for answer in (reply, own))
    assert len(ours["token_logprobs"]) == 16
    assert ours["token_logprobs"] == pytest.approx(theirs["token_logprobs"], abs=1e-4)
    for mine, other in zip(ours["top_logprobs"], theirs["top_logprobs"], strict=True):
        assert mine == pytest.approx(other, abs=1e-4)


def test_structured_output_is_prefills_own(run: LocalRun) -> None:
    prompt, wanted = text(60, 51), {"structured_outputs": {"regex": "[a-c]{5}[0-9]{5}"}}
    reply, own = (run.complete(prompt, role=role, **wanted) for role in ("router", "prefill"))
    assert reply.kv_path["outcome"] == "transferred"
    assert re.fullmatch("[a-c]{5}[0-9]{5}", reply.completion)
    assert reply.completion == own.completion


@pytest.fixture
def pausable(run: LocalRun) -> Iterator[LocalRun]:
    """Resume both engines after a test, so that they serve again."""
    run.wait_ready()
    yield run
    for role in ("prefill", "decode"):
        assert run.post(role, "/resume").status == 200


def ticket(run: LocalRun, prompt: str) -> dict[str, Any]:
    asked = {"do_remote_decode": True}
    reply = run.complete(prompt, role="prefill", tokens=1, kv_transfer_params=asked)
    return {"kv_transfer_params": reply.document["kv_transfer_params"]}


@contextmanager
def kv_under_way(run: LocalRun, prompt: str) -> Iterator[Future[Reply]]:
    """A request to decode whose KV cannot arrive before the block ends."""
    fetch = ticket(run, prompt)
    pool = ThreadPoolExecutor(1)
    with run.standing_still("prefill"):
        answer = pool.submit(run.complete, prompt, role="decode", **fetch)
        pool.shutdown(wait=False)
        until_requests(run, "waiting")
        yield answer


def until_requests(run: LocalRun, do: str) -> None:
    """Wait until decode has a request that is ``waiting`` (for its KV) or ``running``."""
    run.wait(
        f"{do} request", lambda: run.metric("decode", f"vllm:num_requests_{do}") == 1, seconds=120
    )


def resumed(run: LocalRun, role: str, answer: Future[Reply]) -> Reply:
    time.sleep(1)
    assert not answer.done(), "it is paused"
    assert run.post(role, "/resume").status == 200
    return answer.result(120)


def same_as_prefill(run: LocalRun, prompt: str, reply: Reply, tokens: int = 16) -> None:
    assert reply.kv_path["outcome"] == "transferred", reply.text
    assert reply.completion == run.complete(prompt, role="prefill", tokens=tokens).completion


@pytest.mark.parametrize("mode", ["abort", "wait"])
def test_pausing_prefill_waits_for_its_leases(pausable: LocalRun, mode: str) -> None:
    """No KV of the old weights may be left to fetch."""
    run, prompt = pausable, text(60, 60 + len(mode))
    fetch = ticket(run, prompt)
    with ThreadPoolExecutor(2) as pool:
        paused = pool.submit(run.post, "prefill", f"/pause?mode={mode}")
        time.sleep(1)
        assert not paused.done(), "a lease is held"
        reply = run.complete(prompt, role="decode", **fetch)
        assert paused.result(120).status == 200
        own = resumed(run, "prefill", pool.submit(run.complete, prompt, role="prefill"))
    assert reply.kv_path["outcome"] == "transferred"
    assert reply.completion == own.completion


@pytest.mark.parametrize("mode", ["abort", "wait"])
def test_pausing_decode_waits_for_kv_under_way(pausable: LocalRun, mode: str) -> None:
    """No block may be written to once the engine says that it is idle."""
    run, prompt = pausable, text(60, 80 + len(mode))
    with ThreadPoolExecutor(1) as pool, kv_under_way(run, prompt) as answer:
        paused = pool.submit(run.post, "decode", f"/pause?mode={mode}")
        time.sleep(1)
        assert not paused.done(), "KV is on its way into its blocks"
    assert paused.result(120).status == 200
    reply = answer.result(120)
    if mode == "abort":
        assert reply.document["choices"][0]["finish_reason"] == "abort"
    else:
        same_as_prefill(run, prompt, reply)


@pytest.mark.parametrize(("clear", "status"), [("false", 200), ("true", 500)])
def test_a_paused_decode_keeps_kv_under_way(pausable: LocalRun, clear: str, status: int) -> None:
    """vLLM cannot clear its caches then. It answers so, but it is paused until /resume."""
    run, prompt = pausable, text(60, 100 + status)
    with kv_under_way(run, prompt) as answer:
        paused = run.post("decode", f"/pause?mode=keep&clear_cache={clear}")
        assert paused.status == status
        assert status == 200 or "waiting for remote KV transfer" in paused.text
    same_as_prefill(run, prompt, resumed(run, "decode", answer))


def test_a_running_request_goes_on_after_its_kv_was_cleared(pausable: LocalRun) -> None:
    run = pausable

    def running(prompt: str, answer: Future[Reply]) -> bool:
        """Pause decode; return whether the request has begun to generate, and has not ended."""
        while run.metric("decode", "vllm:num_requests_running") != 1:
            if answer.done():
                return False
            time.sleep(0.05)
        assert run.post("decode", "/pause?mode=keep").status == 200
        time.sleep(1)
        return not answer.done()

    with ThreadPoolExecutor(1) as pool:
        for seed in range(102, 122):  # it may end before it is seen to run
            prompt = text(60, seed)
            answer = pool.submit(run.complete, prompt, tokens=300)
            if running(prompt, answer):
                break
            assert run.post("decode", "/resume").status == 200
        same_as_prefill(run, prompt, resumed(run, "decode", answer), 300)


def test_malformed_messages_cost_nothing_but_themselves(run: LocalRun) -> None:
    address = (run.address("prefill"), 5600)
    context = run.shown_as(engine_name(run.engine_id("decode")))
    source = random.Random(5)

    def http(body: bytes, path: str = "/v1/handshake", length: int | None = None) -> bytes:
        size = len(body) if length is None else length
        return (
            f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/msgpack\r\n"
            f"Content-Length: {size}\r\nConnection: close\r\n\r\n"
        ).encode() + body

    kinds = (
        lambda: b"",
        lambda: bytes([source.randrange(256)]),
        lambda: source.randbytes(source.randrange(1, 4096)),
        lambda: http(b""),
        lambda: http(bytes([source.randrange(256)])),
        lambda: http(b"\x85\xa9protocols\x92", length=5000),  # truncated
        lambda: http(b"\x81\xa9engine_id\xc0", "/v1/leases"),  # wrong type
        lambda: http(source.randbytes(source.randrange(1, 60_000))),
        lambda: http(source.randbytes(300), "/v1/leases"),
        lambda: http(b"\xdd\xff\xff\xff\xff" * 100),  # an array that claims 2^32 items
    )
    for number in range(200):
        message = http(source.randbytes(10_000_000)) if number % 50 == 7 else kinds[number % 10]()
        with socket.create_connection(address, timeout=60) as plain:
            try:
                if number % 10 == 3:
                    plain.sendall(message)  # no TLS at all
                    plain.shutdown(socket.SHUT_WR)
                    continue
                with context.wrap_socket(plain) as peer:
                    peer.sendall(message)
                    peer.shutdown(socket.SHUT_WR)
                    peer.settimeout(5)
                    while peer.recv(65536):
                        pass
            except OSError:
                continue  # the server hung up in the middle: its right
    moved(run, text(60, 100))


@contextmanager
def restart(run: LocalRun, role: str, seed: int) -> Iterator[None]:
    """Around what kills an engine: under load, no token is made up, and all comes back."""
    run.wait_ready()
    other = "decode" if role == "prefill" else "prefill"
    before, survivor = run.engine_id(role), run.engine_id(other)
    other_pid = run.launcher(other).pid
    with Load(run, lambda number: text(100, seed + number)) as load:
        run.wait("request that is answered", lambda: load.answered, 120)
        yield
        run.wait("end of Ready", lambda: run.condition("Ready")["status"] != "True", 120)
        asked = len(load.replies)
        run.wait("request that ends after the engine did", lambda: len(load.replies) > asked, 120)
    for reply in load.replies:
        # With the policy Fail, a request succeeds or gets an error, but never wrong tokens.
        if reply.status == 200:
            assert reply.kv_path["outcome"] == "transferred", reply.text
        else:
            assert 500 <= reply.status < 600, reply.text
    run.wait_ready(RECOVERY_SECONDS)
    assert run.engine_id(role).rpartition("/")[0] == before.rpartition("/")[0]
    assert run.engine_id(role) != before, "a restart is a new incarnation"
    assert run.engine_id(other) == survivor
    link = only_link(run)
    assert link["prefill_engine_id"] == run.engine_id("prefill")
    assert link["canary"]["state"] == "Passed"
    assert run.launcher(other).pid == other_pid, "the other engine lived on"
    moved(run, text(60, seed + 900))


def test_a_killed_prefill_comes_back_and_its_canaries_go_on(run: LocalRun) -> None:
    often = {"canary": {"intervalSeconds": 5}}
    run.apply(manifest(prefill=ROLE, decode=ROLE, verification=often))
    with restart(run, "prefill", 1000):
        run.kill("prefill")
        run.wait(
            "link that shows the dead engine",
            lambda: run.condition("KVLinksEstablished")["status"] != "True",
            120,
        )

    # The link stands, and prefill ends each request before it has computed it.
    assert run.post("prefill", "/pause?mode=keep").status == 200

    def failed() -> bool:
        assert run.post("prefill", "/pause?mode=abort").status == 200
        status = run.status()
        return (
            condition(status, "KVPathVerified")["reason"] == Reason.CANARY_FAILED
            and condition(status, "KVLinksEstablished")["status"] == "True"
            and condition(status, "Ready")["reason"] == Reason.CANARY_FAILED
            and [link["reason"] for link in status.get("failedLinks", ())] == [Reason.CANARY_FAILED]
        )

    try:
        run.wait("failed canary", failed, 120)
        print(run.condition("KVPathVerified"))
    finally:
        assert run.post("prefill", "/resume").status == 200
        run.apply(manifest(prefill=ROLE, decode=ROLE))
    run.wait_ready()


def test_a_killed_engine_core_is_named_in_the_conditions(run: LocalRun) -> None:
    """The whole of a decode engine is killed on the cluster: test_cluster_policies.py."""
    words = "vLLM's process EngineCore was killed by SIGKILL"
    again = f"its last process ended: {words}"

    def told() -> str:
        return str(run.condition("DecodeReady")["message"])

    with restart(run, "decode", 2000):
        run.kill_core("decode")
        run.wait("message on its end", lambda: words in told(), 120)
        run.wait("message on its next start", lambda: again in told(), RECOVERY_SECONDS)


def test_prompts_that_go_past_the_router_are_named_in_the_conditions(run: LocalRun) -> None:
    """They are answered with 200, and nothing else would tell that prefill has no part in them."""
    run.wait_ready(RECOVERY_SECONDS)
    for seed in range(30):
        reply = run.complete(text(60, 500 + seed), role="decode", tokens=1)
        assert reply.status == 200, reply.text
        assert (reply.kv_path["outcome"], reply.kv_path["reason"]) == ("local", "NoTicket")

    def told() -> bool:
        status = run.status()
        ready, healthy = condition(status, "Ready"), condition(status, "TransportHealthy")
        return (
            (ready["status"], ready["reason"]) == ("False", "LocalPrefill")
            and healthy["status"] == "False"
            and "because of NoTicket: " in healthy["message"]
            and condition(status, "Available")["status"] == "True"
        )

    run.wait("Ready that is False for the prompts' sake", told, 120)

    def accounted() -> bool:
        answer: dict[str, Any] = json.loads(run.get("decode", LAUNCHER_PORT, "/v1/links"))
        prompts = answer["prompts"] or {"local": 0}
        return prompts["local"] >= 30 and prompts["cause"] == "NoTicket"

    # A share is enough for the condition: the engine's counts are read again each few seconds.
    run.wait("all prompts in the account", accounted, 120)
    moved(run, text(60, 600))


def test_the_spans_of_a_request_are_one_trace(
    run: LocalRun, spans: span_collector.Collector
) -> None:
    """From the client's traceparent through router, prefill, KV and decode."""
    trace, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    begun = time.time_ns()
    reply = run.complete(text(60, 43), headers={"traceparent": f"00-{trace}-{parent}-01"})
    ended = time.time_ns()
    assert reply.kv_path["outcome"] == "transferred"
    wanted = {"llm_request": 2, "pdcluster.kv_wait": 1, "pdcluster.kv_receive": 1}
    wanted["pdcluster.kv_lease"] = 1
    counted = lambda: {name: len(found) for name, found in spans.of(trace).items()}  # noqa: E731
    run.wait("all spans", lambda: counted() == wanted, 60)
    found = spans.of(trace)
    [wait], [receive], [lease] = (found[name] for name in wanted if name != "llm_request")
    assert begun <= lease.begun <= wait.ended == receive.begun <= receive.ended <= ended
    assert lease.begun <= receive.begun <= lease.ended
    assert {span.parent for span in (wait, receive, lease)} <= {parent}
    assert receive.attributes["pdcluster.bytes"] == reply.kv_path["bytes"]
    assert receive.attributes["pdcluster.prefill"] == run.engine_id("prefill")
    assert receive.attributes["pdcluster.outcome"] == "transferred"
    assert lease.attributes == {"pdcluster.outcome": "released"}
    own = "1" + trace[1:]
    run.complete(text(60, 44), role="decode", headers={"traceparent": f"00-{own}-{parent}-01"})
    run.wait("the span of a local prompt", lambda: "pdcluster.local_prompt" in spans.of(own), 60)
    [local] = spans.of(own)["pdcluster.local_prompt"]
    assert local.attributes["pdcluster.reason"] == "NoTicket"


def test_both_engines_say_what_they_did_in_the_last_minute(run: LocalRun) -> None:
    def load(role: str) -> dict[str, Any]:
        run.complete(text(60, random.getrandbits(30)))
        return json.loads(run.get(role, LAUNCHER_PORT, "/v1/changes")).get("load") or {}

    for role in ("prefill", "decode"):
        run.wait(f"{role} has computed", lambda role=role: load(role).get("busy_seconds"))
        told = load(role)
        assert 0 < told["busy_seconds"] <= told["seconds"]
        assert told["tokens"] > 0
        assert told["first_token_seconds"] > 0
    assert told["received_bytes"] > 0
    assert 0 < told["receive_seconds"] <= told["first_token_seconds"]


@pytest.mark.soak
def test_every_query_of_dashboards_and_alerts_has_samples_of_a_running_pair(run: LocalRun) -> None:
    """scraped_pair.py lists those that cannot have samples here. Prometheus runs them all."""
    run.wait_ready(RECOVERY_SECONDS)
    with prometheus(run) as scraper:

        def prompts() -> None:
            for role in ("router", "decode"):  # its KV is transferred, and is not
                run.complete(text(60, time.monotonic_ns()), role=role, tokens=4)

        assert any("ScaledObject" in where for where in asked()), "KEDA's queries are asked, too"
        took = scraper.wait_for_samples(asked(), prompts)
        print(f"samples of {len(asked())} queries after {took:.1f} s")
        for query in expressions().values():  # those that have none are at least read
            scraper.samples(query.replace("$__rate_interval", "1m"))
        scraper.wait_for(
            "alert on local prefill", lambda: scraper.alerts_of("PDClusterLocalPrefill")
        )
        assert {rule["health"] for rule in scraper.rules()} == {"ok"}
        link = 'pdcluster_kv_link_bytes_total{prefill="prefill/0"}'
        [moved_bytes] = scraper.samples(f"sum({link}) / sum(pdcluster_kv_received_bytes_total)")
        assert float(moved_bytes["value"][1]) == 1, "all KV came over the only link"


MARKS = {
    "port taken": [pytest.mark.soak],
    "out of memory": [pytest.mark.soak, pytest.mark.needs("cgroup")],
}


@pytest.mark.parametrize(
    "sickness",
    [pytest.param(one, marks=MARKS.get(name, ()), id=name) for name, one in SICKNESSES.items()],
)
def test_status_alone_says_what_is_wrong_and_what_to_do(run: LocalRun, sickness: Sickness) -> None:
    """Weights that are wrong from the start are in test_local_refused_pairs.py."""
    for role in ("prefill", "decode"):  # Ready may be False for prompts that went past the router
        run.wait_pod(role, RECOVERY_SECONDS)
    with sickness.provoke(run):
        said_by_status(run, sickness.why, sickness.step, sickness.next)
