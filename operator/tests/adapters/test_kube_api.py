"""The adapters one by one, against a real API server."""

from __future__ import annotations

import base64
import copy
import time
from dataclasses import replace

import pytest
from operator_runs import CHILDREN, GROUP, cluster as pdcluster, create, events, get

from pdcluster_operator.adapters.api_server.client import KubeClient, NotFound
from pdcluster_operator.adapters.api_server.events import KubeEvents
from pdcluster_operator.adapters.api_server.kinds import BY_NAME, PDCLUSTER, WATCHED
from pdcluster_operator.adapters.api_server.kube_api import KubeApi
from pdcluster_operator.adapters.api_server.kubeconfig import find_configuration
from pdcluster_operator.adapters.engine_authority import EngineAuthority
from pdcluster_operator.api.conditions import ConditionType, set_conditions, yes
from pdcluster_operator.api.object_names import ROTATE_TICKET_KEY_ANNOTATION
from pdcluster_operator.plan.name_conflicts import NAME_CONFLICT
from pdcluster_operator.plan.objects.drift import is_settled
from pdcluster_operator.plan.objects.ownership import is_being_deleted
from pdcluster_operator.plan.planner import make_plan
from pdcluster_operator.plan.types import (
    Apply,
    ConnectorBundle,
    Delete,
    Event,
    HeldCertificates,
    Observed,
    TryOut,
    WriteCertificates,
    WriteTicketKey,
)
from pdcluster_operator.runtime.interfaces import (
    ApiError,
    Conflict,
    Invalid,
    Key,
    NamespaceTerminating,
)

pytestmark = pytest.mark.cluster

AUTHORITY, _ = EngineAuthority.new(time.time())
CONNECTOR = ConnectorBundle("c0ffee" + "0" * 58, b"PK-not-really-a-zip")


@pytest.fixture
def calls() -> list[str]:
    """Methods and answers of the client's calls."""
    return []


@pytest.fixture
async def client(real, namespace, calls):
    configuration = await find_configuration(str(real.folder / "operator.kubeconfig"))

    def seen(method, path, status, seconds):
        calls.append(f"{method} {status}")

    async with KubeClient(configuration, seen) as client:
        yield client


@pytest.fixture
def api(client):
    return KubeApi(client, AUTHORITY)


@pytest.fixture
def live(real, namespace):
    return create(real, namespace, pdcluster())


def applies(live) -> list[Apply]:
    plan = make_plan(Observed(live, (), (), {}, {}, CONNECTOR), 1_800_000_000.0)
    return [step for step in plan.steps if isinstance(step, Apply)]


def child(live, kind: str):
    return next(step.manifest for step in applies(live) if step.manifest["kind"] == kind)


def read(real, manifest):
    metadata = manifest["metadata"]
    path = CHILDREN[manifest["kind"]].format(metadata["namespace"])
    return real.call("GET", f"{path}/{metadata['name']}")


async def test_every_child_is_accepted_and_a_second_look_finds_nothing_to_do(real, api, live):
    for step in applies(live):
        await api.apply(step.manifest)
        _, kept = read(real, step.manifest)
        kept["kind"] = step.manifest["kind"]
        assert is_settled(kept, step.manifest, None), step.why


async def test_a_revision_that_lost_its_labels_gets_them_back_and_keeps_its_data(real, api, live):
    """No watch reports it then, and what is made again from its engines may lack something."""
    plan = make_plan(Observed(live, (), (), {}, {}, CONNECTOR), 1_800_000_000.0)
    revision = next(step.manifest for step in plan.steps if isinstance(step, TryOut))
    await api.apply(revision)
    kept = read(real, revision)[1]
    path = CHILDREN["ControllerRevision"].format(kept["metadata"]["namespace"])
    bare = {"metadata": {"labels": None}}
    real.call("PATCH", f"{path}/{kept['metadata']['name']}", bare, "application/merge-patch+json")
    answer = await api.apply({**revision, "data": {**revision["data"], "spec": {}}})
    assert answer["data"] == kept["data"]
    assert answer["metadata"]["labels"] == kept["metadata"]["labels"]


