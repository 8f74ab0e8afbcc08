"""Each field of the children that Kubernetes or vLLM acts on, for both roles and for the router.

The golden files hold them, too. But who writes those again need not see that one of them is lost.
"""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from simulated_cluster import CONNECTOR, SimulatedCluster, manifest
from valid_specs import manifests

from pdcluster_connector.launcher.options import parse as parse_launcher

EXAMPLES = settings().max_examples // 2  # each is a plan; `make soak` asks for more
KEY = {"apiKeySecretRef": {"name": "api", "key": "token"}}
ROLES = pytest.mark.parametrize("role", ["prefill", "decode"])
WORKLOADS = {"prefill": "StatefulSet", "decode": "StatefulSet", "router": "Deployment"}
PARTS = pytest.mark.parametrize("part", list(WORKLOADS))


def children(**spec):
    """All children of a spec, by kind and by name without the revision."""
    plan = SimulatedCluster(manifest(**spec)).plan()
    assert plan.steps, plan.status["conditions"]
    return [step.manifest for step in plan.steps]


def only(kind, part, **spec):
    (found,) = [
        child
        for child in children(**spec)
        if child["kind"] == kind and f"-{part}" in child["metadata"]["name"]
    ]
    return found


def pod(part, **spec):
    return only(WORKLOADS[part], part, **spec)["spec"]["template"]["spec"]


def container(part, **spec):
    (found,) = pod(part, **spec)["containers"]
    return found


def named(entries):
    """A list of Kubernetes' whose entries have names, as a dict."""
    found = {one["name"]: {k: v for k, v in one.items() if k != "name"} for one in entries}
    assert len(found) == len(entries)
    return found


def flags(words):
    """Flags that all have a value, as a dict of lists."""
    found = {}
    for flag, value in zip(words[::2], words[1::2], strict=True):
        found.setdefault(flag, []).append(value)
    return found


# What every child says.

API_VERSIONS = {
    "Secret": "v1", "ServiceAccount": "v1", "Service": "v1", "ConfigMap": "v1",
    "StatefulSet": "apps/v1", "Deployment": "apps/v1", "ControllerRevision": "apps/v1",
    "PodDisruptionBudget": "policy/v1", "NetworkPolicy": "networking.k8s.io/v1",
}  # fmt: skip
COMPONENTS = {
    "llama-ticket-key": "ticket-key", "llama-certificates": "certificates",
    "llama-pods": "identity", "llama-engines": "engine", "llama-router": "router",
    "llama-prefill": "prefill", "llama-decode": "decode", "pdcluster-connector": "connector",
}  # fmt: skip


def test_every_child_says_whose_it_is():
    found = children(router={"replicas": 2})
    assert {child["kind"] for child in found} == set(API_VERSIONS)
    for child in found:
        metadata, labels = child["metadata"], child["metadata"]["labels"]
        assert child["apiVersion"] == API_VERSIONS[child["kind"]]
        assert metadata["namespace"] == "default"
        (component,) = [c for name, c in COMPONENTS.items() if metadata["name"].startswith(name)]
        if child["kind"] == "ControllerRevision":
            component = "revision"
        shared = child["kind"] == "ConfigMap"
        expected = {
            "app.kubernetes.io/name": "pdcluster",
            "app.kubernetes.io/component": component,
            "app.kubernetes.io/part-of": "pdcluster",
            "app.kubernetes.io/managed-by": "pdcluster-operator",
        }
        if not shared:
            expected |= {"app.kubernetes.io/instance": "llama", "pdcluster.dev/cluster": "llama"}
        assert expected.items() <= labels.items()
        assert metadata.get("ownerReferences") == (
            None
            if shared
            else [
                {
                    "apiVersion": "pdcluster.dev/v1alpha1", "kind": "PDCluster", "name": "llama",
                    "uid": "uid-0", "controller": True, "blockOwnerDeletion": True,
                }
            ]
        )  # fmt: skip


