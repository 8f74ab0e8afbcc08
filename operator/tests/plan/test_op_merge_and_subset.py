"""Merging a user's template over ours, and seeing that a live object says enough."""

from __future__ import annotations

import copy

import pytest
from hypothesis import given, strategies as st

from pdcluster_operator.api.spec.pod_templates import merge
from pdcluster_operator.api.spec.resources import parse_quantity
from pdcluster_operator.plan.objects.drift import covers, differences

BASE = {
    "spec": {
        "grace": 30,
        "containers": [
            {
                "name": "engine",
                "args": ["a", "b"],
                "env": [{"name": "A", "valueFrom": {"x": 1}}, {"name": "B", "value": "b"}],
                "ports": [{"containerPort": 8000, "name": "http"}],
                "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
            }
        ],
        "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory"}}],
    }
}


def engine(**fields):
    return {"spec": {"containers": [{"name": "engine", **fields}]}}


def test_containers_merge_by_name_and_ours_comes_first():
    merged = merge(BASE, {"spec": {"containers": [{"name": "log", "image": "l"}]}})
    assert [box["name"] for box in merged["spec"]["containers"]] == ["engine", "log"]
    merged = merge(BASE, engine(image="x"))
    assert merged["spec"]["containers"][0]["args"] == ["a", "b"]
    assert merged["spec"]["containers"][0]["image"] == "x"


def test_plain_lists_are_replaced():
    assert merge(BASE, engine(args=["c"]))["spec"]["containers"][0]["args"] == ["c"]


@pytest.mark.parametrize("value", ["text", b"bytes", 7, True, {}, {"a": 1}])
@pytest.mark.parametrize("field", ["env", "ports", "volumeMounts"])
def test_what_is_no_list_replaces_a_list(field, value):
    box = merge(BASE, engine(**{field: value}))["spec"]["containers"][0]
    assert box[field] == value


def test_a_variable_or_volume_is_replaced_whole():
    env = merge(BASE, engine(env=[{"name": "A", "value": "1"}]))["spec"]["containers"][0]["env"]
    assert env == [{"name": "A", "value": "1"}, {"name": "B", "value": "b"}]
    volumes = merge(BASE, {"spec": {"volumes": [{"name": "shm", "hostPath": {"path": "/x"}}]}})
    assert volumes["spec"]["volumes"] == [{"name": "shm", "hostPath": {"path": "/x"}}]


def test_mounts_merge_by_path_and_ports_by_number():
    merged = merge(BASE, engine(volumeMounts=[{"mountPath": "/dev/shm", "name": "other"}],
                                ports=[{"containerPort": 8000, "hostPort": 80}]))  # fmt: skip
    box = merged["spec"]["containers"][0]
    assert box["volumeMounts"] == [{"mountPath": "/dev/shm", "name": "other"}]
    assert box["ports"] == [{"containerPort": 8000, "name": "http", "hostPort": 80}]


def test_null_removes():
    assert "grace" not in merge(BASE, {"spec": {"grace": None}})["spec"]


@pytest.mark.parametrize("field", ["env", "ports", "volumeMounts"])
def test_null_for_a_list_of_named_items_is_an_empty_list(field):
    """Helm writes one around an empty range."""
    ours = {"name": "engine", "image": "i", field: [{"name": "A"}]}
    for theirs in ({field: None}, {field: []}, {"image": None}):
        assert merge(ours, theirs) == ours


def test_what_every_pod_needs_is_not_removed():
    """Admission refuses it. What is stored already must not be in the way of a plan."""
    assert merge(BASE, {"spec": None}) == BASE
    assert merge(BASE, {"spec": {"containers": None}}) == BASE


def test_a_probe_has_one_handler():
    ours = {"startupProbe": {"httpGet": {"path": "/"}, "periodSeconds": 2}}
    theirs = {"startupProbe": {"tcpSocket": {"port": 1}}}
    wanted = {"startupProbe": {"tcpSocket": {"port": 1}, "periodSeconds": 2}}
    assert merge(ours, theirs) == wanted
    assert merge(ours, {"startupProbe": {"periodSeconds": 5}})["startupProbe"]["httpGet"]


