"""Reading and rewriting vLLM's command line."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given, strategies as st

from pdcluster_connector.launcher import inside_vllm
from pdcluster_connector.launcher.arguments import (
    KV_FAILURES,
    KV_ROLE,
    ArgumentError,
    EngineCommand,
    engine_command,
)
from pdcluster_connector.protocol.engine_id import new_engine_id

CONFIG = json.dumps({"kv_connector": "PDClusterConnector", "kv_role": "kv_producer"})


def read(*arguments: str, role: str = "prefill") -> EngineCommand:
    return engine_command(arguments, engine_id="a.b/0123456789abcdef", role=role)


def config_of(command: EngineCommand) -> dict:
    for index, word in enumerate(command.arguments):
        if word == "--kv-transfer-config":
            return json.loads(command.arguments[index + 1])
        if word.startswith("--kv-transfer-config="):
            return json.loads(word.partition("=")[2])
    raise AssertionError(command.arguments)


@pytest.mark.parametrize(
    "form",
    [
        ("--kv-transfer-config", CONFIG),
        (f"--kv-transfer-config={CONFIG}",),
        ("--kv_transfer_config", CONFIG),
        (f"--kv_transfer_config={CONFIG}",),
    ],
)
def test_engine_id_is_written_and_nothing_else_changes(form):
    command = read("m", "--dtype", "float32", *form, "--seed", "3")
    assert config_of_any(command) == {**json.loads(CONFIG), "engine_id": "a.b/0123456789abcdef"}
    assert command.arguments[:3] == ("m", "--dtype", "float32")
    added = ("--middleware", inside_vllm.DOOR, "--middleware", inside_vllm.PLAIN_REQUEST_IDS)
    assert command.arguments[-6:] == ("--seed", "3", *added)
    assert len(command.arguments) == 9 + len(form)


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("policy", ["fail", "recompute", None])
def test_what_a_failed_transfer_costs_is_read(role, policy):
    config = {"kv_role": KV_ROLE[role]}
    if policy is not None:
        config["kv_load_failure_policy"] = policy
    words = ["m", "--kv-transfer-config", json.dumps(config)]
    command = engine_command(words, engine_id="a/b", role=role)
    assert command.recomputes is (policy == "recompute")
    assert (KV_FAILURES in command.arguments) is (role == "decode")


@pytest.mark.parametrize(("port", "ranks"), [(65535, 2), (61441, 4096), (0, 1), (65536, 1)])
def test_every_data_parallel_rank_needs_a_port(port, ranks):
    config = {**json.loads(CONFIG), "kv_connector_extra_config": {"side_channel_port": port}}
    words = ["m", "--data-parallel-size", str(ranks), "--kv-transfer-config", json.dumps(config)]
    with pytest.raises(ArgumentError, match=f"side_channel_port is {port}; use 1 to"):
        read(*words)
    config["kv_connector_extra_config"]["side_channel_port"] = 65536 - ranks
    assert read(*words[:-1], json.dumps(config)).side_channel_port == 65536 - ranks


def config_of_any(command: EngineCommand) -> dict:
    words = list(command.arguments)
    place = next(i for i, word in enumerate(words) if "transfer" in word)
    head, equals, value = words[place].partition("=")
    assert head.replace("_", "-") == "--kv-transfer-config"
    return json.loads(value if equals else words[place + 1])


OFFLOADING = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}


def several(*children: object, kv_role: str = "kv_both") -> str:
    extra = {"connectors": list(children)}
    return json.dumps(
        {"kv_connector": "MultiConnector", "kv_role": kv_role, "kv_connector_extra_config": extra}
    )


def test_ours_is_found_beside_vllms_offloading_connector():
    ours = {**json.loads(CONFIG), "kv_connector_extra_config": {"side_channel_port": 5700}}
    command = read("m", "--kv-transfer-config", several(ours, OFFLOADING))
    assert (command.side_channel_port, command.recomputes) == (5700, False)
    # vLLM hands the id on to every connector. A child that has one of its own stops the start.
    config = config_of(command)
    assert config.pop("engine_id") == "a.b/0123456789abcdef"
    assert config == json.loads(several(ours, OFFLOADING))
    assert command.offload_folder == "/dev/shm/vllm_offload_a.b"
    assert read("m", "--kv-transfer-config", several(ours)).offload_folder == ""
    assert read("m", "--kv-transfer-config", CONFIG).offload_folder == ""


@pytest.mark.parametrize(
    ("role", "config", "said"),
    [
        ("prefill", several(OFFLOADING), "must be the first of MultiConnector's connectors"),
        ("prefill", several(), "connectors, not missing; vLLM loads from the first"),
        ("prefill", several(7), "connectors of MultiConnector must be JSON objects"),
        (
            "prefill",
            several(json.loads(CONFIG), OFFLOADING, kv_role="kv_producer"),
            "kv_role of MultiConnector is 'kv_producer', but must be 'kv_both'",
        ),
        (
            "decode",
            several({**json.loads(CONFIG), "kv_role": "kv_consumer"}, OFFLOADING),
            "a decode engine cannot have the OffloadingConnector",
        ),
        (
            "decode",
            several(
                {**json.loads(CONFIG), "kv_role": "kv_consumer"}, json.loads(several(OFFLOADING))
            ),
            "a decode engine cannot have the OffloadingConnector",
        ),
        (
            "decode",
            several(
                {**json.loads(CONFIG), "kv_role": "kv_consumer"},
                {**OFFLOADING, "kv_connector": "SimpleCPUOffloadConnector"},
            ),
            "a decode engine cannot have the SimpleCPUOffloadConnector",
        ),
        (
            "decode",
            several(json.loads(CONFIG)),
            "kv_role is 'kv_producer', but --role decode needs 'kv_consumer'",
        ),
    ],
)
def test_connectors_that_do_not_fit_together(role, config, said):
    with pytest.raises(ArgumentError, match=said):
        read("m", "--kv-transfer-config", config, role=role)


def test_an_engine_id_of_the_user_is_replaced():
    given_id = json.dumps({**json.loads(CONFIG), "engine_id": "mine"})
    assert config_of(read("m", "--kv-transfer-config", given_id))["engine_id"].startswith("a.b/")


@given(st.lists(st.text(max_size=20).filter(lambda t: not t.startswith(("-", "=")))))
def test_other_arguments_survive(words):
    command = engine_command(
        ["model", *words, "--kv-transfer-config", CONFIG], engine_id="a/b", role="prefill"
    )
    assert list(command.arguments[: 1 + len(words)]) == ["model", *words]


def test_defaults():
    command = read("m", "--kv-transfer-config", CONFIG)
    assert (command.model, command.host, command.port) == ("m", "", 8000)
    assert (command.side_channel_host, command.side_channel_port) == ("127.0.0.1", 5600)
    assert (command.tensor, command.pipeline, command.data) == (1, 1, 1)
    assert (command.nodes, command.node_rank, command.is_leader) == (1, 0, True)
    assert (command.block_tokens, command.max_tokens) == (None, None)


@pytest.mark.parametrize(
    ("given", "every", "host"),
    [
        (("--host", "0.0.0.0"), "::", "::"),
        (("--host=0.0.0.0",), "::", "::"),
        ((), "::", "::"),
        (("--host", "::"), "0.0.0.0", "0.0.0.0"),
        (("--host", "127.0.0.3"), "::", "127.0.0.3"),
        (("--host", "fd00::7"), "::", "fd00::7"),
        (("--host", "0.0.0.0"), "", "0.0.0.0"),
    ],
)
def test_every_address_is_that_of_the_families_that_there_are(given, every, host):
    """vLLM's 0.0.0.0 leaves out IPv6, and a kernel without IPv6 takes no ``::``."""
    words = ["m", *given, "--kv-transfer-config", CONFIG]
    command = engine_command(words, engine_id="a/b", role="prefill", every_address=every)
    assert command.host == host
    flags = [word for word in command.arguments if word.startswith("--host")]
    if host in given or not every:
        assert len(flags) == len([word for word in given if word.startswith("--host")])
    else:
        assert command.arguments[-2:] == ("--host", host), "vLLM takes the last one"


