"""The operator's image, from operator/Dockerfile, as a release would build it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from cluster.locks import alone
from cluster.places import cache_folder
from images import base
from images.buildah import Buildah, ensure_packages
from images.pip_settings import pip_options

REPOSITORY = Path(__file__).resolve().parent.parent.parent
DOCKERFILE = REPOSITORY / "operator" / "Dockerfile"
# What operator/Dockerfile.dockerignore lets in.
SOURCES = (
    *("LICENSE", "README.md", "pyproject.toml", "requirements/operator.txt"),
    *("operator/Dockerfile", "operator/src", "connector/src"),
)


@dataclass(frozen=True)
class Image:
    """An image as an archive that containerd can import."""

    repository: str
    tag: str
    archive: Path

    @property
    def name(self) -> str:
        return f"{self.repository}:{self.tag}"


def images_folder() -> Path:
    """Layers, archives and the base: kept from run to run."""
    return cache_folder() / "images"


def operator_image(home: Path | None = None) -> Image:
    """The image of the sources as they are now: built if they changed since the last time.

    Raises:
        ClusterError: it could not be built; the text says why.
    """
    home = home or images_folder()
    tag = source_digest()
    image = Image("docker.io/local/pdcluster-operator", tag, home / f"operator-{tag}.tar")
    with alone(home / "operator.lock", "builds the operator's image"):
        if not image.archive.exists():
            _build(image, home)
    return image


def _build(image: Image, home: Path) -> None:
    ensure_packages()
    buildah = Buildah(home)
    name = f"operator:{image.tag}"
    with pip_options(home) as options:
        options += ["--ignorefile", str(DOCKERFILE.with_name("Dockerfile.dockerignore"))]
        arguments = {"BASE": f"localhost/{base.ensure_base(buildah, home)}"}
        buildah.build(name, DOCKERFILE, REPOSITORY, arguments=arguments, options=options)
    for old in home.glob("operator-*.tar"):
        old.unlink()
    buildah.export(name, image.name, image.archive)
    buildah.prune()


def source_digest(root: Path = REPOSITORY) -> str:
    """12 hexadecimal digits that change with anything that the image is made of."""
    state = hashlib.sha256(base.base_name().encode())
    for source in SOURCES:
        path = root / source
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.is_file() and "__pycache__" not in file.parts:
                name = file.relative_to(root).as_posix().encode()
                state.update(name + b"\0" + hashlib.sha256(file.read_bytes()).digest())
    return state.hexdigest()[:12]