@pytest.mark.parametrize("field", [None, "notOfThisRelease"])
async def test_a_trial_refuses_a_pod_field_that_an_apply_would_refuse(api, live, field):
    """An older API server has fewer fields than a pod template of the spec may have."""
    await api.apply(child(live, "ServiceAccount"))
    plan = make_plan(Observed(live, (), (), {}, {}, CONNECTOR), 1_800_000_000.0)
    for trial in [step for step in plan.steps if isinstance(step, TryOut)]:
        engine, pod = copy.deepcopy(trial.tried)
        if field is None:
            await api.try_out(trial)
            continue
        engine["spec"]["template"]["spec"][field] = pod["spec"][field] = "x"
        for tried, path in ((engine, "spec.template.spec"), (pod, "spec")):
            with pytest.raises(ApiError, match=f'unknown field "{path}.{field}"') as refused:
                await api.try_out(replace(trial, tried=(tried,)))
            assert refused.value.reason == "TemplateRefused"


async def test_what_is_known_is_written_without_a_look(real, api, live, calls):
    kept = {}
    api.remember = lambda one: kept.update({(one["kind"], one["metadata"]["name"]): one})
    for step in applies(live):
        await api.apply(step.manifest)
    assert set(calls) == {"PATCH 201"}, "a child that is not there is created at once"
    calls.clear()
    for step in applies(live):
        metadata = step.manifest["metadata"]
        await api.apply(
            step.manifest, kept[step.manifest["kind"], metadata["name"]]["metadata"]["uid"]
        )
    assert set(calls) == {"PATCH 200"}
    calls.clear()
    await api.apply(child(live, "Service"))
    assert calls == ["PATCH 409", "GET 200", "PATCH 200"], "the store had not seen our own child"


async def test_a_child_that_was_made_anew_is_looked_at(real, api, live, namespace, calls):
    wanted = child(live, "Service")
    await api.apply(wanted, "the-uid-of-one-that-is-gone")
    assert calls == ["PATCH 409", "GET 404", "PATCH 201"]
    path = f"{CHILDREN['Service'].format(namespace)}/{wanted['metadata']['name']}"
    real.call("DELETE", path)
    theirs = copy.deepcopy(dict(wanted))
    theirs["metadata"]["ownerReferences"][0]["controller"] = False
    assert real.call("POST", CHILDREN["Service"].format(namespace), theirs)[0] == 201
    with pytest.raises(ApiError, match="does not belong to this PDCluster"):
        await api.apply(wanted, "the-uid-of-one-that-is-gone")


async def test_an_apply_that_changes_nothing_writes_nothing(real, api, live):
    def written(step):
        """Versions of objects that no controller writes to, and when we last wrote to others."""
        metadata = read(real, step.manifest)[1]["metadata"]
        ours = [one for one in metadata["managedFields"] if one["manager"] == "pdcluster-operator"]
        controlled = step.manifest["kind"] in ("StatefulSet", "Deployment", "PodDisruptionBudget")
        return ours, None if controlled else metadata["resourceVersion"]

    for step in applies(live):
        await api.apply(step.manifest)
        before = written(step)
        await api.apply(step.manifest)
        assert written(step) == before, step.why


async def test_a_repair_leaves_no_second_owner_of_a_field(real, api, live):
    """The repair's patch would own each field, too: a field that is not wanted any more stayed."""
    wanted = copy.deepcopy(dict(child(live, "Service")))
    wanted["spec"]["sessionAffinity"] = "ClientIP"
    await api.apply(wanted)
    metadata = wanted["metadata"]
    path = f"{CHILDREN['Service'].format(metadata['namespace'])}/{metadata['name']}"
    _, held = read(real, wanted)
    held["spec"]["ports"][0]["port"] = 9
    assert real.call("PUT", path, held)[0] == 200
    answer = await api.apply(wanted)
    assert is_settled({**answer, "kind": "Service"}, wanted, None)
    managers = {one["manager"] for one in read(real, wanted)[1]["metadata"]["managedFields"]}
    assert "pdcluster-operator-repair" not in managers
    assert "pdcluster-operator" in managers
    del wanted["spec"]["sessionAffinity"]
    await api.apply(wanted)
    kept = read(real, wanted)[1]["spec"]
    assert kept["sessionAffinity"] == "None"
    assert [port["port"] for port in kept["ports"]] == [
        port["port"] for port in wanted["spec"]["ports"]
    ]


async def test_objects_of_others_are_not_taken(real, api, live, namespace):
    wanted = child(live, "ServiceAccount")
    theirs = copy.deepcopy(dict(wanted))
    del theirs["metadata"]["ownerReferences"], theirs["metadata"]["namespace"]
    path = CHILDREN["ServiceAccount"].format(namespace)
    assert real.call("POST", path, theirs)[0] == 201
    with pytest.raises(ApiError, match="exists and does not belong to this PDCluster") as refused:
        await api.apply(wanted)
    assert refused.value.reason == NAME_CONFLICT
    assert "ownerReferences" not in read(real, wanted)[1]["metadata"]


