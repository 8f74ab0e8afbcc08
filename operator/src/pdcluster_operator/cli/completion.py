"""``pdcluster completion``, and what a shell and kubectl ask while somebody presses Tab.

A question ends after ``SECONDS`` at the latest. Whatever goes wrong is silent: there is nothing to
complete then.
"""

import asyncio
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr

import click
from click.shell_completion import ShellComplete, get_completion_class, shell_complete

from pdcluster_operator.cli.commands import COMPLETE, Command
from pdcluster_operator.cli.exits import Exit

SECONDS = 2.0
PROGRAM = "pdcluster"
FILES, NO_FILES = ":0", ":4"
"""How kubectl is told whether names of files may follow, too."""
DETAILS = """\
Prints a script. Your shell then completes commands, options and the names of PDClusters, which it
asks the API server for.

kubectl completes `kubectl pdcluster` by the program kubectl_complete-pdcluster, which is installed
beside this one. It needs no script.
"""
EXAMPLES = (
    ("source <(pdcluster completion bash)", "in ~/.bashrc"),
    ("source <(pdcluster completion zsh)", "in ~/.zshrc, after compinit"),
    ("pdcluster completion fish > ~/.config/fish/completions/pdcluster.fish", "once"),
)


@click.command(cls=Command, help=DETAILS, examples=EXAMPLES)
@click.argument("shell", type=click.Choice(("bash", "zsh", "fish")))
def completion(shell: str) -> Exit:
    """Print the script of one shell."""
    found = get_completion_class(shell)
    assert found is not None  # noqa: S101 - Click has these three
    print(found(click.Command(PROGRAM), {}, PROGRAM, COMPLETE).source())
    return Exit.DONE


def complete(commands: click.Command, instruction: str) -> int:
    """Answer a shell, whose question is in the environment."""
    with _silent():
        return shell_complete(commands, {}, PROGRAM, COMPLETE, instruction)


def complete_for_kubectl() -> int:
    """Answer kubectl: its arguments are the words so far; the last one is not complete."""
    from pdcluster_operator.cli.main import pdcluster

    *words, last = sys.argv[1:] or [""]
    with _silent():
        found = ShellComplete(pdcluster, {}, PROGRAM, COMPLETE).get_completions(words, last)
        for item in found:
            if item.type == "plain":
                print(f"{item.value}\t{item.help}" if item.help else item.value)
        print(FILES if any(item.type != "plain" for item in found) else NO_FILES, flush=True)
    return Exit.DONE


def names_of(namespace: str | None, context: str | None, *, local: bool) -> list[str]:
    """Return names of PDClusters that the words so far could mean; none if nobody answers."""
    from pdcluster_operator.adapters.api_server.client import KubeClient
    from pdcluster_operator.adapters.api_server.kubeconfig import (
        find_configuration,
        namespace_of_context,
    )
    from pdcluster_operator.cli.connection import names_of_clusters
    from pdcluster_operator.cli.runs import find_run

    async def ask() -> list[str]:
        configuration = await find_configuration(context=context)
        async with KubeClient(configuration) as client:
            return await names_of_clusters(client, namespace or namespace_of_context(context))

    try:
        return [find_run().cluster] if local else asyncio.run(ask())
    except Exception:  # noqa: BLE001 - nobody wants to read an error between two words
        return []


@contextmanager
def _silent() -> Iterator[None]:
    """End the process after some seconds, and write nothing but the answer."""
    signal.signal(signal.SIGALRM, lambda *_: os._exit(Exit.DONE))
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    with open(os.devnull, "w", encoding="utf-8") as nowhere, redirect_stderr(nowhere):
        yield
    signal.setitimer(signal.ITIMER_REAL, 0)
