"""PDClusters of a namespace share one ConfigMap with the connector; no pod ever lacks it."""

from __future__ import annotations

import copy
import hashlib
from typing import Any

import pytest
from hypothesis import HealthCheck, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from shared_namespace import SharedNamespace
from simulated_cluster import START, SimulatedCluster

from pdcluster_operator.adapters.api_server.kinds import BY_NAME, slim
from pdcluster_operator.api.conditions import timestamp
from pdcluster_operator.api.object_names import (
    UNUSED_ANNOTATION,
    connector_name,
    is_connector_name,
)
from pdcluster_operator.plan.connectors import (
    KEEP_SECONDS,
    MOUNTING_KINDS,
    is_forged,
    shared_connectors_of,
    step_for_connector,
)
from pdcluster_operator.plan.planner import make_plan
from pdcluster_operator.plan.types import Apply, ConnectorBundle, Delete

OLDER, NEWER = ConnectorBundle("c" * 64, b"older"), ConnectorBundle("d" * 64, b"newer")
OLD, NEW = "pdcluster-connector-cccccccccccccccc", "pdcluster-connector-dddddddddddddddd"
KEYED = {"router": {"apiKeySecretRef": {"name": "api"}}}
NAMES = st.sampled_from(["one", "two"])
ONE_VARIABLE = {"engine": {"env": [{"name": "A", "value": "1"}]}}


def applied(world: SimulatedCluster) -> list[Apply]:
    """Return the steps of a plan that write the shared ConfigMap."""
    return [
        step
        for step in world.plan().steps
        if isinstance(step, Apply) and is_connector_name(step.manifest["metadata"]["name"])
    ]


def up(*names: str, **spec: Any) -> SharedNamespace:
    namespace = SharedNamespace(*names, **spec)
    for world in namespace.clusters.values():
        world.connector = OLDER
        world.bring_up()
    return namespace


def changed(world: SimulatedCluster) -> None:
    """Let a change of both roles go to its end."""
    world.edit(engine={"env": [{"name": "CHANGED", "value": str(world.counter)}]})
    for _ in range(12):
        world.step()
        world.others_act()
    world.settle()


def test_clusters_of_a_namespace_have_one_and_nobody_owns_it() -> None:
    namespace = up("one", "two")
    [(name, live)] = namespace.shared.items()
    assert name == OLD
    assert live["immutable"] is True
    assert "ownerReferences" not in live["metadata"]
    assert live["metadata"]["labels"]["pdcluster.dev/connector"] == "c" * 16
    assert not [key for world in namespace.clusters.values() for key in world.children
                if key[0] == "ConfigMap"]  # fmt: skip
    assert namespace.mounted() == {OLD}
    assert all(world.plan().steps == () for world in namespace.clusters.values())


def test_what_another_operator_wrote_differently_is_left_if_the_content_is_the_same() -> None:
    namespace = up("one")
    live = namespace.shared[OLD]["metadata"]
    live["labels"]["app.kubernetes.io/version"] = "2"
    live["annotations"]["pdcluster.dev/applied"] = "of another release"
    assert namespace["one"].plan().steps == ()


def test_one_that_is_gone_or_marked_is_applied_again() -> None:
    namespace = up("one")
    live = namespace.shared[OLD]["metadata"]
    live["annotations"][UNUSED_ANNOTATION] = timestamp(START)
    [step] = applied(namespace["one"])
    assert step.uid == live["uid"]
    assert step.manifest["metadata"]["annotations"] == {UNUSED_ANNOTATION: ""}
    del namespace.shared[OLD]
    [step] = applied(namespace["one"])
    assert step.uid == ""


@pytest.mark.parametrize(
    ("source", "volume", "name"),
    [
        ("Bundled", "conf", "llama-connector-0123456789"),
        ("Image", "conf", "llama-connector-0123456789"),
        ("Image", "connector", "llama-connector-settings"),
    ],
)
def test_routers_mount_no_volume_of_the_user_whatever_its_name(
    source: str, volume: str, name: str
) -> None:
    pod = {"spec": {"volumes": [{"name": volume, "configMap": {"name": name}}]}}
    roles = {role: {"podTemplate": copy.deepcopy(pod)} for role in ("prefill", "decode")}
    namespace = up("llama", engine={"connector": source}, **roles, **KEYED)
    world = namespace["llama"]
    [router] = [one for (kind, _), one in world.children.items() if kind == "Deployment"]
    assert shared_connectors_of(router) == set(namespace.shared) == {OLD}
    assert name not in str(router)
    world.connector = NEWER
    assert world.plan().steps == ()