async def test_an_object_that_comes_after_the_look_is_not_taken(
    real, api, client, live, namespace, monkeypatch
):
    wanted = child(live, "ServiceAccount")
    look = client.read

    async def before_they_come(path):
        assert await look(path) is None
        theirs = {"metadata": {"name": wanted["metadata"]["name"]}}
        assert real.call("POST", CHILDREN["ServiceAccount"].format(namespace), theirs)[0] == 201

    monkeypatch.setattr(client, "read", before_they_come)
    with pytest.raises(Conflict):
        await api.apply(wanted, "the-uid-of-one-that-is-gone")
    assert "ownerReferences" not in read(real, wanted)[1]["metadata"]


async def test_a_child_that_something_keeps_from_going_is_not_written_to(real, api, live):
    wanted = child(live, "Service")
    await api.apply(wanted)
    metadata = wanted["metadata"]
    path = f"{CHILDREN['Service'].format(metadata['namespace'])}/{metadata['name']}"
    merge = "application/merge-patch+json"
    real.call("PATCH", path, {"metadata": {"finalizers": ["tests.pdcluster.dev/hold"]}}, merge)
    real.call("DELETE", path)
    with pytest.raises(ApiError, match=metadata["name"]) as going:
        await api.apply(wanted)
    assert going.value.reason == "StillBeingDeleted"
    real.call("PATCH", path, {"metadata": {"finalizers": None}}, merge)
    await api.apply(wanted)
    assert "deletionTimestamp" not in read(real, wanted)[1]["metadata"]


async def test_a_deletion_takes_only_what_was_seen(real, api, live):
    wanted = child(live, "Service")
    await api.apply(wanted)
    metadata = read(real, wanted)[1]["metadata"]
    seen = {"uid": metadata["uid"], "resource_version": metadata["resourceVersion"]}

    def step(**change):
        where = ("Service", metadata["namespace"], metadata["name"])
        return Delete(*where, **{**seen, **change}, why="a test")

    for change in ({"uid": "another"}, {"resource_version": "1"}):
        with pytest.raises(Conflict):
            await api.delete(step(**change))
    assert read(real, wanted)[0] == 200
    await api.delete(step())
    assert read(real, wanted)[0] == 404
    await api.delete(step())


def key_step(live, *, rotate: bool = False) -> WriteTicketKey:
    held = "" if rotate else None
    plan = make_plan(Observed(live, (), (), {}, {}, CONNECTOR, held), 1_800_000_000.0)
    [step] = [step for step in plan.steps if isinstance(step, WriteTicketKey)]
    return step


async def test_the_ticket_key_is_minted_once_and_rotated(real, api, live, namespace):
    key, uid = Key(namespace, "tiny"), live["metadata"]["uid"]
    path = f"/api/v1/namespaces/{namespace}/secrets/tiny-ticket-key"

    def held() -> list[str]:
        return base64.b64decode(real.call("GET", path)[1]["data"]["ticket"]).decode().split()

    assert await api.read_ticket_key(key, uid) is None
    await api.write_ticket_key(key_step(live))
    [first] = held()
    assert await api.read_ticket_key(key, uid) == ""
    with pytest.raises(Conflict):
        await api.write_ticket_key(key_step(live))
    assert held() == [first], "what exists keeps its key"
    live["metadata"]["annotations"] = {ROTATE_TICKET_KEY_ANNOTATION: "1"}
    await api.write_ticket_key(key_step(live, rotate=True))
    assert held()[1:] == [first]
    assert await api.read_ticket_key(key, uid) == "1"
    owners = real.call("GET", path)[1]["metadata"]["ownerReferences"]
    assert [owner["uid"] for owner in owners] == [uid]
    with pytest.raises(ApiError, match="Secret tiny-ticket-key exists and does not") as caught:
        await api.read_ticket_key(key, "another")
    assert caught.value.reason == NAME_CONFLICT


async def test_a_ticket_key_that_somebody_emptied_is_made_again(real, api, live, namespace):
    key, uid = Key(namespace, "tiny"), live["metadata"]["uid"]
    path = f"/api/v1/namespaces/{namespace}/secrets/tiny-ticket-key"
    await api.write_ticket_key(key_step(live))
    merge = "application/merge-patch+json"
    assert real.call("PATCH", path, {"data": {"ticket": ""}}, merge)[0] == 200
    assert await api.read_ticket_key(key, uid) is None
    await api.write_ticket_key(key_step(live))
    assert await api.read_ticket_key(key, uid) == ""
    assert len(base64.b64decode(real.call("GET", path)[1]["data"]["ticket"]).split()) == 1


