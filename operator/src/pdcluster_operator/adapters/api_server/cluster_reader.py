"""Reads one cluster as the operator does, and asks the API server for dry runs.

It has the rights of whoever runs the command. Only :func:`change_spec` writes.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pdcluster_operator.adapters.api_server.client import APPLY, MERGE, KubeClient, NotFound
from pdcluster_operator.adapters.api_server.kinds import PDCLUSTER, WATCHED, slim
from pdcluster_operator.adapters.api_server.kube_api import KubeApi
from pdcluster_operator.adapters.engine_authority import EngineAuthority
from pdcluster_operator.plan import renewals, types
from pdcluster_operator.plan.builders.engine_objects import POD_GROUP_KIND
from pdcluster_operator.plan.builders.protection import operator_namespace_in
from pdcluster_operator.plan.forecast.world import merge_patch, reports_in, server_side_manager
from pdcluster_operator.runtime.interfaces import ApiError, Key
from pdcluster_operator.runtime.store import Store

MANAGER = "pdcluster"


def reader(client: KubeClient) -> KubeApi:
    """Return an API that is only read. The authority that belongs to it signs nothing."""
    return KubeApi(client, EngineAuthority.new(time.time())[0])


async def read_cluster(client: KubeClient, key: Key) -> dict[str, Any] | None:
    """Return the PDCluster as the API server has it; None if there is none."""
    return await client.read(PDCLUSTER.path(key.namespace, key.name))


async def observe(
    client: KubeClient, key: Key, cluster: types.Manifest, connector: types.ConnectorBundle
) -> types.Observed:
    """Return what the operator observes of a cluster, as far as somebody else can tell.

    What launchers say is taken from the status.

    Args:
        cluster: the live PDCluster, or one that does not exist yet.
        connector: the one that the operator is assumed to ship.
    """
    api, store = reader(client), Store()
    for kind in WATCHED:
        try:
            listed = await api.list(kind, key.namespace)
        except NotFound:
            if not kind.optional:
                raise
            listed = []
            store.set_served(kind.name, served=False)
        for manifest in listed:
            store.put(manifest)
    store.put(slim(cluster, PDCLUSTER))
    await store.learn_owners(key, api.read)
    children = store.children(key)
    engines, links = reports_in(cluster, children)
    ticket_key, certificates = await _secrets(api, key, cluster, children)
    policies = (one for one in children if one["kind"] == "NetworkPolicy")
    # The API server gives each Service its families; the first one is that of the cluster.
    services = (one["spec"] for one in children if one["kind"] == "Service")
    six = any(spec.get("ipFamilies", ())[:1] == ["IPv6"] for spec in services)
    return types.Observed(
        cluster=slim(cluster, PDCLUSTER),
        children=children,
        pods=store.pods(key),
        engines=engines,
        links=links,
        connector=connector,
        ticket_key=ticket_key,
        certificates=certificates,
        place=types.Place(
            next(filter(None, map(operator_namespace_in, policies)), None),
            every_address="::" if six else "0.0.0.0",  # noqa: S104
        ),
        pod_groups=store.serves(POD_GROUP_KIND),
        scaler=store.scaler(key),
        connectors=store.connectors(key.namespace),
    )


async def dry_apply(
    client: KubeClient, document: types.Manifest, live: types.Manifest | None
) -> types.Manifest:
    """Return the PDCluster as it would be after ``kubectl apply``; nothing is written.

    Args:
        document: what is applied, with its namespace.
        live: the PDCluster as it is; None if there is none.
    """
    metadata = document["metadata"]
    manager = server_side_manager(live) if live is not None else None
    query = {"dryRun": "All", "fieldManager": manager or MANAGER}
    if live is None:
        collection = PDCLUSTER.path(metadata["namespace"])
        return await client.call("POST", collection, query=query, body=document)
    path = PDCLUSTER.path(metadata["namespace"], metadata["name"])
    body, content = (document, APPLY) if manager else (merge_patch(live, document), MERGE)
    return await client.call("PATCH", path, query=query, body=body, content=content)


async def change_spec(
    client: KubeClient, live: types.Manifest, spec: types.Manifest, *, dry_run: bool = False
) -> None:
    """Replace the spec of the very PDCluster that was read; one that changed is a Conflict."""
    metadata = live["metadata"]
    query = {"fieldManager": MANAGER, **({"dryRun": "All"} if dry_run else {})}
    path = PDCLUSTER.path(metadata["namespace"], metadata["name"])
    await client.call("PUT", path, query=query, body={**live, "spec": dict(spec)})


def lacks_a_right(error: ApiError) -> bool:
    """Whether an answer says that this account may not ask, and nothing about what was asked."""
    return "User " in str(error) and " cannot " in str(error)


async def _secrets(
    api: KubeApi, key: Key, cluster: types.Manifest, children: Sequence[types.Manifest]
) -> tuple[str | None, types.HeldCertificates]:
    """Return what the Secrets say: the ticket key's rotation, and certificates with their CA."""
    uid = str(cluster["metadata"]["uid"])
    try:
        ticket_key = await api.read_ticket_key(key, uid) if children else None
        held = await api.read_certificates(key, uid)
    except ApiError as error:
        if error.reason != "Forbidden":
            raise
        # Few people may read Secrets. The operator has made these, and replaced them when asked.
        ticket_key = renewals.rotation_of(cluster) if children else None
        return ticket_key, renewals.certificates_as_due(children, time.time())
    return ticket_key, replace(held, authority=(held.issue or "").rpartition(".")[0])
