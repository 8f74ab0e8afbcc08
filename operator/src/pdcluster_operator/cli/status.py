"""``pdcluster status``: whether a PDCluster serves, what it waits for, and what to do next."""

import asyncio
import time
from contextlib import suppress
from typing import Any, Self

import click
from msgspec.structs import replace
from rich.live import Live

from pdcluster_operator.adapters.api_server.client import KubeClient, NotFound
from pdcluster_operator.adapters.api_server.kinds import EVENT, LEASE, POD
from pdcluster_operator.api.object_names import CLUSTER_LABEL
from pdcluster_operator.cli import output as outputs, status_view
from pdcluster_operator.cli.commands import Command, Target, duration, target_or_run
from pdcluster_operator.cli.connection import read_named, with_cluster
from pdcluster_operator.cli.exits import Exit, UserError
from pdcluster_operator.cli.status_document import Status
from pdcluster_operator.cli.status_facts import Objects, status_of
from pdcluster_operator.plan.namespace_lease import lease_name
from pdcluster_operator.runtime.interfaces import ApiError, Key

DETAILS = """\
Says in one sentence whether clients are served and, if not, why. Then each engine with what it does
now, its restarts and how it ended, the conditions, the last failures, and for each reason that is
not good the next command. It also tells an operator that is down from a PDCluster that waits.

With --watch it shows each change until Ctrl-C. In a pipe, it prints the sentence at each change,
and with -o json one document a line.

Exit codes: 0 clients are served; 3 they are not, or nobody knows, or --timeout has passed.
"""
EXAMPLES = (
    ("pdcluster status llama", "the state now"),
    ("pdcluster status llama --watch", "the same, as it changes"),
    ("pdcluster status llama --watch --until-ready --timeout 30m", "wait until it is Ready"),
    ("pdcluster status tiny --local", "of a pdcluster up on this machine"),
)
LOOK_SECONDS = 2.0
MOST_EVENTS = 500


@click.command("status", cls=Command, document=Status, help=DETAILS, examples=EXAMPLES)
@target_or_run
@click.option("-w", "--watch", is_flag=True, help="go on, and show each change")
@click.option("--until-ready", is_flag=True, help="with --watch: end when it is Ready")
@click.option(
    "--timeout",
    type=duration,
    metavar="DURATION",
    help="with --watch: give up after this time, such as 90s, 30m or 1h (default: never)",
)
def status(
    target: Target, output: str, watch: bool, until_ready: bool, timeout: float | None
) -> Exit:
    """Show one PDCluster."""
    if (until_ready or timeout) and not watch:
        raise click.UsageError("--until-ready and --timeout need --watch")
    if watch:
        limit = timeout or float("inf")
        return with_cluster(
            target, follow, output, limit, local=target.local, until_ready=until_ready
        )
    return with_cluster(target, once, output, local=target.local)


async def once(client: KubeClient, key: Key, output: str, *, local: bool) -> Exit:
    """Print the state of now."""
    facts = status_of(await read(client, key, local=local))
    outputs.show(output, facts, lambda to: status_view.print_status(to, facts, client.now()))
    return Exit.DONE if facts.serves else Exit.NOT_READY


async def follow(
    client: KubeClient, key: Key, output: str, seconds: float, *, local: bool, until_ready: bool
) -> Exit:
    """Show the state until it is Ready, or until Ctrl-C."""
    deadline = time.monotonic() + seconds
    facts = status_of(await read(client, key, local=local))
    with _Watch(output) as shown:
        shown.show(facts, facts.summary, client.now())
        while not (until_ready and facts.ready) and time.monotonic() < deadline:
            await asyncio.sleep(LOOK_SECONDS)
            try:
                facts = status_of(await read(client, key, local=local))
            except ApiError as error:
                shown.show(facts, f"waits for the API server: {error}", client.now())
            else:
                shown.show(facts, facts.summary, client.now())
    if output == "text" and outputs.console().is_terminal:
        status_view.print_status(outputs.console(), facts, client.now())
    if until_ready and not facts.ready:
        raise UserError(f"not Ready after {seconds:.0f} s: {facts.summary}", Exit.NOT_READY)
    return Exit.DONE if facts.serves else Exit.NOT_READY


class _Watch:
    """Shows each change: on the whole terminal; in a pipe as lines; or as documents."""

    def __init__(self, output: str) -> None:
        self._output, self._shown = output, ""
        console = outputs.console()
        drawn = output == "text" and console.is_terminal
        self._live = Live(console=console, screen=True, auto_refresh=False) if drawn else None

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, facts: Status, said: str, now: float) -> None:
        """Show what is new. ``said`` is the sentence of now."""
        if self._live is not None:
            view = status_view.status_view(replace(facts, summary=said), now)
            self._live.update(view, refresh=True)
        elif said != self._shown:
            self._shown = said
            if self._output == "text":
                print(outputs.plain(said), flush=True)
            elif said == facts.summary:
                outputs.show(self._output, facts, lambda _: None, one_of_many=True)


async def read(client: KubeClient, key: Key, *, local: bool) -> Objects:
    """Read what the status needs. What this account may not read beside it is left out.

    Raises:
        UserError: there is no such PDCluster.
        ApiError: the API server refuses the PDCluster itself, or its pods.
    """
    cluster = await read_named(client, key)
    selection = {"labelSelector": f"{CLUSTER_LABEL}={key.name}"}
    pods = await client.call("GET", POD.path(key.namespace), query=selection)
    events: list[dict[str, Any]] = []
    warnings = {"fieldSelector": "type=Warning", "limit": str(MOST_EVENTS)}
    with suppress(ApiError):
        listed = await client.call("GET", EVENT.path(key.namespace), query=warnings)
        events = listed.get("items") or []
    name = lease_name(str((cluster.get("spec") or {}).get("operatorClass") or ""))
    lease, known = None, True
    try:
        lease = await client.read(LEASE.path(key.namespace, name))
    except NotFound:
        pass
    except ApiError:
        known = False
    return Objects(
        cluster=cluster,
        pods=pods.get("items") or [],
        lease=lease,
        lease_known=known,
        events=events,
        now=client.now(),
        local=local,
        context=client.context,
    )
