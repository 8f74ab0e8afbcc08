"""The engines' image for your own cluster: it contains what mounts bring on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from images import base
from images.built import REPOSITORY, Image, Recipe, build_once

RECIPE: Final = Recipe(
    name="standalone",
    repository="docker.io/local/standalone-engine",
    dockerfile=Path(__file__).with_name("engine.Dockerfile"),
    root=REPOSITORY / "requirements",
    sources=("development.txt",),
    # Libraries that vLLM for CPU loads, and the compiler that torch needs for several ranks.
    included=(*base.INCLUDED, "libnuma1", "g++", "python3-dev"),
)


def standalone_engine() -> Image:
    """Built once for the pinned requirements: some minutes, 30 GB while it is made.

    Raises:
        ClusterError: the image could not be built. The message says why.
    """
    return build_once(RECIPE)
