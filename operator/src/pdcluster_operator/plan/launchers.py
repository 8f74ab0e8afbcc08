"""The launchers of engines that the operator polls."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from pdcluster_operator.api import object_names
from pdcluster_operator.api.spec.types import Certificates, Role
from pdcluster_operator.plan.renewals import certificates_by_engine
from pdcluster_operator.plan.types import Manifest

MISSES = 2
"""Polls in a row that must fail before an engine counts as unreachable."""


@dataclass(frozen=True, slots=True)
class Target:
    """The launcher to poll for one engine: that of its leading pod.

    Attributes:
        engine: logical id.
        url: base URL of the launcher.
        process: changes with the pod and with every restart of its container. What the old
            process said is dropped when it changes.
        certificates: which ones the engine has. With Unknown, it has to show the operator's.
    """

    engine: str
    role: Role
    url: str
    process: str
    certificates: Certificates = Certificates.OPERATOR


def launchers_to_poll(pods: Iterable[Manifest], children: Iterable[Manifest]) -> Iterator[Target]:
    """Yield one target for every engine whose leading pod has an address.

    What the operator made (``children``) says whether the launcher speaks HTTPS. Where that is not
    known, it is asked over HTTPS.
    """
    pods = tuple(pods)
    certificates = certificates_by_engine(pods, children)
    for pod in pods:
        metadata, status = pod["metadata"], pod.get("status") or {}
        engine, address = object_names.engine_of(pod), status.get("podIP")
        if engine and address and metadata["labels"].get(object_names.POD_INDEX_LABEL, "0") == "0":
            restarts = sum(c.get("restartCount", 0) for c in status.get("containerStatuses") or ())
            process = f"{metadata['uid']}/{restarts}"
            held = certificates[engine]
            scheme = "http" if held is Certificates.NONE else "https"
            url = f"{scheme}://{object_names.url_host(address)}:{object_names.LAUNCHER_PORT}"
            yield Target(engine.logical, engine.role, url, process, held)