def test_a_revision_that_mounts_a_marked_one_of_an_older_operator_is_not_used_again() -> None:
    namespace = up("one")
    world = namespace["one"]
    world.connector = NEWER
    changed(world)
    namespace.shared[OLD]["metadata"]["annotations"][UNUSED_ANNOTATION] = timestamp(START)
    world.edit(engine={"env": []})
    for _ in range(12):
        world.step()
        world.others_act()
    in_use = [one for (kind, _), one in world.children.items() if kind == "StatefulSet"]
    assert {name for one in in_use for name in shared_connectors_of(one)} == {NEW}


def bundle(data: bytes) -> ConnectorBundle:
    return ConnectorBundle(hashlib.sha256(data).hexdigest(), data)


def kept(config_map: dict[str, Any]) -> dict[str, Any]:
    """As the store keeps it."""
    return slim(config_map, BY_NAME["ConfigMap"])


FORGERIES: dict[str, dict[str, Any]] = {
    "short": {"binaryData": {"connector.pyz": "ZXZpbA=="}},
    "long": {"binaryData": {"connector.pyz": "ZXZp" * 1000}},
    "another file": {"binaryData": {"connector.py": "ZXZpbA=="}},
    "nothing": {"binaryData": None},
    "more": {"data": {"sitecustomize.py": "evil"}},
    "not for good": {"immutable": False},
    "no base64": {"binaryData": {"connector.pyz": "!"}},
}


@pytest.mark.parametrize("forgery", FORGERIES)
@pytest.mark.parametrize("size", [5, 5_000])
def test_no_pod_starts_with_an_older_connector_that_is_not_what_its_name_says(
    forgery: str, size: int
) -> None:
    older = bundle(b"older" * size)
    world = SharedNamespace("llama", **KEYED)["llama"]
    world.connector = older
    world.bring_up()
    held, name = world.shared, connector_name(older.digest)
    world.connector = NEWER
    config_map = held[name]
    held[name] = kept(config_map)
    assert not is_forged(held[name])
    assert world.plan().steps == ()

    held[name] = kept({**config_map, **FORGERIES[forgery]})
    world.edit(decode={"replicas": 2})
    world.step()
    told = world.condition("Progressing")
    assert (told["status"], told["reason"]) == ("False", "NameConflict")
    assert "does not hold the connector that its name says" in told["message"]
    engines = [key for key in world.children if key[0] == "StatefulSet"]
    assert len(engines) == 2, "the third one waits"

    # What the message says helps: new engines mount the operator's own connector.
    del held[name]
    world.edit(rollout={"renew": "1"})
    for _ in range(12):
        world.step()
        world.others_act()
    world.settle()
    engines = [one for (kind, _), one in world.children.items() if kind == "StatefulSet"]
    assert len(engines) == 3
    assert {one for engine in engines for one in shared_connectors_of(engine)} == {NEW}
    assert world.condition("Progressing")["reason"] == "Complete"


def after_an_upgrade() -> tuple[SimulatedCluster, Any]:
    """A cluster whose engines mount an older connector, and the name of its ConfigMap."""
    world = SharedNamespace("llama", **KEYED)["llama"]
    world.connector = older = bundle(b"older" * 5_000)
    world.bring_up()
    world.connector = NEWER
    return world, connector_name(older.digest)


def test_an_older_connector_that_the_operator_does_not_see_is_mounted_by_no_further_engine() -> (
    None
):
    """It may have been replaced by one without the labels by which it is watched."""
    world, name = after_an_upgrade()
    del world.shared[name]
    world.edit(decode={"replicas": 2})
    world.step()
    assert len([key for key in world.children if key[0] == "StatefulSet"]) == 2
    told = world.condition("Progressing")
    assert (told["status"], told["reason"]) == ("False", "NameConflict")
    assert "is missing, or does not hold" in told["message"]


def test_a_config_map_with_another_name_is_no_forged_connector() -> None:
    theirs = {"metadata": {"name": "their-settings"}, "data": {"a": "1"}}
    assert not is_forged(theirs)
    assert is_forged({**theirs, "metadata": {"name": connector_name("a" * 64)}})


def test_a_forged_connector_holds_back_nothing_that_does_not_mount_it() -> None:
    world, name = after_an_upgrade()
    world.shared[name] = kept({**world.shared[name], **FORGERIES["long"]})
    assert world.plan().events[0].reason == "NameConflict", "although nothing has to be done"
    assert world.plan().events[0].type == "Warning"
    world.edit(prefill={"engine": {"env": [{"name": "A", "value": "1"}]}})
    for _ in range(12):
        world.step()
        world.others_act()
    engines = [(key, one) for key, one in world.children.items() if key[0] == "StatefulSet"]
    mounted = {key[1].split("-")[1]: shared_connectors_of(one) for key, one in engines}
    assert mounted == {"prefill": {NEW}, "decode": {name}}


