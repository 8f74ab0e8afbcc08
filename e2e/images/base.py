"""The base image: a small Debian with Python, made by debootstrap from its usual mirror."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from pathlib import Path

from cluster.commands import output, run
from images.buildah import Buildah

# The release whose Python requirements/operator.txt is resolved for.
SUITE = "bookworm"
INCLUDED = ("ca-certificates", "python3", "python3-venv")
# Half of what debootstrap leaves is not needed in an image.
LEFT_OUT = (
    *("./dev/*", "./proc/*", "./sys/*", "./var/cache/apt/*", "./var/lib/apt/lists/*"),
    *("./usr/share/doc/*", "./usr/share/man/*", "./usr/share/locale/*", "./var/log/*"),
)
DOCKERFILE = "FROM scratch\nADD base.tar /\n"


def base_name(included: tuple[str, ...] = INCLUDED) -> str:
    """NAME:TAG; the tag changes when the content of the image changes."""
    recipe = repr((SUITE, included, LEFT_OUT, DOCKERFILE))
    return f"base:{hashlib.sha256(recipe.encode()).hexdigest()[:12]}"


def ensure_base(buildah: Buildah, home: Path, included: tuple[str, ...] = INCLUDED) -> str:
    """Return the name of a base image with these packages. It is made once, in 1 to 3 minutes."""
    name = base_name(included)
    if buildah.has(name):
        return name
    with tempfile.TemporaryDirectory(prefix="base-", dir=home) as folder:
        root, context = Path(folder, "root"), Path(folder, "context")
        context.mkdir()
        # If this machine is not a Debian of that release, use debootstrap's own default.
        mirror = _mirror()
        words = ["debootstrap", "--variant=minbase", f"--include={','.join(included)}", SUITE]
        buildah.watch(
            f"making a Debian {SUITE}", [*words, str(root), *([mirror] if mirror else [])]
        )
        exclusions = [f"--exclude={pattern}" for pattern in LEFT_OUT]
        run(
            "tar", "--create", "--directory", root, *exclusions, "--file", context / "base.tar", "."
        )
        shutil.rmtree(root)
        (context / "Dockerfile").write_text(DOCKERFILE)
        buildah.build(name, context / "Dockerfile", context)
    return name


def _mirror() -> str:
    """The mirror from which this machine's apt gets that release; empty if it does not."""
    listed = output(
        *("apt-get", "indextargets", "--format", "$(REPO_URI)"),
        *("Created-By: Packages", f"Codename: {SUITE}"),
    )
    return next(iter(listed.split()), "")