@ROLES
def test_an_engines_children_share_labels_by_which_it_is_found(role):
    spec = {role: {"replicas": 2}}
    sets = [c for c in children(**spec) if c["kind"] == "StatefulSet"]
    for index in range(2):
        (engine,) = [
            c
            for c in sets
            if f"-{role}-" in (n := c["metadata"]["name"]) and n.endswith(str(index))
        ]
        name, labels = engine["metadata"]["name"], engine["metadata"]["labels"]
        (service,) = [
            c for c in children(**spec) if c["kind"] == "Service" and c["metadata"]["name"] == name
        ]
        assert service["metadata"]["labels"] == labels
        assert labels["pdcluster.dev/role"] == role
        assert labels["pdcluster.dev/engine"] == name
        assert name == f"llama-{role}-{labels['pdcluster.dev/revision']}-{index}"
        assert labels.items() <= engine["spec"]["template"]["metadata"]["labels"].items()
        both = {"pdcluster.dev/cluster": "llama", "pdcluster.dev/engine": name}
        assert service["spec"]["selector"] == both
        assert engine["spec"]["selector"]["matchLabels"] == both
        assert engine["spec"]["serviceName"] == name
        arguments = container_args(engine)
        assert arguments["--engine"] == [
            f"default.llama.{role}.{labels['pdcluster.dev/revision']}.{index}"
        ]


def container_args(workload):
    words = workload["spec"]["template"]["spec"]["containers"][0]["args"]
    return flags(words[: words.index("--")])


def test_what_many_pods_share_cannot_be_changed_in_place():
    (shared,) = [c for c in children() if c["kind"] == "ConfigMap"]
    assert shared["immutable"] is True
    assert shared["metadata"]["name"] == f"pdcluster-connector-{CONNECTOR.digest[:16]}"
    assert shared["metadata"]["labels"]["pdcluster.dev/connector"] == CONNECTOR.digest[:16]
    assert set(shared["binaryData"]) == {"connector.pyz"}


# Names and numbers of ports: a Service or a probe with a wrong one reaches nothing.


def made_of(cluster):
    """All children of a spec, and the templates of pods among them."""
    made = [step.manifest for step in SimulatedCluster(cluster).plan().steps]
    return made, [c["spec"]["template"] for c in made if c["kind"] in ("StatefulSet", "Deployment")]


@settings(max_examples=EXAMPLES)
@given(manifests())
def test_services_name_ports_that_containers_have(cluster):
    made, templates = made_of(cluster)
    for service in (child["spec"] for child in made if child["kind"] == "Service"):
        for template in templates:
            # Engines of a role that is scaled to zero have no pods.
            if service["selector"].items() <= template["metadata"]["labels"].items():
                ports = named(template["spec"]["containers"][0]["ports"])
                for port in service["ports"]:
                    reached = ports[port["targetPort"]]
                    assert reached["containerPort"] == port["port"]
                    assert reached["protocol"] == port["protocol"] == "TCP"
                    assert port["name"] == port["targetPort"]


@settings(max_examples=EXAMPLES)
@given(manifests())
def test_probes_and_policies_name_ports_that_containers_have(cluster):
    made, templates = made_of(cluster)
    everything = set()
    for box in (template["spec"]["containers"][0] for template in templates):
        everything |= {port["containerPort"] for port in box["ports"]}
        probes = [box[kind] for kind in ("startupProbe", "readinessProbe") if kind in box]
        assert {probe["httpGet"]["port"] for probe in probes} <= {p["name"] for p in box["ports"]}
        assert "readinessProbe" in box
    everything |= {8000, 29000}  # of routers, which are not there without engines of both roles
    policies = [child["spec"] for child in made if child["kind"] == "NetworkPolicy"]
    for rule in (rule for policy in policies for rule in policy["ingress"]):
        for port in rule.get("ports", ()):
            assert port["protocol"] == "TCP"
            assert port["port"] in everything | {5590, 5591}


