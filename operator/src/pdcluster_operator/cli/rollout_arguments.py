"""The command line of ``pdcluster rollout``, and of what else talks to an API server."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pdcluster_operator.cli.exits import Exit

RAW = argparse.RawDescriptionHelpFormatter
DESCRIPTION = """\
What a change of a PDCluster does to its engines: follow it, hold it back, undo it.
To see it before you make it: pdcluster plan FILE --against
"""
EXAMPLES = """\
examples:
  kubectl apply -f cluster.yaml && pdcluster rollout status llama --timeout 30m
  pdcluster rollout pause llama         engines stay as they are, whatever the spec says
  pdcluster rollout resume llama        now they follow the spec
  pdcluster rollout undo llama          back to the engines before the last change

The commands that change something write the spec of the PDCluster, as `kubectl edit` does. If a
tool applies your manifest from a repository, change the manifest there as well: the tool would
write the old value again.
"""
STATUS = """\
Prints a line at each change, and waits for the end.

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
UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}


def add_where(command: argparse.ArgumentParser) -> None:
    """Add the options that say which cluster is meant."""
    command.add_argument(
        "-n", "--namespace", metavar="NAMESPACE", help="default: the one of the context"
    )


def add_rollout(commands: Any) -> None:
    """Add ``rollout`` and its subcommands."""
    rollout = commands.add_parser(
        "rollout",
        help="follow, pause, resume or undo the rollout of a PDCluster",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=RAW,
    )
    verbs = rollout.add_subparsers(dest="verb", required=True, metavar="VERB")
    status = _verb(verbs, "status", "wait until a rollout is complete", STATUS)
    status.add_argument(
        "--timeout",
        type=_seconds,
        default=0.0,
        metavar="DURATION",
        help="give up after this time, such as 90s, 30m or 1h (default: never)",
    )
    status.add_argument(
        "--no-watch", action="store_true", help="print one line, and do not wait for the end"
    )
    _verb(verbs, "pause", "keep engines as they are", "Sets spec.rollout.paused.")
    _verb(verbs, "resume", "let engines follow the spec", "Sets spec.rollout.paused to false.")
    back = _verb(verbs, "undo", "go back to the engines before the last change", UNDO)
    back.add_argument(
        "--dry-run", action="store_true", help="print what would change, and write nothing"
    )


def rollout_command(options: argparse.Namespace) -> Callable[[], Exit]:
    """Return what the options of ``rollout`` ask for."""
    from pdcluster_operator.cli import rollout
    from pdcluster_operator.cli.connection import Where

    name, where = options.name, Where(options.context, options.namespace)
    if options.verb == "status":
        watch, timeout = not options.no_watch, options.timeout
        return partial(rollout.status, name, where, watch=watch, timeout=timeout)
    if options.verb == "undo":
        return partial(rollout.go_back, name, where, dry_run=options.dry_run)
    return partial(rollout.hold, name, where, paused=options.verb == "pause")


def _verb(verbs: Any, word: str, summary: str, description: str) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = verbs.add_parser(
        word, help=summary, description=description, formatter_class=RAW
    )
    command.add_argument("name", metavar="NAME", help="of the PDCluster")
    add_where(command)
    command.add_argument(
        "--context", metavar="CONTEXT", help="of the kubeconfig; default: its current one"
    )
    return command


def _seconds(text: str) -> float:
    number, unit = (text[:-1], text[-1:]) if text[-1:] in UNITS else (text, "s")
    if not number.isdecimal() or int(number) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time such as 90s, 30m or 1h")
    return int(number) * UNITS[unit]
