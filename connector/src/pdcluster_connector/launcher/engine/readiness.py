"""Whether an engine is ready, and what the launcher says of it: state, addresses, versions.

Before an engine is ready, the lines that vLLM prints say how far its start has come. A line can
only move the state forward. No line makes an engine ready: only its ``/health`` does.
``launcher/interface.py`` serves the state at ``/readyz``: with 200 while the engine is ready, else
with 503.
"""

import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from msgspec.structs import replace

from pdcluster_connector.launcher.arguments import EngineCommand
from pdcluster_connector.protocol.engine_id import EngineId
from pdcluster_connector.protocol.host_port import join_address, reachable, url
from pdcluster_connector.protocol.launcher_documents import EngineReport, EngineState

_ORDER: Final = {state: place for place, state in enumerate(EngineState)}


@dataclass(frozen=True, slots=True)
class Progress:
    """A state and one sentence for people who wait for the engine."""

    state: EngineState
    message: str


# A line of vLLM's output, the state that it shows, and a message with the groups of the match.
_RULES: Final = tuple(
    (re.compile(pattern), state, message)
    for pattern, state, message in (
        (
            r"Initializing a V1 LLM engine",
            EngineState.STARTING,
            "the engine core has started and imports the model's code",
        ),
        (
            r"Fetching (1) files:\s+(\d+)%",
            EngineState.LOADING_WEIGHTS,
            "downloading {0} file of the model: {1} %",
        ),
        (
            r"Fetching (\d+) files:\s+(\d+)%",
            EngineState.LOADING_WEIGHTS,
            "downloading {0} files of the model: {1} %",
        ),
        (r"Starting to load model", EngineState.LOADING_WEIGHTS, "loading the model's weights"),
        (
            r"Loading \w+ checkpoint shards:.*?\| (\d+)/(\d+) \[",
            EngineState.LOADING_WEIGHTS,
            "loading the model's weights: shard {0} of {1}",
        ),
        (
            r"Loading weights took",
            EngineState.WARMING_UP,
            "weights loaded; measuring memory for the KV cache",
        ),
        (
            r"KV cache size: ([\d,]+) tokens",
            EngineState.WARMING_UP,
            "KV cache for {0} tokens allocated; warming up",
        ),
        (
            r"Capturing CUDA graphs.*?\| (\d+)/(\d+) \[",
            EngineState.WARMING_UP,
            "capturing CUDA graphs: {0} of {1}",
        ),
        (r"[Cc]ompil(?:ing|ation).*graph", EngineState.WARMING_UP, "compiling the model"),
        (r"Starting vLLM (?:API )?server", EngineState.WARMING_UP, "starting the API server"),
    )
)


def advance(current: Progress, line: str) -> Progress:
    """Progress after one more line of vLLM's output; ``current`` if the line says nothing new."""
    for pattern, state, message in _RULES:
        if match := pattern.search(line):
            if _ORDER[state] < _ORDER[current.state]:
                return current
            return Progress(state, message.format(*match.groups()))
    return current


class Readiness:
    """State of one engine, from its output (any thread), its API's health and the launcher.

    Attributes:
        engine: its id.
        routed: whether routers may send it requests, as the operator said last.
    """

    def __init__(
        self, engine: EngineId, role: str, command: EngineCommand, versions: Mapping[str, str]
    ) -> None:
        self.engine = engine
        self._report = EngineReport(
            engine=engine.logical,
            role=role,
            versions=dict(versions),
            side_channel=join_address(command.side_channel_host, command.side_channel_port),
            data_parallel_size=command.data,
            # Other pods use the API and the side channel. If the API binds every address, the side
            # channel's address is the one that they know.
            api=url(reachable(command.host, command.side_channel_host), command.port),
        )
        self.routed = False
        self._lock = threading.Lock()
        self._progress = Progress(EngineState.STARTING, "starting vLLM")
        self._served = False

    @property
    def ready(self) -> bool:
        """Whether the engine may get requests."""
        return self._progress.state is EngineState.READY

    @property
    def loading(self) -> bool:
        """Whether the engine has never been ready yet."""
        return not self._served and self._progress.state in {
            EngineState.STARTING,
            EngineState.LOADING_WEIGHTS,
            EngineState.WARMING_UP,
        }

    def line(self, text: str) -> None:
        """Take one line of the engine's output."""
        with self._lock:
            if self.loading:
                self._progress = advance(self._progress, text)

    def healthy(self, message: str = "") -> None:
        """Take note that the API answers (of a follower: that its process runs)."""
        with self._lock:
            if self._progress.state is not EngineState.DRAINING:
                self._progress = Progress(EngineState.READY, message)
                self._served = True

    def waiting(self, message: str) -> None:
        """Say what the start waits for."""
        with self._lock:
            if self._progress.state is EngineState.STARTING:
                self._progress = Progress(EngineState.STARTING, message)

    def unhealthy(self, message: str, state: EngineState = EngineState.FAILED) -> None:
        """Take note that the API of an engine that was ready does not answer any more."""
        with self._lock:
            if self._progress.state is EngineState.READY:
                self._progress = Progress(state, message)

    def draining(self, message: str) -> None:
        """Ask for no new requests. Running requests and leases continue."""
        with self._lock:
            self._progress = Progress(EngineState.DRAINING, message)

    def report(self, certificate_expires: float | None = None) -> EngineReport:
        """Return what ``GET /readyz`` answers.

        Args:
            certificate_expires: in seconds since the epoch; None without a certificate.
        """
        progress = self._progress
        return replace(
            self._report,
            ready=self.ready,
            engine=self.engine.logical,
            engine_id=self.engine.engine,
            state=progress.state,
            message=progress.message,
            routed=self.routed,
            certificate_expires=certificate_expires,
        )
