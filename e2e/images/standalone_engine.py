"""The engines' image for a cluster of one's own: it holds all that this machine's mounts bring."""

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
    # What vLLM for CPU loads, and what torch compiles with where there are several ranks.
    included=(*base.INCLUDED, "libnuma1", "g++", "python3-dev"),
)


def standalone_engine() -> Image:
    """Built once for the pinned requirements: some minutes, 30 GB while it is made.

    Raises:
        ClusterError: it could not be built; the text says why.
    """
    return build_once(RECIPE)
