"""Cluster DNS for local mode: pod and Service names to the addresses of this machine's pods."""

from __future__ import annotations

from collections.abc import Callable

from pdcluster_operator.local.api import LocalApi
from pdcluster_operator.local.controllers import is_ready


class Names:
    """Resolves names as the cluster's DNS does."""

    def __init__(self, api: LocalApi, address_of: Callable[[str], str]) -> None:
        self._api = api
        self._address_of = address_of

    def resolve(self, name: str) -> str | None:
        """``pod.service.namespace.svc`` or ``service.namespace.svc`` to an address, or None.

        A pod's name resolves before the pod exists (its address is fixed by its name); a
        Service's to its first ready pod.
        """
        labels = name.removesuffix(".").removesuffix(".cluster.local").split(".")
        if labels[-1] != "svc":
            return None
        if len(labels) == 4:
            return self._address_of(labels[0])
        return self._service(labels[0], labels[1]) if len(labels) == 3 else None

    def _service(self, name: str, namespace: str) -> str | None:
        service = self._api.get("Service", namespace, name)
        selector = (service or {}).get("spec", {}).get("selector") or {}
        if not selector:
            return None
        for pod in self._api.list("Pod", namespace):
            labels = pod["metadata"].get("labels") or {}
            if is_ready(pod) and selector.items() <= labels.items():
                return str(pod["status"]["podIP"])
        return None
