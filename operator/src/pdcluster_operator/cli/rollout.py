"""``pdcluster rollout``: follow, hold back, let go and undo a rollout; and restart engines."""

import asyncio
import functools
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import click
import msgspec

from pdcluster_operator.adapters.api_server.client import KubeClient
from pdcluster_operator.adapters.api_server.cluster_reader import change_spec, observe
from pdcluster_operator.api.conditions import (
    ConditionType,
    Status,
    StatusReason,
    find_condition,
    timestamp,
)
from pdcluster_operator.api.spec import parse, types
from pdcluster_operator.cli import output as outputs
from pdcluster_operator.cli.commands import Group, Target, duration, in_context, target
from pdcluster_operator.cli.connection import read_named, with_cluster
from pdcluster_operator.cli.exits import Exit, UserError
from pdcluster_operator.plan.observed.engines import live_by_role
from pdcluster_operator.plan.rollout import revisions
from pdcluster_operator.plan.rollout.revisions import Revision, stored_revisions
from pdcluster_operator.plan.rollout.targets import find_targets
from pdcluster_operator.plan.status import progress
from pdcluster_operator.plan.types import ConnectorBundle, Manifest, Observed
from pdcluster_operator.runtime.interfaces import ApiError, Key

DETAILS = """\
What a change of a PDCluster does to its engines: follow it, hold it back, undo it, restart them.
To see it before you make it: pdcluster plan FILE --against

The commands that change something write the spec of the PDCluster, as `kubectl edit` does. If a
tool applies your manifest from a repository, change the manifest there as well: the tool would
write the old value again.
"""
EXAMPLES = (
    (
        "kubectl apply -f cluster.yaml && pdcluster rollout status llama --timeout 30m",
        "wait until the change is complete",
    ),
    ("pdcluster rollout pause llama", "engines stay as they are, whatever the spec says"),
    ("pdcluster rollout resume llama", "now they follow the spec"),
    ("pdcluster rollout undo llama", "back to the engines before the last change"),
    ("pdcluster rollout restart llama", "new engines in the place of all that run"),
)
STATUS = """\
Prints a line at each change, and waits for the end. With -o json, each line is a document; with
--no-watch, there is one document.

Exit codes: 0 the rollout is complete; 3 it is not, and waits for somebody: its deadline
(rollout.progressDeadlineSeconds) has passed, or the API server refuses the new pods, or there
is no place for them, or rollout.paused holds it back, or the spec is not accepted; or --timeout
has passed.
"""
UNDO = """\
Writes the spec that the PDCluster had before the last change that replaced engines. The operator
finds the revision that it stored for it, and makes the same engines again. Replicas, the rollout's
settings, monitoring and the router stay as they are. A second undo brings the change back, as with
kubectl. rollout.revisionHistoryLimit says how many revisions are kept.
"""
RESTART = """\
Sets spec.rollout.renew to the time of now. Engines are replaced as with any other change: in
the way of rollout.type, and not while rollout.paused is set. New engines have the operator's newest
pod template and connector, and exchange KV with the old ones.
"""
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


@click.group(cls=Group, help=DETAILS, examples=EXAMPLES)
def rollout() -> None:
    """Hold the verbs."""


class Rollout(msgspec.Struct, frozen=True, rename="camel"):
    """How far a rollout is.

    ``state`` is Complete, Waiting (nothing goes on until somebody acts), Failing (it goes on, and
    a step of the operator fails) or Progressing.
    """

    namespace: str
    name: str
    state: str
    message: str


@rollout.command(help=STATUS, short_help="wait until a rollout is complete", document=Rollout)
@target
@click.option(
    "--timeout",
    type=duration,
    metavar="DURATION",
    help="give up after this time, such as 90s, 30m or 1h (default: never)",
)
@click.option("--no-watch", is_flag=True, help="print one line, and do not wait for the end")
def status(target: Target, timeout: float | None, no_watch: bool, output: str) -> Exit:
    """Follow a rollout."""
    say = functools.partial(_show, output, not no_watch)
    return with_cluster(target, follow, timeout or math.inf, say, watch=not no_watch)


@rollout.command(help="Sets spec.rollout.paused.", short_help="keep engines as they are")
@target
def pause(target: Target) -> Exit:
    """Hold a rollout back."""
    return with_cluster(target, hold, paused=True)


@rollout.command(
    help="Sets spec.rollout.paused to false.", short_help="let engines follow the spec"
)
@target
def resume(target: Target) -> Exit:
    """Let a rollout go on."""
    return with_cluster(target, hold, paused=False)


@rollout.command("undo", help=UNDO, short_help="go back to the engines before the last change")
@target
@click.option("--dry-run", is_flag=True, help="print what would change, and write nothing")
def undo_command(target: Target, dry_run: bool) -> Exit:
    """Go back."""
    return with_cluster(target, go_back, dry_run=dry_run)


