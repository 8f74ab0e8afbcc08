"""`python -m images COMMAND`: the operator's image and the engines' image of the tests."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import yaml

from cluster import images as node_images, lifecycle
from cluster.places import Places
from cluster.report import ClusterError, say
from images.built import Image
from images.engine_image import engine_image, for_this_machine
from images.operator_image import operator_image
from images.standalone_engine import standalone_engine


def build() -> list[Image]:
    """Build both images unless they are built already."""
    started = time.monotonic()
    images = [operator_image(), engine_image()]
    if (took := time.monotonic() - started) > 1:
        say(f"  images are ready after {took:.0f} s")
    return images


def load() -> list[Image]:
    """Build both and import them into this machine's cluster."""
    images = build()
    places = Places.of_user()
    programs = lifecycle.up(places)
    started = time.monotonic()
    for image in images:
        node_images.load(image.archive, places, programs)
    say(f"  images are in the cluster after {time.monotonic() - started:.0f} s")
    return images


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m images", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("build", help="build what changed; prints the images' names")
    commands.add_parser("load", help="build, and import into the cluster of this machine")
    commands.add_parser(
        "standalone",
        help="build the engines' image for a cluster of your own; prints its name and archive",
    )
    manifest = commands.add_parser(
        "manifest", help="print a PDCluster as it runs from these images with a model of here"
    )
    manifest.add_argument("file", type=Path)
    manifest.add_argument("model", type=Path)
    options = parser.parse_args()
    try:
        if options.command == "manifest":
            document = yaml.safe_load(options.file.read_text())
            print(yaml.safe_dump(for_this_machine(document, options.model), sort_keys=False))
            return 0
        if options.command == "standalone":
            image = standalone_engine()
            print(f"{image.name}\n{image.archive}")
            return 0
        for image in load() if options.command == "load" else build():
            print(image.name)
    except ClusterError as error:
        say(f"error: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
