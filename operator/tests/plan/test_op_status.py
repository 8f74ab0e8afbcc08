"""Every reason that a condition can have is provoked here, by what would provoke it."""

from __future__ import annotations

import copy
from dataclasses import replace

import jsonschema
import msgspec
import pytest
from hypothesis import given, settings, strategies as st
from msgspec import structs
from simulated_cluster import START, SimulatedCluster, brought_up, manifest
from valid_specs import manifests

from launcher_answers import decode_engine, decode_links
from pdcluster_connector.protocol.launcher_documents import (
    CanaryReport,
    CanaryState,
    EngineReport,
    EngineState,
    LinksReport,
    LinkState,
)
from pdcluster_connector.protocol.load_report import ReceiveRate
from pdcluster_operator.adapters.api_server.kinds import BY_NAME, slim
from pdcluster_operator.api.conditions import no, timestamp
from pdcluster_operator.api.findings import Rule
from pdcluster_operator.api.schema.status_schema import status_schema
from pdcluster_operator.api.spec.parse import parse_cluster
from pdcluster_operator.plan.objects.drift import rewrite_of
from pdcluster_operator.plan.observed.routers import served_key, why_unreachable
from pdcluster_operator.plan.planner import make_plan
from pdcluster_operator.plan.renewals import DAY
from pdcluster_operator.plan.status.progress import with_failure
from pdcluster_operator.plan.types import Place

STATUS = jsonschema.Draft202012Validator(status_schema())


@pytest.fixture
def world():
    return SimulatedCluster(manifest())


def is_(world, kind, status, reason, *words):
    condition = world.condition(kind)
    assert (condition["status"], condition["reason"]) == (status, reason), condition
    for word in words:
        assert word in condition["message"]
    assert condition["observedGeneration"] == world.cluster["metadata"]["generation"]


@pytest.mark.parametrize("change", ["missing", "of a stranger", "elsewhere", "more", "nothing"])
def test_without_a_service_that_reaches_the_routers_nothing_is_available(world, change):
    world.bring_up()
    name = "Service", "llama-router"
    if change in ("missing", "of a stranger"):  # which the store shows to no PDCluster
        del world.children[name]
    else:
        selector = world.children[name]["spec"]["selector"]
        labels = {"elsewhere": {"pdcluster.dev/pairing-key": "other"}, "more": {"app": "x"}}
        selector |= labels.get(change, {}) if change != "nothing" else {}
        if change == "nothing":
            selector.clear()
    plan = world.plan()
    assert [step.manifest["metadata"]["name"] for step in plan.steps] == [name[1]]
    world.cluster["status"] = dict(plan.status)
    for kind in ("Available", "Ready"):
        is_(world, kind, "False", "RouterUnavailable", "" if change == "elsewhere" else "Service")
    world.settle()
    world.step()
    is_(world, "Ready", "True", "Ready")


@pytest.mark.parametrize("key", [{}, {"apiKeySecretRef": {"name": "api"}}], ids=["open", "gated"])
def test_nobody_sees_which_engines_routers_with_arguments_of_the_user_know(key):
    own = {"name": "router", "args": ["--service-discovery", "--selector", "app=x"]}
    template = {"spec": {"containers": [own]}}
    world = SimulatedCluster(manifest(router={**key, "podTemplate": template}))
    world.bring_up()
    is_(world, "Available", "True", "Serving")
    is_(world, "Ready", "True", "Ready")


def test_a_status_is_made_of_what_is_seen_although_the_secrets_cannot_be_read(world):
    """A backup was restored without owner references, and then the engines die."""
    world.bring_up()
    world.unread = no("NameConflict", "Secret llama-ticket-key exists and does not belong to us")
    assert world.step().steps == ()
    is_(world, "Available", "True", "Serving")
    for kind in ("Progressing", "Ready"):
        is_(world, kind, "False", "NameConflict", "llama-ticket-key")
    for role in ("prefill", "decode"):
        container(world, role, {"terminated": {"exitCode": 1, "message": "CUDA error"}})
    assert world.step().steps == ()
    for kind in ("Available", "PrefillReady", "DecodeReady", "Ready"):
        assert world.condition(kind)["status"] == "False", kind
    is_(world, "Ready", "False", "EngineFailed", "CUDA error")
    is_(world, "Progressing", "False", "NameConflict")
    world.unread = None
    world.others_act()
    world.settle()
    is_(world, "Ready", "True", "Ready")


def test_while_the_secrets_cannot_be_read_clients_are_served_and_no_engine_comes_or_goes(world):
    world.edit(decode={"replicas": 2})
    world.bring_up()
    world.unread = no("Forbidden", "secrets is forbidden")
    before = {name for name in world.children if name[0] == "StatefulSet"}
    world.children.pop(("Service", "llama-router"))
    world.edit(decode={"replicas": 3}, engine={"blockSize": 32}, rollout={"type": "Recreate"})
    for _ in range(4):
        world.step()
        world.others_act()
    assert {name for name in world.children if name[0] == "StatefulSet"} == before
    assert ("Service", "llama-router") in world.children
    is_(world, "Available", "True", "Serving")
    new = SimulatedCluster(manifest())
    new.unread = world.unread
    assert new.step().steps == ()
    is_(new, "Progressing", "False", "Forbidden")


@pytest.mark.parametrize("way", ["Recreate", "Surge"])
def test_while_the_secrets_cannot_be_read_no_rollout_begins(way):
    """The spec goes back to a revision that was tried out already."""
    world = SimulatedCluster(manifest(rollout={"type": way}))
    world.bring_up()
    first = copy.deepcopy(world.cluster["spec"])
    world.edit(engine={"blockSize": 32})
    for _ in range(12):
        world.step()
        world.others_act()
    is_(world, "Ready", "True", "Ready")
    world.unread = no("Forbidden", "secrets is forbidden")
    world.cluster["spec"] = first
    world.cluster["metadata"]["generation"] += 1
    for _ in range(6):
        world.step()
        world.others_act()
        is_(world, "Available", "True", "Serving")
    assert world.condition("Ready")["status"] == "False"


def test_a_label_that_a_webhook_adds_to_selector_and_pods_changes_nothing(world):
    """The operator has noted that its Service is always changed, and leaves it."""
    world.bring_up()
    name = "Service", "llama-router"
    desired = copy.deepcopy(world.children[name])
    world.children[name]["spec"]["selector"]["tenant"] = "blue"
    seen, cluster = world.observed(), parse_cluster(manifest()).cluster
    assert why_unreachable(seen, cluster, accepted=True)
    note = rewrite_of(slim(copy.deepcopy(world.children[name]), BY_NAME["Service"]), desired)
    noted = replace(seen, rewrites={name: note})
    assert why_unreachable(noted, cluster, accepted=True) == ""
    assert served_key(noted, cluster)


@pytest.mark.parametrize("label", ["pdcluster.dev/cluster", "app.kubernetes.io/component"])
def test_a_service_that_selects_other_pods_reaches_no_router_whatever_was_noted(world, label):
    world.bring_up()
    name = "Service", "llama-router"
    desired = copy.deepcopy(world.children[name])
    world.children[name]["spec"]["selector"][label] = "other"
    note = rewrite_of(slim(copy.deepcopy(world.children[name]), BY_NAME["Service"]), desired)
    cluster = parse_cluster(manifest()).cluster
    noted = replace(world.observed(), rewrites={name: note})
    assert served_key(noted, cluster) == ""
    assert "selects other pods" in why_unreachable(noted, cluster, accepted=True)


