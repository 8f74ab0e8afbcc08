"""The connectors of engines that are measured. Each writes down when vLLM calls it.

An engine gets this module as its ``kv_connector_module_path``, so all of its processes import it,
and a connector's own module with it only if it is the engine's. A line takes about 2 µs.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

FILE = "PDCLUSTER_BENCH_NOTES"
"""Variable with the path of the file that gets a line for each moment: seconds, and its name."""
_file: list[int] = []


def note(name: str, at: float | None = None) -> None:
    """Write a moment down: ``at``, or now."""
    if not _file:
        _file.append(os.open(os.environ[FILE], os.O_WRONLY | os.O_APPEND | os.O_CREAT))
    os.write(_file[0], f"{time.monotonic() if at is None else at:.7f} {name}\n".encode())


def _noting(base: Any) -> Any:
    class Noted(base):  # type: ignore[misc]
        def on_new_request(self, request: Any) -> None:
            note("arrived")
            super().on_new_request(request)

        def request_finished_all_groups(self, request: Any, block_ids: Any) -> Any:
            found = super().request_finished_all_groups(request, block_ids)
            produces = self._kv_transfer_config.kv_role == "kv_producer"
            note("prefilled" if produces else "decoded")
            return found

        def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
            metadata = self._connector_metadata
            orders = getattr(metadata, "receive", None) or getattr(metadata, "reqs_to_recv", None)
            if orders:
                note("ordered")
            super().start_load_kv(forward_context, **kwargs)
            if orders and not hasattr(metadata, "receive"):
                note("posted")

        def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
            results = super().get_transfer_results(finished_req_ids)
            if results.finished_recving:
                note("reported")
            return results

    return Noted


def leave_cores() -> None:
    """Let stock's worker run on all cores.

    On a CPU, and only there, it binds its process to the last core of the machine. Here that would
    be one core for the models of two engines.
    """
    os.sched_setaffinity = lambda *_: None


def _note_receives() -> None:
    """Have our receives written down, too: they run on a thread that vLLM knows nothing of."""
    from pdcluster_connector.transfer.measures import ReceiveResults
    from pdcluster_connector.transfer.receive_machine import Receive, State

    add, settle = ReceiveResults.add, Receive._settle

    def noted(self: Any, receive: Receive, nbytes: int, prefill: str) -> None:
        entered = receive.entered
        note("connected", entered.get(State.POSTED))
        note("posted", receive.posted_at)
        note("landed", entered.get(State.FENCE))
        note("done", entered.get(State.DONE))
        add(self, receive, nbytes, prefill)

    def settled(self: Receive, now: float, actions: Any) -> None:
        settle(self, now, actions)
        if self.state is State.FENCE and not self.open and not self.posting:
            note("fenced", now)  # from here on, it only waits for the claim

    ReceiveResults.add = noted  # type: ignore[method-assign]
    Receive._settle = settled  # type: ignore[method-assign]


def let_progress_wait() -> None:
    """Let NIXL's progress thread wait for events, as long as our connector does.

    NIXL's Python API has it poll without a pause.
    """
    from vllm.distributed.nixl_utils import NixlWrapper

    from pdcluster_connector.nixl_io.nixl_agent import progress_delay

    pause = progress_delay(["UCX"])
    bindings = sys.modules[NixlWrapper.__module__].nixlBind

    class Config(bindings.nixlAgentConfig):  # type: ignore[misc, name-defined]
        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, pause if name == "pthrDelay" else value)

    bindings.nixlAgentConfig = Config


def __getattr__(name: str) -> Any:
    if name == "NotedOurs":
        from pdcluster_connector.vllm.connector import PDClusterConnector

        _note_receives()
        made = _noting(PDClusterConnector)
    elif name in {"NotedStock", "NotedCalm"}:
        from vllm.distributed.kv_transfer.kv_connector.v1.nixl import NixlConnector

        leave_cores()
        if name == "NotedCalm":
            let_progress_wait()
        made = _noting(NixlConnector)
    else:
        raise AttributeError(name)
    globals()[name] = made
    return made
