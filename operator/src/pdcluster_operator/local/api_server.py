"""An API server in memory, for one operator and one mini-kubelet.

It behaves like the real one where the operator depends on that: uid, resourceVersion and
generation; server-side apply by a single field manager (what the last apply named and this
one omits goes away; status is apart; an apply that changes nothing is no event); delete
with preconditions; deletion of pods in two steps; garbage collection by owner UID; watch.
It has no schemas, defaults, admission or other field managers.
"""

import copy
import time
import uuid
from collections.abc import Callable
from typing import Any

from pdcluster_operator.api.conditions import timestamp
from pdcluster_operator.runtime.interfaces import Conflict

Manifest = dict[str, Any]
Identity = tuple[str, str, str]
Watcher = Callable[[str, Manifest], None]

_SERVER_FIELDS = ("uid", "resourceVersion", "generation", "creationTimestamp", "deletionTimestamp")


class LocalApi:
    """Objects by (kind, namespace, name). Not thread-safe; everything read is a copy."""

    def __init__(self) -> None:
        self._objects: dict[Identity, Manifest] = {}
        self._watchers: list[Watcher] = []
        self._version = 0

    def watch(self, watcher: Watcher) -> None:
        """Call ``watcher(ADDED|MODIFIED|DELETED, object)`` for each object, and each change."""
        self._watchers.append(watcher)
        for manifest in list(self._objects.values()):
            watcher("ADDED", copy.deepcopy(manifest))

    @property
    def version(self) -> int:
        """The resourceVersion of the last change."""
        return self._version

    def get(self, kind: str, namespace: str, name: str) -> Manifest | None:
        """One object, or None."""
        return copy.deepcopy(self._objects.get((kind, namespace, name)))

    def list(self, kind: str, namespace: str | None = None) -> list[Manifest]:
        """All objects of a kind, ordered by name."""
        return [
            copy.deepcopy(manifest)
            for (one, place, _), manifest in sorted(self._objects.items())
            if one == kind and namespace in (None, place)
        ]

    def apply(self, desired: Manifest) -> Manifest:
        """Create the object, or replace all of it but its status by ``desired``."""
        identity = _identity(desired)
        live = self._objects.get(identity)
        content = {key: copy.deepcopy(value) for key, value in desired.items() if key != "status"}
        metadata = {
            key: value for key, value in content["metadata"].items() if key not in _SERVER_FIELDS
        }
        content["metadata"] = metadata
        if live is None:
            metadata |= {"uid": str(uuid.uuid4()), "generation": 1, "creationTimestamp": self.now()}
            return self._put(identity, content, "ADDED")
        wanted_uid = desired["metadata"].get("uid")
        if wanted_uid not in (None, live["metadata"]["uid"]):
            raise Conflict(f"{_text(live)} is another object than the one applied to")
        metadata |= {
            key: live["metadata"][key] for key in _SERVER_FIELDS if key in live["metadata"]
        }
        if "status" in live:
            content["status"] = live["status"]
        if content == live:
            return copy.deepcopy(live)
        if content.get("spec") != live.get("spec"):
            metadata["generation"] += 1
        return self._put(identity, content, "MODIFIED")

    def set_status(
        self, kind: str, namespace: str, name: str, status: Manifest, uid: str | None = None
    ) -> bool:
        """Write the status subresource; False when the object is gone or another one."""
        live = self._objects.get((kind, namespace, name))
        if live is None or uid not in (None, live["metadata"]["uid"]):
            return False
        if live.get("status") != status:
            self._put(_identity(live), {**live, "status": copy.deepcopy(status)}, "MODIFIED")
        return True

    def delete(
        self,
        kind: str,
        namespace: str,
        name: str,
        *,
        uid: str | None = None,
        resource_version: str | None = None,
    ) -> None:
        """Delete an object and what it owns; a pod only gets its deletionTimestamp.

        Raises :class:`Conflict` when a precondition fails. An absent object is no error.
        """
        live = self._objects.get((kind, namespace, name))
        if live is None:
            return
        metadata = live["metadata"]
        if uid not in (None, metadata["uid"]):
            raise Conflict(f"{_text(live)} is another object than the one to delete")
        if resource_version not in (None, metadata["resourceVersion"]):
            raise Conflict(f"{_text(live)} changed since it was read")
        if kind != "Pod":
            self._remove(live)
        elif "deletionTimestamp" not in metadata:
            marked = {**live, "metadata": {**metadata, "deletionTimestamp": self.now()}}
            self._put(_identity(live), marked, "MODIFIED")

    def finalize(self, pod: Manifest) -> None:
        """Remove a pod whose processes have ended. Only the kubelet calls it."""
        live = self._objects.get(_identity(pod))
        if live is not None and live["metadata"]["uid"] == pod["metadata"]["uid"]:
            self._remove(live)

    def now(self) -> str:
        """Return the time as Kubernetes writes it."""
        return timestamp(time.time())

    def _put(self, identity: Identity, manifest: Manifest, event: str) -> Manifest:
        self._version += 1
        metadata = {**manifest["metadata"], "resourceVersion": str(self._version)}
        self._objects[identity] = {**manifest, "metadata": metadata}
        self._notify(event, self._objects[identity])
        owners = {owner["uid"] for owner in metadata.get("ownerReferences") or ()}
        uids = {held["metadata"]["uid"] for held in self._objects.values()}
        if event == "ADDED" and owners and not owners & uids:
            self.delete(*identity)  # its owner was deleted in the meantime
        return copy.deepcopy({**manifest, "metadata": metadata})

    def _remove(self, live: Manifest) -> None:
        del self._objects[_identity(live)]
        self._version += 1
        metadata = {**live["metadata"], "resourceVersion": str(self._version)}
        self._notify("DELETED", {**live, "metadata": metadata})
        uid = live["metadata"]["uid"]
        for manifest in list(self._objects.values()):
            owners = manifest["metadata"].get("ownerReferences") or ()
            if (
                any(owner["uid"] == uid for owner in owners)
                and _identity(manifest) in self._objects
            ):
                self.delete(*_identity(manifest))

    def _notify(self, event: str, manifest: Manifest) -> None:
        for watcher in self._watchers:
            watcher(event, copy.deepcopy(manifest))


def _identity(manifest: Manifest) -> Identity:
    metadata = manifest["metadata"]
    return manifest["kind"], metadata.get("namespace", "default"), metadata["name"]


def _text(manifest: Manifest) -> str:
    return "{} {}/{}".format(*_identity(manifest))
