"""Says in vLLM's answer why the KV of a request did not come.

vLLM answers such a request with a bare 500, and ends its stream in the same words. Decode engines
load ``--middleware pdcluster_connector.vllm.client_errors.KVFailures``, and answer 503 with the
reason.
"""

import contextlib
import functools
from collections.abc import Awaitable, Callable
from typing import Any

from pdcluster_connector.protocol.kv_path import FAILURE_HEADER

App = Callable[..., Awaitable[None]]


class KVFailures:
    """Not a real middleware: its constructor runs in each API server, and hooks into vLLM there."""

    def __new__(cls, app: App) -> App:  # type: ignore[misc]
        """Return the application itself, so that nothing is added to a request's way."""
        with contextlib.suppress(ImportError, AttributeError):  # else failures stay bare
            explain_failures()
        return app


class _Explained(str):
    """The name of a finish reason, with the reason why KV did not come."""

    __slots__ = ("why",)
    why: str


class _Error(int):
    """A finish reason that vLLM takes for its own ERROR. It names itself by what explains it."""

    explained: _Explained

    def __str__(self) -> str:
        return self.explained


@functools.cache
def explain_failures() -> None:
    """Make vLLM raise an error that can be tried again, with the reason, if KV did not come.

    The connector writes the reason into the headers of the request's output. vLLM's API server gets
    them, but reads them for OpenTelemetry only. It would answer with a bare 500. The name of an
    output's finish reason gets to where vLLM raises, so the reason goes with that name.
    """
    from vllm.entrypoints.generate.base.serving import GenerateBaseServing
    from vllm.exceptions import RetryableRequestError
    from vllm.v1.engine import FinishReason
    from vllm.v1.engine.output_processor import OutputProcessor

    processor: Any = OutputProcessor
    serving: Any = GenerateBaseServing
    process, check = processor.process_outputs, serving._raise_if_error  # noqa: SLF001

    def process_outputs(self: Any, outputs: Any, *args: Any, **kwargs: Any) -> Any:
        for output in outputs:
            why = output.trace_headers and output.trace_headers.get(FAILURE_HEADER)
            if why and output.finish_reason == FinishReason.ERROR:
                output.finish_reason = error = _Error(FinishReason.ERROR)
                error.explained = _Explained(FinishReason.ERROR)
                error.explained.why = why
        return process(self, outputs, *args, **kwargs)

    def raise_if_error(self: Any, finish_reason: str | None, request_id: str) -> None:
        if isinstance(finish_reason, _Explained):
            raise RetryableRequestError(finish_reason.why)
        check(self, finish_reason, request_id)

    processor.process_outputs = process_outputs
    serving._raise_if_error = raise_if_error  # noqa: SLF001