def container(world, role, state, last=None):
    name = world.leaders(role)[0].pod()
    status = {"name": "engine", "state": state, "lastState": last or {}}
    world.pods[name]["status"] |= {
        "containerStatuses": [status],
        "conditions": [{"type": "Ready", "status": "False"}],
    }


def test_from_nothing_to_ready(world):
    world.step()
    is_(world, "Accepted", "True", "PartiallyChecked", "layers")
    is_(world, "PrefillReady", "False", "PodsMissing", "0 of 1")
    is_(world, "KVLinksEstablished", "Unknown", "WaitingForEngines")
    is_(world, "KVPathVerified", "Unknown", "WaitingForEngines")
    is_(world, "TransportHealthy", "Unknown", "BandwidthUnmeasured", "not every link")
    is_(world, "Available", "False", "RouterUnavailable")
    is_(world, "Ready", "False", "PodsMissing")
    is_(world, "Progressing", "True", "PodsMissing")
    world.make_pods()
    world.step()
    is_(world, "PrefillReady", "False", "ContainerCreating")
    world.run_pods()
    world.speak()
    world.step()
    is_(world, "PrefillReady", "True", "EnginesReady", "1 of 1")
    is_(world, "DecodeReady", "True", "EnginesReady")
    world.link(state=LinkState.PENDING)
    world.step()
    is_(world, "KVLinksEstablished", "Unknown", "LinksPending")
    world.link(canary=CanaryReport())
    world.route()
    world.step()
    is_(world, "KVLinksEstablished", "True", "LinksEstablished", "1 of 1")
    is_(world, "TransportHealthy", "True", "NoThreshold")
    is_(world, "KVPathVerified", "Unknown", "CanaryPending")
    is_(world, "Available", "False", "NoVerifiedPair")
    is_(world, "Ready", "Unknown", "CanaryPending")
    world.link()
    plan = world.step()
    is_(world, "KVPathVerified", "True", "CanaryPassed")
    is_(world, "Available", "True", "Serving")
    is_(world, "Ready", "True", "Ready")
    is_(world, "Progressing", "False", "Complete")
    assert [e.message.split(" is ")[0] for e in plan.events] == ["Ready"], "it says it all"
    status = world.cluster["status"]
    assert (status["prefill"], status["decode"], status["links"]) == ("1/1", "1/1", "1/1")
    assert status["endpoint"] == "http://llama-router.default.svc:8000"
    assert status["observedGeneration"] == 1


def test_a_start_that_goes_well_is_one_event(world):
    """An event for each flip on the way would be a dozen, one of them a warning."""
    told = [*world.step().events]
    world.make_pods()
    told += world.step().events
    world.run_pods()
    told += world.step().events
    world.speak()
    told += world.step().events
    world.link(state=LinkState.PENDING)
    world.route()
    told += world.step().events
    world.link(canary=CanaryReport())
    told += world.step().events
    world.link()
    told += world.step().events
    is_(world, "Ready", "True", "Ready")
    assert [(event.type, event.message.split(" is ")[0]) for event in told] == [("Normal", "Ready")]


def test_trouble_is_an_event_whether_it_comes_in_a_start_or_later(world):
    world.step()
    world.run_pods()
    world.speak()
    world.step()
    world.link(state=LinkState.FAILED, reason="HandshakeFailed")
    events = world.step().events
    assert {e.message.split(" is ")[0] for e in events} == {"KVLinksEstablished"}
    world.link()
    world.route()
    world.step()
    is_(world, "Ready", "True", "Ready")
    world.links.clear()
    lost = [event.message.split(" is ")[0] for event in world.step().events]
    assert sorted(lost) == ["Available", "Ready"]
    world.link()
    assert [event.reason for event in world.step().events] == ["Ready"]


def test_an_image_that_cannot_be_pulled():
    world = brought_up()
    waiting = {"reason": "ImagePullBackOff", "message": 'Back-off pulling image "nowhere/x:1"'}
    container(world, "prefill", {"waiting": waiting})
    world.step()
    is_(world, "PrefillReady", "False", "ImageUnavailable", "nowhere/x:1", "llama-prefill")
    is_(world, "Ready", "False", "ImageUnavailable")


def test_a_pod_that_names_a_missing_secret():
    world = brought_up()
    waiting = {"reason": "CreateContainerConfigError", "message": 'secret "hf" not found'}
    container(world, "decode", {"waiting": waiting})
    world.step()
    is_(world, "DecodeReady", "False", "PodConfigError", 'secret "hf" not found')


def test_a_pod_that_fits_on_no_node(world):
    world.step()
    world.make_pods()
    for pod in world.pods.values():
        message = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."
        scheduled = {"type": "PodScheduled", "status": "False", "message": message}
        pod["status"] = {"phase": "Pending", "conditions": [scheduled]}
    world.step()
    is_(world, "PrefillReady", "False", "Unschedulable", "Insufficient nvidia.com/gpu")


def gated(world, role, *gates):
    """Let pods of a role have scheduling gates, as the API server tells of them."""
    for pod in world.pods.values():
        if pod["metadata"]["labels"]["pdcluster.dev/role"] == role:
            kueue = {"queue-name": "team-a", "pod-group-name": "statefulset-llama-1a2b3"}
            pod["metadata"]["labels"] |= {f"kueue.x-k8s.io/{key}": kueue[key] for key in kueue}
            pod["spec"]["schedulingGates"] = [{"name": gate} for gate in gates]
            message = "Scheduling is blocked due to non-empty scheduling gates"
            scheduled = {"type": "PodScheduled", "status": "False", "reason": "SchedulingGated"}
            scheduled["message"] = message
            pod["status"] = {"phase": "Pending", "conditions": [scheduled]}


def test_a_pod_that_kueue_has_not_admitted(world):
    world.step()
    world.make_pods()
    gated(world, "decode", "kueue.x-k8s.io/admission", "kueue.x-k8s.io/topology")
    world.step()
    said = ("LocalQueue team-a;", "describe workloads.kueue.x-k8s.io statefulset-llama-1a2b3 says")
    is_(world, "PrefillReady", "False", "ContainerCreating")
    is_(world, "DecodeReady", "False", "SchedulingGated", *said)
    is_(world, "Ready", "False", "SchedulingGated", *said)
    gated(world, "decode")  # admitted, and the scheduler has not looked at it yet
    world.step()
    is_(world, "DecodeReady", "False", "ContainerCreating")


def test_a_pod_with_a_scheduling_gate_of_somebody_else(world):
    world.step()
    world.make_pods()
    gated(world, "prefill", "example.com/license")
    world.step()
    is_(world, "PrefillReady", "False", "SchedulingGated", "scheduling gate example.com/license")
    assert "Kueue" not in world.condition("PrefillReady")["message"]


@pytest.mark.parametrize("back_off", [False, True])
def test_an_engine_that_dies_shows_its_last_words(back_off):
    world = brought_up()
    end = {"terminated": {"exitCode": 137, "reason": "OOMKilled", "message": "out of memory\n"}}
    if back_off:
        container(world, "prefill", {"waiting": {"reason": "CrashLoopBackOff"}}, end)
    else:
        container(world, "prefill", end)
    world.step()
    is_(world, "PrefillReady", "False", "EngineFailed", "out of memory", "137", "OOMKilled")
    is_(world, "Ready", "False", "EngineFailed", "out of memory")


