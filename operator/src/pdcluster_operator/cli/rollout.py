"""``pdcluster rollout``: follow, hold back, let go and undo a rollout; and restart engines."""

import argparse
import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from pdcluster_operator.adapters.api_server.client import KubeClient
from pdcluster_operator.adapters.api_server.cluster_reader import change_spec, observe, read_cluster
from pdcluster_operator.adapters.api_server.kubeconfig import namespace_of_context
from pdcluster_operator.api.conditions import (
    ConditionType,
    Status,
    StatusReason,
    find_condition,
    timestamp,
)
from pdcluster_operator.api.spec import parse, types
from pdcluster_operator.cli.connection import connected
from pdcluster_operator.cli.exits import Exit, UserError
from pdcluster_operator.plan.observed.engines import live_by_role
from pdcluster_operator.plan.rollout import revisions
from pdcluster_operator.plan.rollout.revisions import Revision, stored_revisions
from pdcluster_operator.plan.rollout.targets import find_targets
from pdcluster_operator.plan.status import progress
from pdcluster_operator.plan.types import ConnectorBundle, Manifest, Observed
from pdcluster_operator.runtime.interfaces import ApiError, Key

POLL_SECONDS = 1.0
OBJECT = "pdcluster.pdcluster.dev"
WITHOUT_AN_END = frozenset(
    {
        StatusReason.NOT_ACCEPTED,
        StatusReason.PAUSED,
        StatusReason.TEMPLATE_REFUSED,
        StatusReason.INSUFFICIENT_CAPACITY,
        StatusReason.PROGRESS_DEADLINE_EXCEEDED,
    }
)
"""With one of these reasons, Progressing stays False until somebody does something."""


@dataclass(frozen=True, slots=True)
class Announcement:
    """Where a rollout stands.

    Attributes:
        line: for people.
        complete: whether nothing is left to do; None while it goes on.
        fails: whether it goes on, and a step of the operator fails.
    """

    line: str
    complete: bool | None
    fails: bool = False


@dataclass(frozen=True, slots=True)
class Undo:
    """A step back.

    Attributes:
        spec: the spec to write. Replicas, the rollout, monitoring and the router stay as they are.
        revisions: names of the stored revisions that engines then have, by role.
        fields: paths of the fields that change.
    """

    spec: Manifest
    revisions: Mapping[types.Role, str]
    fields: tuple[str, ...]


def rollout(options: argparse.Namespace) -> Exit:
    """Run the verb that the command line names."""
    verbs = {"status": status, "undo": go_back, "restart": restart}
    verb = verbs.get(options.verb, hold)

    async def command(client: KubeClient) -> Exit:
        namespace = options.namespace or namespace_of_context(options.context)
        return await verb(client, Key(namespace, options.name), options)

    return connected(options.context, command)


async def status(client: KubeClient, key: Key, options: argparse.Namespace) -> Exit:
    """Print how far a rollout is until it ends; once with ``--no-watch``."""
    deadline = time.monotonic() + options.timeout
    latest = await _announcement(client, key)
    shown, well = _show(key.name, latest.line, ""), time.monotonic()
    while latest.complete is None and not options.no_watch:
        now = time.monotonic()
        well = well if latest.fails else now
        if now > deadline:
            late = f"not complete after {options.timeout:.0f} s: {shown}"
            raise UserError(late, Exit.NOT_READY)
        if now - well > progress.FAILING_SECONDS:
            raise UserError(f"somebody has to act, a step still fails: {shown}", Exit.NOT_READY)
        await asyncio.sleep(POLL_SECONDS)
        latest = await _announcement(client, key, patient=True)
        shown = _show(key.name, latest.line, shown)
    return Exit.NOT_READY if latest.complete is False or latest.fails else Exit.DONE


async def hold(client: KubeClient, key: Key, options: argparse.Namespace) -> Exit:
    """Set ``spec.rollout.paused``: true with ``pause``, false with ``resume``."""
    live, paused = await _live(client, key), options.verb == "pause"
    if _is_paused(live) is paused:
        state = "paused already" if paused else "not paused"
        raise UserError(f"{OBJECT}/{key.name} is {state}", Exit.REQUEST_FAILED)
    await _change_rollout(client, live, {"paused": paused})
    print(f"{OBJECT}/{key.name} {'paused' if paused else 'resumed'}")
    return Exit.DONE


async def restart(client: KubeClient, key: Key, options: argparse.Namespace) -> Exit:
    """Set ``spec.rollout.renew`` to the time of now, so that each engine is replaced once."""
    live = await _live(client, key)
    await _change_rollout(client, live, {"renew": timestamp(time.time())})
    print(f"{OBJECT}/{key.name} restarted")
    return _done(live)


