"""One engine's life: start, become ready, serve, drain, end."""

import asyncio
import contextlib
import os
import secrets
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any, Final

import aiohttp

from pdcluster_connector import listening
from pdcluster_connector.certificate_files import Tls
from pdcluster_connector.host_memory import oom_kills
from pdcluster_connector.launcher import say
from pdcluster_connector.launcher.arguments import EngineCommand, engine_command
from pdcluster_connector.launcher.engine import (
    engine_api,
    engine_process,
    load_window,
    prompt_window,
)
from pdcluster_connector.launcher.engine.last_words import MAX_LINE, MAX_LINES, choose, death
from pdcluster_connector.launcher.engine.readiness import Readiness
from pdcluster_connector.launcher.inside_vllm import DOOR_VARIABLE, DoorFile
from pdcluster_connector.launcher.interface import LauncherServer, metrics_page
from pdcluster_connector.launcher.links import canary, link_table
from pdcluster_connector.launcher.multi_node import ASK_EVERY, Followers, Leader, Rendezvous
from pdcluster_connector.launcher.options import Options
from pdcluster_connector.protocol import api_key, engine_id, kv_path
from pdcluster_connector.protocol.host_port import reachable, url
from pdcluster_connector.protocol.launcher_documents import EngineState

_LOADING_POLL: Final = 0.25
_SERVING_POLL: Final = 1.0
_PROMPTS_POLL: Final = 10.0
_PATIENCE: Final = 3
# Routers ask for /health each second. One second more is for their answers.
_ROUTERS_RETURN: Final = 2.0


async def watch_health(
    api: engine_api.EngineApi, readiness: Readiness, stopped: Callable[[], int]
) -> None:
    """Keep ``readiness`` up to date with what ``/health`` says. Runs until cancelled.

    Args:
        stopped: returns how many processes of the engine a signal has stopped. The API server may
            answer although the engine core is stopped.
    """
    failures, own_fault, since = 0, "", ""
    while True:
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        try:
            state, why = await _health(api, stopped)
        except engine_api.OwnFaultError as error:  # it says nothing about the engine
            if str(error) != own_fault:
                say(own_fault := str(error))
        else:
            if state is EngineState.READY:
                failures, own_fault = 0, ""
                readiness.healthy()
            else:
                since, failures = since if failures else now, failures + 1
                if failures >= _PATIENCE:
                    readiness.unhealthy(f"{why} (since {since})", state)
        await asyncio.sleep(_LOADING_POLL if readiness.loading else _SERVING_POLL)


async def _health(api: engine_api.EngineApi, stopped: Callable[[], int]) -> tuple[EngineState, str]:
    if number := stopped():
        return EngineState.FROZEN, f"a signal (SIGSTOP) has stopped {number} of vLLM's processes"
    try:
        await api.health()
    except engine_api.OwnFaultError:
        raise
    except TimeoutError:
        return EngineState.FROZEN, "vLLM's processes run, but /health did not answer in time"
    except engine_api.NO_ANSWER as error:
        return EngineState.FAILED, str(error)
    return EngineState.READY, ""


async def keep_counting(
    api: engine_api.EngineApi,
    readiness: Readiness,
    load: load_window.LoadWindow,
    prompts: prompt_window.PromptWindow | None,
) -> None:
    """Keep both windows up to date with what the engine counts. Runs until cancelled."""
    while True:
        if not readiness.loading:
            # An engine that does not answer is the health check's matter.
            with contextlib.suppress(*engine_api.NO_ANSWER):
                metrics = (await api.metrics()).decode(errors="replace")
                load.add(metrics, time.monotonic())
                if prompts is not None:
                    prompts.add(prompt_window.count_prompts(metrics), time.monotonic())
        await asyncio.sleep(_LOADING_POLL if readiness.loading else _PROMPTS_POLL)