async def test_secrets_that_somebody_made_immutable_are_named(real, api, live, namespace):
    live["spec"]["transfer"] = {**live["spec"].get("transfer", {}), "tls": "Enabled"}
    observed = Observed(live, (), (), {}, {}, CONNECTOR, "")
    [wanted] = [
        one for one in make_plan(observed, 1.8e9).steps if isinstance(one, WriteCertificates)
    ]
    await api.write_ticket_key(key_step(live))
    await api.write_certificates(wanted)
    merge = "application/merge-patch+json"
    for name in ("tiny-ticket-key", "tiny-certificates"):
        path = f"/api/v1/namespaces/{namespace}/secrets/{name}"
        assert real.call("PATCH", path, {"immutable": True}, merge)[0] == 200
    live["metadata"]["annotations"] = {ROTATE_TICKET_KEY_ANNOTATION: "1"}
    held = await api.read_certificates(Key(namespace, "tiny"), live["metadata"]["uid"])
    later = replace(wanted, start=wanted.start + 9e6, end=wanted.end + 9e6, uid=held.uid)
    for write in (api.write_ticket_key(key_step(live, rotate=True)), api.write_certificates(later)):
        with pytest.raises(
            ApiError, match="is immutable, so it cannot be changed: delete it"
        ) as no:
            await write
        assert no.value.reason == "Immutable"


async def test_no_key_is_written_into_a_secret_that_has_come_instead(real, api, live, namespace):
    live["metadata"]["annotations"] = {ROTATE_TICKET_KEY_ANNOTATION: "1"}
    with pytest.raises(Conflict, match="was deleted"):
        await api.write_ticket_key(key_step(live, rotate=True))
    theirs = {"metadata": {"name": "tiny-ticket-key"}, "data": {"password": "c2VjcmV0"}}
    path = f"/api/v1/namespaces/{namespace}/secrets"
    assert real.call("POST", path, theirs)[0] == 201
    with pytest.raises(ApiError, match="Secret tiny-ticket-key exists and does not") as caught:
        await api.write_ticket_key(key_step(live, rotate=True))
    assert caught.value.reason == NAME_CONFLICT
    assert real.call("GET", f"{path}/tiny-ticket-key")[1]["data"] == theirs["data"]


async def test_certificates_come_and_go_with_their_engines(real, api, live, namespace):
    key, uid = Key(namespace, "tiny"), live["metadata"]["uid"]
    path = f"/api/v1/namespaces/{namespace}/secrets/tiny-certificates"
    seen = []
    api.remember = seen.append
    live["spec"]["transfer"] = {**live["spec"].get("transfer", {}), "tls": "Enabled"}

    def steps(held: HeldCertificates) -> list[WriteCertificates]:
        observed = Observed(live, (), (), {}, {}, CONNECTOR, "", held)
        planned = make_plan(observed, 1_800_000_000.0).steps
        return [step for step in planned if isinstance(step, WriteCertificates)]

    assert await api.read_certificates(key, uid) == HeldCertificates(AUTHORITY.fingerprint)
    [wanted] = steps(await api.read_certificates(key, uid))
    gone = replace(wanted, engines={**wanted.engines, "prefill-bbbbb-7": "ns.tiny.prefill.bbbbb.7"})
    for written in (gone, wanted, wanted):
        await api.write_certificates(written)
        assert (await api.read_certificates(key, uid)).engines == written.engines.keys()
    assert steps(await api.read_certificates(key, uid)) == []
    data = real.call("GET", path)[1]["data"]
    assert data.keys() == {"ca.crt", *(f"{one}.{end}" for one in wanted.engines
                                       for end in ("crt", "key"))}  # fmt: skip
    assert seen == [], "keys are not for the store"
    with pytest.raises(ApiError, match="Secret tiny-certificates exists and does not") as caught:
        await api.read_certificates(key, "another")
    assert caught.value.reason == NAME_CONFLICT


