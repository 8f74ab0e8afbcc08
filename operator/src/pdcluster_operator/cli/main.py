"""The ``pdcluster`` command and its help."""

import argparse
import importlib.util
import math
import signal
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from pdcluster_operator.cli.exits import Exit, UserError

DESCRIPTION = """\
One PDCluster manifest describes vLLM engines that compute prompts (prefill), engines that
generate tokens (decode), and the KV cache that moves from the first to the second.
"""
EXAMPLES = """\
start here:
  pdcluster lint cluster.yaml           every mistake at once, without a cluster
  pdcluster plan cluster.yaml           what the operator would create
  pdcluster plan cluster.yaml --against what it would do to the cluster that runs
  pdcluster rollout status llama        wait until a change has reached the engines
  pdcluster up cluster.yaml             run it on this machine: no Kubernetes needed
  pdcluster up cluster.yaml --once "Why is the sky blue?"
                                        one answer, and what its KV cache did; then stop

exit codes: 0 done, 1 the manifest is wrong, 2 the command line is wrong, 3 not Ready in time or a
change that waits for somebody, 4 a request failed, 5 the KV cache did not move, 6 this machine
lacks something, 130 Ctrl-C
"""
NO_LOCAL_MODE = (
    "this installation has no local mode, because the operator's image leaves it out; install "
    "pdcluster from its sources on a Linux machine (pip install '.[operator]', and vLLM in the "
    "same Python), or apply the manifest to a Kubernetes cluster with kubectl"
)
UP_DETAILS = """\
The operator's own control loop runs over an in-memory API, and a mini-kubelet turns pods into
processes, each pod on a 127.x.y.z address of its own. Ctrl-C ends every process. A second Ctrl-C
kills them.

Before the first process starts, it lists everything that this machine lacks: vLLM and NIXL, the
model, GPUs, memory, ports, the router's program. It then exits with 6, or with 2 if the manifest
rules out --once.

A manifest usually names a model folder of the nodes (model.source.hostPath). --model-dir puts a
folder of this machine in its place, whatever source the manifest names.
"""
PLAN_DETAILS = """\
Without --against: the steps for a cluster of which nothing exists yet, without Kubernetes; with
-o yaml, the objects themselves.

With --against: what would follow if you applied FILE now. Nothing is written. It prints which
engines are replaced, and which field of the spec makes that necessary; every step of the operator,
in order, and what the operator waits for in between; the engines and GPUs at the peak; whether
requests fail meanwhile; and what the API server says to the new pods, by a dry run.

The steps come from the operator's own planner. The forecast assumes that everything goes well: new
pods find a node, all engines of a role become ready at once, and the operator has this command's
version. What the engines' launchers say is taken from the status. You need the rights to read the
PDCluster and its objects, and to change the PDCluster.

Exit codes with --against: 0 the change would be complete; 1 the manifest or the new pods are
refused; 3 the change would stop before it is complete; 4 the API server refuses the questions.
"""
ROLLOUT = """\
What a change of a PDCluster does to its engines: follow it, hold it back, undo it, restart them.
To see it before you make it: pdcluster plan FILE --against
"""
ROLLOUT_EXAMPLES = """\
examples:
  kubectl apply -f cluster.yaml && pdcluster rollout status llama --timeout 30m
  pdcluster rollout pause llama         engines stay as they are, whatever the spec says
  pdcluster rollout resume llama        now they follow the spec
  pdcluster rollout undo llama          back to the engines before the last change
  pdcluster rollout restart llama       new engines in the place of all that run

The commands that change something write the spec of the PDCluster, as `kubectl edit` does. If a
tool applies your manifest from a repository, change the manifest there as well: the tool would
write the old value again.
"""
ROLLOUT_STATUS = """\
Prints a line at each change, and waits for the end.

Exit codes: 0 the rollout is complete; 3 it is not, and waits for somebody: its deadline
(rollout.progressDeadlineSeconds) has passed, or the API server refuses the new pods, or there
is no place for them, or rollout.paused holds it back, or the spec is not accepted; or --timeout
has passed.
"""
ROLLOUT_UNDO = """\
Writes the spec that the PDCluster had before the last change that replaced engines. The operator
finds the revision that it stored for it, and makes the same engines again. Replicas, the rollout's
settings, monitoring and the router stay as they are. A second undo brings the change back, as with
kubectl. rollout.revisionHistoryLimit says how many revisions are kept.
"""
ROLLOUT_RESTART = """\
Sets spec.rollout.renew to the time of now. Engines are replaced as with any other change: in
the way of rollout.type, and not while rollout.paused is set. New engines have the operator's newest
pod template and connector, and exchange KV with the old ones.
"""
UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}
RAW = argparse.RawDescriptionHelpFormatter