@dataclass(eq=False, repr=False)
class Supervisor:
    """Runs one engine until it ends.

    Args:
        options: the launcher's command line.
        command: the engine's command line.
        versions: what is installed.
        package: folder or zip file that vLLM's processes import the connector from.
        tls: for the launcher's interface; None for plain HTTP.
    """

    options: Options
    command: EngineCommand
    versions: Mapping[str, str]
    package: Path
    tls: Tls | None = None

    def __post_init__(self) -> None:
        options, command = self.options, self.command
        self._readiness = Readiness(options.engine, options.role, command, self.versions)
        self._links = link_table.LinkTable((command.pipeline, command.tensor), command.data)
        self._prompts = prompt_window.PromptWindow() if options.role == "decode" else None
        self._load = load_window.LoadWindow(options.role, command.data)
        self._token = secrets.token_urlsafe(24)
        self._key = os.environ.get(api_key.VARIABLE)
        self._followers = Followers(command.nodes)
        self._lines: deque[str] = deque(maxlen=MAX_LINES)
        self._engine = engine_process.EngineProcess(self._on_line)
        self._door = DoorFile()
        self._api: engine_api.EngineApi
        self._living: asyncio.Task[int]
        self._stops = 0
        self._left_out = -inf  # when routers were last left out
        self._loss = ""
        self._tasks: set[asyncio.Task[None]] = set()
        self._draining: asyncio.Task[None] | None = None
        self._leader: tuple[Leader, asyncio.Task[None]] | None = None

    async def run(self) -> tuple[int, str]:
        """Return (exit code, reason). The reason is empty if the engine was told to end.

        On return, no process of the engine is left.
        """
        killed_before = oom_kills()
        code = 128 + signal.SIGTERM  # of a stop before there is an engine
        async with aiohttp.ClientSession() as session:
            address = url(reachable(self.command.host), self.command.port)
            self._api = engine_api.EngineApi(session, address, self._key)
            followers = self._followers if self.command.nodes > 1 else None
            server = LauncherServer(
                self._readiness,
                self._links,
                self._token,
                self._begin_drain,
                followers,
                self.tls,
                self._prompts,
                self._load,
            )
            metrics: listening.ConnectionGuard | None = None
            try:
                await server.start(self.options.host, self.options.port)
                if self.options.metrics_port and self.command.is_leader:
                    port = listening.open_port(self.options.host, self.options.metrics_port)
                    page = metrics_page(self._api.metrics)
                    metrics = await listening.serve(page, port, shutdown_timeout=0.2)
                self._living = asyncio.create_task(self._live(session))
                for number in (signal.SIGTERM, signal.SIGINT):
                    asyncio.get_running_loop().add_signal_handler(number, self._on_signal, number)
                code = await self._living
            except OSError as error:
                return 1, f"the launcher cannot start the engine: {error.strerror or error}"
            except asyncio.CancelledError:
                pass
            finally:
                for task in self._tasks:
                    task.cancel()
                self._engine.clean_up()
                self._door.clean_up()
                if metrics is not None:
                    await metrics.close()
                await server.stop()
        if self._loss:
            return 1, f"{self._loss}; all pods of an engine end together"
        if self._stops:
            return code, ""
        process = "vLLM's API server" if self.command.is_leader else "vLLM's headless server"
        out_of_memory = oom_kills() > killed_before
        words = choose(tuple(self._lines))
        return code or 1, death(code, words, out_of_memory=out_of_memory, process=process)

    async def _live(self, session: aiohttp.ClientSession) -> int:
        if self.command.is_leader:
            secured = self.tls is not None
            own = url(reachable(self.options.host), self.options.port, secured=secured)
            self._start_engine(self.command, own, self._token)
            self._spawn(watch_health(self._api, self._readiness, self._engine.stopped))
            if self.command.nodes > 1:
                self._spawn(self._watch_followers())
            if self.options.role == "decode":
                vocabulary = canary.vocabulary(self.command.model)
                canaries = canary.Canaries(
                    self._api,
                    self._readiness.engine.engine,
                    self.command.data,
                    lambda: canary.prompt(
                        self.command.block_tokens, self.command.max_tokens, vocabulary
                    ),
                    kv_path.key_of(self._token),
                    self._key,
                )
                self._spawn(canaries.keep_running(self._links, session, self._is_routed))
                if not self.command.recomputes:
                    self._spawn(self._watch_links())
            counting = keep_counting(self._api, self._readiness, self._load, self._prompts)
            self._spawn(counting)
        else:
            await self._follow(session)
        return await self._engine.wait()

    async def _watch_links(self) -> None:
        """Have routers leave the engine out while none of its links works.

        Links are made and probed without requests, so it comes back by itself.
        """
        while True:
            now = time.monotonic()
            if (why := self._links.why_none_works(now)) or self._door.no_link.exists():
                self._left_out = now
            self._door.leave_out(why)
            await asyncio.sleep(_SERVING_POLL)

    def _is_routed(self) -> bool:
        """Whether routers send requests here. A canary before would say so too early."""
        if self._door.no_link.exists():  # the next look may be late
            return False
        return self._readiness.ready and time.monotonic() >= self._left_out + _ROUTERS_RETURN

    def _start_engine(self, command: EngineCommand, control: str, token: str) -> None:
        arguments = [sys.executable, "-m", self.options.runner, *command.arguments]
        environment = engine_process.engine_environment(self.package, control, token)
        self._engine.start(arguments, environment | {DOOR_VARIABLE: str(self._door.path)})

    # Several nodes.

    async def _follow(self, session: aiohttp.ClientSession) -> None:
        """Start this node's part of an engine whose identity its leader knows."""
        address = url(self.command.leader, self.options.port, secured=self.tls is not None)
        leader = Leader(session, address, self.command.node_rank, secrets.token_hex(8), self.tls)
        met = await leader.meet(self._readiness.waiting)
        self._readiness.engine = engine_id.parse_engine_id(met.engine_id)
        command = engine_command(
            self.options.vllm,
            engine_id=met.engine_id,
            role=self.options.role,
            every_address=listening.every_address(),
        )
        self._start_engine(command, address, met.token)
        self._leader = leader, self._spawn(self._watch_leader(leader, met))

    async def _watch_leader(self, leader: Leader, met: Rendezvous) -> None:
        """Be as ready as the leader, and end with it."""

        def heard(answer: Rendezvous) -> None:
            if answer.ready:
                self._readiness.healthy(f"node {self.command.node_rank} of the engine")
            else:
                # Nothing of this pod has failed: its leader drains, or says itself what failed.
                why = "the engine's leader is not ready"
                self._readiness.unhealthy(why, EngineState.WARMING_UP)

        why = await leader.watch(met, heard)
        if not self._stops:
            self._lose(why)

    async def _watch_followers(self) -> None:
        """End the engine when it cannot go on with its followers."""
        while True:
            if loss := self._followers.loss(time.monotonic()):
                self._lose(loss)
            elif (rank := self._followers.leaving) is not None and not self._stops:
                await self._drain(self.options.drain_seconds)
                if not self._stops:  # else the engine is being stopped, and need not be killed
                    self._lose(f"node {rank} of this engine was told to stop")
            await asyncio.sleep(ASK_EVERY)

    def _lose(self, why: str) -> None:
        if not self._stops:
            self._loss = why
        self._engine.kill()

    # Signals.

    def _on_signal(self, number: signal.Signals) -> None:
        self._stops += 1
        if not self._engine.running:
            self._living.cancel()
        elif self._stops > 1:
            say("killing the engine")
            self._engine.kill()
        else:
            say(f"{number.name}: draining, then stopping; again to kill at once")
            self._spawn(self._stop())

    async def _stop(self) -> None:
        if self._readiness.loading:
            # Nobody uses it yet, and until it serves vLLM may not heed a SIGTERM for minutes.
            self._engine.kill()
            return
        if self.command.is_leader:
            await self._drain(self.options.drain_seconds)
        elif self._leader is not None:
            leader, watched = self._leader
            leader.leaving = True
            self._readiness.draining("the engine's leader drains")
            await asyncio.wait({watched}, timeout=self.options.drain_seconds)
        self._readiness.draining("stopping the engine")
        self._engine.signal(signal.SIGTERM)
        await asyncio.sleep(self.options.stop_seconds)
        say(f"the engine did not end within {self.options.stop_seconds:g} s: killing it")
        self._engine.kill()

    def _begin_drain(self) -> None:
        if self._draining is None and not self._stops:
            self._draining = self._spawn(self._drain(inf))

    async def _drain(self, seconds: float) -> None:
        deadline, close = time.monotonic() + seconds, self._door.close
        await engine_api.wait_until_idle(self._api, self._readiness, deadline, close)

    # What runs beside the engine.

    def _spawn(self, coroutine: Any) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._on_done)
        return task

    def _on_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            say(f"a task of the launcher failed: {type(error).__name__}: {error}")

    # The engine's surroundings.

    def _on_line(self, line: str) -> None:
        self._lines.append(line[:MAX_LINE])
        self._readiness.line(line)
