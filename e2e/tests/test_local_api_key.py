"""A key for the API: real engines, launchers and the router, with it and without.

Prefill has two pipeline stages and decode has one: one start of engines shows both.
"""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from kv_load import moved, text
from local_run import LocalRun, manifest
from reply import Reply, answer

from llmd_sidecar import PREFILL_HEADER, Sidecar
from pdcluster_operator.api.object_names import HTTP_PORT, LAUNCHER_PORT
from pdcluster_operator.cli.once import ask

pytestmark = [pytest.mark.local, pytest.mark.timeout(900)]

KEY = "sk-local-0123456789"
ENGINES = ("prefill", "decode")
EVERYWHERE = ("router", *ENGINES)
# What the admission rule EagerPipeline tells to write where an engine has stages.
PROFILED = ["--compilation-config", '{"mode":3,"backend":"eager"}']


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalRun]:
    """A Ready cluster: the canary passed both engines, and the router's probe was answered."""
    folder: Path = tmp_path_factory.mktemp("local")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_API_KEY", KEY)
        patch.setenv("PDCLUSTER_API_KEY", KEY)
        guarded = manifest(
            router={"apiKeySecretRef": {"name": "api", "key": "key"}},
            engine={"extraArgs": ["--dtype", "float32", "--kv-cache-memory-bytes", "128M"]},
            prefill={"parallelism": {"pipeline": 2}, "engine": {"extraArgs": PROFILED}},
            decode={"engine": {"extraArgs": ["--enforce-eager"]}},
        )
        with LocalRun(guarded, folder, KEY) as run:
            run.wait_ready()
            yield run


def post(run: LocalRun, role: str, path: str, key: str | None) -> Reply:
    body = {"model": "tiny", "prompt": text(60, 7), "max_tokens": 8, "temperature": 0}
    request = urllib.request.Request(
        f"http://{run.address(role)}:{HTTP_PORT}{path}",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    if key is not None:
        request.add_header("Authorization", f"Bearer {key}")
    return answer(request)


@pytest.mark.parametrize("role", EVERYWHERE)
@pytest.mark.parametrize("path", ["/v1/completions", "/invocations", "/tokenize"])
@pytest.mark.parametrize("key", [None, "sk-wrong"])
def test_without_the_key_nothing_is_served(
    run: LocalRun, role: str, path: str, key: str | None
) -> None:
    assert post(run, role, path, key).status == 401


@pytest.mark.parametrize("role", ENGINES)
@pytest.mark.parametrize("path", ["/health", "/metrics"])
def test_probes_and_prometheus_need_none(run: LocalRun, role: str, path: str) -> None:
    assert (run.get(role, HTTP_PORT, path) == "") is (path == "/health")


def test_with_the_key_kv_moves_through_the_router(run: LocalRun) -> None:
    url = f"http://{run.address('router')}:{HTTP_PORT}"
    decode = [f"http://{run.address('decode')}:{HTTP_PORT}"]
    asked = ask(url, "tiny", text(60, 8), 8, decode, KEY)
    reply = asyncio.run(asked)
    assert reply.moved
    assert reply.tokens == 8
    assert (
        reply.text
        == asyncio.run(
            ask(f"http://{run.address('prefill')}:{HTTP_PORT}", "tiny", text(60, 8), 8, [], KEY)
        ).text
    )


def through_llmd(
    run: LocalRun, path: str, body: dict[str, object], *, key: str = KEY, skip: bool = False
) -> Reply:
    """Send a request as llm-d's endpoint picker does, through its sidecar's contract."""
    with Sidecar(f"http://{run.address('decode')}:{HTTP_PORT}") as sidecar:
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
        if not skip:
            headers[PREFILL_HEADER] = f"{run.address('prefill')}:{HTTP_PORT}"
        document = json.dumps({"model": "tiny", "temperature": 0, **body}).encode()
        return answer(urllib.request.Request(f"{sidecar.url}{path}", document, headers))


def alone(run: LocalRun, path: str, body: dict[str, object]) -> Reply:
    """Send the same request to the prefill engine alone."""
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
    document = json.dumps({"model": "tiny", "temperature": 0, **body}).encode()
    url = f"http://{run.address('prefill')}:{HTTP_PORT}{path}"
    return answer(urllib.request.Request(url, document, headers))


COMPLETION = {"prompt": text(60, 31), "max_tokens": 8, "min_tokens": 8}
CHAT = {
    "messages": [{"role": "user", "content": text(60, 32)}],
    "max_completion_tokens": 8,
    "min_tokens": 8,
}


@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)],
    ids=["completion", "chat"],
)
def test_kv_moves_under_the_contract_of_llmds_sidecar(
    run: LocalRun, path: str, body: dict[str, object]
) -> None:
    reply = through_llmd(run, path, body)
    assert reply.status == 200, reply.text
    assert reply.kv_path["outcome"] == "transferred", reply.kv_path
    assert reply.kv_path["bytes"] > 0
    assert reply.document["usage"]["completion_tokens"] == 8
    salted = alone(run, path, {**body, "cache_salt": "alone"}).document
    assert [one | {"logprobs": None} for one in reply.document["choices"]] == [
        one | {"logprobs": None} for one in salted["choices"]
    ]


