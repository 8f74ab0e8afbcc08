"""Running helm as a user does, and reading what it renders."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

CHART = Path(__file__).resolve().parent.parent / "pdcluster"
GOLDEN = Path(__file__).resolve().parent / "golden"
RELEASE, NAMESPACE = "pdcluster", "pdcluster-system"
# The one value that has no default.
REQUIRED = Path(__file__).resolve().parent / "values" / "default.yaml"
# What a rendering is made for, so that it does not depend on helm's built-in default.
KUBERNETES = "1.37.2"

Manifest = dict[str, Any]


class HelmError(Exception):
    """Helm refused; the text is what it said."""


@dataclass(frozen=True)
class Helm:
    """One helm binary."""

    path: Path

    def run(self, *arguments: str) -> str:
        done = subprocess.run(
            [str(self.path), *arguments], capture_output=True, text=True, timeout=240, check=False
        )
        if done.returncode:
            raise HelmError(done.stdout + done.stderr)
        return done.stdout

    def render(
        self,
        *arguments: str,
        values: Path | None = None,
        release: str = RELEASE,
        namespace: str = NAMESPACE,
    ) -> str:
        """The text of all manifests, hooks included."""
        words = ["template", release, str(CHART), "--namespace", namespace]
        words += ["--kube-version", KUBERNETES, "--values", str(REQUIRED), *arguments]
        if values is not None:
            words += ["--values", str(values)]
        return self.run(*words)

    def objects(self, *arguments: str, **options: Any) -> list[Manifest]:
        documents = yaml.safe_load_all(self.render(*arguments, **options))
        return [document for document in documents if document]


def of_kind(objects: list[Manifest], kind: str, component: str = "") -> list[Manifest]:
    """The objects of a kind, if wanted of one component."""
    label = "app.kubernetes.io/component"
    return [
        one
        for one in objects
        if one["kind"] == kind and component in ("", one["metadata"]["labels"][label])
    ]


def one(objects: list[Manifest], kind: str, component: str = "") -> Manifest:
    """The only such object."""
    (found,) = of_kind(objects, kind, component)
    return found


def pod_specs(objects: list[Manifest]) -> dict[str, Manifest]:
    """Every pod's specification, by the name of what makes it."""
    found = {}
    for manifest in objects:
        if manifest["kind"] == "Pod":
            found[manifest["metadata"]["name"]] = manifest["spec"]
        elif "template" in manifest.get("spec", {}):
            found[manifest["metadata"]["name"]] = manifest["spec"]["template"]["spec"]
    return found
