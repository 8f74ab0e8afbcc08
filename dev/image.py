"""Build an image with docker, podman or buildah, and push it if asked to.

    make image                                        the operator's, on this machine only
    make image REPOSITORY=registry.example/team/pdcluster-operator PUSH=1
    make router-image REPOSITORY=registry.example/team/vllm-router PUSH=1

Needs nothing but Python 3.11 or newer and one of the three programs. The variables:

    REPOSITORY  name of the image without a tag
    TAG         default: the version of what is in it
    PUSH        1: push it to the registry of REPOSITORY
    BASE        image with Python 3.11 or newer and its venv module
    BUILDER     words of the program; default: the first of docker, podman, buildah on PATH
    PIP_CONFIG  a pip.conf for the build, as a secret that no layer keeps
    OPTIONS     further words for the build, such as --platform linux/arm64
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILDERS = ("docker", "podman", "buildah")
# The Python and the Debian that the requirements are resolved for, and the tests run.
BASE = "docker.io/library/python:3.11-slim-bookworm"


class RefusedError(Exception):
    """The image cannot be built or pushed. The text says why and what to do."""


@dataclass(frozen=True)
class Kind:
    """An image of this repository."""

    dockerfile: str
    repository: str
    version: str
    use: str  # how an installation is told about it; {repository} and {tag} are filled in


def kinds() -> dict[str, Kind]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pins = (ROOT / "requirements" / "development.txt").read_text()
    (router,) = re.findall(r"^vllm-router==(\S+)$", pins, re.MULTILINE)
    return {
        "operator": Kind(
            "operator/Dockerfile",
            "pdcluster-operator",
            project["version"],
            "helm upgrade --install pdcluster charts/pdcluster --namespace pdcluster-system "
            "--create-namespace \\\n  --set image.repository={repository},image.tag={tag}",
        ),
        "router": Kind(
            "operator/router.Dockerfile",
            "vllm-router",
            router,
            "in a PDCluster: spec.router.image: {repository}:{tag}",
        ),
    }


def builder(wanted: str, which=shutil.which) -> list[str]:
    """The words of the program that builds.

    Raises:
        RefusedError: there is none.
    """
    words = shlex.split(wanted) or [next(filter(which, BUILDERS), "")]
    if not words[0] or not which(words[0]):
        raise RefusedError(
            f"{words[0] or 'docker, podman or buildah'} was not found on PATH: install one of "
            f"{', '.join(BUILDERS)}, or name another with BUILDER"
        )
    return words


def commands(
    kind: Kind, program: list[str], variables: Mapping[str, str]
) -> tuple[str, str, list[list[str]]]:
    """Repository, tag, and the commands to run in the repository's folder.

    Raises:
        RefusedError: the variables contradict each other.
    """
    repository = variables.get("REPOSITORY") or kind.repository
    tag = variables.get("TAG") or kind.version
    name = repository.rpartition("/")[2]
    if ":" in name or "@" in name:
        raise RefusedError(f"REPOSITORY is {repository}: the tag is named by TAG")
    host = repository.partition("/")[0]
    push = variables.get("PUSH", "") not in ("", "0")
    if push and (host == repository or not ("." in host or ":" in host or host == "localhost")):
        raise RefusedError(
            f"REPOSITORY is {repository}: to push, name the registry too, such as "
            f"registry.example/team/{name}"
        )
    reference = f"{repository}:{tag}"
    build = [*program, "build", "--file", kind.dockerfile, "--tag", reference]
    build += ["--build-arg", f"BASE={variables.get('BASE') or BASE}"]
    if config := variables.get("PIP_CONFIG"):
        build += ["--secret", f"id=pip,src={config}"]
    build += [*shlex.split(variables.get("OPTIONS", "")), "."]
    return repository, tag, [build, *([[*program, "push", reference]] if push else [])]


def main() -> int:
    kind = kinds()[sys.argv[1]]
    try:
        program = builder(os.environ.get("BUILDER", ""))
        repository, tag, wanted = commands(kind, program, os.environ)
    except RefusedError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    # The Dockerfiles mount a secret, which docker's old builder cannot.
    environment = {**os.environ, "DOCKER_BUILDKIT": "1"}
    for command in wanted:
        print(f"$ {shlex.join(command)}", flush=True)
        done = subprocess.run(command, cwd=ROOT, env=environment, check=False)
        if done.returncode:
            print(f"error: it ended with exit code {done.returncode}", file=sys.stderr)
            return 1
    if len(wanted) == 1:
        print("\nOnly this machine has it. PUSH=1 with REPOSITORY=REGISTRY/… pushes it.")
    print(f"\n{kind.use.format(repository=repository, tag=tag)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