def test_values():
    extra = {"side_channel_host": "10.0.0.7", "side_channel_port": 5700}
    config = json.dumps({**json.loads(CONFIG), "kv_connector_extra_config": extra})
    command = read(
        "/models/x", "--port=9000", "--host", "127.0.0.3", "-tp", "4", "--pipeline_parallel_size",
        "2", "-dp=3", "--nnodes", "2", "--node-rank", "1", "--block-size", "16", "--max-model-len",
        "1024", "--served-model-name", "llama", "--enforce-eager", "--kv-transfer-config", config,
        "--master-addr", "leader.svc", "--load-format", "dummy", "--port", "9001",
    )  # fmt: skip
    assert (command.host, command.port) == ("127.0.0.3", 9001)
    assert (command.side_channel_host, command.side_channel_port) == ("10.0.0.7", 5700)
    assert (command.tensor, command.pipeline, command.data) == (4, 2, 3)
    assert (command.nodes, command.node_rank, command.is_leader) == (2, 1, False)
    assert (command.block_tokens, command.max_tokens) == (16, 1024)
    assert (command.leader, command.load_format) == ("leader.svc", "dummy")


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (("m",), ("--kv-transfer-config is missing", "kv_connector_module_path")),
        (("m", "--kv-transfer-config"), ("is not valid JSON",)),
        (("m", "--kv-transfer-config", "{"), ("is not valid JSON",)),
        (("m", "--kv-transfer-config", "[1]"), ("must be a JSON object",)),
        (("m", "--kv-transfer-config", "{}"), ("kv_role is None", "'kv_producer'")),
        (("m", "--kv-transfer-config.kv_role", "kv_producer"), ("not dotted",)),
        (
            ("m", "--kv-transfer-config", CONFIG, f"--kv-transfer-config={CONFIG}"),
            ("more than once",),
        ),
        (("--kv-transfer-config", CONFIG), ("the model is missing",)),
        (("m", "--port", "http", "--kv-transfer-config", CONFIG), ("--port is 'http'",)),
        (("m", "--port", "99999", "--kv-transfer-config", CONFIG), ("1 to 65535",)),
        (("m", "-tp", "0", "--kv-transfer-config", CONFIG), ("--tensor-parallel-size is '0'",)),
        (
            (
                "m",
                "--kv-transfer-config",
                '{"kv_role":"kv_producer","kv_connector_extra_config":{"side_channel_port":true}}',
            ),
            ("side_channel_port is True",),
        ),
        (
            (
                "m",
                "--kv-transfer-config",
                '{"kv_role":"kv_producer","kv_connector_extra_config":7}',
            ),
            ("kv_connector_extra_config must be a JSON object",),
        ),
    ],
)
def test_bad_command_lines_are_named(arguments, names):
    with pytest.raises(ArgumentError) as error:
        read(*arguments)
    for name in names:
        assert name in str(error.value)


