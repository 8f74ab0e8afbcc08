"""``pdcluster up``: runs a manifest on this machine, with the operator's own control loop."""

import asyncio
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Container
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
from rich.text import Text

from pdcluster_connector.compat.findings import counted
from pdcluster_connector.host_memory import available_bytes
from pdcluster_connector.protocol.api_key import VARIABLE as API_KEY_VARIABLE
from pdcluster_operator.api.findings import Findings, under
from pdcluster_operator.api.object_names import HTTP_PORT
from pdcluster_operator.api.spec.pod_templates import as_mapping
from pdcluster_operator.api.spec.types import Cluster, Visibility
from pdcluster_operator.cli import lint, manifests, once, output, plan, view as views
from pdcluster_operator.cli.commands import Command, duration, positive
from pdcluster_operator.cli.cpu_engines import complete
from pdcluster_operator.cli.exits import Exit, UserError
from pdcluster_operator.cli.model_shape import model_of
from pdcluster_operator.cli.runs import new_run_folder
from pdcluster_operator.local import cluster as local_cluster, pod_logs
from pdcluster_operator.local.door import Door
from pdcluster_operator.local.facts import gather
from pdcluster_operator.local.preflight import COMMAND_LINE, judge
from pdcluster_operator.runtime.interfaces import Key

LOOK_SECONDS = 0.3
STOP_SECONDS = 10.0
DEATHS = 2
"""After so many deaths of a pod in a row while it starts, ``up`` gives up."""
CANNOT_START = ("CreateContainerConfigError", "Unschedulable")
PATIENCE_SECONDS = 10.0
"""With --once: how long a pod may wait for something that this machine lacks."""
ON_THE_WAY = ("Accepted", "KVLinksEstablished", "KVPathVerified")
"""Conditions that are shown while a cluster starts. The lines of the pods cover the others."""
AFTERWARDS = (*ON_THE_WAY, "TransportHealthy", "Ready")

DETAILS = """\
FILE is a manifest in YAML; - is standard input.

The operator's own control loop runs over an in-memory API, and a mini-kubelet turns pods into
processes, each pod on a 127.x.y.z address of its own. Ctrl-C ends every process. A second Ctrl-C
kills them.

Before the first process starts, it lists everything that this machine lacks: vLLM and NIXL, the
model, GPUs, memory, ports, the router's program. It then exits with 6, or with 2 if the manifest
rules out --once.

An engine that dies twice in a row before it is ready ends the run with 3. The log's last lines that
matter are printed, and its path. --keep-going lets the engine start again and again, as a cluster
does.

Engines on CPUs (transfer.device: CPU) share this machine. What a manifest leaves out for that is
added and printed: the size of the KV cache, float32, --enforce-eager, and threads that are bound to
no cores.

A manifest usually names a model folder of the nodes (model.source.hostPath). --model-dir puts a
folder of this machine in its place, whatever source the manifest names.
"""


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line of ``pdcluster up`` asks for.

    Attributes:
        once: the prompt of ``--once``; None without it.
        timeout: seconds.
    """

    file: str
    once: str | None
    max_tokens: int
    timeout: float
    model_dir: Path | None
    keep_going: bool
    plain: bool
    ui: bool


@click.command(cls=Command, help=DETAILS)
@click.argument("file", type=click.Path(), metavar="FILE")
@click.option(
    "--once",
    metavar="PROMPT",
    help="wait until Ready, send one prompt through the router, print the answer and what its KV "
    "cache did, and stop",
)
@click.option(
    "--max-tokens",
    type=positive,
    default=32,
    metavar="N",
    help="tokens to generate with --once (default 32)",
)
@click.option(
    "--timeout",
    type=duration,
    default="15m",
    metavar="DURATION",
    help="with --once: give up if not Ready after this time, such as 90s or 30m (default 15m)",
)
@click.option(
    "--model-dir",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="serve the model in this folder, instead of the one that the manifest names",
)
@click.option(
    "--keep-going",
    is_flag=True,
    help=f"without --once: go on when an engine has died {DEATHS} times while it starts",
)
@click.option(
    "--ui", is_flag=True, help="serve a page of it for your browser too, as pdcluster ui does"
)
@click.option("--plain", is_flag=True, help="print lines instead of a live table")
def up(**options: Any) -> Exit:
    """Run a manifest on this machine."""
    return run(Options(**options))


def run(options: Options) -> Exit:
    """Run until Ctrl-C, or until the one prompt is answered."""
    if sys.platform != "linux":
        raise UserError(
            f"local mode needs Linux, this is {sys.platform}: use a Linux machine or "
            "container, or a Kubernetes cluster",
            Exit.MACHINE,
        )
    console = output.console()
    read = manifests.read_cluster(options.file)
    document = with_model(read.body, options.model_dir)
    model = model_of(document)
    cluster, findings = lint.judge(replace(read, body=document), one_node=True, model=model)
    if not findings.ok:
        lint.print_findings(console, read, findings)
        return Exit.MANIFEST
    for warning in findings.warnings:
        # --model-dir replaced the source, so a warning about the source is of no use.
        replaced = options.model_dir is not None and under(warning.path, "spec.model.source")
        if not replaced:
            said = f"warning: {lint.located(read, warning)}{warning}"
            console.print(Text(said, style="yellow"), soft_wrap=True)
    document, added = complete(
        document, cluster, model, free=available_bytes(), cores=len(os.sched_getaffinity(0))
    )
    if added:
        cluster = lint.judge(replace(read, body=document), one_node=True)[0]
    connector = plan.shipped_connector()
    document = with_names(document)
    facts = gather(
        document, cluster, connector, local_cluster.container_environment(), local_cluster.POD_PORTS
    )
    lacks = judge(
        cluster, facts, once=options.once is not None, model_flag=options.model_dir is not None
    )
    if lacks:
        lint.print_findings(console, read, Findings(tuple(lacks)), " on this machine")
        on_line = all(lack.rule in COMMAND_LINE for lack in lacks)
        return Exit.USAGE if on_line else Exit.MACHINE
    folder = new_run_folder(cluster.name)
    console.print(
        Text(f"running {cluster.namespace}/{cluster.name}; logs are below {folder}"), soft_wrap=True
    )
    for words in added:
        console.print(Text(f"added for engines on CPUs: {words}", style="dim"), soft_wrap=True)
    console.print(
        Text(f"not simulated: {', '.join(local_cluster.NOT_SIMULATED)}", style="dim"),
        soft_wrap=True,
    )
    with views.View(console, plain=options.plain) as view:
        logging.basicConfig(level=logging.WARNING, handlers=[_ToView(view)], force=True)
        # Anybody on this machine can send a request that is none.
        logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)
        local = local_cluster.LocalCluster(folder, connector, view.say)
        return asyncio.run(UpRun(options, cluster, view, local, folder).main(document))


class _ToView(logging.Handler):
    """The operator's own warnings, among the lines of the terminal."""

    def __init__(self, view: views.View) -> None:
        super().__init__()
        self._view = view

    def emit(self, record: logging.LogRecord) -> None:
        self._view.say(f"{record.levelname.lower()}: {record.getMessage()}")


