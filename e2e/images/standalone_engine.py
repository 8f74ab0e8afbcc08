"""The engines' image for a cluster of one's own: it holds all that this machine's mounts bring."""

from __future__ import annotations

import hashlib
from pathlib import Path

from cluster.locks import alone
from images import base
from images.buildah import Buildah, ensure_packages
from images.operator_image import REPOSITORY, Image, images_folder
from images.pip_settings import pip_options

DOCKERFILE = Path(__file__).with_name("engine.Dockerfile")
REQUIREMENTS = REPOSITORY / "requirements"
# What vLLM for CPU loads, and what torch compiles with where there are several ranks.
INCLUDED = (*base.INCLUDED, "libnuma1", "g++", "python3-dev")


def standalone_engine() -> Image:
    """Built once for the pinned requirements: some minutes, 30 GB while it is made.

    Raises:
        ClusterError: it could not be built; the text says why.
    """
    home = images_folder()
    state = hashlib.sha256(base.base_name(INCLUDED).encode())
    for file in (DOCKERFILE, REQUIREMENTS / "development.txt"):
        state.update(hashlib.sha256(file.read_bytes()).digest())
    tag = state.hexdigest()[:12]
    image = Image("docker.io/local/standalone-engine", tag, home / f"standalone-{tag}.tar")
    with alone(home / "standalone.lock", "builds the standalone engines' image"):
        if not image.archive.exists():
            ensure_packages()
            buildah = Buildah(home)
            arguments = {"BASE": f"localhost/{base.ensure_base(buildah, home, INCLUDED)}"}
            name = f"standalone:{tag}"
            with pip_options(home) as options:
                buildah.build(name, DOCKERFILE, REQUIREMENTS, arguments=arguments, options=options)
            buildah.export(name, image.name, image.archive)
    return image
