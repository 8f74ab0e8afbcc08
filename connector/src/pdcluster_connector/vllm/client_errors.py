"""Says in vLLM's answer why the KV of a request did not come.

vLLM answers such a request with a bare 500, and ends its stream in the same words. Decode engines
load ``--middleware pdcluster_connector.vllm.client_errors.KVFailures``, and answer 503 with the
reason.
"""

import contextlib
import functools
import re
from collections.abc import Awaitable, Callable
from typing import Any, Final

from pdcluster_connector.protocol.kv_path import FAILURE_HEADER

App = Callable[..., Awaitable[None]]

_MOST_FAILURES: Final = 8192  # of requests that are not answered yet, or whose clients have left


class KVFailures:
    """Not a real middleware: its constructor runs in each API server, and hooks into vLLM there."""

    def __new__(cls, app: App) -> App:  # type: ignore[misc]
        """Return the application itself, so that nothing is added to a request's way."""
        with contextlib.suppress(ImportError, AttributeError):  # else failures stay bare
            explain_failures()
        return app


@functools.cache
def explain_failures() -> None:
    """Make vLLM raise an error that can be tried again, with the reason, if KV did not come.

    The connector writes the reason into the headers of the request's output. vLLM's API server gets
    them, but reads them for OpenTelemetry only. It would answer with a bare 500.
    """
    from vllm.entrypoints.generate.base.serving import GenerateBaseServing
    from vllm.exceptions import GenerationError, RetryableRequestError
    from vllm.v1.engine.output_processor import OutputProcessor

    failures: dict[str, str] = {}  # the newest, by vLLM's id in the engine core
    processor: Any = OutputProcessor
    serving: Any = GenerateBaseServing
    process, check = processor.process_outputs, serving._raise_if_error  # noqa: SLF001

    def process_outputs(self: Any, outputs: Any, *args: Any, **kwargs: Any) -> Any:
        for output in outputs:
            if output.trace_headers and (why := output.trace_headers.get(FAILURE_HEADER)):
                failures[output.request_id] = why
                if len(failures) > _MOST_FAILURES:
                    del failures[next(iter(failures))]
        return process(self, outputs, *args, **kwargs)

    def raise_if_error(self: Any, finish_reason: str | None, request_id: str) -> None:
        try:
            check(self, finish_reason, request_id)
        except GenerationError:
            # The engine core's id also has the choice, the prompt's number and a random end.
            its = re.compile(rf"(\d+_)?{re.escape(request_id)}([-_]\d+)?(-[0-9a-f]{{8}})?")
            known = next((one for one in failures if its.fullmatch(one)), None)
            if known is None:
                raise
            raise RetryableRequestError(failures.pop(known)) from None

    processor.process_outputs = process_outputs
    serving._raise_if_error = raise_if_error  # noqa: SLF001