def test_no_revision_is_used_again_whose_connector_is_not_what_its_name_says() -> None:
    older = bundle(b"older" * 5_000)
    world = SharedNamespace("llama")["llama"]
    world.connector = older
    world.bring_up()
    world.connector = NEWER
    changed(world)
    live = world.shared[connector_name(older.digest)]
    world.shared[connector_name(older.digest)] = kept(live | FORGERIES["long"])
    world.edit(engine={"env": []})
    for _ in range(12):
        world.step()
        world.others_act()
    engines = [one for (kind, _), one in world.children.items() if kind == "StatefulSet"]
    assert {one for engine in engines for one in shared_connectors_of(engine)} == {NEW}
    assert world.condition("Progressing")["reason"] == "Complete"


def test_operators_of_two_releases_share_a_namespace() -> None:
    namespace = SharedNamespace("one", "two")
    namespace["one"].connector, namespace["two"].connector = OLDER, NEWER
    for world in namespace.clusters.values():
        world.bring_up()
    for _ in range(3):
        namespace.collect()
        namespace.wait(KEEP_SECONDS)
    assert set(namespace.shared) == {OLD, NEW}
    namespace.delete("one")
    namespace.collect()
    assert not namespace["two"].plan().steps
    namespace.wait(KEEP_SECONDS)
    namespace.collect()
    assert set(namespace.shared) == {OLD, NEW}, "pods of the first one are ending still"
    namespace["one"].reap()
    namespace.collect()
    namespace.wait(KEEP_SECONDS)
    namespace.collect()
    assert set(namespace.shared) == {NEW}


def live(**annotations: str) -> dict[str, Any]:
    metadata = {"name": OLD, "namespace": "ns", "uid": "u", "resourceVersion": "7"}
    return {"kind": "ConfigMap", "metadata": {**metadata, "annotations": annotations}}


def since_of(step: object) -> str:
    assert isinstance(step, Apply)
    return str(step.manifest["metadata"]["annotations"][UNUSED_ANNOTATION])


def test_it_is_marked_first_and_deleted_when_the_mark_is_old() -> None:
    step = step_for_connector(live(), mounted=False, now=START)
    assert isinstance(step, Apply)
    metadata = step.manifest["metadata"]
    assert (metadata["uid"], metadata["resourceVersion"]) == ("u", "7")
    assert metadata["annotations"] == {UNUSED_ANNOTATION: timestamp(START)}
    marked = live(**metadata["annotations"])
    assert step_for_connector(marked, mounted=False, now=START + 599) is None
    gone = step_for_connector(marked, mounted=False, now=START + 600)  # as in docs/operations.md
    assert isinstance(gone, Delete)
    assert (gone.uid, gone.resource_version, gone.name) == ("u", "7", OLD)


def test_a_mark_goes_when_something_mounts_it_again() -> None:
    step = step_for_connector(
        live(**{UNUSED_ANNOTATION: timestamp(START)}), mounted=True, now=START + 2 * KEEP_SECONDS
    )
    assert since_of(step) == ""
    assert step_for_connector(live(), mounted=True, now=START) is None


@pytest.mark.parametrize("mark", ["", "yesterday", timestamp(START + 10 * KEEP_SECONDS)])
def test_a_mark_that_says_no_time_that_can_be_is_written_anew(mark: str) -> None:
    step = step_for_connector(live(**{UNUSED_ANNOTATION: mark}), mounted=False, now=START)
    assert since_of(step) == timestamp(START)


def test_one_that_is_being_deleted_is_left_to_kubernetes() -> None:
    dying = live(**{UNUSED_ANNOTATION: timestamp(START)})
    dying["metadata"]["deletionTimestamp"] = timestamp(START)
    assert step_for_connector(dying, mounted=False, now=START + 2 * KEEP_SECONDS) is None


@pytest.mark.parametrize("kind", sorted(MOUNTING_KINDS))
def test_every_kind_that_holds_a_pod_mounts(kind: str) -> None:
    volumes = [{"configMap": {"name": name}} for name in ("settings", OLD, "llama-connector-abc")]
    pod = {"spec": {"volumes": [{"emptyDir": {}}, *volumes]}}
    body = {
        "Pod": pod,
        "ControllerRevision": {"data": {"template": pod}},
    }.get(kind, {"spec": {"template": pod}})
    assert shared_connectors_of({"kind": kind, **body}) == {OLD}
    assert shared_connectors_of({"kind": kind}) == frozenset()
    assert shared_connectors_of({"kind": "Service", **body}) == frozenset()