def parser() -> argparse.ArgumentParser:
    """Return the command line of ``pdcluster``."""
    root = argparse.ArgumentParser(
        "pdcluster", description=DESCRIPTION, epilog=EXAMPLES, formatter_class=RAW
    )
    root.add_argument("--version", action="version", version=f"pdcluster {_version()}")
    commands = root.add_subparsers(dest="command", required=True, metavar="COMMAND")

    lint = commands.add_parser(
        "lint",
        help="check manifests offline with the operator's admission rules",
        description="Prints every error and warning with JSON path, value, rule and remedy. "
        "Exits with 1 if there is an error; warnings alone exit with 0.",
    )
    lint.add_argument("files", nargs="+", metavar="FILE", help="manifest in YAML; - is stdin")

    summary = "print what the operator would do, for a new cluster or for one that runs"
    plan = _add(commands, "plan", summary, PLAN_DETAILS)
    plan.add_argument("file", metavar="FILE", help="manifest in YAML; - is stdin")
    plan.add_argument(
        "-o",
        "--output",
        choices=("steps", "yaml"),
        default="steps",
        help="yaml: the objects, without the Secrets that the operator fills (not with --against)",
    )
    plan.add_argument(
        "--against",
        nargs="?",
        const="",
        metavar="CONTEXT",
        help="plan the change of the PDCluster that runs there; default: the current context",
    )
    _add_where(plan)

    _add_rollout(commands)

    up = _add(commands, "up", "run a manifest on this machine, without Kubernetes", UP_DETAILS)
    up.add_argument("file", metavar="FILE", help="manifest in YAML; - is stdin")
    up.add_argument(
        "--once",
        metavar="PROMPT",
        help="wait until Ready, send one prompt through the router, print the answer "
        "and what its KV cache did, and stop",
    )
    up.add_argument(
        "--max-tokens",
        type=_positive,
        default=32,
        metavar="N",
        help="tokens to generate with --once (default 32)",
    )
    up.add_argument(
        "--timeout",
        type=_positive,
        default=900,
        metavar="SECONDS",
        help="with --once: give up if not Ready by then (default 900)",
    )
    up.add_argument(
        "--model-dir",
        type=Path,
        metavar="DIR",
        help="serve the model in this folder, instead of the one that the manifest names",
    )
    up.add_argument("--plain", action="store_true", help="print lines instead of a live table")
    return root


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    # Before a command runs, Ctrl-C may end the process at once. Python would raise an exception
    # instead, which an import can swallow.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    options = parser().parse_args(arguments)
    try:
        command = _command(options)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        return int(command(options))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return int(error.exit)
    except KeyboardInterrupt:
        return int(Exit.INTERRUPTED)
    except BrokenPipeError:
        sys.stderr.close()
        return int(Exit.DONE)
    except SystemExit as end:
        # rich exits so when a pipe was closed, for example by `head`. The exit code 1 would mean
        # that the manifest is refused.
        if options.command == "up" or not isinstance(end.__context__, BrokenPipeError):
            raise
        return int(Exit.DONE)


def _command(options: argparse.Namespace) -> Callable[[argparse.Namespace], Exit]:
    # Each command imports only what it needs: lint starts in a tenth of a second.
    if options.command == "lint":
        from pdcluster_operator.cli.lint import lint as command
    elif options.command == "rollout":
        from pdcluster_operator.cli.rollout import rollout as command
    elif options.command == "plan" and options.against is not None:
        from pdcluster_operator.cli.against import show_plan_against as command
    elif options.command == "plan":
        from pdcluster_operator.cli.plan import show_plan as command
    elif importlib.util.find_spec("pdcluster_operator.local") is None:
        raise UserError(NO_LOCAL_MODE, Exit.MACHINE)
    else:
        from pdcluster_operator.cli.up import up as command
    return command


def _add(
    commands: Any, word: str, summary: str, description: str, epilog: str = ""
) -> argparse.ArgumentParser:
    """Add a command whose help keeps its lines as they are."""
    command: argparse.ArgumentParser = commands.add_parser(
        word, help=summary, description=description, epilog=epilog, formatter_class=RAW
    )
    return command


def _add_where(command: argparse.ArgumentParser) -> None:
    """Add the option that names the namespace."""
    command.add_argument(
        "-n", "--namespace", metavar="NAMESPACE", help="default: the one of the context"
    )


def _add_rollout(commands: Any) -> None:
    """Add ``rollout`` and its subcommands."""
    summary = "follow, pause, resume or undo the rollout of a PDCluster, or restart its engines"
    rollout = _add(commands, "rollout", summary, ROLLOUT, ROLLOUT_EXAMPLES)
    verbs = rollout.add_subparsers(dest="verb", required=True, metavar="VERB")
    status = _add(verbs, "status", "wait until a rollout is complete", ROLLOUT_STATUS)
    pause = _add(verbs, "pause", "keep engines as they are", "Sets spec.rollout.paused.")
    resume = _add(
        verbs, "resume", "let engines follow the spec", "Sets spec.rollout.paused to false."
    )
    undo = _add(verbs, "undo", "go back to the engines before the last change", ROLLOUT_UNDO)
    restart = _add(verbs, "restart", "replace every engine by a new one", ROLLOUT_RESTART)
    for verb in (status, pause, resume, undo, restart):
        verb.add_argument("name", metavar="NAME", help="of the PDCluster")
        _add_where(verb)
        verb.add_argument(
            "--context", metavar="CONTEXT", help="of the kubeconfig; default: its current one"
        )
    status.add_argument(
        "--timeout",
        type=_seconds,
        default=math.inf,
        metavar="DURATION",
        help="give up after this time, such as 90s, 30m or 1h (default: never)",
    )
    status.add_argument(
        "--no-watch", action="store_true", help="print one line, and do not wait for the end"
    )
    undo.add_argument(
        "--dry-run", action="store_true", help="print what would change, and write nothing"
    )


def _seconds(text: str) -> float:
    number, unit = (text[:-1], text[-1:]) if text[-1:] in UNITS else (text, "s")
    if not number.isdecimal() or int(number) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time such as 90s, 30m or 1h")
    return int(number) * UNITS[unit]


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def _version() -> str:
    try:
        return version("pdcluster")
    except PackageNotFoundError:
        return "(from source)"


if __name__ == "__main__":
    sys.exit(main())