def test_the_ports_are_those_of_the_docs():
    spec = {"router": KEY, "prefill": {"parallelism": {"data": 3}}}

    def numbers(part):
        return {
            n: port["containerPort"] for n, port in named(container(part, **spec)["ports"]).items()
        }

    engine = {"http": 8000, "launcher": 5590, "metrics": 5591, "side-channel": 5600}
    assert numbers("decode") == engine
    assert numbers("prefill") == engine | {"side-ch-1": 5601, "side-ch-2": 5602}
    assert numbers("router") == {"http": 8000, "metrics": 29000, "gate": 5590}
    service = only("Service", "decode", **spec)["spec"]
    assert {p["name"]: p["port"] for p in service["ports"]} == engine
    # An engine of several pods needs the names of its pods before any of them is ready.
    assert (service["clusterIP"], service["publishNotReadyAddresses"]) == ("None", True)
    assert named(only("Service", "router", **spec)["spec"]["ports"]) == {
        "http": {"port": 8000, "targetPort": "http", "protocol": "TCP", "appProtocol": "http"}
    }


# What a pod may do.


@PARTS
def test_pods_have_no_rights_that_they_do_not_need(part):
    spec = pod(part)
    assert spec["serviceAccountName"] == "llama-pods"
    assert spec["automountServiceAccountToken"] is False
    # Else a Service of the user's that is called vllm sets VLLM_PORT.
    assert spec["enableServiceLinks"] is False
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert spec["containers"][0]["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
    }
    assert only("ServiceAccount", "pods")["automountServiceAccountToken"] is False


def test_routers_do_not_run_as_root():
    security = pod("router")["securityContext"]
    assert security["runAsNonRoot"] is True
    assert security["runAsUser"] == security["runAsGroup"] == 65_532