def test_who_mounts_it_wins_against_a_deletion_that_is_decided() -> None:
    namespace = SharedNamespace("one")
    world = namespace["one"]
    [write] = applied(world)
    world.perform(write)  # and the operator is killed
    namespace.collect()
    namespace.wait(KEEP_SECONDS)
    decided = namespace.collector_steps()
    assert [type(step) for step in decided] == [Delete]
    for step in world.plan().steps:
        world.perform(step)
    namespace.collect(decided)
    assert namespace.missing() == set()
    assert len(namespace.shared) == 1
    # The other way round: it is deleted between the look and the writes of the same plan.
    namespace.delete("one")
    world.reap()
    namespace.collect()
    namespace.wait(KEEP_SECONDS)
    steps = world.plan().steps
    namespace.collect()
    assert namespace.shared == {}
    for step in steps:
        world.perform(step)
        assert namespace.missing() == set()


class Sharing(RuleBasedStateMachine):
    """Two PDClusters, their operators of two releases, and collectors that see well or late."""

    def __init__(self) -> None:
        super().__init__()
        self.namespace = SharedNamespace("one", "two", rollout={"revisionHistoryLimit": 1})
        self.namespace["one"].connector, self.namespace["two"].connector = OLDER, NEWER
        self.late: list[Apply | Delete] = []
        self.deleted: set[str] = set()

    @rule(name=NAMES)
    def come_up(self, name: str) -> None:
        self.work(name)

    @rule(name=NAMES, done=st.integers(0, 20), collector_first=st.booleans())
    def be_killed(self, name: str, done: int, collector_first: bool) -> None:
        """Do some steps of a plan. The collector may write between the look and the steps."""
        world = self.namespace[name]
        if name in self.deleted:
            return
        steps = make_plan(world.observed(), world.now).steps
        if collector_first:
            self.namespace.collect()
        for step in steps[:done]:
            try:
                world.perform(step)
            except (KeyError, AssertionError):
                break  # a precondition: the object is another one, or gone
            assert self.namespace.missing() == set()

    @rule(name=NAMES)
    def let_others_act(self, name: str) -> None:
        world = self.namespace[name]
        world.reap()
        if name not in self.deleted:
            world.others_act()

    @rule()
    def collect(self) -> None:
        self.namespace.collect()

    @rule()
    def look_when_marks_are_old(self) -> None:
        self.namespace.collect()
        self.namespace.wait(KEEP_SECONDS)
        self.late = self.namespace.collector_steps()

    @rule()
    def collect_late(self) -> None:
        self.namespace.collect(self.late)

    @rule(name=NAMES, value=st.sampled_from(["1", "2", "3"]))
    def edit(self, name: str, value: str) -> None:
        self.namespace[name].edit(engine={"env": [{"name": "A", "value": value}]})

    @rule(name=NAMES)
    def upgrade(self, name: str) -> None:
        self.namespace[name].connector = NEWER

    @rule(name=NAMES, ended=st.booleans())
    def delete(self, name: str, ended: bool) -> None:
        self.namespace.delete(name)
        self.deleted.add(name)
        if ended:
            self.namespace[name].reap()

    @rule(name=NAMES)
    def create_again(self, name: str) -> None:
        self.deleted.discard(name)

    @invariant()
    def no_pod_lacks_one(self) -> None:
        assert self.namespace.missing() == set()

    def work(self, name: str) -> None:
        for _ in range(8 * (name not in self.deleted)):
            self.namespace[name].step()
            assert self.namespace.missing() == set()
            self.namespace[name].others_act()

    def teardown(self) -> None:
        """However it went, it ends with what is mounted, and with nothing when all is gone."""
        for name in self.namespace.clusters:
            self.work(name)
        self.settle()
        assert set(self.namespace.shared) == self.namespace.mounted()
        for name, world in self.namespace.clusters.items():
            self.namespace.delete(name)
            world.reap()
        self.settle()
        assert self.namespace.shared == {}

    def settle(self) -> None:
        for _ in range(3):
            self.namespace.collect()
            self.namespace.wait(KEEP_SECONDS)


Sharing.TestCase.settings = settings(
    max_examples=15,
    stateful_step_count=12,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
TestSharing = Sharing.TestCase
