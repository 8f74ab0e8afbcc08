"""Container images without a registry: an archive written here, imported into containerd.

An archive is what `docker save` writes: one layer, a configuration and a manifest. Pods name such
an image `local/NAME:1` and set `imagePullPolicy: Never`.
"""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cluster.commands import run
from cluster.daemons import Programs
from cluster.places import Places
from cluster.report import ClusterError

POD = "docker.io/local/pod:1"
DNS = "docker.io/local/coredns:1"
BUSYBOX = Path("/bin/busybox")
# Without busybox' network programs: they crash in Debian's static build when they look up a name.
APPLETS = ("sh", "ls", "cat", "env", "ps", "sleep", "mkdir", "rm", "grep", "head", "tail", "df")
ACCOUNTS = {
    "etc/passwd": b"root:x:0:0::/:/bin/sh\nnobody:x:65534:65534::/:/bin/sh\n",
    "etc/group": b"root:x:0:\nnobody:x:65534:\n",
}
FOLDERS = ("bin", "dev", "etc", "proc", "run", "sys", "tmp", "usr", "var")


@dataclass(frozen=True)
class Link:
    """A symbolic link in an image."""

    target: str


Content = bytes | Path | Link


def write_archive(
    archive: Path,
    name: str,
    content: Mapping[str, Content],
    entrypoint: Sequence[str],
    environment: Mapping[str, str] | None = None,
) -> None:
    """Write an image `name` of one layer. `content` maps paths without a leading slash.

    The image also has the folders of a root file system and two accounts (root, nobody). The same
    content gives the same bytes.
    """
    layer = _layer({**ACCOUNTS, **content})
    variables = {"PATH": "/bin:/usr/bin", **(environment or {})}
    configuration = {
        "architecture": "amd64",
        "os": "linux",
        "config": {
            "Entrypoint": list(entrypoint),
            "Env": [f"{key}={value}" for key, value in variables.items()],
        },
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(layer).hexdigest()}"]},
        "history": [{}],
    }
    manifest = [{"Config": "config.json", "RepoTags": [name], "Layers": ["layer.tar"]}]
    # Another process may read or write an archive of this name at the same time.
    with (
        tempfile.NamedTemporaryFile(dir=archive.parent, delete=False) as file,
        tarfile.open(fileobj=file, mode="w") as tar,
    ):
        _add(tar, "layer.tar", layer)
        _add(tar, "config.json", json.dumps(configuration).encode())
        _add(tar, "manifest.json", json.dumps(manifest).encode())
    Path(file.name).replace(archive)


def _layer(content: Mapping[str, Content]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        # A link that replaces a folder must not come after it: containerd sets folders' times last.
        for folder in (name for name in FOLDERS if name not in content):
            entry = tarfile.TarInfo(folder)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o1777 if folder == "tmp" else 0o755
            tar.addfile(entry)
        for path, item in sorted(content.items()):
            if isinstance(item, Link):
                entry = tarfile.TarInfo(path)
                entry.type, entry.linkname = tarfile.SYMTYPE, item.target
                tar.addfile(entry)
            else:
                _add(tar, path, item if isinstance(item, bytes) else item.read_bytes())
    return buffer.getvalue()


def _add(tar: tarfile.TarFile, path: str, data: bytes) -> None:
    entry = tarfile.TarInfo(path)
    entry.size, entry.mode = len(data), 0o755
    tar.addfile(entry, io.BytesIO(data))


def load(archive: Path, places: Places, programs: Programs) -> None:
    """Import an archive where the kubelet finds it."""
    run(
        programs["ctr"],
        "--address",
        places.containerd_socket,
        "--namespace",
        "k8s.io",
        "images",
        "import",
        archive,
    )


def load_own(places: Places, programs: Programs, patience: float = 120.0) -> None:
    """Make and import the images that the node itself needs, as soon as containerd answers."""
    shell: dict[str, Content] = {f"bin/{name}": Link("busybox") for name in APPLETS}
    own: dict[str, dict[str, Content]] = {
        POD: {"bin/pod": programs["pod"], "bin/busybox": BUSYBOX, **shell},
        DNS: {"bin/coredns": programs["coredns"]},
    }
    archives = []
    for name, content in own.items():
        program = next(iter(content))
        archives.append(places.node / f"{Path(program).name}.tar")
        write_archive(archives[-1], name, content, [f"/{program}"])
    end = time.monotonic() + patience
    while not places.containerd_socket.exists():
        if time.monotonic() > end or (places.ended / "containerd").exists():
            raise ClusterError(f"containerd does not answer; its log: {places.logs}/containerd.log")
        time.sleep(0.02)
    for archive in archives:
        load(archive, places, programs)
        archive.unlink()
