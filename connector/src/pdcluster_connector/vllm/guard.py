"""Keeps the connector's exceptions out of vLLM's engine step.

vLLM runs connector methods inside its step. An exception there ends the engine and every request in
it. So each of these methods is wrapped here. An exception is logged with its traceback and counted,
and it fails only the requests that the call was about.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, TypeVar

logger = logging.getLogger(__name__)

R = TypeVar("R")


def engine_step(
    fallback: Callable[[], R], affected: Callable[..., Any] | None = None
) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """Wrap a connector method that vLLM calls in a step.

    Args:
        fallback: makes the value to return after an exception.
        affected: called as ``affected(connector, error, *args)`` to fail the requests that the
            call was about.

    The connector's ``count_fault(method, error)`` is told of every exception.
    """

    def wrap(method: Callable[..., R]) -> Callable[..., R]:
        @functools.wraps(method)
        def safe(self: Any, *args: Any, **kwargs: Any) -> R:
            try:
                return method(self, *args, **kwargs)
            except Exception as error:
                logger.exception("PDClusterConnector.%s failed", method.__name__)
                _aftermath(self, method.__name__, error, affected, args)
                return fallback()

        return safe

    return wrap


def _aftermath(
    connector: Any,
    name: str,
    error: Exception,
    affected: Callable[..., Any] | None,
    args: tuple[Any, ...],
) -> None:
    try:
        connector.count_fault(name, error)
        if affected is not None:
            affected(connector, error, *args)
    except Exception:
        logger.exception("PDClusterConnector.%s: failing its requests failed too", name)