async def go_back(client: KubeClient, key: Key, options: argparse.Namespace) -> Exit:
    """Write the spec that was there before the last change of the engines."""
    live = await _live(client, key)
    # A spec that goes back to a stored revision needs no connector of ours.
    found = undo(await observe(client, key, live, ConnectorBundle("", b"")))
    if found is None:
        raise UserError(
            f"no other revision of {OBJECT}/{key.name} is stored, so there is nothing to go back "
            "to; apply the manifest that you want",
            Exit.REQUEST_FAILED,
        )
    await change_spec(client, live, found.spec, dry_run=options.dry_run)
    note = " (dry run: nothing was written)" if options.dry_run else ""
    print(f"{OBJECT}/{key.name} rolled back{note}")
    print(f"changed: {', '.join(found.fields)}")
    for role, revision in found.revisions.items():
        print(f"{role}: engines of revision {revision}")
    return _done(live)


async def _change_rollout(client: KubeClient, live: Manifest, fields: Manifest) -> None:
    spec = live.get("spec") or {}
    await change_spec(client, live, {**spec, "rollout": {**(spec.get("rollout") or {}), **fields}})


def _is_paused(live: Manifest) -> bool:
    return bool(((live.get("spec") or {}).get("rollout") or {}).get("paused", False))


def _done(live: Manifest) -> Exit:
    if _is_paused(live):
        print("rollout.paused is set, so engines stay as they are until `pdcluster rollout resume`")
    return Exit.DONE


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


def announce(cluster: Manifest) -> Announcement:
    """Return how far the rollout of a PDCluster's spec is."""
    status, metadata = cluster.get("status") or {}, cluster["metadata"]
    generation = metadata.get("generation", 0)
    if status.get("observedGeneration", 0) < generation:
        return Announcement(f"waits until the operator sees generation {generation}", None)
    counts = (
        f"prefill {status.get('prefill')} ready, decode {status.get('decode')} ready, "
        f"links {status.get('links')}"
    )
    ready = find_condition(status, ConditionType.READY)
    progressing = find_condition(status, ConditionType.PROGRESSING)
    if progressing.get("reason") == StatusReason.COMPLETE:
        why = "" if ready.get("status") == Status.TRUE else f"; {ready.get('message')}"
        return Announcement(f"complete: {counts}{why}", True)
    accepted = find_condition(status, ConditionType.ACCEPTED)
    if accepted.get("status") == Status.FALSE:
        return Announcement(f"not accepted: {accepted.get('message')}", False)
    why = f"{progressing.get('reason')}: {progressing.get('message')}"
    held = progressing.get("status") == Status.FALSE
    ended = held and progressing.get("reason") in WITHOUT_AN_END
    return Announcement(f"{counts}; {why}", False if ended else None, held and not ended)


def undo(observed: Observed) -> Undo | None:
    """Return the step back to the spec before; None if no other one is stored.

    Each stored revision holds the spec that it was made from. A revision that is used again becomes
    the newest one of its role. So, of all stored specs that differ from the current one, the last
    is the one whose revisions have the highest numbers.
    """
    now = observed.cluster["spec"]
    current = _names(_targets(observed, now))
    best, newest = None, -1
    for revision in stored_revisions(observed):
        spec = revisions.with_spec_of_engines(now, revision.spec)
        wanted = _targets(observed, spec)
        age = sum(one.number for one in wanted.values())
        stored = bool(wanted) and all(one.number for one in wanted.values())
        if stored and _names(wanted) != current and age > newest:
            best, newest = (spec, wanted), age
    if best is None:
        return None
    spec, wanted = best
    fields = revisions.changed_fields(
        revisions.spec_of_engines(observed.cluster), revisions.spec_of_engines({"spec": spec})
    )
    return Undo(spec, _names(wanted), tuple(fields))


def _targets(observed: Observed, spec: Manifest) -> Mapping[types.Role, Revision]:
    """Return the revisions that a spec asks for; none if the spec cannot be read."""
    cluster = {**observed.cluster, "spec": dict(spec)}
    parsed = parse.parse_cluster(cluster)
    if parsed.errors:
        return {}
    seen = replace(observed, cluster=cluster)
    return find_targets(seen, parsed.cluster, live_by_role(seen)).wanted


def _names(targets: Mapping[types.Role, Revision]) -> dict[types.Role, str]:
    return {role: one.name for role, one in targets.items()}