def test_a_container_that_somebody_else_put_in_the_pod_is_not_taken_for_the_engine():
    """A webhook may add a sidecar."""
    world = brought_up()
    stuck = {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}
    for first in (True, False):
        name = world.leaders("decode")[0].pod()
        runs = {"name": "engine", "state": {"running": {}}, "lastState": {}}
        other = {"name": "agent", "state": stuck, "lastState": {}}
        world.pods[name]["status"] |= {
            "containerStatuses": [other, runs] if first else [runs, other],
            "conditions": [{"type": "Ready", "status": "True"}],
        }
        world.step()
        is_(world, "DecodeReady", "True", "EnginesReady")
    container(world, "decode", stuck)
    world.step()
    is_(world, "DecodeReady", "False", "ImageUnavailable", "no such image")


def test_last_words_are_still_there_while_it_starts_again():
    world = brought_up()
    end = {"terminated": {"exitCode": 1, "message": "no such model"}}
    container(world, "prefill", {"running": {}}, end)
    del world.engines[world.leaders("prefill")[0].logical]
    world.step()
    again = "the launcher does not answer yet; started again; its last process ended: no such model"
    is_(world, "PrefillReady", "False", "Starting", f"{again} (exit code 1)")


@pytest.mark.parametrize(
    ("state", "message", "words"),
    [
        (
            "Starting",
            "starting vLLM",
            "starting again; its last process ended: no such model (exit code",
        ),
        (
            "LoadingWeights",
            "shard 1 of 2",
            "shard 1 of 2; started again; its last process ended: no such",
        ),
        ("Draining", "waiting for 1 request", "Draining: waiting for 1 request"),
    ],
)
def test_a_start_after_a_death_says_so(state, message, words):
    world = brought_up()
    end = {"terminated": {"exitCode": 1, "message": "no such model"}}
    container(world, "prefill", {"running": {}}, end)
    logical = world.leaders("prefill")[0].logical
    world.engines[logical] = structs.replace(
        world.engines[logical], ready=False, state=state, message=message
    )
    world.step()
    is_(world, "PrefillReady", "False", state, words)
    told = world.condition("PrefillReady")["message"]
    assert "died" not in told
    assert ("no such model" in told) is (state != "Draining")


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("", "out of memory: the kernel killed it; raise its memory limit (resources), or lower "),
        ("INFO 11-21 a line of the log", "lower its KV cache: INFO 11-21 a line of the log (exit"),
        ("out of memory: the kernel killed X; do this", "died: out of memory: the kernel killed X"),
    ],
)
def test_the_kubelets_word_on_memory_comes_first(said, words):
    world = brought_up()
    end = {"terminated": {"exitCode": 137, "reason": "OOMKilled", "message": said}}
    container(world, "decode", {"waiting": {"reason": "CrashLoopBackOff"}}, end)
    world.step()
    is_(world, "DecodeReady", "False", "EngineFailed", "the engine died: out of memory", words)
    assert "(exit code 137, OOMKilled)" in world.condition("DecodeReady")["message"]


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        ("Starting", "Starting"),
        ("LoadingWeights", "LoadingWeights"),
        ("WarmingUp", "WarmingUp"),
        ("Draining", "Draining"),
        ("Failed", "EngineFailed"),
        ("Frozen", "EngineFrozen"),
        ("SomethingNewer", "Starting"),
    ],
)
def test_what_the_launcher_says_while_not_ready(state, reason):
    world = brought_up()
    logical = world.leaders("decode")[0].logical
    world.engines[logical] = structs.replace(
        world.engines[logical], ready=False, state=state, message="because"
    )
    world.step()
    is_(world, "DecodeReady", "False", reason, "because")


LIVENESS = {"httpGet": {"path": "/health", "port": 8000}, "failureThreshold": 5}
NOTHING = "without a livenessProbe, nothing starts it again"
RESTARTS = "its livenessProbe starts it again if it fails 5 times, 10 s apart"


def with_container(template):
    return brought_up(decode={"podTemplate": {"spec": {"containers": [template]}}})


def silent_decode(container, template=None, ready="False", **more):
    """The decode launcher answers nobody, and its pod is not ready."""
    world = with_container(template or {"name": "engine"})
    name = world.leaders("decode")[0]
    del world.engines[name.logical]
    world.pods[name.pod()]["status"] |= {
        "conditions": [{"type": "Ready", "status": ready, **more}],
        "containerStatuses": [{"name": "engine", "state": {"running": {}}, **container}],
    }
    world.step()
    return world, name.pod()


@pytest.mark.parametrize(
    ("template", "becomes"),
    [({"name": "engine"}, NOTHING), ({"name": "engine", "livenessProbe": LIVENESS}, RESTARTS)],
)
def test_a_frozen_engine_is_named_with_what_becomes_of_it(template, becomes):
    world = with_container(template)
    name = world.leaders("decode")[0]
    world.engines[name.logical] = structs.replace(
        world.engines[name.logical], ready=False, state="Frozen", message="why (since t)"
    )
    world.step()
    for kind in ("DecodeReady", "Ready"):
        is_(world, kind, "False", "EngineFrozen", f"{name.pod()}: why (since t); {becomes}")
    world, pod = silent_decode({"started": True, "ready": False}, template)
    is_(world, "DecodeReady", "False", "ContainerFrozen", f"container of {pod} runs, but", becomes)


def test_a_silent_launcher_is_frozen_or_on_a_lost_node_only_if_kubernetes_shows_it():
    for shown in ({"started": False, "ready": False}, {"ready": False}, {}):
        world, _ = silent_decode(shown)
        is_(world, "DecodeReady", "False", "Starting", "the launcher does not answer yet")
    ran = {"started": True, "ready": True}
    world, pod = silent_decode(ran)
    is_(world, "DecodeReady", "False", "NodeNotReady", f"node node of {pod} does not report")
    world, _ = silent_decode(ran, ready="True")
    is_(world, "DecodeReady", "Unknown", "LauncherUnreachable")


def test_an_engine_without_a_startup_probe_or_behind_a_readiness_gate_may_only_start():
    own = {"name": "engine", "startupProbe": None}
    world, _ = silent_decode({"started": True, "ready": False}, own)
    is_(world, "DecodeReady", "False", "Starting")
    world, _ = silent_decode({"started": True, "ready": True}, reason="ReadinessGatesNotReady")
    is_(world, "DecodeReady", "False", "Starting")


def test_a_pod_that_is_being_deleted_drains():
    world = brought_up()
    pod = world.pods[world.leaders("decode")[0].pod()]
    pod["metadata"]["deletionTimestamp"] = timestamp(world.now + 30)
    world.step()
    is_(world, "DecodeReady", "False", "Draining")


def test_an_operator_that_reaches_no_pod_says_unknown_and_changes_nothing():
    world = brought_up()
    world.engines.clear()
    world.links.clear()
    plan = world.step()
    assert plan.steps == ()
    for kind in ("PrefillReady", "DecodeReady", "KVLinksEstablished", "KVPathVerified",
                 "Available", "Ready"):  # fmt: skip
        is_(world, kind, "Unknown", "LauncherUnreachable")
    engines = world.cluster["status"]["engines"]
    assert {engine["state"] for engine in engines} == {"Unknown"}
    assert all(engine["engineId"].endswith("/0123456789abcdef") for engine in engines)


