"""``pdcluster rollout``: follow, hold back, let go and undo the rollout of a PDCluster."""

from __future__ import annotations

import asyncio
import math
import time
from typing import Any

from pdcluster_operator.adapters.api_server.client import KubeClient
from pdcluster_operator.adapters.api_server.cluster_reader import change_spec, observe, read_cluster
from pdcluster_operator.cli.connection import Where, connected
from pdcluster_operator.cli.exits import Exit, UserError
from pdcluster_operator.plan.rollout.announce import Announcement, announce
from pdcluster_operator.plan.rollout.undo import Undo, undo
from pdcluster_operator.plan.types import ConnectorBundle
from pdcluster_operator.runtime.interfaces import ApiError, Key

POLL_SECONDS = 1.0
OBJECT = "pdcluster.pdcluster.dev"


def status(name: str, where: Where, *, watch: bool, timeout: float) -> Exit:
    """Print how far a rollout is until it ends.

    Args:
        watch: wait for the end.
        timeout: seconds to wait; 0 is without a limit.
    """

    async def follow(client: KubeClient) -> Exit:
        key = Key(where.namespace_or_default(), name)
        deadline = time.monotonic() + timeout if timeout else math.inf
        latest = await _announcement(client, key)
        shown = _show(name, latest.line, "")
        while watch and latest.complete is None:
            if time.monotonic() > deadline:
                raise UserError(f"not complete after {timeout:.0f} s: {shown}", Exit.NOT_READY)
            await asyncio.sleep(POLL_SECONDS)
            latest = await _announcement(client, key, patient=True)
            shown = _show(name, latest.line, shown)
        return Exit.NOT_READY if latest.complete is False else Exit.DONE

    return connected(where, follow)


def hold(name: str, where: Where, *, paused: bool) -> Exit:
    """Set or remove ``spec.rollout.paused``."""

    async def change(client: KubeClient) -> Exit:
        live = await _live(client, Key(where.namespace_or_default(), name))
        spec = live.get("spec") or {}
        rollout = spec.get("rollout") or {}
        word = "paused" if paused else "resumed"
        if bool(rollout.get("paused", False)) is paused:
            state = "paused already" if paused else "not paused"
            raise UserError(f"{OBJECT}/{name} is {state}", Exit.REQUEST_FAILED)
        await change_spec(client, live, {**spec, "rollout": {**rollout, "paused": paused}})
        print(f"{OBJECT}/{name} {word}")
        return Exit.DONE

    return connected(where, change)


def go_back(name: str, where: Where, *, dry_run: bool) -> Exit:
    """Write the spec that was there before the last change of the engines."""

    async def change(client: KubeClient) -> Exit:
        key = Key(where.namespace_or_default(), name)
        live = await _live(client, key)
        # A spec that goes back to a stored revision needs no connector of ours.
        found = undo(await observe(client, key, live, ConnectorBundle("", b"")))
        if found is None:
            raise UserError(
                f"no other revision of {OBJECT}/{name} is stored, so there is nothing to go back "
                "to; apply the manifest that you want",
                Exit.REQUEST_FAILED,
            )
        await change_spec(client, live, found.spec, dry_run=dry_run)
        print(f"{OBJECT}/{name} rolled back{' (dry run: nothing was written)' if dry_run else ''}")
        _print_undo(found, live)
        return Exit.DONE

    return connected(where, change)


def _print_undo(found: Undo, live: dict[str, Any]) -> None:
    print(f"changed: {', '.join(found.fields)}")
    for role, revision in found.revisions.items():
        print(f"{role}: engines of revision {revision}")
    if ((live.get("spec") or {}).get("rollout") or {}).get("paused"):
        print("rollout.paused is set, so engines stay as they are until `pdcluster rollout resume`")


async def _announcement(client: KubeClient, key: Key, *, patient: bool = False) -> Announcement:
    """Ask how far the rollout is. A patient question may go without an answer."""
    try:
        return announce(await _live(client, key))
    except ApiError as error:
        if not patient:
            raise
        return Announcement(f"waits for the API server: {error}", None)


def _show(name: str, line: str, shown: str) -> str:
    if line != shown:
        print(f'PDCluster "{name}": {line}', flush=True)
    return line


async def _live(client: KubeClient, key: Key) -> dict[str, Any]:
    live = await read_cluster(client, key)
    if live is None:
        raise UserError(
            f'there is no PDCluster "{key.name}" in namespace "{key.namespace}"',
            Exit.REQUEST_FAILED,
        )
    return live