@ROLES
def test_only_rdma_may_lock_memory(role):
    rdma = {"device": "CPU", "rdma": {"resource": "rdma/ib", "networks": ["net-a", "x/net-b"]}}
    workload = only("StatefulSet", role, transfer=rdma)["spec"]["template"]
    box = workload["spec"]["containers"][0]
    assert box["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
    assert workload["metadata"]["annotations"] == {"k8s.v1.cni.cncf.io/networks": "net-a,x/net-b"}
    assert box["resources"] == {"limits": {"rdma/ib": "1"}}
    none = only("StatefulSet", role, transfer={**rdma, "rdma": {"resource": "rdma/ib"}})
    assert "annotations" not in none["spec"]["template"]["metadata"]


# Probes and the end of a pod.


@ROLES
@pytest.mark.parametrize(("timeout", "failures"), [(60, 30), (61, 30), (62, 31), (3600, 1800)])
def test_an_engine_may_start_for_as_long_as_the_spec_says(role, timeout, failures):
    spec = {"engine": {"startupTimeoutSeconds": timeout}, "transfer": {"device": "CPU"}}
    for tls, scheme in (("Enabled", {"scheme": "HTTPS"}), ("Disabled", {})):
        spec["transfer"] = {"device": "CPU", "tls": tls}
        box = container(role, **spec)
        asked = {"path": "/readyz", "port": "launcher", **scheme}
        timing = {"httpGet": asked, "periodSeconds": 2, "timeoutSeconds": 2}
        assert box["startupProbe"] == {**timing, "failureThreshold": failures}
        assert box["readinessProbe"] == {**timing, "failureThreshold": 3}


def test_a_router_is_asked_whether_its_engines_answer():
    timing = {"periodSeconds": 1, "timeoutSeconds": 2, "failureThreshold": 3}
    plain, gated = container("router"), container("router", router=KEY)
    assert plain["readinessProbe"] == {
        "httpGet": {"path": "/readiness", "port": "http"}, **timing,
    }  # fmt: skip
    # With a key the router answers nobody without it: the kubelet asks the gate.
    assert gated["readinessProbe"] == {"httpGet": {"path": "/readyz", "port": "gate"}, **timing}
    assert "startupProbe" not in plain


@pytest.mark.parametrize("lease", [5, 30, 31, 3600])
@pytest.mark.parametrize("request_seconds", [10, 600])
def test_a_pod_may_end_for_as_long_as_its_requests_and_leases_last(lease, request_seconds):
    spec = {
        "requestTimeoutSeconds": request_seconds,
        "transfer": {"device": "CPU", "leaseSeconds": lease},
    }
    drain = request_seconds + max(lease, 30)
    for role in ("prefill", "decode"):
        arguments = container_args(only("StatefulSet", role, **spec))
        assert arguments["--drain-seconds"] == [str(drain)]
        assert arguments["--stop-seconds"] == ["20"]
        assert pod(role, **spec)["terminationGracePeriodSeconds"] == drain + 20 + 10
    router = pod("router", **spec)
    assert router["terminationGracePeriodSeconds"] == 20 + request_seconds + 10
    assert router["containers"][0]["lifecycle"] == {"preStop": {"sleep": {"seconds": 20}}}


@ROLES
def test_the_kubelet_reads_why_an_engine_ended_where_the_launcher_writes_it(role):
    workload = only("StatefulSet", role)
    box = workload["spec"]["template"]["spec"]["containers"][0]
    assert container_args(workload)["--termination-log"] == [box["terminationMessagePath"]]
    assert box["terminationMessagePath"] == "/dev/termination-log"
    assert box["terminationMessagePolicy"] == "FallbackToLogsOnError"
    assert container("router")["terminationMessagePolicy"] == "FallbackToLogsOnError"


def test_a_new_router_is_ready_before_an_old_one_goes():
    deployment = only("Deployment", "router", router={"replicas": 2})["spec"]
    assert deployment["replicas"] == 2
    assert deployment["strategy"] == {
        "type": "RollingUpdate",
        "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0},
    }


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_one_router_is_evictable_and_of_several_one_at_a_time(replicas):
    made = children(router={"replicas": replicas})
    (deployment,) = [c for c in made if c["kind"] == "Deployment"]
    budgets = [
        c for c in made if c["kind"] == "PodDisruptionBudget" and "router" in c["metadata"]["name"]
    ]
    if replicas == 1:
        assert budgets == []
        return
    (budget,) = budgets
    assert budget["spec"] == {
        "maxUnavailable": 1,
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
        "selector": deployment["spec"]["selector"],
    }


# What the processes are told.


@ROLES
def test_where_the_connector_comes_from_decides_what_runs(role):
    bundled, image = container(role), container(role, engine={"connector": "Image"})
    assert bundled["command"] == ["python3", "/pdcluster/connector.pyz"]
    assert image["command"] == ["python3", "-m", "pdcluster_connector.launcher"]
    assert named(bundled["volumeMounts"])["connector"] == {
        "mountPath": "/pdcluster", "readOnly": True,
    }  # fmt: skip
    volumes = named(pod(role)["volumes"])
    assert volumes["connector"] == {
        "configMap": {"name": f"pdcluster-connector-{CONNECTOR.digest[:16]}"}
    }
    assert "connector" not in named(image["volumeMounts"])
    assert "connector" not in named(pod(role, engine={"connector": "Image"})["volumes"])


@ROLES
def test_each_role_has_its_own_image_and_the_shared_one_else(role):
    other = {"prefill": "decode", "decode": "prefill"}[role]
    spec = {"engine": {"image": "shared:1"}, role: {"engine": {"image": "own:1"}}}
    assert container(role, **spec)["image"] == "own:1"
    assert container(other, **spec)["image"] == "shared:1"


@ROLES
def test_the_launcher_and_the_connector_learn_what_the_spec_says(role):
    transfer = {
        "device": "CPU", "leaseSeconds": 77, "nixlThreads": 9, "backends": ["UCX"],
        "kvLayout": "BHLNC", "internalNames": "Shown",
        "loadFailurePolicy": "Recompute", "tls": "Disabled",
    }  # fmt: skip
    workload = only("StatefulSet", role, transfer=transfer)
    launcher = parse_launcher(workload["spec"]["template"]["spec"]["containers"][0]["args"])
    assert (launcher.role, launcher.host, launcher.port) == (role, "0.0.0.0", 5590)
    config = json.loads(launcher.vllm[launcher.vllm.index("--kv-transfer-config") + 1])
    key = workload["metadata"]["labels"]["pdcluster.dev/pairing-key"]
    assert config == {
        "kv_connector": "PDClusterConnector",
        "kv_connector_module_path": "pdcluster_connector.vllm.connector",
        "kv_role": {"prefill": "kv_producer", "decode": "kv_consumer"}[role],
        "kv_buffer_device": "cpu",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "side_channel_host": "$(POD_IP)",
            "side_channel_port": 5600,
            "lease_seconds": 77,
            "drain_deadline_seconds": 30,
            "backends": ["UCX"],
            "show_internal_names": True,
            "ticket_key_file": "/pdcluster-keys/ticket",
            "ticket_audience": f"default/llama/{key}",
            "kv_layout": "BHLNC",
            "num_threads": 9,
            "allow_insecure": True,
        },
    }
    assert {"--served-model-name", "--tensor-parallel-size"} <= set(launcher.vllm)
    gpu = container(role, transfer={"device": "CUDA"})["args"]
    assert json.loads(gpu[gpu.index("--kv-transfer-config") + 1])["kv_buffer_device"] == "cuda"


