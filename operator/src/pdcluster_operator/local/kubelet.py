"""A foreground mini-kubelet: the pods of the in-memory API become processes of this machine.

It has at most 400 lines of code together with :mod:`.container_process`, which a test counts. As in
a cluster, the container runtime (:mod:`.shim`) and the network plugin (:mod:`.addresses`) are no
part of it. The pre-flight has found what the machine lacks for good, so the kubelet looks for
nothing.
"""

import asyncio
import base64
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pdcluster_connector.protocol.api_key import VARIABLE as API_KEY_VARIABLE
from pdcluster_operator.local import container_process, shim
from pdcluster_operator.local.addresses import AddressBook, PortBusyError
from pdcluster_operator.local.api_server import LocalApi, Manifest

CONFIG = "CreateContainerConfigError"
UNSCHEDULABLE = "Unschedulable"
RETRY_SECONDS = 2.0
SHARED_MEMORY = "/dev/shm"  # noqa: S108 - the machine's own stands for the pod's


@dataclass(eq=False)
class Kubelet:
    """Runs every pod of the API below ``folder``.

    Args:
        resolve: cluster DNS, see :func:`.addresses.resolve`.
        environment: variables that a container image would set, such as PATH.
    """

    api: LocalApi
    addresses: AddressBook
    folder: Path
    resolve: Callable[[str], str | None]
    environment: dict[str, str]

    def __post_init__(self) -> None:
        self._pods: dict[str, PodRun] = {}
        self.api.watch(self._on_event)

    def logs(self) -> dict[str, Path]:
        """Return the current log of every container, by pod name."""
        return {
            run.name: container.log
            for run in self._pods.values()
            for container in run.containers[:1]
        }

    def stopped(self) -> dict[str, list[int]]:
        """Return the processes of each pod that a signal has stopped: they wait for SIGCONT."""
        known = shim.processes()
        return {
            run.name: [pid for one in run.containers for pid in shim.stopped(one.shim or -1, known)]
            for run in self._pods.values()
        }

    async def stop(self, grace: float) -> None:
        """End every process; what still runs after ``grace`` seconds is killed."""
        await asyncio.gather(*(run.stop(grace) for run in self._pods.values()))

    def kill(self) -> None:
        """Kill every process at once."""
        for run in self._pods.values():
            for container in run.containers:
                container.kill()

    def _on_event(self, event: str, pod: Manifest) -> None:
        if pod["kind"] != "Pod" or event == "DELETED":
            return
        uid = pod["metadata"]["uid"]
        if uid not in self._pods:
            self._pods[uid] = PodRun(self, pod)
        elif "deletionTimestamp" in pod["metadata"] and not self._pods[uid].ending:
            self._pods[uid].ending = asyncio.ensure_future(self._end(uid))

    async def _end(self, uid: str) -> None:
        pod = self._pods[uid].pod
        await self._pods[uid].stop(float(pod["spec"].get("terminationGracePeriodSeconds", 30)))
        del self._pods[uid]
        self.api.finalize(pod)


