"""Each write is for the object that was seen, or for none: what came instead is left alone.

``test_kube_api.py`` shows the same on a real API server.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, cast

import pytest

from pdcluster_operator.adapters.api_server.client import KubeClient, NotFound
from pdcluster_operator.adapters.api_server.kube_api import KubeApi
from pdcluster_operator.adapters.engine_authority import EngineAuthority
from pdcluster_operator.plan.types import Delete, WriteTicketKey
from pdcluster_operator.runtime.cluster_secrets import with_a_new_key
from pdcluster_operator.runtime.interfaces import ApiError, Conflict, Key

KEY, UID = Key("ns", "llama"), "u-cluster"
OWNER = {"kind": "PDCluster", "name": "llama", "uid": UID, "controller": True}
SERVICE, SECRET = "/api/v1/namespaces/ns/services/llama-router", "/api/v1/namespaces/ns/secrets/"
CLUSTER = "/apis/pdcluster.dev/v1alpha1/namespaces/ns/pdclusters/llama"


class Server:
    """An API server: it compares the UID and the resourceVersion of each write that names them."""

    def __init__(self) -> None:
        self.held: dict[str, dict[str, Any]] = {}
        self.meanwhile: Callable[[], object] = lambda: None  # what others do after a read

    def hold(self, path: str, manifest: Mapping[str, Any], uid: str, version: str = "8") -> None:
        made = copy.deepcopy(dict(manifest))
        made["metadata"] = {**made["metadata"], "uid": uid, "resourceVersion": version}
        self.held[path] = made

    async def read(self, path: str) -> dict[str, Any] | None:
        found = copy.deepcopy(self.held.get(path))
        self.meanwhile()
        return found

    async def call(
        self, method: str, path: str, *, body: Mapping[str, Any], **_: Any
    ) -> dict[str, Any]:
        path = path.removesuffix("/status")
        if method == "POST":
            path = f"{path}/{body['metadata']['name']}"
            if path in self.held:
                raise Conflict(f"{path} exists")
        live = self.held.get(path)
        seen = body.get("preconditions" if method == "DELETE" else "metadata") or {}
        if live is None and (method == "DELETE" or "uid" in seen):
            raise NotFound(path) if method == "DELETE" else Conflict(path)
        if live is not None and any(
            seen.get(field, live["metadata"][field]) != live["metadata"][field]
            for field in ("uid", "resourceVersion")
        ):
            raise Conflict(f"{path} has changed")
        if method == "DELETE":
            return self.held.pop(path)
        known = {**(live or {}), **body}
        known["metadata"] = {"uid": "u-new", **(live or body)["metadata"], **body["metadata"]}
        known["metadata"]["resourceVersion"] = "9"
        self.held[path] = known
        return copy.deepcopy(known)


def api_of(
    server: Server, remember: Callable[[dict[str, Any]], object] = lambda _: None
) -> KubeApi:
    return KubeApi(cast("KubeClient", server), EngineAuthority.new(0.0)[0], remember)


def thing(kind: str, name: str, *owners: dict[str, Any], **more: Any) -> dict[str, Any]:
    metadata = {"name": name, "namespace": "ns", "annotations": {}, "ownerReferences": [*owners]}
    return {"apiVersion": "v1", "kind": kind, "metadata": metadata, **more}


OURS = thing("Service", "llama-router", OWNER, spec={"selector": {"a": "ours"}})
THEIRS = thing("Service", "llama-router", spec={"selector": {"a": "theirs"}})


@pytest.mark.parametrize("uid", ["", "u-of-one-that-is-gone"])
async def test_what_somebody_created_meanwhile_is_not_overwritten(uid: str) -> None:
    server = Server()
    server.hold(SERVICE, THEIRS, "u-theirs")
    with pytest.raises(ApiError, match="exists and does not belong to this PDCluster"):
        await api_of(server).apply(OURS, uid)
    assert server.held[SERVICE]["spec"] == THEIRS["spec"]


async def test_what_is_ours_is_created_and_changed() -> None:
    server, remembered = Server(), list[dict[str, Any]]()
    api = api_of(server, remembered.append)
    made = await api.apply(OURS)
    changed = {**OURS, "spec": {"selector": {"a": "changed"}}}
    await api.apply(changed, made["metadata"]["uid"])
    assert server.held[SERVICE]["spec"] == changed["spec"]
    assert [one["spec"] for one in remembered] == [OURS["spec"], changed["spec"]]


@pytest.mark.parametrize(("uid", "version"), [("u-another", "8"), ("u-ours", "7")])
async def test_what_changed_since_is_not_deleted(uid: str, version: str) -> None:
    server = Server()
    server.hold(SERVICE, OURS, "u-ours")
    with pytest.raises(Conflict):
        await api_of(server).delete(Delete("Service", "ns", "llama-router", uid, version, "a test"))
    assert SERVICE in server.held
    await api_of(server).delete(Delete("Service", "ns", "llama-router", "u-ours", "8", "a test"))
    assert server.held == {}


async def test_the_secrets_of_others_are_not_read() -> None:
    server = Server()
    for name in ("llama-ticket-key", "llama-certificates"):
        server.hold(SECRET + name, thing("Secret", name, {**OWNER, "uid": "u-other"}), "u-1")
    for read in (api_of(server).read_ticket_key, api_of(server).read_certificates):
        with pytest.raises(ApiError, match="exists and does not belong to this PDCluster"):
            await read(KEY, UID)


def ticket_key(*, rotate: bool) -> tuple[WriteTicketKey, dict[str, Any]]:
    """Return the step, and the Secret that another operator has written."""
    wanted = thing("Secret", "llama-ticket-key", OWNER)
    step = WriteTicketKey(wanted, rotate=rotate, why="a test")
    return step, with_a_new_key(step, None)


async def test_a_ticket_key_that_another_operator_has_just_made_stays() -> None:
    server, (step, held) = Server(), ticket_key(rotate=False)
    server.hold(SECRET + "llama-ticket-key", held, "u-1")
    with pytest.raises(Conflict):
        await api_of(server).write_ticket_key(step)
    assert server.held[SECRET + "llama-ticket-key"]["data"] == held["data"]


async def test_a_ticket_key_that_engines_could_not_use_is_made_again() -> None:
    server, (step, held) = Server(), ticket_key(rotate=False)
    server.hold(SECRET + "llama-ticket-key", {**held, "data": {"ticket": ""}}, "u-1")
    await api_of(server).write_ticket_key(step)
    assert await api_of(server).read_ticket_key(KEY, UID) == ""


async def test_a_ticket_key_that_changes_during_a_rotation_is_not_lost() -> None:
    """Another operator has rotated it: its new key would be gone, and tickets with it refused."""
    server, (step, held) = Server(), ticket_key(rotate=True)
    path = SECRET + "llama-ticket-key"
    server.hold(path, held, "u-1")
    server.meanwhile = lambda: server.hold(path, with_a_new_key(step, held), "u-1", "9")
    with pytest.raises(Conflict):
        await api_of(server).write_ticket_key(step)
    server.meanwhile = lambda: None
    await api_of(server).write_ticket_key(step)


@pytest.mark.parametrize("version", ["", "7"])
async def test_the_status_of_a_cluster_that_was_made_anew_stays(version: str) -> None:
    server = Server()
    server.hold(CLUSTER, thing("PDCluster", "llama", status={"model": "new"}), "u-new")
    await api_of(server).write_status(KEY, UID, {"model": "old"}, version)
    assert server.held[CLUSTER]["status"] == {"model": "new"}
    await api_of(server).write_status(KEY, "u-new", {"model": "changed"}, version)
    assert server.held[CLUSTER]["status"] == {"model": "changed"}


async def test_the_content_of_a_secret_is_not_remembered() -> None:
    remembered = list[dict[str, Any]]()
    _, secret = ticket_key(rotate=False)
    await api_of(Server(), remembered.append).apply(secret)
    assert remembered == []