@pytest.mark.parametrize("probe", ["startupProbe", "readinessProbe", "livenessProbe"])
def test_what_a_users_probe_asks_replaces_all_that_ours_asks(probe):
    """Ours speaks HTTPS with the launcher: that is not how another port is asked."""
    ours = {probe: {"httpGet": {"path": "/readyz", "port": "launcher", "scheme": "HTTPS"},
                    "periodSeconds": 2, "failureThreshold": 900}}  # fmt: skip
    theirs = {probe: {"httpGet": {"path": "/health", "port": 8000}, "failureThreshold": 30}}
    assert merge(ours, theirs)[probe] == {**theirs[probe], "periodSeconds": 2}
    assert merge(ours, {probe: {"httpGet": None, "exec": {"command": ["a"]}}})[probe] == {
        "exec": {"command": ["a"]}, "periodSeconds": 2, "failureThreshold": 900,
    }  # fmt: skip
    assert merge(ours, {probe: None}) == {}


def test_a_hook_has_one_handler():
    ours = {"lifecycle": {"preStop": {"sleep": {"seconds": 20}}}}
    theirs = {"lifecycle": {"preStop": {"exec": {"command": ["sync"]}}}}
    assert merge(ours, theirs) == theirs


def test_the_mount_of_another_volume_takes_nothing_of_ours():
    cache = {"name": "cache", "mountPath": "/c", "subPath": "a", "readOnly": True}
    ours = {"volumeMounts": [cache]}
    theirs = {"volumeMounts": [{"name": "mine", "mountPath": "/c"}]}
    assert merge(ours, theirs) == theirs
    same = merge(ours, {"volumeMounts": [{"name": "cache", "mountPath": "/c", "readOnly": False}]})
    assert same["volumeMounts"][0]["subPath"] == "a"


def test_a_port_of_another_protocol_is_another_port():
    ours = {"ports": [{"name": "http", "containerPort": 8000, "protocol": "TCP"}]}
    quic = {"name": "quic", "containerPort": 8000, "protocol": "UDP"}
    assert merge(ours, {"ports": [quic]})["ports"] == [*ours["ports"], quic]
    assert merge(ours, {"ports": [{"containerPort": 8000, "hostPort": 8000}]})["ports"] == [
        {**ours["ports"][0], "hostPort": 8000}
    ]


@pytest.mark.parametrize(
    "security", [{"privileged": True}, {"capabilities": {"add": ["SYS_ADMIN"]}}]
)
def test_a_privileged_container_may_escalate(security):
    # Kubernetes refuses the one beside a False of the other.
    ours = {"securityContext": {"allowPrivilegeEscalation": False}}
    assert merge(ours, {"securityContext": security})["securityContext"] == security
    kept = merge(ours, {"securityContext": {"privileged": False}})["securityContext"]
    assert kept["allowPrivilegeEscalation"] is False


def test_merging_changes_neither_side():
    base, overlay = copy.deepcopy(BASE), engine(env=[{"name": "A", "value": "1"}])
    kept = copy.deepcopy(overlay)
    merge(base, overlay)
    assert (base, overlay) == (BASE, kept)


JSON = st.recursive(
    st.booleans() | st.integers(0, 9) | st.sampled_from(["a", "1Gi", "500m"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["a", "b", "name", "env", "limits"]), inner, max_size=3)
    ),
    max_leaves=12,
)


@given(JSON)
def test_everything_covers_itself(value):
    assert covers(copy.deepcopy(value), value)


@given(JSON, JSON)
def test_merging_nothing_and_merging_twice(base, overlay):
    assert merge(base, {}) == base or not isinstance(base, dict)
    once = merge(base, overlay)
    if isinstance(base, dict) and isinstance(overlay, dict) and "env" not in str(overlay):
        assert merge(once, overlay) == once