@rollout.command("restart", help=RESTART, short_help="replace every engine by a new one")
@target
def restart_command(target: Target) -> Exit:
    """Replace each engine once."""
    return with_cluster(target, restart)


async def follow(
    client: KubeClient,
    key: Key,
    seconds: float,
    say: Callable[[Key, Announcement], None],
    *,
    watch: bool,
) -> Exit:
    """Say how far a rollout is until it ends; once if nobody watches."""
    deadline = time.monotonic() + seconds
    latest = shown = await _announcement(client, key)
    say(key, shown)
    well = time.monotonic()
    while latest.complete is None and watch:
        now = time.monotonic()
        well = well if latest.fails else now
        if now > deadline:
            late = f"not complete after {seconds:.0f} s: {shown.line}"
            raise UserError(late, Exit.NOT_READY)
        if now - well > progress.FAILING_SECONDS:
            raise UserError(
                f"somebody has to act, a step still fails: {shown.line}", Exit.NOT_READY
            )
        await asyncio.sleep(POLL_SECONDS)
        latest = await _announcement(client, key, patient=True)
        if latest != shown:
            say(key, shown := latest)
    return Exit.NOT_READY if latest.complete is False or latest.fails else Exit.DONE


async def hold(client: KubeClient, key: Key, *, paused: bool) -> Exit:
    """Set ``spec.rollout.paused``: true with ``pause``, false with ``resume``."""
    live = await read_named(client, key)
    if _is_paused(live) is paused:
        state = "paused already" if paused else "not paused"
        raise UserError(f"{OBJECT}/{key.name} is {state}", Exit.REQUEST_FAILED)
    await _change_rollout(client, live, {"paused": paused})
    print(f"{OBJECT}/{key.name} {'paused' if paused else 'resumed'}")
    return Exit.DONE


async def restart(client: KubeClient, key: Key) -> Exit:
    """Set ``spec.rollout.renew`` to the time of now, so that each engine is replaced once."""
    live = await read_named(client, key)
    await _change_rollout(client, live, {"renew": timestamp(time.time())})
    print(f"{OBJECT}/{key.name} restarted")
    return _done(client, key, live)


async def go_back(client: KubeClient, key: Key, *, dry_run: bool) -> Exit:
    """Write the spec that was there before the last change of the engines."""
    live = await read_named(client, key)
    # A spec that goes back to a stored revision needs no connector of ours.
    found = undo(await observe(client, key, live, ConnectorBundle("", b"")))
    if found is None:
        raise UserError(
            f"no other revision of {OBJECT}/{key.name} is stored, so there is nothing to go back "
            "to; apply the manifest that you want",
            Exit.REQUEST_FAILED,
        )
    await change_spec(client, live, found.spec, dry_run=dry_run)
    note = " (dry run: nothing was written)" if dry_run else ""
    print(f"{OBJECT}/{key.name} rolled back{note}")
    print(outputs.plain(f"changed: {', '.join(found.fields)}"))
    for role, revision in found.revisions.items():
        print(f"{role}: engines of revision {revision}")
    return _done(client, key, live)


async def _change_rollout(client: KubeClient, live: Manifest, fields: Manifest) -> None:
    spec = live.get("spec") or {}
    await change_spec(client, live, {**spec, "rollout": {**(spec.get("rollout") or {}), **fields}})


def _is_paused(live: Manifest) -> bool:
    return bool(((live.get("spec") or {}).get("rollout") or {}).get("paused", False))


def _done(client: KubeClient, key: Key, live: Manifest) -> Exit:
    if _is_paused(live):
        command = f"pdcluster rollout resume {key.name} -n {key.namespace}"
        resume = in_context(command, client.context)
        print(f"rollout.paused is set, so engines stay as they are until `{resume}`")
    return Exit.DONE


async def _announcement(client: KubeClient, key: Key, *, patient: bool = False) -> Announcement:
    """Ask how far the rollout is. A patient question may go without an answer."""
    try:
        return announce(await read_named(client, key))
    except ApiError as error:
        if not patient:
            raise
        return Announcement(f"waits for the API server: {error}", None)


def _show(output: str, watch: bool, key: Key, found: Announcement) -> None:
    """Print how far a rollout is."""
    goes_on = "Failing" if found.fails else "Progressing"
    state = {True: "Complete", False: "Waiting", None: goes_on}[found.complete]
    outputs.show(
        output,
        Rollout(key.namespace, key.name, state, found.line),
        lambda _: print(outputs.plain(f'PDCluster "{key.name}": {found.line}'), flush=True),
        one_of_many=watch,
    )


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
