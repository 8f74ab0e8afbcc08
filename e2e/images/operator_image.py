"""The operator's image, from operator/Dockerfile, as a release would build it."""

from __future__ import annotations

from typing import Final

from images.built import REPOSITORY, Image, Recipe, build_once

RECIPE: Final = Recipe(
    name="operator",
    repository="docker.io/local/pdcluster-operator",
    dockerfile=REPOSITORY / "operator" / "Dockerfile",
    root=REPOSITORY,
    # The files that operator/Dockerfile.dockerignore allows.
    sources=(
        *("LICENSE", "README.md", "pyproject.toml", "requirements/operator.txt"),
        *("operator/src", "connector/src"),
    ),
)


def operator_image() -> Image:
    """The image of the sources as they are now.

    Raises:
        ClusterError: the image could not be built. The message says why.
    """
    return build_once(RECIPE)