async def test_certificates_are_written_with_one_request(real, api, live, namespace, calls):
    key, uid = Key(namespace, "tiny"), live["metadata"]["uid"]

    async def write(now: float, held: HeldCertificates) -> list[str]:
        """Write what a plan of that moment has; return the requests that it took."""
        observed = Observed(live, (), (), {}, {}, CONNECTOR, "", held)
        [step] = [s for s in make_plan(observed, now).steps if isinstance(s, WriteCertificates)]
        calls.clear()
        await api.write_certificates(step)
        return list(calls)

    month = 30 * 86_400.0
    assert await write(month, await api.read_certificates(key, uid)) == ["PATCH 201"]
    held = await api.read_certificates(key, uid)
    assert await write(2 * month, held) == ["PATCH 200"]
    assert (
        real.call("DELETE", f"/api/v1/namespaces/{namespace}/secrets/tiny-certificates")[0] == 200
    )
    assert await write(3 * month, held) == ["PATCH 409", "GET 404", "PATCH 201"]


def written(cluster):
    """The status without the CRD's default conditions. The operator writes over each of them."""
    status = dict(cluster["status"])
    ours = [one for one in status.pop("conditions", ()) if one["reason"] != "NotSeenYet"]
    return status | ({"conditions": ours} if ours else {})


async def test_status_is_written_by_a_manager_of_its_own(real, api, live, namespace):
    key, uid = Key(namespace, "tiny"), live["metadata"]["uid"]
    await api.write_status(key, uid, status("one"))
    kept = get(real, namespace)
    assert written(kept) == status("one"), "nothing is pruned"
    assert kept["metadata"]["generation"] == live["metadata"]["generation"]
    managers = {entry["manager"] for entry in kept["metadata"]["managedFields"]}
    assert "pdcluster-operator-status" in managers
    assert "pdcluster-operator" not in managers
    assert "annotations" not in kept["metadata"]
    assert "finalizers" not in kept["metadata"]
    await api.write_status(key, uid, {"model": "one"})
    assert "conditions" not in written(get(real, namespace)), "what is left out goes away"


async def test_a_status_is_written_without_a_look_while_the_cluster_is_as_seen(
    real, api, live, namespace, calls
):
    key, metadata = Key(namespace, "tiny"), live["metadata"]
    await api.write_status(key, metadata["uid"], status("one"), metadata["resourceVersion"])
    assert calls == ["PATCH 200"]
    calls.clear()
    await api.write_status(key, metadata["uid"], status("two"), metadata["resourceVersion"])
    assert calls == ["PATCH 409", "GET 200", "PATCH 200"]
    assert written(get(real, namespace)) == status("two")
    await api.write_status(key, "another", status("three"), metadata["resourceVersion"])
    assert written(get(real, namespace)) == status("two")


async def test_the_status_of_a_cluster_that_was_made_anew_stays(real, api, live, namespace):
    await api.write_status(Key(namespace, "tiny"), "another", {"model": "one"})
    assert written(get(real, namespace)) == {}
    await api.write_status(Key(namespace, "gone"), "another", {"model": "one"})
    assert get(real, namespace, "gone")["code"] == 404, "a status creates no object"


async def test_what_is_read_is_what_there_is_and_that_its_deletion_began(
    real, api, live, namespace
):
    place = "PDCluster", namespace, "tiny"
    assert (await api.read(*place))["metadata"]["uid"] == live["metadata"]["uid"]
    assert await api.read("PDCluster", namespace, "gone") is None
    path = f"{GROUP}/namespaces/{namespace}/pdclusters/tiny"
    held = {"metadata": {"finalizers": ["tests.pdcluster.dev/hold"]}}
    real.call("PATCH", path, held, "application/merge-patch+json")
    real.call("DELETE", path)
    assert is_being_deleted(await api.read(*place))
    real.call("PATCH", path, {"metadata": {"finalizers": None}}, "application/merge-patch+json")


async def test_lists_hold_every_page_and_only_what_is_ours(real, api, live, namespace):
    for number in range(4):
        create(real, namespace, pdcluster(f"more-{number}"))
    assert len(await api.list(replace(PDCLUSTER, page=2), namespace)) == 5
    other = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "other"}}
    other["spec"] = {"ports": [{"port": 80}]}
    assert real.call("POST", CHILDREN["Service"].format(namespace), other)[0] == 201
    for step in applies(live):
        await api.apply(step.manifest)
    for kind in WATCHED:
        if kind.name == "PodGroup":  # not served here
            continue
        found = await api.list(kind, namespace)
        wanted = {
            step.manifest["metadata"]["name"]
            for step in applies(live)
            if step.manifest["kind"] == kind.name
        }
        assert wanted <= {one["metadata"]["name"] for one in found}
        assert all(one["kind"] == kind.name and "apiVersion" in one for one in found)
        assert not any("managedFields" in one["metadata"] for one in found)
        assert "other" not in {one["metadata"]["name"] for one in found}


