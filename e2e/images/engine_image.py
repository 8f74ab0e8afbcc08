"""The engines' image: vLLM for CPU and NIXL of this machine's own Python, and not our connector.

The image itself holds only a few links. The pods mount this machine's /usr, its Python and its
virtual environment, read-only. A real image would be too slow. Measured on two busy cores: the
environment is 7.0 GB, or 3.7 GB without the CUDA libraries. One pass over that (tar and a checksum)
takes 33 s. containerd makes three passes each time a cluster starts, because an ended cluster
leaves nothing. That is two to three minutes and 11 GB of disk for files that this machine already
has. A copy would also fill the page cache a second time while two engines start.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cluster.images import Content, Link, write_archive
from images.built import Image, images_folder

# Links into /usr in the image of a current system; mounts on an older system.
SYSTEM_FOLDERS = ("bin", "lib", "lib64", "sbin")
LOADER_CACHE = Path("/etc/ld.so.cache")
CONTAINERS = {"prefill": "engine", "decode": "engine", "router": "router"}


def engine_image(home: Path | None = None, build: str = "") -> Image:
    """The image of engines and routers. Its PATH names the environment that runs this code.

    ``build`` gives the same image another tag, as a newer build has one.
    """
    home = home or images_folder()
    home.mkdir(parents=True, exist_ok=True)
    path = f"{sys.prefix}/bin:/usr/local/bin:/usr/bin:/bin"
    content: dict[str, Content] = {
        name: Link(str(Path("/", name).readlink()))
        for name in SYSTEM_FOLDERS
        if Path("/", name).is_symlink()
    }
    tag = hashlib.sha256(repr((path, content)).encode()).hexdigest()[:12]
    tag += f"-{build}" if build else ""
    image = Image("docker.io/local/engine", tag, home / f"engine-{tag}.tar")
    write_archive(image.archive, image.name, content, [], {"PATH": path})
    return image


def machine_folders() -> tuple[Path, ...]:
    """The folders of this machine that an engine needs, at the same path, none inside another."""
    system = [Path("/", name) for name in SYSTEM_FOLDERS]
    folders = [
        Path("/usr"),
        *(folder for folder in system if folder.is_dir() and not folder.is_symlink()),
        Path(sys.prefix).resolve(),
        Path(sys.base_prefix).resolve(),
    ]
    return tuple(
        folder
        for folder in dict.fromkeys(folders)
        if not any(folder.is_relative_to(other) for other in folders if other != folder)
    )


def vllm_cache() -> Path:
    """The folder with vLLM's cache about models. It saves ten seconds of each engine's start."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "vllm"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def pod_template(container: str) -> dict[str, Any]:
    """A pod template for a PDCluster that mounts this machine's folders into a container."""
    cache = vllm_cache()
    mounted = dict.fromkeys((*machine_folders(), cache), "Directory") | {LOADER_CACHE: "File"}
    volumes, mounts = [], []
    for number, (path, kind) in enumerate(mounted.items()):
        name = f"machine-{number}"
        volumes.append({"name": name, "hostPath": {"path": str(path), "type": kind}})
        mounts.append({"name": name, "mountPath": str(path), "readOnly": True})
    env = [{"name": "VLLM_CACHE_ROOT", "value": str(cache)}]
    mounting = {"name": container, "env": env, "volumeMounts": mounts}
    return {"spec": {"containers": [mounting], "volumes": volumes}}


def for_this_machine(manifest: Mapping[str, Any], model: Path) -> dict[str, Any]:
    """A PDCluster that runs from the image above and serves a model of this machine."""
    image = engine_image().name
    spec = dict(manifest["spec"])
    spec["model"] = {**spec.get("model", {}), "source": {"hostPath": {"path": str(model)}}}
    spec["engine"] = {**spec.get("engine", {}), "image": image}
    for part, container in CONTAINERS.items():
        spec[part] = {**spec.get(part, {}), "podTemplate": pod_template(container)}
    spec["router"]["image"] = image
    return {**manifest, "spec": spec}