def test_a_follower_that_is_not_ready_keeps_its_engine_from_being_ready():
    world = brought_up(prefill={"parallelism": {"tensor": 2, "nodes": 2}})
    is_(world, "Ready", "True", "Ready")
    name = world.leaders("prefill")[0].pod(1)
    world.pods[name]["status"]["conditions"] = [{"type": "Ready", "status": "False"}]
    world.step()
    is_(world, "PrefillReady", "False", "Starting", name)
    del world.pods[name]
    world.step()
    is_(world, "PrefillReady", "False", "PodsMissing", "1 of 2")


def test_of_several_followers_the_first_that_is_not_ready_is_named():
    world = brought_up(prefill={"parallelism": {"tensor": 3, "nodes": 3}})
    engine = world.leaders("prefill")[0]
    world.pods = dict(reversed(world.pods.items()))
    for node in (2, 1):
        world.pods[engine.pod(node)]["status"]["conditions"] = [
            {"type": "Ready", "status": "False"}
        ]
        world.step()
        is_(world, "PrefillReady", "False", "Starting", f"{engine.pod(node)} is not ready")


@pytest.mark.parametrize("answers", [True, False])
def test_of_several_pods_the_first_says_how_the_engine_ended_before(answers):
    world = brought_up(prefill={"parallelism": {"tensor": 2, "nodes": 2}})
    engine = world.leaders("prefill")[0]
    for node, code in ((0, 137), (1, 3)):
        ended = {"terminated": {"exitCode": code, "reason": "Error"}}
        world.pods[engine.pod(node)]["status"] |= {
            "conditions": [{"type": "Ready", "status": "False"}],
            "containerStatuses": [
                {"name": "engine", "state": {"running": {}}, "lastState": ended},
            ],
        }
    report = world.engines.pop(engine.logical)
    if answers:
        world.engines[engine.logical] = structs.replace(report, ready=False, state="LoadingWeights")
    world.step()
    is_(world, "PrefillReady", "False", "LoadingWeights" if answers else "Starting", "137")


def test_an_engine_whose_first_pod_is_missing_lacks_a_pod_however_many_others_it_has():
    world = brought_up(prefill={"parallelism": {"tensor": 2, "nodes": 2}})
    engine = world.leaders("prefill")[0]
    stray = copy.deepcopy(world.pods[engine.pod(1)])
    stray["metadata"]["name"] = engine.pod(2)  # left over from more nodes
    world.pods[engine.pod(2)] = stray
    del world.pods[engine.pod(0)]
    world.step()
    is_(world, "PrefillReady", "False", "PodsMissing")


def test_a_failed_link_names_the_pair_and_both_values():
    world = brought_up()
    message = "block size in tokens differs (prefill 16, decode 32)"
    world.link(state=LinkState.FAILED, reason="BlockInteriorOpaque", message=message)
    world.step()
    is_(world, "KVLinksEstablished", "False", "BlockInteriorOpaque", message, "llama-prefill")
    is_(world, "KVPathVerified", "False", "CanaryPending", "link failed")
    is_(world, "Ready", "False", "BlockInteriorOpaque", message)
    (failed,) = world.cluster["status"]["failedLinks"]
    assert failed["prefill"].startswith("llama-prefill-")
    assert failed["decode"].startswith("llama-decode-")
    assert (failed["reason"], failed["message"]) == ("BlockInteriorOpaque", message)
    since = failed["lastTransitionTime"]
    world.now += 100
    world.step()
    assert world.cluster["status"]["failedLinks"][0]["lastTransitionTime"] == since


def test_failed_links_are_bounded():
    world = brought_up(prefill={"replicas": 6}, decode={"replicas": 6})
    world.link(state=LinkState.FAILED, reason="SideChannelUnreachable", message="x" * 5000)
    world.step()
    assert len(world.cluster["status"]["failedLinks"]) == 16
    assert max(len(f["message"]) for f in world.cluster["status"]["failedLinks"]) <= 1024
    is_(world, "KVLinksEstablished", "False", "SideChannelUnreachable", "36 of 36")
    assert world.cluster["status"]["links"] == "0/36"


def test_prefill_dies_and_comes_back():
    world = brought_up()
    prefill = world.leaders("prefill")[0].logical
    container(world, "prefill", {"terminated": {"exitCode": 137}})
    del world.engines[prefill]
    world.step()
    # Decode has not noticed yet: its last word does not make the link good.
    is_(world, "KVLinksEstablished", "False", "WaitingForEngines")
    decode = next(iter(world.links))
    row = world.links[decode].links[0]
    gone = structs.replace(
        row, state=LinkState.FAILED, reason="SideChannelUnreachable", message="refused"
    )
    world.links[decode] = structs.replace(world.links[decode], links=(gone,))
    world.step()
    is_(world, "KVLinksEstablished", "False", "SideChannelUnreachable", "refused")
    world.run_pods()
    world.engines[prefill] = EngineReport(
        ready=True, engine=prefill, engine_id=f"{prefill}/new", state=EngineState.READY
    )
    # The link is still that of the old incarnation.
    world.links[decode] = structs.replace(world.links[decode], links=(row,))
    world.step()
    is_(world, "KVLinksEstablished", "False", "LinksPending")
    world.link()
    world.step()
    is_(world, "Ready", "True", "Ready")


def test_a_canary_that_moves_nothing():
    world = brought_up()
    failed = CanaryReport(CanaryState.FAILED, message="decode computed the prompt itself")
    world.link(canary=failed)
    world.step()
    is_(world, "KVLinksEstablished", "True", "LinksEstablished")
    is_(world, "KVPathVerified", "False", "CanaryFailed", "computed the prompt itself")
    is_(world, "Available", "False", "NoVerifiedPair")
    (link,) = world.cluster["status"]["failedLinks"]
    assert (link["reason"], link["message"]) == ("CanaryFailed", failed.message)
    assert link["prefill"].startswith("llama-prefill-")
    assert link["decode"].startswith("llama-decode-")
    since = link["lastTransitionTime"]
    world.now += 100
    world.step()
    assert world.cluster["status"]["failedLinks"][0]["lastTransitionTime"] == since
    world.link()
    world.step()
    assert world.cluster["status"]["failedLinks"] == []


def test_a_link_that_was_lost_needs_another_canary():
    world = brought_up()
    world.link(state=LinkState.FAILED, reason="TransferStalled", message="a read did not land")
    world.step()
    is_(world, "Ready", "False", "TransferStalled", "llama-prefill", "a read did not land")
    world.link(canary=CanaryReport(message="connection refused"))
    world.step()
    is_(world, "KVLinksEstablished", "True", "LinksEstablished")
    is_(world, "KVPathVerified", "False", "CanaryPending", "llama-decode", "connection refused")
    is_(world, "Ready", "False", "CanaryPending")
    world.link()
    world.step()
    is_(world, "Ready", "True", "Ready")