def test_the_roles_must_agree():
    with pytest.raises(ArgumentError, match="--role decode needs 'kv_consumer'"):
        read("m", "--kv-transfer-config", CONFIG, role="decode")
    both = json.dumps({"kv_role": "kv_both"})
    assert read("m", "--kv-transfer-config", both, role="decode").model == "m"


def test_each_start_has_an_incarnation_of_its_own():
    assert re.fullmatch(
        r"ns\.c\.prefill\.r\.0/[0-9a-f]{16}", new_engine_id("ns.c.prefill.r.0").engine
    )
    assert len({new_engine_id("a").incarnation for _ in range(1000)}) == 1000
    for wrong in ("", "a/b", "a b", "-a", "a\n", "x" * 201):
        with pytest.raises(ValueError, match="is not a valid engine id"):
            new_engine_id(wrong)


@pytest.mark.parametrize(
    ("data", "nodes", "ranks"),
    [
        (1, 1, [(0,)]),
        (3, 1, [(0, 1, 2)]),
        (4, 2, [(0, 1), (2, 3)]),
        (2, 2, [(0,), (1,)]),
        (1, 2, [(0,), ()]),  # one rank over both pods: its scheduler is the leader's
    ],
)
def test_which_data_parallel_ranks_a_pod_has(data, nodes, ranks):
    sizes = ("--data-parallel-size", str(data), "--nnodes", str(nodes))
    words = ("m", *sizes, "--kv-transfer-config", CONFIG)
    found = [read(*words, "--node-rank", str(node)).data_ranks for node in range(nodes)]
    assert found == ranks


def test_followers_are_headless():
    follower = ("m", "--nnodes", "2", "--node-rank", "1", "--kv-transfer-config", CONFIG)
    assert read(*follower).arguments[-1] == "--headless"
    assert read(*follower, "--headless").arguments.count("--headless") == 1
    # vLLM refuses a server there, and takes the last of two words.
    servers = read("m", "--api-server-count", "1", *follower[1:]).arguments
    assert servers[-3:] == ("--api-server-count", "0", "--headless")
    leader = ("m", "--nnodes", "2", "--node-rank", "0", "--kv-transfer-config", CONFIG)
    assert "--headless" not in read(*leader).arguments
