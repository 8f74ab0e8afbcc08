"""This machine as a node: why a pod cannot start on it, and folders that stand for volumes.

The checks are those of a scheduler and a kubelet, before a process starts. What an engine itself
needs (ports, shared memory, room for its KV cache) the launcher checks, here as in a cluster.
"""

from __future__ import annotations

import base64
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from pdcluster_connector.host_memory import available_bytes
from pdcluster_connector.protocol import api_key
from pdcluster_operator.api.spec.resources import parse_quantity
from pdcluster_operator.local.api_server import LocalApi
from pdcluster_operator.plan.builders.secrets import CERTIFICATE_VOLUME, TICKET_KEY_VOLUME

Manifest = Mapping[str, Any]

CONFIG = "CreateContainerConfigError"
UNSCHEDULABLE = "Unschedulable"
OWN_SECRETS = (TICKET_KEY_VOLUME, CERTIFICATE_VOLUME)
"""Volumes of Secrets that the operator makes."""
LESS_MEMORY = (
    "stop other programs, or lower resources and the KV cache (--kv-cache-memory-bytes or "
    "VLLM_CPU_KVCACHE_SPACE) of its role"
)


class Lack(StrEnum):
    """Rule ids of a pre-flight: why this machine cannot run a pod."""

    NOT_SIMULATED = "NotSimulated"
    VOLUME_UNUSABLE = "VolumeUnusable"
    PROGRAM_MISSING = "ProgramMissing"
    VARIABLE_MISSING = "VariableMissing"
    VARIABLE_UNUSABLE = "VariableUnusable"
    PORT_TAKEN = "PortTaken"
    MEMORY_TOO_SMALL = "MemoryTooSmall"


@dataclass(frozen=True, slots=True)
class Problem:
    """Why a pod cannot start here.

    Attributes:
        reason: Kubernetes' reason.
        lack: ours.
        subject: the volume, program or variable that it is about.
        what: the fault, in one sentence.
        remedy: how to correct it, in one sentence.
    """

    reason: str
    lack: Lack
    subject: str
    what: str
    remedy: str

    @property
    def message(self) -> str:
        """Both sentences, as in the message of a kubelet."""
        return f"{self.what}: {self.remedy}"


def find_problem(pod: Manifest, environment: Mapping[str, str], promised: int) -> Problem | None:
    """Return the first problem that keeps a pod from starting, or None.

    Args:
        pod: the pod to be started.
        environment: what its containers inherit, PATH among it.
        promised: bytes of memory that running pods have requested and not yet used.
    """
    first = next(find_problems(pod, environment), None)
    return first or _memory_problem(pod["spec"]["containers"], promised)


def find_problems(pod: Manifest, environment: Mapping[str, str]) -> Iterator[Problem]:
    """Yield every problem that keeps a pod from starting, but for memory."""
    spec = pod["spec"]
    if spec.get("initContainers"):
        yield Problem(
            CONFIG,
            Lack.NOT_SIMULATED,
            "initContainers",
            "local mode runs no init containers",
            "remove them from podTemplate, or use a cluster",
        )
    for volume in spec.get("volumes") or ():
        if problem := _volume_problem(volume):
            yield problem
    for container in spec["containers"]:
        program = (container.get("command") or [""])[0]
        if program and shutil.which(program, path=environment["PATH"]) is None:
            yield Problem(
                CONFIG,
                Lack.PROGRAM_MISSING,
                program,
                f"{program} is not installed",
                "install it next to python3 (`make env` does), or put its folder on PATH",
            )
        for entry in container.get("env") or ():
            if entry["name"] == api_key.VARIABLE and entry["name"] in environment:
                if wrong := api_key.problem(environment[api_key.VARIABLE]):
                    what, _, remedy = wrong.partition(": ")
                    yield Problem(CONFIG, Lack.VARIABLE_UNUSABLE, entry["name"], what, remedy)
            elif (
                entry.get("valueFrom", {}).keys() - {"fieldRef"}
                and entry["name"] not in environment
            ):
                yield Problem(
                    CONFIG,
                    Lack.VARIABLE_MISSING,
                    entry["name"],
                    f"{entry['name']} comes from a Secret or a ConfigMap, which local mode lacks",
                    "set it in your environment",
                )


