"""The ``pdcluster`` command: its table of commands, and how each of them ends."""

import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from io import BufferedWriter, FileIO, TextIOWrapper
from pathlib import Path
from typing import Any

import click

from pdcluster_operator.cli.commands import COMPLETE, WIDEST, Entry, Group
from pdcluster_operator.cli.exits import Exit, UserError

COMMANDS = {
    "doctor": Entry(
        "pdcluster_operator.cli.doctor:doctor",
        "check what a cluster or this machine has before the first GPU hour",
    ),
    "init": Entry(
        "pdcluster_operator.cli.init:init", "write a first manifest for a model and some GPUs"
    ),
    "lint": Entry(
        "pdcluster_operator.cli.lint:lint",
        "check manifests offline with the operator's admission rules",
    ),
    "plan": Entry(
        "pdcluster_operator.cli.plan:plan",
        "print what the operator would do, for a new cluster or for one that runs",
    ),
    "status": Entry(
        "pdcluster_operator.cli.status:status",
        "whether a PDCluster serves, what it waits for, and the next command",
    ),
    "links": Entry(
        "pdcluster_operator.cli.links:links",
        "every link between prefill and decode engines, as a picture",
    ),
    "logs": Entry(
        "pdcluster_operator.cli.logs:logs",
        "the logs of engines, launchers and routers together",
    ),
    "ui": Entry(
        "pdcluster_operator.cli.ui.command:ui",
        "a read-only page of PDClusters for your browser, on this machine",
    ),
    "rollout": Entry(
        "pdcluster_operator.cli.rollout:rollout",
        "follow, pause, resume or undo the rollout of a PDCluster, or restart its engines",
    ),
    "check": Entry(
        "pdcluster_operator.cli.check:check",
        "send one prompt from prefill to decode: where its KV went, how long, and is it right",
    ),
    "explain": Entry(
        "pdcluster_operator.cli.explain:explain",
        "say what a reason or rule means and what to do, with an example of a manifest",
    ),
    "bench": Entry(
        "pdcluster_operator.cli.bench:bench",
        "compare P/D with the same engines aggregated: TTFT, ITL, throughput, a picture",
    ),
    "up": Entry(
        "pdcluster_operator.cli.up:up", "run a manifest on this machine, without Kubernetes"
    ),
    "completion": Entry(
        "pdcluster_operator.cli.completion:completion",
        "print the script with which your shell completes commands, options and names",
    ),
}
DESCRIPTION = """\
One PDCluster manifest describes vLLM engines that compute prompts (prefill), engines that
generate tokens (decode), and the KV cache that moves from the first to the second.

`pdcluster COMMAND --help` describes a command and each of its options.
"""
EXAMPLES = (
    ("pdcluster lint cluster.yaml", "every mistake at once, without a cluster"),
    ("pdcluster plan cluster.yaml", "what the operator would create"),
    ("pdcluster plan cluster.yaml --against", "what it would do to the cluster that runs"),
    ("pdcluster rollout status llama", "wait until a change has reached the engines"),
    ("pdcluster up cluster.yaml", "run it on this machine: no Kubernetes needed"),
    ("pdcluster status llama", "does it serve, if not why, and the next command"),
    ("pdcluster check llama", "did KV move for one prompt, how fast, and are the tokens right"),
    (
        'pdcluster up cluster.yaml --once "Why is the sky blue?"',
        "one answer, and what its KV cache did; then stop",
    ),
)
EXIT_CODES = """\
Exit codes: 0 done, 1 the manifest is wrong, 2 the command line is wrong, 3 not Ready in time or a
change that waits for somebody, 4 a request failed, 5 the KV cache did not move, 6 this machine
lacks something, 130 Ctrl-C
"""
LOCAL = "pdcluster_operator.local"
NO_LOCAL_MODE = (
    "this installation has no local mode, because the operator's image leaves it out; install "
    "pdcluster from its sources on a Linux machine (pip install '.[operator]', and vLLM in the "
    "same Python), or apply the manifest to a Kubernetes cluster with kubectl"
)