@pytest.mark.parametrize(
    ("live", "desired", "same"),
    [
        ({"a": 1, "more": 2}, {"a": 1}, True),
        ({"a": 2}, {"a": 1}, False),
        ({}, {"a": {}}, True),
        ({}, {"a": ""}, True),
        ({"a": "x"}, {"a": ""}, False),
        ({}, {"a": False}, False),
        ({}, {"a": 0}, False),
        ({"a": [1, 2]}, {"a": [1]}, False),
        ({"limits": {"cpu": "500m"}}, {"limits": {"cpu": "0.5"}}, True),
        ({"limits": {"memory": "1Gi"}}, {"limits": {"memory": "1024Mi"}}, True),
        ({"limits": {"cpu": "1"}}, {"limits": {"cpu": 1}}, True),
        ({"limits": {"cpu": "2"}}, {"limits": {"cpu": "1"}}, False),
        ({"emptyDir": {"sizeLimit": "8192Mi"}}, {"emptyDir": {"sizeLimit": "8Gi"}}, True),
        ({"note": "1024Mi"}, {"note": "1Gi"}, False),
        (
            {"env": [{"name": "B"}, {"name": "A", "x": 1}]},
            {"env": [{"name": "A"}, {"name": "B"}]},
            True,
        ),
        ({"env": [{"name": "A"}]}, {"env": [{"name": "B"}]}, False),
        # Of several items, each counts: the first, the last, and one without a name.
        (
            {"env": [{"name": "A", "value": "1"}, {"name": "B", "value": "2"}]},
            {"env": [{"name": "A", "value": "1"}, {"name": "B", "value": "3"}]},
            False,
        ),
        (
            {"env": [{"name": "A", "value": "1"}, {"name": "B", "value": "2"}]},
            {"env": [{"name": "A", "value": "3"}, {"name": "B", "value": "2"}]},
            False,
        ),
        ({"env": [{"name": "A"}, {"value": "1"}]}, {"env": [{"name": "A"}, {"name": "B"}]}, False),
        ({"args": ["a", "b"]}, {"args": ["a", "c"]}, False),
        ({"args": ["a", "b"]}, {"args": ["c", "b"]}, False),
        ({"limits": {"cpu": "1", "memory": "1"}}, {"limits": {"cpu": "1", "memory": "2"}}, False),
        # Items without names: an API server adds defaults to each.
        ({"rules": [{"port": 1, "protocol": "TCP"}]}, {"rules": [{"port": 1}]}, True),
        ({"rules": [{"port": 1}]}, {"rules": [{"port": 1, "protocol": "TCP"}]}, False),
        (None, {"a": 1}, False),
        ({"a": None}, {"a": {"b": 1}}, False),
        ({"limits": {}}, {"limits": {"cpu": "1"}}, False),
    ],
)
def test_what_a_live_object_covers(live, desired, same):
    assert covers(live, desired) is same


@given(JSON, JSON)
def test_there_are_differences_exactly_where_something_is_not_covered(live, desired):
    assert bool(list(differences(live, desired))) is not covers(live, desired)


def test_differences_are_named_by_their_path():
    live = {
        "metadata": {"labels": {"a": "1"}},
        "containers": [{"name": "engine", "image": "mirror/x"}, {"name": "mesh"}],
        "args": ["a", "b"],
    }
    desired = {
        "metadata": {"labels": {"a": "1", "b": "2"}},
        "containers": [{"name": "engine", "image": "x", "ports": []}],
        "args": ["a"],
    }
    assert list(differences(live, desired)) == [
        ("metadata.labels.b", None),
        ("containers[engine].image", "mirror/x"),
        ("containers[mesh]", {"name": "mesh"}),
        ("args", ["a", "b"]),
    ]


def test_an_amount_that_is_written_in_another_way_is_no_difference():
    live = {"resources": {"limits": {"cpu": "1000m", "memory": "1Gi"}}}
    desired = {"resources": {"limits": {"cpu": "1", "memory": "2Gi"}}}
    assert list(differences(live, desired)) == [("resources.limits.memory", "1Gi")]


