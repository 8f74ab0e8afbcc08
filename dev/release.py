"""Make the files of a release below dist/, and publish nothing.

    make release                 a dry run, of any commit
    make release TAG=v0.2.0      what the hosted workflow runs for a tag: it must fit the files

The workflow (.github/workflows/release.yml) builds and signs the images, and pushes what this
makes. Needs Go, if helm is not on PATH. The files:

    pdcluster-VERSION-py3-none-any.whl, pdcluster-VERSION.tar.gz   for the package index
    pdcluster-VERSION.tgz              the chart
    kubectl-pdcluster-VERSION.tar.gz   the plugin of kubectl, and pdcluster.yaml for krew
    operator.cdx.json                  what is in the operator's image (CycloneDX)
    notes.md                           the section of the changelog
    SHA256SUMS                         of all of them
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import io
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

import yaml
from image import kinds

from cluster import binaries
from cluster.places import Places
from pdcluster_operator.api.schema.crd import PlainDumper

ROOT = Path(__file__).resolve().parent.parent
SECTION = re.compile(
    r"^## \[(?P<name>[^\]]+)\][^\n]*\n(?P<text>.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL
)
PLATFORMS = "linux/amd64,linux/arm64"
KREW_SCRIPT = "kubectl-pdcluster"
NOT_PUBLISHED = "https://releases.example/pdcluster"
CAVEATS = """\
The command is a Python program (Python 3.11 or newer). The plugin starts `pdcluster` if it is on
PATH; otherwise uvx or pipx runs it, whichever is installed.
"""


class RefusedError(Exception):
    """The release cannot be made. The text says why and what to do."""


def version_of(project: str, chart: str, changelog: str, tag: str) -> tuple[str, str]:
    """Return the version and its notes, from the texts of the files that state it.

    Args:
        tag: of git; empty in a dry run, whose notes are those of the section `Unreleased`.

    Raises:
        RefusedError: the files contradict each other or the tag.
    """
    version = tomllib.loads(project)["project"]["version"]
    stated = yaml.safe_load(chart)
    for field in ("version", "appVersion"):
        if stated[field] != version:
            raise RefusedError(
                f"Chart.yaml has the {field} {stated[field]}, and pyproject.toml the version "
                f"{version}: write the same into both"
            )
    sections = {found["name"]: found["text"].strip() for found in SECTION.finditer(changelog)}
    if not tag:
        return version, sections.get("Unreleased", "")
    if tag != f"v{version}":
        raise RefusedError(
            f"the tag is {tag}, and pyproject.toml has the version {version}: a tag is v and the "
            "version of its commit"
        )
    if sections.get("Unreleased"):
        raise RefusedError(
            "CHANGELOG.md has lines in its section Unreleased: move them into the section "
            f"[{version}], because they are part of this release"
        )
    if not sections.get(version):
        raise RefusedError(
            f"CHANGELOG.md has no section [{version}] with lines: say what users have to know"
        )
    return version, sections[version]


def krew(version: str, folder: Path, url: str) -> list[Path]:
    """Write the plugin's archive and its manifest. The same sources give the same bytes."""
    script = (ROOT / "dev" / "krew" / KREW_SCRIPT).read_text().replace("@VERSION@", version)
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as made:
        for name, data, mode in (
            (KREW_SCRIPT, script.encode(), 0o755),
            ("LICENSE", (ROOT / "LICENSE").read_bytes(), 0o644),
        ):
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(data), mode
            made.addfile(member, io.BytesIO(data))
    archive = folder / f"{KREW_SCRIPT}-{version}.tar.gz"
    archive.write_bytes(gzip.compress(content.getvalue(), mtime=0))
    manifest = {
        "apiVersion": "krew.googlecontainertools.github.com/v1alpha2",
        "kind": "Plugin",
        "metadata": {"name": "pdcluster"},
        "spec": {
            "version": f"v{version}",
            "homepage": url,
            "shortDescription": "See, check and change vLLM's prefill and decode",
            "description": "Shows whether KV moves between the prefill and decode engines of a "
            "PDCluster, and why not; checks manifests; follows and undoes changes.\n",
            "caveats": CAVEATS,
            "platforms": [
                {
                    "selector": {
                        "matchExpressions": [
                            {"key": "os", "operator": "In", "values": ["linux", "darwin"]}
                        ]
                    },
                    "uri": f"{url}/download/v{version}/{archive.name}",
                    "sha256": hashlib.sha256(archive.read_bytes()).hexdigest(),
                    "bin": KREW_SCRIPT,
                    "files": [{"from": "*", "to": "."}],
                }
            ],
        },
    }
    described = folder / "pdcluster.yaml"
    described.write_text(yaml.dump(manifest, Dumper=PlainDumper, sort_keys=False))
    return [archive, described]


def run(*words: str | Path) -> None:
    done = subprocess.run(
        list(map(str, words)), cwd=ROOT, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RefusedError(
            f"{' '.join(map(str, words[:3]))} ended with {done.returncode}:\n"
            f"{done.stdout}{done.stderr}"
        )


def make(folder: Path, tag: str, uv: Path, url: str) -> str:
    """Make every file anew; returns the version."""
    texts = [ROOT / "pyproject.toml", ROOT / "charts/pdcluster/Chart.yaml", ROOT / "CHANGELOG.md"]
    version, notes = version_of(*(path.read_text() for path in texts), tag)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    run(uv, "build", "--quiet", "--out-dir", folder, ".")
    (folder / ".gitignore").unlink(missing_ok=True)
    (helm,) = (one for one in binaries.HELM_PROGRAMS if one.name == "helm4")
    paths = binaries.provide([helm], Places.of_user())
    run(paths["helm4"], "package", "charts/pdcluster", "--destination", folder)
    run(
        Path(sys.executable).with_name("cyclonedx-py"),
        *("requirements", "requirements/operator.txt", "--pyproject", "pyproject.toml"),
        *("--output-reproducible", "--validate", "-o", folder / "operator.cdx.json"),
    )
    krew(version, folder, url)
    (folder / "notes.md").write_text(f"{notes}\n")
    sums = [
        f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n"
        for path in sorted(folder.iterdir())
    ]
    (folder / "SHA256SUMS").write_text("".join(sums))
    return version


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tag", default="", help="the tag of this commit; without, a dry run")
    parser.add_argument("--uv", type=Path, required=True, help="the program that builds wheels")
    parser.add_argument("--url", default="", help="where the files will be downloaded from")
    parser.add_argument("--folder", type=Path, default=ROOT / "dist")
    options = parser.parse_args()
    try:
        version = make(options.folder, options.tag, options.uv, options.url or NOT_PUBLISHED)
    except RefusedError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for path in sorted(options.folder.iterdir()):
        print(f"{path.stat().st_size:>10,}  {path.name}")
    print("\nThe workflow would also run, for a tag:")
    for name, kind in kinds().items():
        target = "image" if name == "operator" else "router-image"
        print(
            f"  make {target} REPOSITORY=REGISTRY/{kind.repository} TAG={kind.version}"
            f" OPTIONS='--platform {PLATFORMS} --push'"
        )
    print(f"  helm push dist/pdcluster-{version}.tgz oci://REGISTRY/charts")
    print("Nothing was published.")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