@ROLES
def test_the_ticket_key_is_mounted_where_the_connector_reads_it(role):
    assert named(container(role)["volumeMounts"])["ticket-key"] == {
        "mountPath": "/pdcluster-keys", "readOnly": True,
    }  # fmt: skip
    assert named(pod(role)["volumes"])["ticket-key"] == {
        "secret": {"secretName": "llama-ticket-key"}
    }


@ROLES
@pytest.mark.parametrize(("device", "size"), [("CPU", "2Gi"), ("CUDA", "8Gi")])
def test_shared_memory_is_larger_with_gpus(role, device, size):
    volumes = named(pod(role, transfer={"device": device})["volumes"])
    assert volumes["shm"] == {"emptyDir": {"medium": "Memory", "sizeLimit": size}}
    mounts = named(container(role, transfer={"device": device})["volumeMounts"])
    assert mounts["shm"] == {"mountPath": "/dev/shm"}


HUB = {
    "huggingFace": {
        "repo": "org/m",
        "revision": "v1",
        "tokenSecretRef": {"name": "hub", "key": "k"},
    }
}
CACHE = {"persistentVolumeClaim": {"claimName": "cache", "path": "a/b/"}}
CLAIM = {"persistentVolumeClaim": {"claimName": "weights", "path": "sub/folder"}}


