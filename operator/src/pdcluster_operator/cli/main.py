"""The ``pdcluster`` command and its help."""

from __future__ import annotations

import argparse
import importlib.util
import signal
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from pdcluster_operator.cli.exits import Exit, UserError

DESCRIPTION = """\
One PDCluster manifest describes vLLM engines that compute prompts (prefill), engines that
generate tokens (decode), and the KV cache that moves from the first to the second.
"""
EXAMPLES = """\
start here:
  pdcluster lint cluster.yaml           every mistake at once, without a cluster
  pdcluster plan cluster.yaml           what the operator would create
  pdcluster up cluster.yaml             run it on this machine: no Kubernetes needed
  pdcluster up cluster.yaml --once "Why is the sky blue?"
                                        one answer, and what its KV cache did; then stop

exit codes: 0 done, 1 the manifest is wrong, 2 the command line is wrong, 3 not Ready in time,
4 the request failed, 5 the KV cache did not move, 6 this machine lacks something, 130 Ctrl-C
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


def parser() -> argparse.ArgumentParser:
    """Return the command line of ``pdcluster``."""
    raw = argparse.RawDescriptionHelpFormatter
    root = argparse.ArgumentParser(
        "pdcluster", description=DESCRIPTION, epilog=EXAMPLES, formatter_class=raw
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

    plan = commands.add_parser(
        "plan",
        help="print what the operator would do for a new cluster",
        description="Prints the steps in order; with -o yaml, the objects themselves.",
    )
    plan.add_argument("file", metavar="FILE", help="manifest in YAML; - is stdin")
    plan.add_argument("-o", "--output", choices=("steps", "yaml"), default="steps")

    up = commands.add_parser(
        "up",
        help="run a manifest on this machine, without Kubernetes",
        description=UP_DETAILS,
        formatter_class=raw,
    )
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
        return int(command())
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return int(error.exit)
    except KeyboardInterrupt:
        return int(Exit.INTERRUPTED)
    except BrokenPipeError:
        sys.stderr.close()
        return int(Exit.DONE)
    except SystemExit as end:
        # rich exits so when a pipe was closed, for example by `head`. The exit code 1 would say
        # that the manifest is refused.
        if options.command == "up" or not isinstance(end.__context__, BrokenPipeError):
            raise
        return int(Exit.DONE)


def _command(options: argparse.Namespace) -> Callable[[], Exit]:
    # Each command imports only what it needs: lint starts in a tenth of a second.
    if options.command == "lint":
        from pdcluster_operator.cli.lint import lint

        return partial(lint, options.files)
    if options.command == "plan":
        from pdcluster_operator.cli.plan import show_plan

        return partial(show_plan, options.file, options.output)
    if importlib.util.find_spec("pdcluster_operator.local") is None:
        raise UserError(NO_LOCAL_MODE, Exit.MACHINE)
    from pdcluster_operator.cli.up import up
    from pdcluster_operator.cli.up_run import UpOptions

    return partial(
        up,
        UpOptions(
            file=options.file,
            once=options.once,
            max_tokens=options.max_tokens,
            timeout=options.timeout,
            model_dir=options.model_dir,
            plain=options.plain,
        ),
    )


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
