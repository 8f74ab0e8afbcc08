"""An asyncio loop in a thread of its own, for work that must not wait for engine steps."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class LoopThread:
    """A daemon thread that runs an asyncio loop between :meth:`start` and :meth:`stop`."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._stopping = asyncio.Event()

    def start(self) -> None:
        """Start the thread. It first runs the callbacks that :meth:`call` got before the start."""
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the loop runs."""
        return self._thread.is_alive()

    def call(self, callback: Callable[..., object], *args: object) -> bool:
        """Run ``callback(*args)`` on the loop, from any thread. False once stopped."""
        try:
            self.loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:  # the loop is closed
            return False
        return True

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine on the loop, from any other thread."""
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def stop(self, timeout: float = 5.0) -> None:
        """Cancel every task, wait for them, end the thread and close the loop."""
        if self._thread.is_alive():
            self.call(self._stopping.set)
            self._thread.join(timeout)
        else:
            self.loop.close()

    def _run(self) -> None:
        # A router's image may have Python 3.10, which has no asyncio.Runner.
        loop = self.loop
        try:
            loop.run_until_complete(self._stopping.wait())
        finally:
            if tasks := asyncio.all_tasks(loop):
                for task in tasks:
                    task.cancel()
                loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.run_until_complete(loop.shutdown_default_executor())
            loop.close()
