"""One ``pdcluster up``: from the first process to the end of the last."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Callable, Container
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from pdcluster_connector.compat.counted import counted
from pdcluster_connector.protocol.api_key import VARIABLE as API_KEY_VARIABLE
from pdcluster_operator.api.object_names import HTTP_PORT
from pdcluster_operator.api.spec.types import Cluster
from pdcluster_operator.cli.exits import Exit, UserError
from pdcluster_operator.cli.once import ask, describe_path
from pdcluster_operator.cli.snapshot import Snapshot, take_snapshot
from pdcluster_operator.cli.view import View, conditions_table, links_table, waiting_for
from pdcluster_operator.local.cluster import LocalCluster
from pdcluster_operator.runtime.interfaces import Key

LOOK_SECONDS = 0.3
STOP_SECONDS = 10.0
DEATHS = 2
"""With --once: after so many deaths of a pod while it starts, ``up`` gives up."""
CANNOT_START = ("CreateContainerConfigError", "Unschedulable")
PATIENCE_SECONDS = 10.0
"""With --once: how long a pod may wait for something that this machine lacks."""
ON_THE_WAY = ("Accepted", "KVLinksEstablished", "KVPathVerified")
"""Conditions that say more than the lines of the pods while a cluster starts."""


@dataclass(frozen=True, slots=True)
class UpOptions:
    """The command line of ``pdcluster up``."""

    file: str
    once: str | None
    max_tokens: int
    timeout: float
    model_dir: Path | None
    plain: bool


class UpRun:
    """Starts a cluster, does what was asked, and ends every process."""

    def __init__(
        self,
        options: UpOptions,
        document: dict[str, Any],
        cluster: Cluster,
        console: Console,
        view: View,
    ) -> None:
        self._options, self._document, self._cluster = options, document, cluster
        self._console, self._view = console, view
        self._interrupts = 0
        self._interrupted = asyncio.Event()

    async def main(self, local: LocalCluster) -> Exit:
        """Start everything, do what was asked, and end every process in any case."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._interrupt, local)
        async with local:
            key = local.apply(self._document)
            work = asyncio.ensure_future(self._work(local, key))
            stop = asyncio.ensure_future(self._interrupted.wait())
            await asyncio.wait((work, stop), return_when=asyncio.FIRST_COMPLETED)
            self._view.finish()
            stop.cancel()
            if not work.done():
                work.cancel()
            ended = (await asyncio.gather(work, return_exceptions=True))[0]
            await self._stop(local)
        if isinstance(ended, asyncio.CancelledError):
            return Exit.INTERRUPTED
        if isinstance(ended, BaseException):
            raise ended
        return ended

    async def _work(self, local: LocalCluster, key: Key) -> Exit:
        await self._until_ready(local, key)
        self._view.finish()
        snapshot = take_snapshot(local, key)
        self._view.say(f"{self._cluster.name} is Ready: KV was seen to move from prefill to decode")
        if self._options.once is not None:
            return await self._ask(local, key, self._options.once)
        self._show(snapshot)
        url = self._endpoint(local, key)
        request = {"model": self._cluster.served_name, "prompt": "Once upon a time"}
        secret = f"${API_KEY_VARIABLE}"
        sent = f' -H "Authorization: Bearer {secret}"' if self._asks_for_key else ""
        self._print(
            f"endpoint: {url}\n\n  curl {url}/v1/completions -H 'Content-Type: application/json' "
            f"\\\n   {sent} -d '{json.dumps(request)}'\n\nCtrl-C stops it."
        )
        self._view.know_conditions(snapshot)
        await self._watch(local, key, lambda _: False)
        return Exit.DONE

    async def _until_ready(self, local: LocalCluster, key: Key) -> None:
        began = time.monotonic()
        deadline = began + self._options.timeout if self._options.once is not None else None

        def settled(snapshot: Snapshot) -> bool:
            if snapshot.ready or deadline is None:
                return snapshot.ready
            for pod in snapshot.pods:
                if pod.state == "Died" and pod.restarts + 1 >= DEATHS:
                    raise UserError(
                        f"{pod.name} died {pod.restarts + 1} times: {pod.end}; see {pod.log}",
                        Exit.NOT_READY,
                    )
                if pod.state in CANNOT_START and time.monotonic() > began + PATIENCE_SECONDS:
                    raise UserError(f"{pod.name} cannot start: {pod.doing}", Exit.MACHINE)
            if time.monotonic() > deadline:
                raise UserError(
                    f"not Ready after {self._options.timeout:.0f} s, waiting for "
                    f"{waiting_for(snapshot)}",
                    Exit.NOT_READY,
                )
            return False

        await self._watch(local, key, settled, ON_THE_WAY)

    async def _watch(
        self,
        local: LocalCluster,
        key: Key,
        settled: Callable[[Snapshot], bool],
        types: Container[str] | None = None,
    ) -> None:
        while True:
            snapshot = take_snapshot(local, key)
            self._view.show(snapshot)
            if settled(snapshot):
                return
            self._view.show_conditions(snapshot, types)
            await asyncio.sleep(LOOK_SECONDS)

    async def _ask(self, local: LocalCluster, key: Key, prompt: str) -> Exit:
        snapshot = take_snapshot(local, key)
        decode = [
            f"http://{pod.address}:{HTTP_PORT}" for pod in snapshot.pods if pod.role == "decode"
        ]
        url = self._endpoint(local, key)
        model, tokens = self._cluster.served_name, self._options.max_tokens
        secret = os.environ.get(API_KEY_VARIABLE) if self._asks_for_key else None
        answer = await ask(url, model, prompt, tokens, decode, secret)
        self._show(take_snapshot(local, key))
        self._print(
            f"prompt:  {prompt}\nanswer:  {answer.text!r} ({counted(answer.tokens, 'token')})\n"
            f"KV path: {describe_path(answer)}"
        )
        if not answer.moved:
            self._print("error: the KV cache did not move for this request")
            return Exit.KV_DID_NOT_MOVE
        return Exit.DONE

    @property
    def _asks_for_key(self) -> bool:
        return self._cluster.spec.router.api_key_secret_ref is not None

    def _endpoint(self, local: LocalCluster, key: Key) -> str:
        """Return the endpoint, with an address of this machine in place of the Service's name."""
        url = str((local.cluster(key).get("status") or {}).get("endpoint") or "")
        scheme, _, rest = url.partition("://")
        host, _, port = rest.partition(":")
        address = local.names.resolve(host)
        if not url or address is None:
            raise UserError(
                "the cluster has no router that is ready: set router.replicas to 1",
                Exit.REQUEST_FAILED,
            )
        return f"{scheme}://{address}:{port}"

    async def _stop(self, local: LocalCluster) -> None:
        if not self._interrupts:
            await local.stop(STOP_SECONDS)
            return
        self._view.say("stopping every process; Ctrl-C again kills them")
        await local.stop(STOP_SECONDS)
        self._view.say("stopped")

    def _interrupt(self, local: LocalCluster) -> None:
        self._interrupts += 1
        if self._interrupts > 1:
            local.kubelet.kill()
        self._interrupted.set()

    def _show(self, snapshot: Snapshot) -> None:
        for table in (links_table(snapshot.links), conditions_table(snapshot.conditions)):
            self._console.print()
            self._console.print(table, soft_wrap=True)
        self._console.print()

    def _print(self, text: str) -> None:
        self._console.print(Text(text), soft_wrap=True)