@pytest.mark.parametrize(
    "transfer",
    [{"minBandwidthMBps": 1000}, {"rdma": {"resource": "rdma/ib"}}],
)
def test_a_slow_link_is_probably_tcp(transfer):
    world = brought_up(transfer={"device": "CPU", **transfer})
    is_(world, "TransportHealthy", "True", "BandwidthSufficient")
    world.link(bytes_per_second=1000e6)
    world.step()
    is_(world, "TransportHealthy", "True", "BandwidthSufficient")
    world.link(bytes_per_second=999e6)
    world.step()
    is_(world, "TransportHealthy", "False", "ProbableTCPFallback", "1000 MB/s")
    assert "999" not in world.condition("TransportHealthy")["message"]
    is_(world, "Ready", "False", "ProbableTCPFallback")
    world.link(bytes_per_second=0.0)
    world.step()
    is_(world, "TransportHealthy", "Unknown", "BandwidthUnmeasured")
    world.link(bytes_per_second=999e6, state=LinkState.FAILED)  # measured before it failed
    world.step()
    is_(world, "TransportHealthy", "Unknown", "BandwidthUnmeasured")


def test_slow_receives_make_the_transport_unhealthy_until_they_are_fast():
    world = brought_up(transfer={"device": "CPU", "minBandwidthMBps": 1000})
    is_(world, "TransportHealthy", "True", "BandwidthSufficient")
    world.link(receives=ReceiveRate(120e6, 110e6, 16, 2**31))
    world.step()
    is_(world, "TransportHealthy", "False", "ProbableTCPFallback", "its receives reached 110 MB/s")
    is_(world, "Ready", "False", "ProbableTCPFallback")
    status = world.cluster["status"]
    for best, median in ((140e6, 90e6), (2e9, 140e6)):
        world.link(receives=ReceiveRate(best, median, 16, 2**31))
        world.step()
        assert world.cluster["status"] == status, "numbers alone are not written"
    world.link(receives=ReceiveRate(2e9, 1e9, 16, 2**31))
    world.step()
    is_(world, "TransportHealthy", "True", "BandwidthSufficient")


def test_the_bandwidth_that_is_asked_for_counts_also_with_rdma():
    transfer = {"device": "CPU", "rdma": {"resource": "rdma/ib"}, "minBandwidthMBps": 10}
    world = brought_up(transfer=transfer)
    world.link(bytes_per_second=50e6)
    world.step()
    is_(world, "TransportHealthy", "True", "BandwidthSufficient", "10 MB/s")


def test_of_several_engines_the_one_that_waiting_does_not_cure_is_named():
    world = brought_up(decode={"replicas": 2})
    first, second = world.leaders("decode")
    for engine, state in (
        (first, {"waiting": {"reason": "ContainerCreating"}}),
        (second, {"waiting": {"reason": "ImagePullBackOff"}}),
    ):
        world.pods[engine.pod()]["status"] |= {
            "containerStatuses": [{"name": "engine", "state": state}],
            "conditions": [{"type": "Ready", "status": "False"}],
        }
    world.step()
    is_(world, "DecodeReady", "False", "ImageUnavailable", second.stateful_set)


def test_a_link_that_failed_with_the_former_incarnation_has_failed():
    world = brought_up()
    world.link(prefill_engine_id="former/1", state=LinkState.FAILED, reason="PeerRestarted")
    world.step()
    is_(world, "KVLinksEstablished", "False", "PeerRestarted")


def test_prompts_that_decode_computes_itself():
    world = brought_up()
    world.count_prompts(100, 5)
    world.step()
    is_(world, "Ready", "True", "Ready")
    world.count_prompts(100, 40)
    plan = world.step()
    told = ("llama-decode-", "5 %", "NoTicket", "to the router")
    is_(world, "TransportHealthy", "False", "LocalPrefill", *told)
    is_(world, "Ready", "False", "LocalPrefill", *told)
    is_(world, "Available", "True", "Serving")
    warned = {e.message.split(" is ")[0] for e in plan.events if e.type == "Warning"}
    assert warned == {"Ready"}, "it repeats what TransportHealthy says"
    status = world.cluster["status"]
    world.count_prompts(200, 51)
    assert world.plan().status == status, "another share is no news"
    assert world.plan().events == ()
    world.count_prompts(100, 0)
    plan = world.step()
    is_(world, "TransportHealthy", "True", "NoThreshold")
    is_(world, "Ready", "True", "Ready")
    assert {e.type for e in plan.events} == {"Normal"}


def test_a_router_that_is_gone():
    world = brought_up()
    world.children["Deployment", next(n for k, n in world.children if k == "Deployment")][
        "status"
    ] = {}
    world.step()
    is_(world, "KVPathVerified", "True", "CanaryPassed")
    is_(world, "Available", "False", "RouterUnavailable")
    is_(world, "Ready", "False", "RouterUnavailable")
    container(world, "decode", {"waiting": {"reason": "CrashLoopBackOff", "message": "died"}})
    world.step()
    assert world.condition("Available")["message"] == "no router pod is ready"
    [labels] = [
        child["spec"]["template"]["metadata"]["labels"]
        for (kind, _), child in world.children.items()
        if kind == "Deployment"
    ]
    stuck = {"name": "router", "state": {"waiting": {"reason": "ImagePullBackOff"}}}
    world.pods["llama-router-x"] = {
        "metadata": {"name": "llama-router-x", "labels": labels},
        "status": {"containerStatuses": [stuck]},
    }
    world.step()
    is_(world, "Available", "False", "RouterUnavailable", "llama-router-x: ImagePullBackOff")


def test_a_router_whose_new_pods_do_not_start_while_the_old_serve():
    world = brought_up()
    world.edit(router={"image": "registry.example/no/such:1"})
    world.step()
    (deployment,) = (child for (kind, _), child in world.children.items() if kind == "Deployment")
    deployment["metadata"]["generation"] = 2
    deployment["status"] = {"observedGeneration": 1, "availableReplicas": 1, "updatedReplicas": 1}
    world.step()
    is_(world, "Available", "True", "Serving")
    is_(world, "Ready", "False", "RouterReplacing", "has changed")
    deployment["status"] |= {"observedGeneration": 2, "updatedReplicas": 1, "replicas": 2}
    world.pods["llama-router-new"] = {
        "metadata": {
            "name": "llama-router-new",
            "labels": deployment["spec"]["template"]["metadata"]["labels"],
        },
        "status": {
            "containerStatuses": [
                {"name": "router", "state": {"waiting": {"reason": "ImagePullBackOff"}}}
            ]
        },
    }
    world.step()
    is_(world, "Ready", "False", "RouterReplacing", "llama-router-new: ImagePullBackOff")
    is_(world, "Progressing", "True", "RouterReplacing")
    del world.pods["llama-router-new"]
    deployment["status"]["replicas"] = 1
    world.step()
    is_(world, "Ready", "True", "Ready")