@pytest.mark.parametrize(
    "live", [[{"value": "x"}], [{"name": "A", "value": "1"}, {"name": "A", "value": "2"}], None]
)
def test_items_that_nothing_tells_apart_differ_as_one_list(live):
    assert list(differences({"env": live}, {"env": [{"name": "A"}]})) == [("env", live)]


@pytest.mark.parametrize(
    ("text", "value"),
    [("1", 1), ("500m", 0.5), ("1.5", 1.5), ("16Gi", 16 * 2**30), ("1k", 1000), ("1e3", 1000),
     ("1.5e3", 1500), ("2E-1", 0.2), ("-2", -2), (".5", 0.5), ("5.", 5)],
)  # fmt: skip
def test_quantities(text, value):
    assert float(parse_quantity(text)) == value


@pytest.mark.parametrize("text", ["", "4 cores", "1gb", "1KiB", "0x1", "1e", "--1", "Gi", "9" * 99])
def test_what_is_no_quantity(text):
    assert parse_quantity(text) is None


def test_suffixes_of_quantities_are_those_of_kubernetes():
    decimal = {suffix: 1000**power for power, suffix in enumerate("kMGTPE", 1)}
    binary = {f"{suffix}i": 1024**power for power, suffix in enumerate("KMGTPE", 1)}
    for suffix, factor in (decimal | binary).items():
        assert parse_quantity(f"3{suffix}") == 3 * factor
    for power, suffix in enumerate("mun", 1):
        assert parse_quantity(f"3{suffix}") * 1000**power == 3


@pytest.mark.parametrize("probe", ["startupProbe", "readinessProbe", "livenessProbe"])
@pytest.mark.parametrize("handler", ["exec", "grpc", "tcpSocket"])
def test_every_probe_and_every_handler_replaces_ours(probe, handler):
    """Kubernetes refuses a probe with two handlers."""
    theirs = {handler: {"port": 1}, "httpGet": None}
    for overlay in (theirs, {handler: {"port": 1}}):
        merged = merge({probe: {"httpGet": {"path": "/"}, "timeoutSeconds": 2}}, {probe: overlay})
        assert merged == {probe: {handler: {"port": 1}, "timeoutSeconds": 2}}
    unset = merge({probe: {"httpGet": {"path": "/"}}}, {probe: {handler: None}})
    assert unset == {probe: {"httpGet": {"path": "/"}}}, "a null sets no handler"


@pytest.mark.parametrize(
    ("security", "escalates"),
    [
        ({"capabilities": {"add": ["CAP_SYS_ADMIN"]}}, True),
        ({"capabilities": {"add": ["NET_ADMIN", "SYS_ADMIN"]}}, True),
        ({"capabilities": {"add": ["NET_ADMIN"]}}, False),
        ({"capabilities": {"drop": ["SYS_ADMIN"]}}, False),
        ({"capabilities": {"add": "SYS_ADMIN"}}, False),
        ({"capabilities": {"add": None}}, False),
        ({"capabilities": ["SYS_ADMIN"]}, False),
        ({"capabilities": None}, False),
        ({"privileged": "true"}, False),
    ],
)
def test_only_what_kubernetes_calls_privileged_may_escalate(security, escalates):
    ours = {"securityContext": {"allowPrivilegeEscalation": False}}
    merged = merge(ours, {"securityContext": security})["securityContext"]
    assert ("allowPrivilegeEscalation" not in merged) is escalates


def test_no_null_of_a_user_reaches_the_api_server():
    overlay = {"a": {"b": None, "c": {"d": None, "e": 1}}, "f": None}
    assert merge({}, overlay) == {"a": {"c": {"e": 1}}}
    assert merge({"a": {"b": 1, "c": {}}, "f": 2}, overlay) == {"a": {"c": {"e": 1}}}


def test_items_that_nothing_names_are_added():
    added = [{"value": "1"}, {"name": None, "value": "2"}, {"name": "C"}]
    env = merge(BASE, engine(env=added))["spec"]["containers"][0]["env"]
    kept = [{"value": "1"}, {"value": "2"}, {"name": "C"}]  # a null would reach the API server
    assert env == [*BASE["spec"]["containers"][0]["env"], *kept]
