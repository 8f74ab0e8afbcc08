"""What holds for every valid spec."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

import simulated_cluster
import valid_specs
from hypothesis import given, settings
from simulated_cluster import SimulatedCluster, copied
from valid_specs import manifests

from pdcluster_connector.launcher.arguments import engine_command
from pdcluster_connector.launcher.options import parse as parse_launcher
from pdcluster_connector.vllm.config import parse_options
from pdcluster_operator.api.rules.validate import check_manifest
from pdcluster_operator.api.schema.crd import crd
from pdcluster_operator.api.spec.engine_types import Switch
from pdcluster_operator.api.spec.resolve import resolve_engine
from pdcluster_operator.api.spec.router_types import RouterType
from pdcluster_operator.api.spec.types import Role, Visibility

EXAMPLES = settings().max_examples // 2  # each is several plans; `make soak` asks for more

LABEL = re.compile(r"[a-z0-9A-Z]([-._a-z0-9A-Z]*[a-z0-9A-Z])?")
DNS_1035 = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")


def pod_templates(plan):
    for step in plan.steps:
        template = step.manifest.get("spec", {}).get("template")
        if template is not None:
            yield step.manifest, template


def engine_containers(plan):
    for child, template in pod_templates(plan):
        if child["kind"] == "StatefulSet":
            yield child, template["spec"]["containers"][0]


def test_every_field_of_the_api_is_drawn():
    """Else what follows holds for every spec that leaves the field out."""
    drawn = Path(valid_specs.__file__).read_text() + Path(simulated_cluster.__file__).read_text()
    spec = crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    names = {name for name in fields_of(spec) if not re.search(rf"\b{name}\b", drawn)}
    assert names == set(), "draw them in valid_specs.py"


def fields_of(schema):
    for name, part in schema.get("properties", {}).items():
        yield name
        yield from fields_of(part)
        yield from fields_of(part.get("items", {}))


@settings(max_examples=EXAMPLES)
@given(manifests())
def test_planning_its_own_result_gives_no_step(cluster):
    world = SimulatedCluster(cluster)
    if world.step().scales:
        world.step()  # a number that was outside of the bounds of spec.autoscaling
    if any(kind == "Job" for kind, _ in world.children):
        assert not any(kind == "StatefulSet" for kind, _ in world.children)
        world.step()  # the weights are there: the engines that waited for them are created
    assert world.step().steps == ()
    world.run_pods()
    world.step()  # the first pair has its nodes: the engines that waited for it are created
    world.run_pods()
    world.speak()
    world.step()
    world.link()
    world.route()
    world.settle()
    before = copied(world.cluster["status"])
    world.now += 1000
    plan = world.plan()
    assert plan.steps == ()
    assert plan.status == before
    wanted = all(cluster["spec"][role].get("replicas", 1) for role in ("prefill", "decode"))
    assert world.condition("Ready")["status"] == ("True" if wanted else "False")


@settings(max_examples=EXAMPLES)
@given(manifests())
def test_names_are_unique_legal_and_short_enough(cluster):
    plan = SimulatedCluster(cluster).plan()
    seen = set()
    for step in plan.steps:
        kind, name = step.manifest["kind"], step.manifest["metadata"]["name"]
        assert (kind, name) not in seen
        seen.add((kind, name))
        assert DNS_1035.fullmatch(name)
        # Kubernetes appends a hyphen and ten characters to both, for revisions.
        assert len(name) <= (52 if kind in ("StatefulSet", "Deployment") else 63)
        for value in step.manifest["metadata"]["labels"].values():
            assert len(value) <= 63
            assert LABEL.fullmatch(value)
    for child, _ in engine_containers(plan):
        assert len(f"{child['metadata']['name']}-{child['spec']['replicas'] - 1}") <= 63


@settings(max_examples=EXAMPLES)
@given(manifests())
def test_ports_and_volumes_of_a_pod_do_not_collide(cluster):
    for _, template in pod_templates(SimulatedCluster(cluster).plan()):
        spec = template["spec"]
        ports = [port for box in spec["containers"] for port in box.get("ports", ())]
        assert len({port["containerPort"] for port in ports}) == len(ports)
        assert len({port["name"] for port in ports}) == len(ports)
        assert all(len(port["name"]) <= 15 for port in ports)
        volumes = [volume["name"] for volume in spec.get("volumes", ())]
        assert len(set(volumes)) == len(volumes)
        for box in spec["containers"]:
            mounts = [mount["mountPath"] for mount in box.get("volumeMounts", ())]
            assert len(set(mounts)) == len(mounts)
            assert {mount["name"] for mount in box.get("volumeMounts", ())} <= set(volumes)
            names = [var["name"] for var in box.get("env", ())]
            assert len(set(names)) == len(names)


@settings(max_examples=EXAMPLES)
@given(manifests())
def test_selectors_find_exactly_their_pods(cluster):
    plan = SimulatedCluster(cluster).plan()
    templates = list(pod_templates(plan))
    for child, template in templates:
        labels = template["metadata"]["labels"]
        for other, _ in templates:
            selector = other["spec"].get("selector", {}).get("matchLabels")
            if selector is None:  # the API server gives a Job one of its own
                assert other["kind"] == "Job"
                continue
            assert (selector.items() <= labels.items()) == (other is child)


@settings(max_examples=EXAMPLES)
@given(manifests())
def test_the_command_line_says_what_the_spec_says(cluster):
    parsed, findings = check_manifest(cluster)
    assert findings.ok
    for child, container in engine_containers(SimulatedCluster(cluster).plan()):
        role = Role(child["metadata"]["labels"]["pdcluster.dev/role"])
        engine, parallel = resolve_engine(parsed, role), parsed.spec.role(role).parallelism
        launcher = parse_launcher([expanded(word) for word in container["args"]])
        assert (launcher.role, launcher.host, launcher.port) == (role.value, "0.0.0.0", 5590)
        assert launcher.metrics_port == 5591
        assert launcher.engine.logical.startswith(f"default.{parsed.name}.{role}.")
        known, rest = vllm_parser().parse_known_args(launcher.vllm)
        assert known.model == engine.model
        assert known.served_model_name == parsed.served_name
        sidecar = role is Role.DECODE and parsed.spec.router.type is RouterType.LLMD
        assert (known.host, known.port) == (("127.0.0.1", 8200) if sidecar else ("0.0.0.0", 8000))
        assert known.tensor_parallel_size == parallel.tensor
        assert known.pipeline_parallel_size == parallel.pipeline
        assert known.data_parallel_size == parallel.data
        assert known.nnodes == parallel.nodes
        assert known.block_size == engine.block_size
        assert known.enable_prefix_caching == (engine.prefix_caching is Switch.ENABLED)
        assert known.kv_cache_dtype == engine.kv_cache_dtype
        assert known.max_model_len == engine.max_model_len
        assert known.attention_backend == engine.attention_backend
        assert known.revision == engine.model_revision
        assert tuple(rest) == engine.extra_args
        guarded = parsed.spec.router.api_key_secret_ref is not None
        assert any(name.endswith(".RequireKey") for name in known.middleware) is guarded
        config = known.kv_transfer_config
        if engine.kv_offload is not None:
            assert (config["kv_connector"], config["kv_role"]) == ("MultiConnector", "kv_both")
            config, offloading = config["kv_connector_extra_config"]["connectors"]
            nbytes = offloading["kv_connector_extra_config"]["cpu_bytes_to_use"]
            assert nbytes * parallel.data // parallel.nodes in range((3 << 30) - 64, (3 << 30) + 1)
        assert config["kv_role"] == {"prefill": "kv_producer", "decode": "kv_consumer"}[role]
        options = parse_options(config["kv_connector_extra_config"])
        assert options.lease_seconds == parsed.spec.transfer.lease_seconds
        shown = parsed.spec.transfer.internal_names is Visibility.SHOWN
        assert options.show_internal_names == shown
        assert (options.side_channel_host, options.side_channel_port) == ("10.0.0.9", 5600)
        threads = parsed.spec.transfer.nixl_threads
        layout = parsed.spec.transfer.kv_layout.value
        assert options.kv_layout == ("" if layout == "Auto" else layout)
        assert options.num_threads == (4 if threads is None else threads)
        assert known.kv_transfer_config["kv_load_failure_policy"] in ("fail", "recompute")


@settings(max_examples=EXAMPLES)
@given(manifests())
def test_the_launcher_reads_the_same_from_it(cluster):
    parsed, _ = check_manifest(cluster)
    for child, container in engine_containers(SimulatedCluster(cluster).plan()):
        role = child["metadata"]["labels"]["pdcluster.dev/role"]
        launcher = parse_launcher([expanded(word) for word in container["args"]])
        command = engine_command(
            launcher.vllm, engine_id=f"{launcher.engine.logical}/00", role=role
        )
        parallel = parsed.spec.role(Role(role)).parallelism
        assert (command.tensor, command.nodes, command.node_rank) == (
            parallel.tensor, parallel.nodes, 0,
        )  # fmt: skip
        assert (command.side_channel_host, command.side_channel_port) == ("10.0.0.9", 5600)
        grace = next(t for c, t in pod_templates(SimulatedCluster(cluster).plan()) if c == child)
        seconds = grace["spec"]["terminationGracePeriodSeconds"]
        assert seconds > launcher.drain_seconds + launcher.stop_seconds
        longest = parsed.spec.request_timeout_seconds + parsed.spec.transfer.lease_seconds
        assert launcher.drain_seconds >= longest


@settings(max_examples=EXAMPLES)
@given(manifests())
def test_replicas_and_router_do_not_restart_engines(cluster):
    def revisions(manifest):
        return {
            child["metadata"]["labels"]["pdcluster.dev/revision"]
            for child, _ in engine_containers(SimulatedCluster(manifest).plan())
        }

    before = revisions(cluster)
    changed = copied(cluster)
    for role in ("prefill", "decode"):
        changed["spec"][role]["replicas"] = cluster["spec"][role].get("replicas", 1) + 1
    # The key and the sidecar are the engines' too: they must be restarted for others.
    router = cluster["spec"].get("router", {})
    kept = {n: router[n] for n in ("apiKeySecretRef", "type", "sidecarImage") if n in router}
    changed["spec"]["router"] = kept if "type" in kept else {"replicas": 2, **kept}
    changed["spec"]["verification"] = {"canary": {"intervalSeconds": 7}}
    renew = cluster["spec"].get("rollout", {}).get("renew")
    rollout = {"renew": renew} if renew else {}
    changed["spec"]["rollout"] = {"progressDeadlineSeconds": 77, **rollout}
    assert before <= revisions(changed)


def expanded(word: str) -> str:
    return word.replace("$(POD_IP)", "10.0.0.9").replace("$(PDCLUSTER_NODE_RANK)", "0")


def vllm_parser() -> argparse.ArgumentParser:
    """An independent reading of the flags that the operator writes."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("model")
    for name in ("--served-model-name", "--host", "--kv-cache-dtype", "--attention-backend",
                 "--revision", "--distributed-executor-backend", "--master-addr"):  # fmt: skip
        parser.add_argument(name)
    parser.add_argument("--middleware", action="append", default=[])
    for name in ("--port", "--block-size", "--max-model-len", "--node-rank", "--master-port"):
        parser.add_argument(name, type=int)
    parser.add_argument("--tensor-parallel-size", type=int, required=True)
    for name in ("--pipeline-parallel-size", "--data-parallel-size", "--api-server-count",
                 "--nnodes"):  # fmt: skip
        parser.add_argument(name, type=int, default=1)
    parser.add_argument("--enable-prefix-caching", action=argparse.BooleanOptionalAction)
    parser.add_argument("--kv-transfer-config", type=json.loads)
    return parser
