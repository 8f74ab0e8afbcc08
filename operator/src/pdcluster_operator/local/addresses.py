"""Addresses of pods on this machine: one loopback address a pod, free ports, and cluster DNS."""

import contextlib
import ipaddress
import os
import socket
from collections.abc import Callable, Iterable
from pathlib import Path

from pdcluster_operator.local.api_server import LocalApi
from pdcluster_operator.plan.observed.pods import is_pod_ready

RESERVED_PORT = 5589
"""Bound on every address in use, so that two local clusters never choose the same one."""
ATTEMPTS = 64
UNUSED = "127.255.255.253"
"""An address that no pod gets. Only a listener on every address can take its ports."""


class PortBusyError(Exception):
    """No address of this machine has a port free. The message names the port and its holder."""

    def __init__(self, what: str) -> None:
        super().__init__(f"{what}: stop that program, or run this one in a container of its own")


class AddressBook:
    """Gives every pod name an address of 127.0.0.0/8 on which ``ports`` are free."""

    def __init__(
        self, ports: tuple[int, ...], say: Callable[[str], None], first: str = "127.0.0.2"
    ) -> None:
        self._ports = ports
        self._say = say
        self._next = ipaddress.IPv4Address(first)
        self._held: dict[str, tuple[str, socket.socket]] = {}

    def address(self, pod: str) -> str:
        """Return the pod's address; raises :class:`PortBusyError` when no address is free."""
        if pod not in self._held:
            self._held[pod] = self._choose(pod)
        address, _ = self._held[pod]
        return address

    def close(self) -> None:
        """Give all addresses back."""
        for _, reservation in self._held.values():
            reservation.close()
        self._held.clear()

    def _choose(self, pod: str) -> tuple[str, socket.socket]:
        passed: list[str] = []
        for _ in range(ATTEMPTS):
            candidate, self._next = str(self._next), self._next + 1
            reservation = _listen(candidate, RESERVED_PORT)
            busy = next((port for port in self._ports if not is_free(candidate, port)), None)
            if reservation is not None and busy is None:
                if passed:
                    self._say(f"{pod} gets {candidate}: {passed[0]}")
                return candidate, reservation
            if reservation is not None:
                reservation.close()
            taken = busy or RESERVED_PORT
            for port, holder in taken_everywhere([taken]).items():
                raise PortBusyError(f"port {port} of every address (0.0.0.0) is taken{holder}")
            passed.append(f"port {taken} of {candidate} is taken{_holder(candidate, taken)}")
        raise PortBusyError(f"no loopback address is free for {pod}: {passed[-1]}")


def taken_everywhere(ports: Iterable[int]) -> dict[int, str]:
    """Return each port that is taken on every address, with its holder."""
    return {port: _holder(UNUSED, port) for port in ports if not is_free(UNUSED, port)}


def is_free(address: str, port: int) -> bool:
    """Whether a server could listen there now."""
    if (probe := _listen(address, port)) is None:
        return False
    probe.close()
    return True


def _listen(address: str, port: int) -> socket.socket | None:
    server = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        server.bind((address, port))
        server.listen(1)
    except OSError:
        server.close()
        return None
    return server


def _holder(address: str, port: int) -> str:
    """Return the process that listens there: `` by NAME (pid N)``, or "" if /proc shows none."""
    packed = "".join(f"{int(part):02X}" for part in reversed(address.split(".")))
    listening = {f"{host}:{port:04X}" for host in (packed, "00000000", "0" * 32)}
    inodes = {
        fields[9]
        for table in (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
        if table.exists()
        for line in table.read_text().splitlines()[1:]
        if (fields := line.split())[1] in listening and fields[3] == "0A"
    }
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or is somebody else's
            if any(_socket(link) in inodes for link in (process / "fd").iterdir()):
                return f" by {(process / 'comm').read_text().strip()} (pid {process.name})"
    return ""


def _socket(descriptor: Path) -> str:
    """Return the inode of a socket; nothing for a descriptor that was closed meanwhile."""
    try:
        return os.readlink(descriptor).removeprefix("socket:[").removesuffix("]")
    except OSError:
        return ""


def resolve(api: LocalApi, address_of: Callable[[str], str], name: str) -> str | None:
    """Resolve a name as the cluster's DNS does: to an address, or None.

    ``pod.service.namespace.svc`` resolves before the pod exists, because its address is fixed by
    its name. ``service.namespace.svc`` resolves to the Service's first ready pod.
    """
    labels = name.removesuffix(".").removesuffix(".cluster.local").split(".")
    if labels[-1] != "svc" or len(labels) not in (3, 4):
        return None
    if len(labels) == 4:
        return address_of(labels[0])
    service = api.get("Service", labels[1], labels[0])
    selector = (service or {}).get("spec", {}).get("selector") or {}
    for pod in api.list("Pod", labels[1]) if selector else ():
        labels_of_pod = pod["metadata"].get("labels") or {}
        if is_pod_ready(pod) and selector.items() <= labels_of_pod.items():
            return str(pod["status"]["podIP"])
    return None