def with_model(document: Any, folder: Path | None) -> Any:
    """Return the manifest with ``--model-dir`` as its model's source."""
    spec = as_mapping(as_mapping(document).get("spec"))
    model = spec.get("model")
    if folder is None or not isinstance(model, dict):
        return document
    source = {"hostPath": {"path": os.path.abspath(folder)}}
    return {**document, "spec": {**spec, "model": {**model, "source": source}}}


def with_names(document: dict[str, Any]) -> dict[str, Any]:
    """Return a valid manifest with ``internalNames: Shown``, unless it sets the field."""
    spec = document["spec"]
    shown = {"internalNames": Visibility.SHOWN.value, **(spec.get("transfer") or {})}
    return {**document, "spec": {**spec, "transfer": shown}}


class UpRun:
    """Starts a cluster, runs until the prompt is answered or Ctrl-C, and ends every process."""

    def __init__(
        self,
        options: Options,
        cluster: Cluster,
        view: views.View,
        local: local_cluster.LocalCluster,
        folder: Path,
    ) -> None:
        self._options, self._cluster, self._view, self._local = options, cluster, view, local
        self._folder = folder
        self._key = Key(cluster.namespace, cluster.name)
        self._interrupts = 0
        self._served: dict[str, int] = {}
        self._told: set[str] = set()

    async def main(self, document: dict[str, Any]) -> Exit:
        """Start everything, run, and end every process in any case."""
        api, logs = self._local.api, self._local.kubelet.logs
        door = Door(api, logs, self._folder, self._key.namespace)
        async with self._local, door, AsyncExitStack() as pages:
            work = asyncio.ensure_future(self._work())
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                asyncio.get_running_loop().add_signal_handler(number, self._interrupt, work)
            self._local.apply(document)
            if self._options.ui:
                from pdcluster_operator.cli.ui.command import page_of_run

                page = page_of_run(str(door.kubeconfig), self._key)
                self._view.say(f"page: {await pages.enter_async_context(page)}")
            [ended] = await asyncio.gather(work, return_exceptions=True)
            self._view.finish()
            interrupted = self._interrupts > 0
            if interrupted:
                self._view.say("stopping every process; Ctrl-C again kills them")
            await self._local.stop(STOP_SECONDS)
            if interrupted:
                self._view.say("stopped")
        if isinstance(ended, asyncio.CancelledError):
            return Exit.INTERRUPTED
        if isinstance(ended, BaseException):
            raise ended
        return ended

    async def _work(self) -> Exit:
        await self._until_ready()
        self._view.finish()
        snapshot = views.take_snapshot(self._local, self._key)
        self._view.say(f"{self._cluster.name} is Ready: KV was seen to move from prefill to decode")
        if self._options.once is not None:
            return await self._ask(self._options.once)
        self._show(snapshot)
        url = self._endpoint()
        request = {"model": self._cluster.served_name, "prompt": "Once upon a time"}
        secret = f"${API_KEY_VARIABLE}"
        sent = f' -H "Authorization: Bearer {secret}"' if self._asks_for_key else ""
        self._print(
            f"endpoint: {url}\n\n  curl {url}/v1/completions -H 'Content-Type: application/json' "
            f"\\\n   {sent} -d '{json.dumps(request)}'\n\nIn another terminal:\n\n"
            f"  pdcluster status {self._cluster.name} --local\n\nCtrl-C stops it."
        )
        self._view.mark_as_shown(snapshot)
        await self._watch(lambda _: False, AFTERWARDS)
        return Exit.DONE

    async def _until_ready(self) -> None:
        began = time.monotonic()
        deadline = began + self._options.timeout if self._options.once is not None else None

        def settled(snapshot: views.Snapshot) -> bool:
            if snapshot.ready or deadline is None:
                return snapshot.ready
            for pod in snapshot.pods:
                if pod.state in CANNOT_START and time.monotonic() > began + PATIENCE_SECONDS:
                    raise UserError(f"{pod.name} cannot start: {pod.doing}", Exit.MACHINE)
            if time.monotonic() > deadline:
                raise UserError(
                    f"not Ready after {self._options.timeout:.0f} s, waiting for "
                    f"{views.waiting_for(snapshot)}",
                    Exit.NOT_READY,
                )
            return False

        await self._watch(settled, ON_THE_WAY)

    async def _watch(
        self,
        settled: Callable[[views.Snapshot], bool],
        types: Container[str],
    ) -> None:
        while True:
            snapshot = views.take_snapshot(self._local, self._key)
            self._view.show(snapshot)
            if settled(snapshot):
                return
            for pod in snapshot.pods:
                self._judge(pod, snapshot.ready)
            self._view.show_conditions(snapshot, types)
            await asyncio.sleep(LOOK_SECONDS)

    def _judge(self, pod: views.PodLine, ready: bool) -> None:
        """End the run if a pod died too often while it started; with --keep-going, say it once."""
        if ready and pod.serves:  # one that dies of its first request has not begun to serve
            self._served[pod.name] = pod.restarts + 1
            self._told.discard(pod.name)
        deaths = pod.restarts + 1 - self._served.get(pod.name, 0)
        if pod.state != "Died" or deaths < DEATHS or pod.name in self._told:
            return
        self._told.add(pod.name)
        if not self._options.keep_going:
            self._view.finish()
        if lines := pod_logs.why(pod.log) if pod.log else []:
            self._print("\n  ".join([f"{pod.name} wrote last:", *lines]))
        verdict = f"{pod.name} died {deaths} times: {pod.end}; see {pod.log}"
        if not self._options.keep_going:
            raise UserError(verdict, Exit.NOT_READY)
        self._view.say(verdict)

    async def _ask(self, prompt: str) -> Exit:
        snapshot = views.take_snapshot(self._local, self._key)
        decode = [
            f"http://{pod.address}:{HTTP_PORT}" for pod in snapshot.pods if pod.role == "decode"
        ]
        url = self._endpoint()
        model, tokens = self._cluster.served_name, self._options.max_tokens
        secret = os.environ.get(API_KEY_VARIABLE) if self._asks_for_key else None
        answer = await once.ask(url, model, prompt, tokens, decode, secret)
        self._show(views.take_snapshot(self._local, self._key))
        self._print(
            f"prompt:  {prompt}\nanswer:  {answer.text!r} ({counted(answer.tokens, 'token')})\n"
            f"KV path: {once.describe_path(answer)}"
        )
        if not answer.moved:
            self._print("error: the KV cache did not move for this request")
            return Exit.KV_DID_NOT_MOVE
        return Exit.DONE

    @property
    def _asks_for_key(self) -> bool:
        return self._cluster.spec.router.api_key_secret_ref is not None

    def _endpoint(self) -> str:
        """Return the endpoint, with an address of this machine in place of the Service's name."""
        url = str((self._local.cluster(self._key).get("status") or {}).get("endpoint") or "")
        scheme, _, rest = url.partition("://")
        host, _, port = rest.partition(":")
        address = self._local.resolve(host)
        if not url or address is None:
            raise UserError(
                "the cluster has no router that is ready: set router.replicas to 1",
                Exit.REQUEST_FAILED,
            )
        return f"{scheme}://{address}:{port}"

    def _interrupt(self, work: asyncio.Future[Exit]) -> None:
        self._interrupts += 1
        if self._interrupts > 1:
            self._local.kubelet.kill()
        work.cancel()

    def _show(self, snapshot: views.Snapshot) -> None:
        for table in (
            views.links_table(snapshot.links),
            views.conditions_table(snapshot.conditions),
        ):
            self._view.console.print()
            self._view.console.print(table, soft_wrap=True)
        self._view.console.print()

    def _print(self, text: str) -> None:
        self._view.console.print(Text(text), soft_wrap=True)