@ROLES
@pytest.mark.parametrize(
    ("model", "word", "volume", "mount"),
    [
        (
            {"source": CLAIM}, "/models/model/sub/folder",
            ("model", {"persistentVolumeClaim": {"claimName": "weights", "readOnly": True}}),
            {"mountPath": "/models/model", "readOnly": True},
        ),
        (
            {"source": {"hostPath": {"path": "/data/m"}}}, "/models/model",
            ("model", {"hostPath": {"path": "/data/m", "type": "Directory"}}),
            {"mountPath": "/models/model", "readOnly": True},
        ),
        (
            {"source": HUB}, "org/m", ("cache", {"emptyDir": {}}), {"mountPath": "/models/cache"},
        ),
        (
            {"source": HUB, "cache": CACHE}, "org/m",
            ("cache", {"persistentVolumeClaim": {"claimName": "cache"}}),
            {"mountPath": "/models/cache", "subPath": "a/b"},
        ),
    ],
    ids=["claim", "folder", "download", "download into a claim"],
)  # fmt: skip
def test_the_weights_are_where_vllm_looks_for_them(role, model, word, volume, mount):
    spec = pod(role, model=model)
    box = spec["containers"][0]
    name, source = volume
    assert named(spec["volumes"])[name] == source
    assert named(box["volumeMounts"])[name] == mount
    assert {"model", "cache"}.intersection(named(spec["volumes"])) == {name}
    serve = box["args"][box["args"].index("--") + 1 :]
    assert serve[0] == word
    env = named(box["env"])
    if "huggingFace" in model["source"]:
        assert serve[serve.index("--revision") + 1] == "v1"
        assert env["HF_HOME"] == {"value": "/models/cache"}
        assert env["HF_TOKEN"] == {"valueFrom": {"secretKeyRef": {"name": "hub", "key": "k"}}}
    else:
        assert "--revision" not in serve
        assert {"HF_HOME", "HF_TOKEN"}.isdisjoint(env)


