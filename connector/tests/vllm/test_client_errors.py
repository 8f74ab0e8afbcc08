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
def fail(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Let outputs of failed requests reach the API server; return the names of their reasons."""
    seen: list[Any] = []

    def process_outputs(self: Any, engine_core_outputs: list[Any], *args: Any) -> None:
        seen.extend(engine_core_outputs)

    check = GenerateBaseServing._raise_if_error
    monkeypatch.setattr(GenerateBaseServing, "_raise_if_error", check)  # put back at the end
    monkeypatch.setattr(OutputProcessor, "process_outputs", process_outputs)
    explain_failures.__wrapped__()

    def fail(*request_ids: str, **headers: str) -> list[str]:
        outputs = [
            EngineCoreOutput(
                request_id=one, new_token_ids=[], finish_reason=FinishReason.ERROR,
                trace_headers={**headers, FAILURE_HEADER: WHY % one},
            )
            for one in request_ids
        ]  # fmt: skip
        OutputProcessor.process_outputs(SimpleNamespace(), outputs, 1.5)
        assert seen[-len(outputs) :] == outputs, "vLLM gets them"
        counted = {FinishReason.ERROR: "as vLLM counts finished requests"}
        assert all(one.finish_reason in counted for one in outputs)
        # As vLLM's _new_completion_output does.
        return [str(one.finish_reason) for one in outputs]

    return fail


def raised(finish_reason: str, request_id: str = "cmpl-1f") -> Any:
    """The error that vLLM's serving code raises for a request."""
    serving = object.__new__(GenerateBaseServing)
    with pytest.raises(GenerationError) as error:
        serving._raise_if_error(finish_reason, request_id)
    return error.value


def test_a_failed_request_gets_503_with_the_reason(fail):
    [name] = fail("cmpl-1f-0-0123abcd")
    assert name == "error", "whatever else vLLM does with it"
    answer = create_error_response(raised(name)).error
    assert (answer.code, answer.type) == (503, "ServiceUnavailableError")
    assert answer.message == WHY % "cmpl-1f-0-0123abcd"


def test_a_stream_ends_with_vllms_own_event(fail):
    [name] = fail("cmpl-1f-0-0123abcd", traceparent="00-1-2-01")
    serving = object.__new__(GenerateBaseServing)
    event = json.loads(serving._convert_generation_error_to_streaming_response(raised(name)))
    assert event["error"]["code"] == 503
    assert event["error"]["message"] == WHY % "cmpl-1f-0-0123abcd"


def test_each_request_gets_its_own_reason_whatever_ids_clients_choose(fail):
    """A client chooses its id, which may look like that of another request's choice or retry."""
    ids = ["chatcmpl-job-7-1-0123abcd", "chatcmpl-job-7-0123abcd", "chatcmpl-job-7-4567abcd"]
    for name, its in zip(fail(*ids), ids, strict=True):
        assert str(raised(name, "chatcmpl-job-7")) == WHY % its
    for other in ids:
        assert create_error_response(raised("error", other)).error.code == 500, "another failure"


def test_a_request_that_has_not_failed_raises_nothing(fail):
    fail("cmpl-1f-0-0123abcd")
    for reason in (None, "stop", "length", "abort"):
        object.__new__(GenerateBaseServing)._raise_if_error(reason, "cmpl-1f")


def test_a_request_that_ends_otherwise_keeps_its_reason(fail):
    output = EngineCoreOutput(
        request_id="a", new_token_ids=[1], finish_reason=FinishReason.STOP,
        trace_headers={FAILURE_HEADER: WHY},
    )  # fmt: skip
    OutputProcessor.process_outputs(SimpleNamespace(), [output])
    assert output.finish_reason is FinishReason.STOP


def test_nothing_stands_in_the_way_of_a_request(monkeypatch):
    monkeypatch.setattr(client_errors, "explain_failures", lambda: None)
    app = object()
    assert KVFailures(app) is app