def test_without_decode_engines_a_silent_prefill_engine_is_not_complete():
    """Its launcher answers nobody, so nobody knows whether the spec's engine is there."""
    world = brought_up(decode={"replicas": 0})
    is_(world, "Progressing", "False", "Complete")
    world.edit(prefill={"engine": {"env": [{"name": "A", "value": "1"}]}})
    for _ in range(8):
        world.engines.clear()
        world.step()
        world.others_act()
    world.engines.clear()
    world.step()
    is_(world, "PrefillReady", "Unknown", "LauncherUnreachable")
    is_(world, "Ready", "Unknown", "LauncherUnreachable")
    is_(world, "Progressing", "True", "LauncherUnreachable")
    world.others_act()
    world.settle()
    is_(world, "Ready", "False", "ScaledToZero")
    is_(world, "Progressing", "False", "Complete")


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_zero_replicas_are_a_state_and_no_failure(role):
    world = brought_up()
    world.edit(**{role: {"replicas": 0}})
    events = [*world.step().events]
    is_(world, "Progressing", "True", "Replacing")
    plan = world.step()
    events += plan.events
    world.others_act()
    plan = world.settle()
    is_(world, "PrefillReady", "True", "ScaledToZero" if role == "prefill" else "EnginesReady")
    is_(world, "DecodeReady", "True", "ScaledToZero" if role == "decode" else "EnginesReady")
    is_(world, "KVLinksEstablished", "Unknown", "NoPairs")
    is_(world, "KVPathVerified", "Unknown", "NoPairs")
    is_(world, "Available", "False", "ScaledToZero", role)
    is_(world, "Ready", "False", "ScaledToZero", role)
    is_(world, "Progressing", "False", "Complete")
    assert (plan.requeue_after or 0) > DAY, "only new certificates are due one day"
    assert {event.type for event in events if event.reason == "ScaledToZero"} == {"Normal"}
    assert "progressingSince" not in world.cluster["status"]
    world.now += 10 * 86_400
    assert not world.step().events


def test_a_role_that_cannot_start_beside_one_of_zero_has_a_deadline():
    world = SimulatedCluster(
        manifest(decode={"replicas": 0}, rollout={"progressDeadlineSeconds": 60})
    )
    world.step()
    is_(world, "Progressing", "True", "PodsMissing")
    world.now += 61
    world.step()
    is_(world, "Progressing", "False", "ProgressDeadlineExceeded")


def test_only_engines_that_routers_can_forget_wait_for_them():
    """Routers never forget the only engine of a role."""
    world = brought_up(decode={"replicas": 2})
    assert world.plan().routed == {name.logical for name in world.leaders("decode")}


def test_a_spec_that_is_refused_changes_nothing_of_what_is_said_of_the_engines():
    world = brought_up(prefill={"replicas": 2}, decode={"replicas": 3})
    kinds = ("PrefillReady", "DecodeReady", "KVLinksEstablished", "KVPathVerified")
    before = copy.deepcopy({kind: world.condition(kind) for kind in kinds})
    engines = copy.deepcopy(world.cluster["status"]["engines"])
    peers = world.plan().peers
    assert len(peers) == 3
    endpoint = world.cluster["status"]["endpoint"]
    assert endpoint
    world.edit(decode={"replicas": -1}, router={"replicas": 0})
    plan = world.step()
    assert world.cluster["status"]["endpoint"] == endpoint
    is_(world, "Accepted", "False", "OutOfRange")
    assert plan.steps == ()
    assert plan.peers == peers
    assert world.cluster["status"]["engines"] == engines
    for kind, said in before.items():
        now = world.condition(kind)
        assert (now["status"], now["message"]) == (said["status"], said["message"])


def test_a_spec_that_is_refused_in_a_rollout_pairs_no_engines_of_two_pairing_keys():
    world = brought_up()
    world.edit(engine={"blockSize": 32})
    world.step()
    world.others_act()
    world.step()
    assert len(world.leaders("decode")) == 2
    links = world.cluster["status"]["links"]
    assert links.endswith("/2")
    world.edit(router={"replicas": -1})
    world.step()
    is_(world, "Accepted", "False", "OutOfRange")
    assert world.cluster["status"]["links"] == links


@pytest.mark.parametrize("engines", [None, 7, "text", [None], ["text"], [{}], [{"name": 7}]])
def test_a_status_in_which_somebody_wrote_fails_no_plan(engines):
    world = brought_up()
    written = world.cluster["status"]["engines"]
    world.cluster["status"]["engines"] = engines
    assert world.step().steps == ()
    assert world.cluster["status"]["engines"] == written


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_an_autoscaler_finds_the_pods_of_decode_engines_and_no_others(role):
    world = brought_up()
    wanted = dict(pair.split("=") for pair in world.cluster["status"]["selector"].split(","))
    for name in world.leaders(role):
        # The controller of StatefulSets numbers the pods.
        made = {"apps.kubernetes.io/pod-index": "0"}
        labels = world.pods[name.pod()]["metadata"]["labels"] | made
        assert (wanted.items() <= labels.items()) is (role == "decode")


def test_replicas_counts_the_decode_engines_that_exist():
    world = SimulatedCluster(manifest(decode={"replicas": 3}, rollout={"paused": True}))
    world.step()
    assert world.cluster["status"]["replicas"] == 0, "nothing existed when this was observed"
    world.step()
    assert world.cluster["status"]["replicas"] == 3
    engine = next(child for (kind, name), child in world.children.items()
                  if kind == "StatefulSet" and "-decode-" in name)  # fmt: skip
    engine["metadata"]["deletionTimestamp"] = "2027-01-01T00:00:00Z"
    world.step()
    assert world.cluster["status"]["replicas"] == 2


@pytest.mark.parametrize("reason", ["x" * 257, "two words", "Ends:", "ümlaut", "<script>"])
def test_a_reason_that_the_crd_does_not_take_is_replaced(reason):
    """One such reason would make the API server refuse every later write of the status."""
    world = brought_up()
    world.link(state=LinkState.FAILED, reason=reason, message="why")
    world.step()
    is_(world, "KVLinksEstablished", "False", "ReasonUnreadable", "why")
    is_(world, "Ready", "False", "ReasonUnreadable", "why")
    [failed] = world.cluster["status"]["failedLinks"]
    assert failed["reason"] == "ReasonUnreadable"