class PodRun:
    """One pod: its address, folders, containers and status."""

    def __init__(self, kubelet: Kubelet, pod: Manifest) -> None:
        self.pod, self.name, self._kubelet = pod, pod["metadata"]["name"], kubelet
        self.containers: list[container_process.Container] = []
        self.ending: asyncio.Future[None] | None = None
        self._address = ""
        self._task = asyncio.ensure_future(self._run())

    async def stop(self, grace: float) -> None:
        """End the pod's processes and its restarts."""
        self._task.cancel()
        await asyncio.gather(*(container.stop(grace) for container in self.containers))

    async def _run(self) -> None:
        while lacking := self._prepare():
            self._publish(**lacking)
            await asyncio.sleep(RETRY_SECONDS)
        await asyncio.gather(*(container.run() for container in self.containers))

    def _prepare(self) -> dict[str, str]:
        """Make the containers. If something is missing, return it for :meth:`_publish`."""
        kubelet, namespace = self._kubelet, self.pod["metadata"]["namespace"]
        base, spec = kubelet.folder / self.name / "volumes", self.pod["spec"]
        try:
            self._address = kubelet.addresses.address(self.name)
            volumes = {
                volume["name"]: volume_folder(kubelet.api, namespace, volume, base)
                for volume in spec.get("volumes") or ()
            }
            self.containers = [self._container(one, volumes) for one in spec["containers"]]
        except PortBusyError as error:
            return {"unschedulable": str(error)}
        except OSError as error:
            what = f"{error.filename or base}: {error.strerror}"
            return {"wrong": f"{what}: the pod starts as soon as this is corrected"}
        return {}

    def _container(self, spec: Manifest, volumes: dict[str, Path]) -> container_process.Container:
        folder = self._kubelet.folder / self.name / spec["name"]
        folders = {
            mount["mountPath"]: str(volumes[mount["name"]] / mount.get("subPath", "")).rstrip("/")
            for mount in spec.get("volumeMounts") or ()
        }
        last_words = spec.get("terminationMessagePath", "/dev/termination-log")
        folders |= {last_words: str(folder / "termination-log"), SHARED_MEMORY: SHARED_MEMORY}

        def local(text: str) -> str:
            return container_process.substitute(text, self._address, folders, self._kubelet.resolve)

        environment = container_process.kubernetes_environment(self.pod, spec, self._address)
        words = (*(spec.get("command") or ()), *(spec.get("args") or ()))
        command = [local(container_process.expand(word, environment)) for word in words]
        asked = {entry["name"] for entry in spec.get("env") or ()}
        inherited = {
            name: value
            for name, value in self._kubelet.environment.items()
            if name != API_KEY_VARIABLE or name in asked
        }
        merged = inherited | {name: local(value) for name, value in environment.items()}
        return container_process.Container(
            spec,
            command=command,
            environment=merged,
            folder=folder,
            address=self._address,
            changed=self._publish,
        )

    def _publish(self, *, unschedulable: str = "", wrong: str = "") -> None:
        """Write the pod's status, and why it has no containers yet. It has what somebody reads."""
        statuses = [{**container.status} for container in self.containers]
        scheduled = {"type": "PodScheduled", "status": "True"}
        if unschedulable:
            scheduled |= {"status": "False", "reason": UNSCHEDULABLE, "message": unschedulable}
        if wrong:
            waiting = {"waiting": {"reason": CONFIG, "message": wrong}}
            statuses = [
                {"name": spec["name"], "ready": False, "restartCount": 0, "state": waiting}
                for spec in self.pod["spec"]["containers"]
            ]
        ready = "True" if statuses and all(status["ready"] for status in statuses) else "False"
        status = {
            "podIP": self._address,
            "containerStatuses": statuses,
            "conditions": [scheduled, {"type": "Ready", "status": ready}],
        }
        metadata = self.pod["metadata"]
        self._kubelet.api.set_status(
            "Pod", metadata["namespace"], self.name, status, metadata["uid"]
        )


def volume_folder(api: LocalApi, namespace: str, volume: Manifest, base: Path) -> Path:
    """Make the folder of a hostPath, emptyDir, ConfigMap or Secret volume.

    Args:
        base: folder of the pod's volumes. A hostPath is used where it is.

    Raises:
        OSError: it cannot be read or written, or the ConfigMap or Secret is not there yet.
    """
    if "hostPath" in volume:
        folder = Path(volume["hostPath"]["path"])
        os.listdir(folder)
        return folder
    folder = Path(base, volume["name"])
    folder.mkdir(parents=True, exist_ok=True)
    if "configMap" in volume:
        kind, name, data = "ConfigMap", volume["configMap"]["name"], "binaryData"
    elif "secret" in volume:
        kind, name, data = "Secret", volume["secret"]["secretName"], "data"
    else:
        return folder
    source = api.get(kind, namespace, name)
    if source is None:
        raise FileNotFoundError(0, f"there is no such {kind} yet", name)
    files = source.get(data) or {}
    wanted = (volume.get("secret") or {}).get("items") or [{"key": k, "path": k} for k in files]
    for item in wanted:
        if item["key"] not in files:
            raise FileNotFoundError(0, f"the {kind} holds no {item['key']} yet", name)
        (folder / item["path"]).touch(mode=0o600)
        (folder / item["path"]).write_bytes(base64.b64decode(files[item["key"]]))
    return folder
