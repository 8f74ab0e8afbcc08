"""The engines' images, as far as their names tell what is inside."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from pdcluster_connector.compat.reasons import Reason
from pdcluster_connector.compat.versions import ANY_VERSION, SUPPORTED, supported, text_of

from .enums import Role
from .findings import FieldError, Rule, shown
from .resolve import Engine, resolve_engine
from .types import Cluster

# Tags that mean another image tomorrow.
MOVING_TAGS = frozenset({"latest", "nightly", "main", "master", "edge", "dev", "stable"})
# vLLM's own images, also in a mirror: their tags are vLLM's releases.
RELEASED = re.compile(r"(.*/)?vllm-openai(-[a-z0-9]+)*")
_RELEASE = re.compile(r"v?(\d{1,4})\.(\d{1,4})(\.\d.*|[^.\d].*)?")


@dataclass(frozen=True, slots=True)
class Image:
    """An image reference in its parts.

    Attributes:
        repository: with its registry, without tag and digest.
        tag: ``latest`` where neither a tag nor a digest is written; empty beside a digest alone.
        digest: what pins the image for good; empty without.
    """

    repository: str
    tag: str
    digest: str

    @property
    def release(self) -> tuple[int, int] | None:
        """The release (major, minor) that the tag says; None if it says none."""
        match = _RELEASE.fullmatch(self.tag)
        return (int(match[1]), int(match[2])) if match else None


def parse_image(reference: str) -> Image:
    """Take an image reference apart: ``registry:5000/vllm/vllm-openai:v0.32.0@sha256:…``."""
    name, _, digest = reference.partition("@")
    folder, slash, last = name.rpartition("/")
    base, _, tag = last.partition(":")
    return Image(folder + slash + base, tag or ("" if digest else "latest"), digest)


def image_errors(cluster: Cluster) -> Iterator[FieldError]:
    """Yield images of vLLM's own whose release this connector does not work with."""
    for path, engine, image in _engine_images(cluster):
        if RELEASED.fullmatch(image.repository) and not _any_version(engine):
            yield from _version(path, engine, image)


def image_warnings(cluster: Cluster) -> Iterator[FieldError]:
    """Yield images that may hold another vLLM than is meant, or differ between the roles."""
    for path, engine, image in _engine_images(cluster):
        vllm = "vllm" in image.repository.rpartition("/")[2]
        if vllm and (_any_version(engine) or not RELEASED.fullmatch(image.repository)):
            yield from _version(path, engine, image)
        yield from _moving(path, engine.image, image)
    router = cluster.spec.router
    if router.replicas:
        yield from _moving("spec.router.image", router.image, parse_image(router.image))
    prefill, decode = (resolve_engine(cluster, role).image for role in Role)
    if prefill != decode:
        yield FieldError(
            _path(cluster, Role.DECODE),
            shown(f"prefill {prefill}, decode {decode}"),
            Rule.IMAGES_DIFFER,
            "another vLLM may lay out its KV cache in another way",
            "Use one image for both roles, in spec.engine.image.",
            ("spec.engine.image", "spec.prefill.engine.image"),
        )


def _engine_images(cluster: Cluster) -> Iterator[tuple[str, Engine, Image]]:
    """Yield each image once, with the field that it stands in."""
    seen = set()
    for role in Role:
        engine = resolve_engine(cluster, role)
        path = _path(cluster, role)
        if path not in seen:
            yield path, engine, parse_image(engine.image)
        seen.add(path)


def _path(cluster: Cluster, role: Role) -> str:
    own = cluster.spec.role(role).engine.image
    return f"spec.{role}.engine.image" if own else "spec.engine.image"


def _any_version(engine: Engine) -> bool:
    return any(var.name == ANY_VERSION and var.value == "1" for var in engine.env)


def _version(path: str, engine: Engine, image: Image) -> Iterator[FieldError]:
    release = image.release
    if release is None or supported("vllm", release):
        return
    if release[0] and not RELEASED.fullmatch(image.repository):
        return  # somebody's own numbers: vLLM's begin with 0
    low, high = map(text_of, SUPPORTED["vllm"])
    yield FieldError(
        path,
        shown(engine.image),
        Reason.VERSION_UNSUPPORTED,
        f"its tag says vLLM {text_of(release)}; this connector works with vLLM >= {low}, < {high}",
        f"Use such an image, or try it with {ANY_VERSION}=1 in engine.env.",
    )


def _moving(path: str, reference: str, image: Image) -> Iterator[FieldError]:
    if image.tag in MOVING_TAGS and not image.digest:
        yield FieldError(
            path,
            shown(reference),
            Rule.IMAGE_NOT_PINNED,
            f"the tag {image.tag} moves: pods on different nodes may run different images",
            "Name a release, such as v0.32.0, or a digest."
            if path != "spec.router.image"
            else "Name a release or a digest.",
        )
