"""Images from Dockerfiles, as archives for containerd. Equal sources are built once."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from cluster.locks import alone
from cluster.places import cache_folder
from images import base
from images.buildah import Buildah, ensure_packages
from images.pip_settings import pip_options

REPOSITORY = Path(__file__).resolve().parent.parent.parent


@dataclass(frozen=True)
class Image:
    """An image as an archive that containerd can import."""

    repository: str
    tag: str
    archive: Path

    @property
    def name(self) -> str:
        return f"{self.repository}:{self.tag}"


@dataclass(frozen=True)
class Recipe:
    """What an image is made of.

    Attributes:
        name: of the image here, in the cache.
        repository: of the image in a cluster.
        dockerfile: begins with ``FROM ${BASE}``.
        sources: files and folders below `root` that the Dockerfile copies.
        included: Debian packages of the base.
    """

    name: str
    repository: str
    dockerfile: Path
    root: Path
    sources: tuple[str, ...]
    included: tuple[str, ...] = base.INCLUDED


def images_folder() -> Path:
    """Layers, archives and the base: kept from run to run."""
    return cache_folder() / "images"


def build_once(recipe: Recipe) -> Image:
    """Return the image of the current sources. Builds it if they changed since the last time.

    It is built from a copy of the sources, so its tag is right even if somebody edits meanwhile.

    Raises:
        ClusterError: the image could not be built. The message says why.
    """
    home = images_folder()
    with (
        alone(home / f"{recipe.name}.lock", f"builds the image {recipe.name}"),
        tempfile.TemporaryDirectory(prefix="sources-", dir=home) as folder,
    ):
        dockerfile, context = copied(recipe, Path(folder))
        tag = digest(recipe, Path(folder))
        image = Image(recipe.repository, tag, home / f"{recipe.name}-{tag}.tar")
        if not image.archive.exists():
            _build(recipe, image, dockerfile, context)
    return image


def copied(recipe: Recipe, folder: Path) -> tuple[Path, Path]:
    """The Dockerfile and the build's context, as copies in `folder`."""
    dockerfile, context = folder / "Dockerfile", folder / "context"
    shutil.copy2(recipe.dockerfile, dockerfile)
    for source in recipe.sources:
        path, target = recipe.root / source, context / source
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            shutil.copytree(path, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(path, target)
    return dockerfile, context


def digest(recipe: Recipe, folder: Path) -> str:
    """12 hexadecimal digits that change with the base and with any file in `folder`."""
    state = hashlib.sha256(base.base_name(recipe.included).encode())
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = file.relative_to(folder).as_posix().encode()
        state.update(name + b"\0" + hashlib.sha256(file.read_bytes()).digest())
    return state.hexdigest()[:12]


def _build(recipe: Recipe, image: Image, dockerfile: Path, context: Path) -> None:
    ensure_packages()
    home = image.archive.parent
    buildah = Buildah(home)
    name = f"{recipe.name}:{image.tag}"
    arguments = {"BASE": f"localhost/{base.ensure_base(buildah, home, recipe.included)}"}
    with pip_options(home) as options:
        buildah.build(name, dockerfile, context, arguments=arguments, options=options)
    for old in home.glob(f"{recipe.name}-*.tar"):
        old.unlink()
    buildah.export(name, image.name, image.archive)
    buildah.prune()