def test_a_stream_under_that_contract_has_the_same_tokens(run: LocalRun) -> None:
    body: dict[str, object] = {"prompt": text(60, 33), "max_tokens": 8, "min_tokens": 8}
    reply = through_llmd(run, "/v1/completions", {**body, "stream": True})
    lines = [line.removeprefix("data: ") for line in reply.text.splitlines() if line]
    assert lines.pop() == "[DONE]"
    streamed = "".join(json.loads(line)["choices"][0]["text"] for line in lines)
    assert streamed == alone(run, "/v1/completions", body).completion


def test_a_prompt_without_that_header_is_computed_by_decode(run: LocalRun) -> None:
    reply = through_llmd(run, "/v1/completions", {**COMPLETION, "prompt": text(60, 34)}, skip=True)
    assert reply.status == 200, reply.text
    assert reply.kv_path["outcome"] == "local"


def test_a_wrong_key_is_refused_by_prefill_and_the_client_sees_it(run: LocalRun) -> None:
    assert through_llmd(run, "/v1/completions", COMPLETION, key="sk-wrong").status == 401


def test_pipeline_stages_hand_over_to_one_rank(run: LocalRun) -> None:
    for seed in range(4):
        moved(run, text(20 + 10 * seed, 9000 + seed))


def stands_nowhere(run: LocalRun) -> None:
    """Fail if the key is in an argument, a file of the run, an object, or what commands print."""
    for process in psutil.Process().children(recursive=True):
        assert KEY not in " ".join(process.cmdline())
    files = [path for path in run.folder.rglob("*") if path.is_file()]
    assert len([path for path in files if path.suffix == ".log"]) >= 2
    assert not [path for path in files if KEY.encode() in path.read_bytes()]
    assert KEY not in repr(run.snapshot())
    for words in (("status", "-o", "json"), ("logs",), ("check", "-o", "json")):
        said = run.command(*words)[1]
        assert said
        assert KEY not in said


def test_the_key_stands_in_no_argument_and_in_no_log(run: LocalRun) -> None:
    stands_nowhere(run)


def test_the_operator_still_hears_the_launchers(run: LocalRun) -> None:
    for role in ENGINES:
        assert json.loads(run.get(role, LAUNCHER_PORT, "/readyz"))["state"] == "Ready"
    assert run.condition("KVPathVerified")["status"] == "True"


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalRun]:
    """A Ready cluster whose router somebody else would run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_API_KEY", KEY)
        patch.setenv("PDCLUSTER_API_KEY", KEY)
        guarded = manifest(router={"type": "None", "apiKeySecretRef": {"name": "api"}})
        with LocalRun(guarded, tmp_path_factory.mktemp("bare"), KEY) as run:
            run.wait_ready()
            yield run


@pytest.mark.soak
def test_without_a_router_engines_ask_for_the_key_and_the_canary_has_it(bare: LocalRun) -> None:
    assert bare.condition("KVPathVerified")["status"] == "True"
    for role in ENGINES:
        for path in ("/v1/completions", "/tokenize"):
            assert {post(bare, role, path, key).status for key in (None, "sk-wrong")} == {401}
        assert post(bare, role, "/v1/completions", KEY).status == 200
    reply = through_llmd(bare, "/v1/completions", COMPLETION)
    assert reply.kv_path["outcome"] == "transferred", reply.kv_path
    stands_nowhere(bare)
