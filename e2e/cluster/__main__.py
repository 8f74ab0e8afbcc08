"""`python -m cluster COMMAND`: a real Kubernetes of one node on this machine, for tests."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from cluster import binaries, images, lifecycle, machine
from cluster.places import Places
from cluster.report import ClusterError, say


def up(places: Places, _: argparse.Namespace) -> int:
    if other := lifecycle.users_own():
        say(f"  KUBECONFIG is set to {other}: that cluster is used, and no other is started")
        return 0
    lifecycle.up(places)
    # For eval in a shell; all else goes to standard error.
    print(f"export KUBECONFIG={places.kubeconfig}")
    print(f'export PATH={places.links}:"$PATH"')
    return 0


def down(places: Places, _: argparse.Namespace) -> int:
    lifecycle.down(places)
    return 0


def status(places: Places, _: argparse.Namespace) -> int:
    """Exit code 0 when the cluster is up with all its programs, 3 when there is none, else 1."""
    if not machine.running():
        print("no cluster")
        return 3
    for name, how in lifecycle.ended(places).items():
        print(f"{name} {how}; its log: {places.logs / name}.log")
    if not lifecycle.healthy(places):
        print("the cluster does not work: `up` starts it anew")
        return 1
    print(f"up: KUBECONFIG={places.kubeconfig}\nlogs: {places.logs}")
    return 0


def build(places: Places, options: argparse.Namespace) -> int:
    wanted = options.program or [program.name for program in binaries.PROGRAMS]
    known = {program.name: program for program in binaries.PROGRAMS}
    if strange := [name for name in wanted if name not in known]:
        raise ClusterError(f"no program is called {strange[0]}; there are: {', '.join(known)}")
    for path in binaries.provide([known[name] for name in wanted], places).values():
        print(path)
    return 0


def load(places: Places, options: argparse.Namespace) -> int:
    for archive in options.archive:
        images.load(archive, places, lifecycle.up(places))
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m cluster", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command, text in (
        (up, "start the cluster, or find it started; prints exports for a shell"),
        (down, "end the cluster and remove all of it but the built programs"),
        (status, "say whether the cluster works"),
        (build, "build programs before they are needed (all: helm3 and helm4 too)"),
        (load, "import image archives as `docker save` writes them"),
    ):
        sub = commands.add_parser(command.__name__, help=text, description=text)
        sub.set_defaults(command=command)
        if command is build:
            sub.add_argument("program", nargs="*")
        if command is load:
            sub.add_argument("archive", nargs="+", type=Path)
    options = parser.parse_args()
    try:
        return int(options.command(Places.of_user(), options))
    except ClusterError as error:
        say(f"error: {error}")
        return 1


if __name__ == "__main__":
    sys.exit(main())