def memory_request(pod: Manifest) -> int:
    """Bytes of memory that a pod's containers request."""
    return sum(_request(container) for container in pod["spec"]["containers"])


def _volume_problem(volume: Manifest) -> Problem | None:
    name = volume["name"]
    if path := volume.get("hostPath", {}).get("path"):
        folder = Path(path)
        remedy = "put the model there, or name its folder with --model-dir"
        if not folder.is_dir():
            what = f"{path} (volume {name}) is not a folder on this machine"
            return Problem(CONFIG, Lack.VOLUME_UNUSABLE, name, what, remedy)
        if not os.access(folder, os.R_OK | os.X_OK):
            return Problem(
                CONFIG,
                Lack.VOLUME_UNUSABLE,
                name,
                f"{path} (volume {name}) can't be read by this user",
                "change its permissions (chmod -R a+rX), or choose another folder",
            )
        if not any(folder.iterdir()):
            what = f"{path} (volume {name}) is empty"
            return Problem(CONFIG, Lack.VOLUME_UNUSABLE, name, what, remedy)
    elif not volume.keys() & {"emptyDir", "configMap"} and name not in OWN_SECRETS:
        kind = next((key for key in volume if key != "name"), "unknown")
        return Problem(
            CONFIG,
            Lack.NOT_SIMULATED,
            name,
            f"volume {name} is a {kind}, which local mode lacks",
            "use a hostPath, or name a model folder with --model-dir",
        )
    return None


def _memory_problem(containers: list[Manifest], promised: int) -> Problem | None:
    asked = sum(_request(container) for container in containers)
    free = available_bytes() - promised
    if asked <= max(free, 0):
        return None
    return Problem(
        UNSCHEDULABLE,
        Lack.MEMORY_TOO_SMALL,
        "memory",
        f"it asks for {asked / 2**30:.1f} GiB of memory and "
        f"{max(free, 0) / 2**30:.1f} GiB are free",
        LESS_MEMORY,
    )


def _request(container: Manifest) -> int:
    resources = container.get("resources") or {}
    asked = {**(resources.get("limits") or {}), **(resources.get("requests") or {})}.get("memory")
    return int(parse_quantity(str(asked)) or 0) if asked else 0


def volume_folder(api: LocalApi, namespace: str, volume: Mapping[str, Any], base: Path) -> Path:
    """Make the folder of a hostPath, emptyDir, ConfigMap or Secret volume.

    Args:
        base: folder of the pod's volumes. A hostPath is used where it is.

    Raises:
        OSError: it cannot be written, or the ConfigMap or Secret is not there yet.
    """
    if "hostPath" in volume:
        return Path(volume["hostPath"]["path"])
    folder = Path(base, volume["name"])
    folder.mkdir(parents=True, exist_ok=True)
    if "configMap" in volume:
        name = volume["configMap"]["name"]
        source = api.get("ConfigMap", namespace, name)
        if source is None:
            raise FileNotFoundError(0, "there is no such ConfigMap yet", name)
        for key, text in (source.get("data") or {}).items():
            (folder / key).write_text(text)
        for key, encoded in (source.get("binaryData") or {}).items():
            (folder / key).write_bytes(base64.b64decode(encoded))
    if "secret" in volume:
        name = volume["secret"]["secretName"]
        source = api.get("Secret", namespace, name)
        if source is None:
            raise FileNotFoundError(0, "there is no such Secret", name)
        data = source.get("data") or {}
        items = volume["secret"].get("items") or [{"key": key, "path": key} for key in data]
        for item in items:
            if item["key"] not in data:
                raise FileNotFoundError(0, f"the Secret holds no {item['key']} yet", name)
            (folder / item["path"]).touch(mode=0o600)
            (folder / item["path"]).write_bytes(base64.b64decode(data[item["key"]]))
    return folder
