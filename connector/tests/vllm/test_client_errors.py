"""vLLM's API server says why the KV of a request did not come, with vLLM's own errors."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.entrypoints.generate.base.serving import GenerateBaseServing
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.exceptions import GenerationError
from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.engine.output_processor import OutputProcessor

from pdcluster_connector.protocol.kv_path import FAILURE_HEADER
from pdcluster_connector.vllm import client_errors
from pdcluster_connector.vllm.client_errors import KVFailures, explain_failures

pytestmark = pytest.mark.vllm

WHY = "KV was not received: PeerRestarted (request %s)"


@pytest.fixture
def fail(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let outputs of failed requests, by the engine core's ids, reach the API server."""
    seen: list[Any] = []

    def process_outputs(self: Any, engine_core_outputs: list[Any], *args: Any) -> None:
        seen.extend(engine_core_outputs)

    check = GenerateBaseServing._raise_if_error
    monkeypatch.setattr(GenerateBaseServing, "_raise_if_error", check)  # put back at the end
    monkeypatch.setattr(OutputProcessor, "process_outputs", process_outputs)
    explain_failures.__wrapped__()

    def fail(*request_ids: str, **headers: str) -> None:
        outputs = [
            EngineCoreOutput(
                request_id=one, new_token_ids=[], finish_reason=FinishReason.ERROR,
                trace_headers={**headers, FAILURE_HEADER: WHY % one},
            )
            for one in request_ids
        ]  # fmt: skip
        OutputProcessor.process_outputs(SimpleNamespace(), outputs, 1.5)
        assert seen[-len(outputs) :] == outputs, "vLLM gets them as they are"

    return fail


def raised(request_id: str, finish_reason: str = "error") -> Any:
    """The error that vLLM's serving code raises for a request."""
    serving = object.__new__(GenerateBaseServing)
    with pytest.raises(GenerationError) as error:
        serving._raise_if_error(finish_reason, request_id)
    return error.value


# As vLLM 0.32 makes them: of a completion, of one of several prompts, of a choice, of a chat.
IDS = {
    "cmpl-1f": "cmpl-1f-0-0123abcd",
    "cmpl-2f": "cmpl-2f-17-0123abcd",
    "cmpl-3f": "2_cmpl-3f-0-0123abcd",
    "chatcmpl-4f": "chatcmpl-4f-0123abcd",
    "chatcmpl-my own (id)-1": "chatcmpl-my own (id)-1-0123abcd",
    "cmpl-plain": "cmpl-plain-0",
}


@pytest.mark.parametrize("request_id", IDS)
def test_a_failed_request_gets_503_with_the_reason_once(fail, request_id):
    fail(IDS[request_id])
    answer = create_error_response(raised(request_id)).error
    assert (answer.code, answer.type) == (503, "ServiceUnavailableError")
    assert answer.message == WHY % IDS[request_id]
    assert create_error_response(raised(request_id)).error.code == 500, "only once"


def test_a_stream_ends_with_vllms_own_event(fail):
    fail("cmpl-1f-0-0123abcd", traceparent="00-1-2-01")
    error = raised("cmpl-1f")
    serving = object.__new__(GenerateBaseServing)
    event = json.loads(serving._convert_generation_error_to_streaming_response(error))
    assert event["error"]["code"] == 503
    assert event["error"]["message"] == WHY % "cmpl-1f-0-0123abcd"


@pytest.mark.parametrize("other", ["cmpl-1", "cmpl-1f-0-0123", "1f", "cmpl-1f-0-0123abcd-0"])
def test_other_requests_and_other_failures_stay_as_vllm_answers_them(fail, other):
    fail("cmpl-1f-0-0123abcd")
    assert create_error_response(raised(other)).error.code == 500


def test_a_request_that_has_not_failed_raises_nothing(fail):
    fail("cmpl-1f-0-0123abcd")
    for reason in (None, "stop", "length", "abort"):
        object.__new__(GenerateBaseServing)._raise_if_error(reason, "cmpl-1f")


def test_clients_that_left_cost_no_memory(fail, monkeypatch):
    monkeypatch.setattr(client_errors, "_MOST_FAILURES", 3)
    fail(*(f"cmpl-{number}-0" for number in range(4)))
    assert [raised(f"cmpl-{n}").status_code for n in range(4)] == [500, 503, 503, 503]


def test_nothing_stands_in_the_way_of_a_request(monkeypatch):
    monkeypatch.setattr(client_errors, "explain_failures", lambda: None)
    app = object()
    assert KVFailures(app) is app