@settings(max_examples=settings().max_examples // 2)
@given(
    text=st.text(max_size=3000) | st.sampled_from(["e" * 513, "R" * 300]),
    ready=st.booleans(),
    state=st.sampled_from(["FAILED", "PENDING", "ESTABLISHED"]),
)
def test_whatever_launchers_say_the_crd_takes_the_status(text, ready, state):
    world = brought_up()
    for name, report in world.engines.items():
        document = {"engine": name, "engine_id": f"{name}/{text}", "message": text, "state": text,
                    "ready": ready, "role": text}  # fmt: skip
        told = decode_engine(msgspec.json.encode(document))
        if isinstance(told, EngineReport):  # an id may be too long
            world.engines[name] = structs.replace(told, role=report.role)
    for decode in list(world.links):
        link = {"prefill": world.leaders("prefill")[0].logical, "state": LinkState[state].value,
                "reason": text, "message": text,
                "canary": {"state": LinkState.FAILED.value, "message": text}}  # fmt: skip
        document = {"engine": decode, "engine_id": text, "links": [link]}
        told = decode_links(msgspec.json.encode(document))
        if isinstance(told, LinksReport):
            world.links[decode] = told
    STATUS.validate(dict(world.plan().status))


@pytest.mark.parametrize("change", ["paused", "unaccepted"])
def test_engines_are_judged_by_the_pods_that_they_have(change):
    """A change of ``nodes`` that does not reach the engines does not make them lack pods."""
    world = brought_up(prefill={"parallelism": {"tensor": 4, "nodes": 2}})
    is_(world, "PrefillReady", "True", "EnginesReady")
    if change == "paused":
        world.edit(prefill={"parallelism": {"tensor": 4, "nodes": 4}}, rollout={"paused": True})
    else:
        world.edit(prefill={"parallelism": {"tensor": 4, "nodes": 3}})
    world.step()
    is_(world, "PrefillReady", "True", "EnginesReady")
    world.pods.pop(world.leaders("prefill")[0].pod(1))
    world.step()
    is_(world, "PrefillReady", "False", "PodsMissing", "1 of 2")


def test_a_transport_is_not_healthy_without_evidence():
    world = brought_up()
    is_(world, "TransportHealthy", "True", "NoThreshold")
    world.link(state=LinkState.FAILED, reason="TransferStalled", message="no byte came")
    world.step()
    is_(world, "TransportHealthy", "Unknown", "BandwidthUnmeasured")
    world.links.clear()
    world.step()
    is_(world, "TransportHealthy", "Unknown", "BandwidthUnmeasured")


def test_the_deadline_is_over_only_after_all_of_its_seconds():
    world = SimulatedCluster(manifest(rollout={"progressDeadlineSeconds": 60}))
    began = world.now
    for after, status in ((0, "True"), (60, "True"), (61, "False")):
        world.now = began + after
        world.step()
        assert world.condition("Progressing")["status"] == status


def test_a_step_that_fails_for_a_moment_does_not_begin_the_deadline_anew():
    world = SimulatedCluster(manifest(rollout={"progressDeadlineSeconds": 60}))
    world.step()
    for _ in range(5):
        world.now += 8
        planned = world.plan().status
        status = with_failure(planned, world.cluster, "InternalError", "x", world.now, outage=0.0)
        world.cluster["status"] = status
        is_(world, "Progressing", "False", "InternalError")
        world.now += 8
        world.step()
    is_(world, "Progressing", "False", "ProgressDeadlineExceeded")
    world.edit(engine={"env": [{"name": "A", "value": "b"}]})
    world.step()
    is_(world, "Progressing", "True", "Replacing")


def test_a_refused_new_cluster_makes_nothing():
    world = SimulatedCluster(manifest(prefill={"parallelism": {"tensor": 3, "nodes": 2}}))
    plan = world.step()
    assert plan.steps == ()
    is_(world, "Accepted", "False", "NodesDivideWorkers", "spec.prefill.parallelism.nodes")
    is_(world, "PrefillReady", "False", "NotAccepted")
    is_(world, "Progressing", "False", "NotAccepted")
    is_(world, "Ready", "False", "NodesDivideWorkers")
    assert [event.type for event in plan.events] == ["Warning"]


def test_who_makes_a_cluster_is_told_that_its_side_channel_has_no_tls():
    secured = SimulatedCluster(manifest(transfer={"device": "CPU", "tls": "Enabled"}))
    assert secured.step().events == ()
    world = SimulatedCluster(manifest(transfer={"device": "CPU", "tls": "Disabled"}))
    (insecure,) = world.step().events
    assert (insecure.type, insecure.reason) == ("Warning", Rule.INSECURE_SIDE_CHANNEL)
    assert not [event for event in world.step().events if event.reason == insecure.reason]


def test_replacing_engines():
    world = brought_up()
    world.edit(engine={"maxModelLen": 256})
    world.step()
    is_(world, "Progressing", "True", "Replacing")
    world.bring_up()  # all engines are healthy, and the old ones go
    is_(world, "Ready", "False", "Replacing", "still exist", "engine.maxModelLen")
    is_(world, "Progressing", "True", "Replacing")
    said = world.condition("Progressing")["message"]
    assert said.count("engine.maxModelLen") == 1, "Ready says the same"


def test_scaling_down_is_not_ready_until_the_last_pod_is_gone():
    world = brought_up(decode={"replicas": 2})
    world.edit(decode={"replicas": 1})
    world.step()  # the routers forget it first
    world.step()
    is_(world, "Ready", "False", "Replacing")
    is_(world, "Progressing", "True", "Replacing", "does not ask for still exist")
    world.reap()
    world.settle()
    is_(world, "Ready", "True", "Ready")


def test_paused():
    world = brought_up()
    world.edit(engine={"maxModelLen": 256}, rollout={"paused": True})
    world.step()
    is_(world, "Ready", "False", "Paused")
    is_(world, "Progressing", "False", "Paused", "rollout.paused")


def test_a_deadline_that_began_by_a_clock_that_was_ahead_begins_again():
    world = SimulatedCluster(manifest(rollout={"progressDeadlineSeconds": 60}))
    world.now += 365 * DAY
    world.step()
    world.now -= 365 * DAY
    world.step()
    world.now += 61
    world.step()
    is_(world, "Progressing", "False", "ProgressDeadlineExceeded")


def test_without_a_change_that_waits_a_paused_cluster_says_what_it_waits_for():
    world = SimulatedCluster(manifest(rollout={"paused": True, "progressDeadlineSeconds": 60}))
    world.step()
    is_(world, "Progressing", "True", "PodsMissing")
    world.now += 61
    world.step()
    is_(world, "Progressing", "False", "ProgressDeadlineExceeded")
    world.bring_up()
    is_(world, "Progressing", "False", "Complete")
    del world.engines[world.leaders("prefill")[0].logical]
    container(world, "prefill", {"running": {}})
    world.step()
    is_(world, "Progressing", "True", "Starting")


def test_the_deadline_ends_progress_and_a_newer_engine_starts_it_again():
    world = SimulatedCluster(manifest(rollout={"progressDeadlineSeconds": 60}))
    world.step()
    world.now += 50
    world.step()
    is_(world, "Progressing", "True", "PodsMissing")
    world.now += 20
    world.step()
    is_(world, "Progressing", "False", "ProgressDeadlineExceeded", "60 s")
    world.now += 100
    world.step()
    is_(world, "Progressing", "False", "ProgressDeadlineExceeded")
    sets = [child for (kind, _), child in world.children.items() if kind == "StatefulSet"]
    for child, year in zip(sets, (2040, 2020), strict=True):
        child["metadata"]["creationTimestamp"] = f"{year}-01-01T00:00:00Z"
    world.step()
    is_(world, "Progressing", "True", "PodsMissing")


def test_time_before_the_change_does_not_count_against_the_deadline():
    """A cluster that was Ready for days has its whole time again when something happens to it."""
    world = brought_up(rollout={"progressDeadlineSeconds": 60})
    is_(world, "Progressing", "False", "Complete")
    world.now += 3 * 86_400
    del world.engines[world.leaders("prefill")[0].logical]
    container(world, "prefill", {"running": {}})
    world.step()
    is_(world, "Progressing", "True", "Starting")
    world.now += 58
    world.step()
    is_(world, "Progressing", "True", "Starting")
    world.now += 10
    world.step()
    is_(world, "Progressing", "False", "ProgressDeadlineExceeded")


def test_a_newer_engine_has_the_whole_deadline():
    """A second change while the first is on its way: the time counts from the newest engine."""
    world = SimulatedCluster(manifest(rollout={"progressDeadlineSeconds": 60}))
    world.step()
    for (kind, _), child in world.children.items():
        if kind == "StatefulSet":
            child["metadata"]["creationTimestamp"] = timestamp(START + 50)
    world.now = START + 100
    world.step()
    is_(world, "Progressing", "True", "PodsMissing")
    world.now = START + 120
    world.step()
    is_(world, "Progressing", "False", "ProgressDeadlineExceeded")


def test_a_prefill_engine_that_is_silent_alone_takes_no_link_down():
    """Its launcher does not answer the operator; decode still sees it, and KV still moves."""
    world = brought_up()
    del world.engines[world.leaders("prefill")[0].logical]
    assert world.step().steps == ()
    is_(world, "PrefillReady", "Unknown", "LauncherUnreachable")
    is_(world, "KVLinksEstablished", "True", "LinksEstablished")
    is_(world, "KVPathVerified", "True", "CanaryPassed")
    is_(world, "Available", "True", "Serving")
    is_(world, "Ready", "Unknown", "LauncherUnreachable")
    assert world.cluster["status"]["links"] == "1/1"
    (assignment,) = world.plan().peers.values()
    assert len(assignment.peers) == 1, "decode keeps it as a peer"


def test_transition_times_move_only_with_the_status(world):
    world.step()
    first = world.condition("PrefillReady")["lastTransitionTime"]
    world.now += 60
    world.make_pods()
    world.step()
    assert world.condition("PrefillReady")["reason"] == "ContainerCreating"
    assert world.condition("PrefillReady")["lastTransitionTime"] == first
    world.run_pods()
    world.speak()
    world.step()
    assert world.condition("PrefillReady")["lastTransitionTime"] > first


@settings(max_examples=settings().max_examples // 2)
@given(manifests())
def test_no_spec_tells_enough_to_leave_the_handshake_nothing(cluster):
    """So that there is no other reason for an accepted spec."""
    world = SimulatedCluster(cluster)
    world.step()
    world.step()  # the first one may have scaled it to the least of its autoscaling
    is_(world, "Accepted", "True", "PartiallyChecked", "layers")


def test_of_long_last_words_the_end_is_shown():
    world = brought_up()
    words = "first line\n" + "x" * 600 + "\nthe cause"
    container(world, "prefill", {"terminated": {"exitCode": 1, "message": words}})
    world.step()
    is_(world, "PrefillReady", "False", "EngineFailed", "the cause (exit code 1)")
    assert "first line" not in world.condition("PrefillReady")["message"]


TWO_PODS = {"parallelism": {"tensor": 2, "nodes": 2}}


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("node", [0, 1])
def test_the_trouble_of_any_pod_is_the_engines(role, node):
    world = brought_up(**{role: TWO_PODS})
    pod = world.leaders(role)[0].pod(node)
    waiting = {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}
    world.pods[pod]["status"] |= {
        "containerStatuses": [{"name": "engine", "state": waiting, "lastState": {}}],
        "conditions": [{"type": "Ready", "status": "False"}],
    }
    world.step()
    is_(world, f"{role.capitalize()}Ready", "False", "ImageUnavailable", pod, "no such image")


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_launcher_knows_sooner_than_the_kubelet_that_its_own_pod_is_ready(role):
    """The kubelet asks every two seconds. Of the other pods only the kubelet knows."""
    world = brought_up(**{role: TWO_PODS})
    name = world.leaders(role)[0]
    world.pods[name.pod(0)]["status"]["conditions"] = [{"type": "Ready", "status": "False"}]
    world.step()
    is_(world, f"{role.capitalize()}Ready", "True", "EnginesReady")
    world.pods[name.pod(1)]["status"]["conditions"] = [{"type": "Ready", "status": "False"}]
    world.step()
    is_(world, f"{role.capitalize()}Ready", "False", "Starting", f"{name.pod(1)} is not ready")


@pytest.mark.parametrize("measured", [0, 1, 2])
def test_one_link_that_is_not_measured_leaves_the_bandwidth_open(measured):
    transfer = {"device": "CPU", "minBandwidthMBps": 10}
    world = brought_up(transfer=transfer, prefill={"replicas": 2})
    (decode,) = world.leaders("decode")
    links = world.links[decode.logical]
    rows = [
        structs.replace(link, bytes_per_second=50e6 if number < measured else 0.0)
        for number, link in enumerate(links.links)
    ]
    for order in (rows, rows[::-1]):
        world.links[decode.logical] = structs.replace(links, links=tuple(order))
        world.step()
        if measured == 2:
            is_(world, "TransportHealthy", "True", "BandwidthSufficient")
        else:
            is_(world, "TransportHealthy", "Unknown", "BandwidthUnmeasured", "not every link")


def test_a_new_cluster_that_is_refused_is_not_scaled_to_zero():
    world = SimulatedCluster(manifest(decode={"replicas": -1}))
    world.step()
    is_(world, "Available", "False", "NoVerifiedPair")
    assert "progressingSince" not in world.cluster["status"]


def test_an_address_that_is_made_again_gives_an_engine_no_more_time():
    """The deadline counts from the newest engine. Its Service has the same name."""
    world = SimulatedCluster(manifest(rollout={"progressDeadlineSeconds": 60}))
    world.step()
    for child in world.children.values():
        late = 0 if child["kind"] == "StatefulSet" else 50
        child["metadata"]["creationTimestamp"] = timestamp(START + late)
    world.now = START + 70
    world.step()
    is_(world, "Progressing", "False", "ProgressDeadlineExceeded")


def test_an_engine_that_leaves_says_nothing_of_when_the_wanted_ones_were_made():
    """Its pods may take long to end. Somebody may have made its StatefulSet again meanwhile."""
    world = brought_up(rollout={"type": "Recreate", "progressDeadlineSeconds": 60})
    (old,) = world.leaders("decode")
    kept = copy.deepcopy(world.children["StatefulSet", old.stateful_set])
    world.edit(decode={"engine": {"maxModelLen": 128}})
    began = world.now
    world.step()
    world.step()
    kept["metadata"] |= {"creationTimestamp": timestamp(began + 50), "uid": "again"}
    kept["metadata"]["deletionTimestamp"] = timestamp(began + 50)
    world.children["StatefulSet", old.stateful_set] = kept
    world.now = began + 70
    world.step()
    is_(world, "Progressing", "False", "ProgressDeadlineExceeded")


def test_what_whoever_installs_the_operator_forbids_is_refused_in_the_plan_too(world):
    """Admission may be off. The rules are the same."""
    plan = make_plan(replace(world.observed(), place=Place(host_path_models=False)), world.now)
    assert plan.steps == ()
    assert plan.status["conditions"][0]["reason"] == "HostPathNotAdmitted"
    assert world.plan().steps


def test_an_engine_that_names_no_incarnation_keeps_the_one_that_is_known():
    """A launcher of another version may name one that is too long, which counts as not given."""
    world = brought_up()
    before = copy.deepcopy(world.cluster["status"]["engines"])
    for name, report in world.engines.items():
        world.engines[name] = structs.replace(report, engine_id="")
    world.step()
    assert world.cluster["status"]["engines"] == before


def test_an_engine_of_one_pod_is_whole_while_a_change_to_several_is_paused():
    world = brought_up()
    world.edit(prefill={"parallelism": {"tensor": 2, "nodes": 2}}, rollout={"paused": True})
    world.step()
    is_(world, "PrefillReady", "True", "EnginesReady")