@ROLES
def test_the_environment_of_an_engine(role):
    own = [
        {"name": "A", "value": "1"},
        {"name": "B"} | {"valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
    ]
    spec = {role: {"parallelism": {"tensor": 4, "nodes": 2}, "engine": {"env": own}}, "router": KEY}
    workload = only("StatefulSet", role, **spec)
    box = workload["spec"]["template"]["spec"]["containers"][0]
    field = "metadata.labels['apps.kubernetes.io/pod-index']"
    assert named(box["env"]) == {
        "POD_IP": {"valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        "VLLM_HOST_IP": {"value": "$(POD_IP)"},
        "VLLM_SSM_CONV_STATE_LAYOUT": {"value": "DS"},
        "PDCLUSTER_NODE_RANK": {"valueFrom": {"fieldRef": {"fieldPath": field}}},
        "VLLM_API_KEY": {"valueFrom": {"secretKeyRef": {"name": "api", "key": "token"}}},
        "A": {"value": "1"},
        "B": {"valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
    }
    assert workload["spec"]["replicas"] == 2
    words = box["args"]
    assert words[words.index("--master-addr") + 1] == (
        f"{workload['metadata']['name']}-0.{workload['metadata']['name']}.default.svc"
    )
    assert words[words.index("--master-port") + 1] == "29500"
    assert words[words.index("--node-rank") + 1] == "$(PDCLUSTER_NODE_RANK)"
    assert words[words.index("--nnodes") + 1] == "2"
    assert words[words.index("--distributed-executor-backend") + 1] == "mp"
    other = {"prefill": "decode", "decode": "prefill"}[role]
    assert set(named(container(other, **spec)["env"])) == {
        "POD_IP", "VLLM_HOST_IP", "VLLM_SSM_CONV_STATE_LAYOUT", "VLLM_API_KEY",
    }  # fmt: skip
    # Who sets the layout of the states by himself is obeyed.
    layout = [{"name": "VLLM_SSM_CONV_STATE_LAYOUT", "value": "SD"}]
    assert named(container(role, engine={"env": layout})["env"])["VLLM_SSM_CONV_STATE_LAYOUT"] == {
        "value": "SD"
    }


def test_on_efa_libfabric_has_no_way_to_fall_back_to_tcp():
    efa = {"rdma": {"resource": "vpc.amazonaws.com/efa"}, "backends": ["LIBFABRIC"]}
    box = container("decode", transfer=efa)
    assert named(box["env"])["FI_PROVIDER"] == {"value": "efa"}
    config = json.loads(box["args"][box["args"].index("--kv-transfer-config") + 1])
    assert config["kv_connector_extra_config"]["backends"] == ["LIBFABRIC"]
    assert box["resources"]["limits"]["vpc.amazonaws.com/efa"] == "1"
    # Who names a provider by himself is obeyed, and other devices and UCX have no need of one.
    own = {"env": [{"name": "FI_PROVIDER", "value": "tcp"}]}
    assert named(container("decode", transfer=efa, engine=own)["env"])["FI_PROVIDER"] == {
        "value": "tcp"
    }
    for changed in ({"backends": ["UCX"]}, {"rdma": {"resource": "rdma/ib"}}):
        others = container("decode", transfer=efa | changed)["env"]
        assert "FI_PROVIDER" not in named(others)


POLICIES = {
    "RoundRobin": "round_robin", "Random": "random", "CacheAware": "cache_aware",
    "PowerOfTwo": "power_of_two", "ConsistentHash": "consistent_hash",
    "KVAware": "kv_aware", "StickyLeastLoaded": "sticky_least_loaded",
}  # fmt: skip


@pytest.mark.parametrize("policy", list(POLICIES))
def test_the_routers_command_line(policy):
    spec = {
        "prefill": {"replicas": 2}, "decode": {"replicas": 3}, "requestTimeoutSeconds": 99,
        "router": {"policy": policy, "image": "router:1"},
    }  # fmt: skip
    box = container("router", **spec)
    assert (box["image"], box["command"]) == ("router:1", ["vllm-router"])
    first, *words = box["args"]
    assert first == "--vllm-pd-disaggregation"
    engines = [c["metadata"]["name"] for c in children(**spec) if c["kind"] == "StatefulSet"]
    urls = {
        role: [f"http://{n}-0.{n}.default.svc:8000" for n in engines if f"-{role}-" in n]
        for role in ("prefill", "decode")
    }
    assert flags(words) == {
        "--prefill": urls["prefill"],
        "--decode": urls["decode"],
        "--host": ["0.0.0.0"],
        "--port": ["8000"],
        "--policy": [POLICIES[policy]],
        # In turn, both roles would step together.
        **({"--decode-policy": ["random"]} if policy == "RoundRobin" else {}),
        "--worker-startup-timeout-secs": ["86400"],
        "--worker-startup-check-interval": ["1"],
        "--health-check-interval-secs": ["1"],
        "--health-failure-threshold": ["3"],
        "--health-success-threshold": ["1"],
        "--request-timeout-secs": ["99"],
        "--prometheus-host": ["0.0.0.0"],
        "--prometheus-port": ["29000"],
    }
    assert (len(urls["prefill"]), len(urls["decode"])) == (2, 3)


@pytest.mark.parametrize(
    ("router", "said"),
    [
        ({}, {"policy": "round_robin", "decode": "random"}),
        ({"policy": "RoundRobin"}, {"policy": "round_robin", "decode": "random"}),
        ({"decodePolicy": "RoundRobin"}, {"policy": "round_robin", "decode": "round_robin"}),
        ({"prefillPolicy": "Random"},
         {"policy": "round_robin", "prefill": "random", "decode": "random"}),
        ({"policy": "CacheAware"}, {"policy": "cache_aware"}),
        ({"policy": "CacheAware", "prefillPolicy": "RoundRobin"},
         {"policy": "cache_aware", "prefill": "round_robin"}),
        ({"policy": "ConsistentHash", "decodePolicy": "PowerOfTwo"},
         {"policy": "consistent_hash", "decode": "power_of_two"}),
    ],
)  # fmt: skip
def test_each_role_has_a_policy(router, said):
    words = flags(container("router", router=router)["args"][1:])
    names = {"--policy": "policy", "--prefill-policy": "prefill", "--decode-policy": "decode"}
    assert {names[flag]: value for flag, (value,) in words.items() if flag in names} == said


@pytest.mark.parametrize("level", ["Debug", "Info", "Warning", "Error", "Critical"])
def test_the_level_of_the_routers_log(level):
    words = flags(container("router", router={"logLevel": level})["args"][1:])
    assert words["--log-level"] == [level.lower()]
    assert "--log-level" not in container("router")["args"]


def test_the_users_own_flags_come_last_so_that_they_win():
    args = container("router", router={"extraArgs": ["--decode-policy", "power_of_two"]})["args"]
    assert args[-2:] == ["--decode-policy", "power_of_two"]
    assert args[args.index("--decode-policy") + 1] == "random"


def client_service(**spec):
    (found,) = [
        c for c in children(**spec)
        if c["kind"] == "Service" and c["metadata"]["name"].endswith("-router")
    ]  # fmt: skip
    return found


def test_the_service_for_clients_is_as_the_spec_says():
    plain = client_service()
    assert "type" not in plain["spec"], "somebody else may have set it"
    service = {
        "type": "LoadBalancer", "loadBalancerClass": "a/b",
        "loadBalancerSourceRanges": ["10.0.0.0/8"], "externalTrafficPolicy": "Local",
    }  # fmt: skip
    marks = {"example.com/a": "ours", "example.com/b": "b"}
    spec = {
        "router": {"service": {**service, "annotations": marks}},
        "commonMetadata": {"annotations": {"example.com/a": "common", "example.com/c": "c"}},
    }
    opened = client_service(**spec)
    assert opened["spec"] == {**plain["spec"], **service}
    assert opened["metadata"]["annotations"].items() >= {**marks, "example.com/c": "c"}.items()
    others = [c for c in children(**spec) if c["metadata"]["name"] != opened["metadata"]["name"]]
    assert not [c for c in others if "example.com/b" in c["metadata"].get("annotations", {})]
    assert client_service(router={"service": {}})["spec"] == {**plain["spec"], "type": "ClusterIP"}


def test_with_a_key_the_gate_starts_the_router():
    key_for_both = {"router": {"image": "router:1", **KEY}}
    gated = container("router", **key_for_both)
    assert gated["command"] == ["python3", "-m", "pdcluster_connector.launcher.router_gate"]
    assert gated["args"][:5] == ["--host", "0.0.0.0", "--port", "5590", "--"]
    (volume,) = pod("router", **key_for_both)["volumes"]
    assert volume["configMap"]["name"] == f"pdcluster-connector-{CONNECTOR.digest[:16]}"
    assert "volumes" not in pod("router"), "without a key it needs nothing of ours"
    plain = container("router")["args"]
    assert [w for w in gated["args"][5:] if "://" not in w] == [w for w in plain if "://" not in w]
    assert named(gated["env"]) == {
        "PYTHONPATH": {"value": "/pdcluster/connector.pyz"},
        "VLLM_API_KEY": {"valueFrom": {"secretKeyRef": {"name": "api", "key": "token"}}},
    }
    assert gated["volumeMounts"] == [
        {"name": "connector", "mountPath": "/pdcluster", "readOnly": True}
    ]


@pytest.mark.parametrize("amounts", ["requests", "limits"])
@PARTS
def test_resources_reach_their_own_place(part, amounts):
    given = {part: {"resources": {amounts: {"cpu": 4, "memory": "1Gi"}}}}
    before = {one: container(one)["resources"] for one in WORKLOADS}
    for one in WORKLOADS:
        # Routers have amounts of their own; engines have none.
        changed = {amounts: {"cpu": "4", "memory": "1Gi"}} if one == part else {}
        assert container(one, **given)["resources"] == before[one] | changed


def test_a_container_beside_the_router_stays_as_it_was_written():
    agents = [{"name": "a", "image": "a:1"}, {"name": "b", "image": "b:1", "args": ["--prefill"]}]
    made = pod("router", router={"podTemplate": {"spec": {"containers": agents}}})["containers"]
    assert made[1:] == agents
    assert made[0]["name"] == "router"
