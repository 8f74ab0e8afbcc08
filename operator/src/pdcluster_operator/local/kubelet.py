"""A foreground mini-kubelet: the pods of the in-memory API become processes of this machine.

It has at most 400 lines of code together with :mod:`.container`, which a test counts. The container
runtime (:mod:`.shim`), the network plugin (:mod:`.addresses`) and the volumes are no part of it, as
in a cluster.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from pdcluster_connector.protocol.api_key import VARIABLE as API_KEY_VARIABLE
from pdcluster_operator.local.addresses import AddressBook, PortBusyError
from pdcluster_operator.local.api_server import LocalApi, Manifest
from pdcluster_operator.local.container import (
    Container,
    Substitutions,
    kubernetes_command,
    kubernetes_environment,
)
from pdcluster_operator.local.machine import (
    CONFIG,
    UNSCHEDULABLE,
    Lack,
    Problem,
    find_problem,
    memory_request,
    volume_folder,
)

RETRY_SECONDS = 2.0
SHARED_MEMORY = "/dev/shm"  # noqa: S108 - the machine's own stands for the pod's
PROMISE_SECONDS = 60.0
"""For this long after its start, the kubelet reserves the memory that a pod asked for.

The pod has not allocated it yet.
"""


class Kubelet:
    """Runs every pod of the API below ``folder``.

    Args:
        resolve: cluster DNS, see :class:`.addresses.Names`.
        environment: variables that a container image would set, such as PATH.
    """

    def __init__(
        self,
        api: LocalApi,
        addresses: AddressBook,
        folder: Path,
        resolve: Callable[[str], str | None],
        environment: dict[str, str],
    ) -> None:
        self.api, self.addresses, self.folder = api, addresses, folder
        self.resolve, self.environment = resolve, environment
        self._pods: dict[str, PodRun] = {}
        self._ends: set[asyncio.Task[None]] = set()
        api.watch(self._on_event)

    def logs(self) -> dict[str, Path]:
        """Return the current log of every container, by pod name."""
        return {
            run.name: container.log
            for run in self._pods.values()
            for container in run.containers[:1]
        }

    def promised(self) -> int:
        """Return the memory, in bytes, that pods younger than PROMISE_SECONDS have requested."""
        now = asyncio.get_running_loop().time()
        return sum(
            memory_request(run.pod)
            for run in self._pods.values()
            if run.started_at is not None and now - run.started_at < PROMISE_SECONDS
        )

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
        metadata = pod["metadata"]
        if metadata["uid"] not in self._pods:
            self._pods[metadata["uid"]] = PodRun(self, pod)
        elif "deletionTimestamp" in metadata:
            task = asyncio.ensure_future(self._end(pod))
            self._ends.add(task)
            task.add_done_callback(self._ends.discard)

    async def _end(self, pod: Manifest) -> None:
        run = self._pods[pod["metadata"]["uid"]]
        if not run.ending:
            await run.stop(float(pod["spec"].get("terminationGracePeriodSeconds", 30)))
            del self._pods[pod["metadata"]["uid"]]
            self.api.finalize(pod)


class PodRun:
    """One pod: its address, folders, containers and status."""

    def __init__(self, kubelet: Kubelet, pod: Manifest) -> None:
        self.pod, self.name, self._kubelet = pod, pod["metadata"]["name"], kubelet
        self.containers: list[Container] = []
        self.started_at: float | None = None
        self.ending = False
        self._address = ""
        self._task = asyncio.ensure_future(self._run())

    async def stop(self, grace: float) -> None:
        """End the pod's processes and its restarts."""
        self.ending = True
        self._task.cancel()
        await asyncio.gather(*(container.stop(grace) for container in self.containers))

    async def _run(self) -> None:
        while (problem := self._prepare()) is not None:
            self._publish(problem)
            await asyncio.sleep(RETRY_SECONDS)
        self.started_at = asyncio.get_running_loop().time()
        await asyncio.gather(*(container.run() for container in self.containers))

    def _prepare(self) -> Problem | None:
        kubelet, namespace = self._kubelet, self.pod["metadata"]["namespace"]
        base = kubelet.folder / self.name / "volumes"
        problem = find_problem(self.pod, kubelet.environment, kubelet.promised())
        if problem is not None:
            return problem
        try:
            self._address = kubelet.addresses.address(self.name)
            volumes = {
                volume["name"]: volume_folder(kubelet.api, namespace, volume, base)
                for volume in self.pod["spec"].get("volumes") or ()
            }
            self.containers = [
                self._container(spec, volumes) for spec in self.pod["spec"]["containers"]
            ]
        except PortBusyError as error:
            return Problem(UNSCHEDULABLE, Lack.PORT_TAKEN, "port", error.what, error.remedy)
        except OSError as error:
            what = f"{error.filename or base}: {error.strerror}"
            return Problem(
                CONFIG,
                Lack.VOLUME_UNUSABLE,
                "volumes",
                what,
                "the pod starts as soon as this is corrected",
            )
        return None

    def _container(self, spec: Manifest, volumes: dict[str, Path]) -> Container:
        folder = self._kubelet.folder / self.name / spec["name"]
        folders = {
            mount["mountPath"]: str(volumes[mount["name"]] / mount.get("subPath", "")).rstrip("/")
            for mount in spec.get("volumeMounts") or ()
        }
        last_words = spec.get("terminationMessagePath", "/dev/termination-log")
        folders |= {last_words: str(folder / "termination-log"), SHARED_MEMORY: SHARED_MEMORY}
        local = Substitutions(self._address, folders, self._kubelet.resolve)
        environment = kubernetes_environment(self.pod, spec, self._address)
        command = [local.apply(word) for word in kubernetes_command(spec, environment)]
        asked = {entry["name"] for entry in spec.get("env") or ()}
        inherited = {
            name: value
            for name, value in self._kubelet.environment.items()
            if name != API_KEY_VARIABLE or name in asked
        }
        merged = inherited | {name: local.apply(value) for name, value in environment.items()}
        return Container(
            spec,
            command=command,
            environment=merged,
            folder=folder,
            address=self._address,
            changed=self._publish,
        )

    def _publish(self, problem: Problem | None = None) -> None:
        statuses = [{**container.status} for container in self.containers]
        scheduled = {"type": "PodScheduled", "status": "True"}
        if problem is not None and problem.reason == UNSCHEDULABLE:
            scheduled |= {"status": "False", "reason": UNSCHEDULABLE, "message": problem.message}
        elif problem is not None:
            waiting = {"waiting": {"reason": problem.reason, "message": problem.message}}
            statuses = [
                {"name": spec["name"], "ready": False, "restartCount": 0, "state": waiting}
                for spec in self.pod["spec"]["containers"]
            ]
        ready = "True" if statuses and all(status["ready"] for status in statuses) else "False"
        status = {
            "phase": "Running" if self.started_at is not None else "Pending",
            "podIP": self._address,
            "podIPs": [{"ip": self._address}],
            "containerStatuses": statuses,
            "conditions": [
                scheduled,
                {"type": "ContainersReady", "status": ready},
                {"type": "Ready", "status": ready},
            ],
        }
        metadata = self.pod["metadata"]
        self._kubelet.api.set_status(
            "Pod", metadata["namespace"], self.name, status, metadata["uid"]
        )