def _say_version(context: click.Context, _: click.Parameter, asked: bool) -> None:
    if not asked:
        return
    from importlib.metadata import PackageNotFoundError, version

    try:
        known = version("pdcluster")
    except PackageNotFoundError:
        known = "(from source)"
    click.echo(f"pdcluster {known}")
    context.exit()


pdcluster = Group(
    "pdcluster",
    table=COMMANDS,
    help=DESCRIPTION,
    examples=EXAMPLES,
    epilog=EXIT_CODES,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": WIDEST},
)
click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_say_version,
    help="print the version",
)(pdcluster)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    # Before a command runs, Ctrl-C may end the process at once. Python would raise an exception
    # instead, which an import can swallow.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        _guard_streams()
        code = _run(words)
        sys.stdout.flush()
        return code
    except click.exceptions.Exit as end:
        return end.exit_code
    except (click.UsageError, UserError, ModuleNotFoundError) as error:
        return _say(error)
    except KeyboardInterrupt:
        return int(Exit.INTERRUPTED)
    except BrokenPipeError:
        return int(Exit.DONE)
    except SystemExit as end:
        # rich exits so when a pipe was closed, for example by `head`. The exit code 1 would mean
        # that the manifest is refused.
        if words[:1] == ["up"] or not isinstance(end.__context__, BrokenPipeError):
            raise
        return int(Exit.DONE)
    finally:
        _drop_what_nobody_takes()


class Stream(FileIO):
    """Standard output or error. If it cannot be written, the command ends with one sentence."""

    def write(self, data: Any) -> Any:
        """Write bytes.

        Raises:
            BrokenPipeError: the reader went away.
            UserError: a full disk, for example.
        """
        try:
            return super().write(data)
        except BrokenPipeError:
            raise
        except OSError as error:
            raise UserError(
                f"standard output cannot be written: {error.strerror}; free space there, or send "
                "the output elsewhere",
                Exit.MACHINE,
            ) from error


def _guard_streams() -> None:
    """Make standard streams that say in one sentence what is wrong with them.

    Raises:
        UserError: standard output is closed.
    """
    closed = [name for name in ("stdin", "stdout", "stderr") if getattr(sys, name) is None]
    for name in closed:  # in this order, each gets its own number, and no file of ours does
        mode = "r" if name == "stdin" else "w"
        setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115
    if "stdout" in closed:
        raise UserError("standard output is closed: send it to a file or /dev/null", Exit.USAGE)
    for name in ("stdout", "stderr"):
        old = getattr(sys, name)
        if old is not getattr(sys, f"__{name}__") or name in closed:
            continue
        new = TextIOWrapper(
            BufferedWriter(Stream(old.fileno(), "w", closefd=False)),
            encoding=old.encoding,
            # A manifest or the name of a file may have what the terminal's encoding does not.
            errors="backslashreplace",
            line_buffering=old.line_buffering,
            write_through=old.write_through,
        )
        setattr(sys, name, new)


def _drop_what_nobody_takes() -> None:
    """Empty the streams: else Python tries again at its end, and changes the exit code."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, UserError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)


def _run(words: list[str]) -> int:
    if instruction := os.environ.get(COMPLETE):
        from pdcluster_operator.cli.completion import complete

        return complete(pdcluster, instruction)
    plugin = Path(sys.argv[0]).name.startswith("kubectl-")
    with pdcluster.make_context("kubectl pdcluster" if plugin else "pdcluster", words) as root:
        return int(pdcluster.invoke(root))


def _say(error: Exception) -> int:
    """Say what is wrong and what to do; returns the exit code."""
    code, said = Exit.USAGE, f"error: {error}"
    if isinstance(error, UserError):
        code = error.exit
    elif isinstance(error, click.exceptions.NoArgsIsHelpError):
        said = error.format_message()
    elif isinstance(error, click.UsageError):
        words = error.ctx.command_path if error.ctx else "pdcluster"
        said = f"error: {error.format_message().rstrip('.')}; see `{words} --help`"
    elif isinstance(error, ModuleNotFoundError) and (error.name or "").startswith(LOCAL):
        code, said = Exit.MACHINE, f"error: {NO_LOCAL_MODE}"
    else:
        raise error
    from pdcluster_operator.cli.output import plain

    with suppress(OSError, UserError):
        print(plain(said), file=sys.stderr)
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