async def test_answers_are_told_to_whoever_wants_to_remember(api, live, namespace):
    seen = []
    api.remember = seen.append
    await api.apply(child(live, "Service"))
    await api.write_status(Key(namespace, "tiny"), live["metadata"]["uid"], {"model": "one"})
    assert [one["kind"] for one in seen] == ["Service", "PDCluster"]
    assert all(one["metadata"]["resourceVersion"] for one in seen)


async def test_refusals_are_told_apart(real, client, live, namespace):
    service = copy.deepcopy(child(live, "Service"))
    service["spec"]["ports"][0]["port"] = 99_999
    with pytest.raises(Invalid):
        await KubeApi(client, AUTHORITY).apply(service)
    with pytest.raises(NotFound):
        await client.call("GET", BY_NAME["Pod"].path(namespace, "nobody"))
    with pytest.raises(ApiError) as forbidden:
        await client.call("GET", BY_NAME["Pod"].path("default", "nobody"))
    assert forbidden.value.reason == "Forbidden"


async def test_a_server_that_is_gone_is_an_error_that_passes(real):
    configuration = await find_configuration(str(real.folder / "operator.kubeconfig"))
    configuration.host = "https://127.0.0.1:1"
    seen = []
    async with KubeClient(configuration, lambda *call: seen.append(call)) as client:
        with pytest.raises(ApiError) as gone:
            await client.call("GET", "/version")
    assert gone.value.reason == "ApiServerUnreachable"
    assert seen[0][:3] == ("GET", "/version", 0)


async def test_an_event_that_repeats_is_counted(real, client, live, namespace):
    now = [1_800_000_000.0]
    sink = KubeEvents(client, lambda: now[0])
    flip = Event("Warning", "EngineFailed", "PrefillReady is False: it died")
    for _ in range(3):
        await sink.publish(live, [flip])
        now[0] += 60
    await sink.publish(live, [Event("Normal", "EnginesReady", "PrefillReady is True")])
    first, second = sorted(events(real, namespace), key=lambda event: event["type"], reverse=True)
    assert first["note"] == flip.message
    assert first["series"]["count"] == 3
    assert first["regarding"]["uid"] == live["metadata"]["uid"]
    assert first["regarding"]["kind"] == "PDCluster"
    assert "series" not in second
    now[0] += 4000
    await sink.publish(live, [flip])
    assert len(events(real, namespace)) == 3, "long after, it is news again"


async def test_an_event_that_the_server_forgot_is_posted_again(real, client, live, namespace):
    sink = KubeEvents(client)
    flip = Event("Warning", "EngineFailed", "it died")
    await sink.publish(live, [flip])
    path = f"/apis/events.k8s.io/v1/namespaces/{namespace}/events"
    real.call("DELETE", f"{path}/{events(real, namespace)[0]['metadata']['name']}")
    await sink.publish(live, [flip])
    assert len(events(real, namespace)) == 1


async def test_a_namespace_that_is_being_deleted_is_told_apart(real, client, live, namespace):
    path = f"/api/v1/namespaces/{namespace}"
    kept = {"metadata": {"name": "kept", "finalizers": ["example.com/kept"]}}
    real.call("POST", f"{path}/configmaps", kept)
    real.call("DELETE", path)
    try:
        with pytest.raises(NamespaceTerminating):
            await KubeEvents(client).publish(live, [Event("Normal", "Accepted", "too late")])
        with pytest.raises(NamespaceTerminating):
            await KubeApi(client, AUTHORITY).apply(child(live, "Service"))
    finally:
        merge = "application/merge-patch+json"
        real.call("PATCH", f"{path}/configmaps/kept", {"metadata": {"finalizers": None}}, merge)


async def test_losing_an_event_is_no_failure(client, live):
    gone = {**live, "metadata": {**live["metadata"], "namespace": "no-such-namespace"}}
    await KubeEvents(client).publish(gone, [Event("Normal", "Accepted", "lost")])


def status(model: str):
    verdicts = [(ConditionType.ACCEPTED, yes("Accepted", "fine"))]
    return {
        "observedGeneration": 1,
        "model": model,
        "endpoint": "",
        "failedLinks": [],
        "engines": [
            {"name": "a", "role": "prefill", "state": "Ready", "engineId": "", "message": ""}
        ],
        "conditions": set_conditions({}, verdicts, 1, 1_800_000_000.0),
    }
