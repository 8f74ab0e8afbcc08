"""The table of remedies: complete, and each command in it is one that exists."""

from __future__ import annotations

import asyncio
import re
import shlex
import socket
from pathlib import Path
from typing import cast

import click
import pytest
from dev.reasons_page import families

from pdcluster_connector.compat.reasons import Reason
from pdcluster_connector.launcher import before_start, supervisor
from pdcluster_connector.launcher.arguments import engine_command
from pdcluster_connector.launcher.engine import last_words
from pdcluster_connector.launcher.engine.engine_api import EngineApi
from pdcluster_connector.launcher.engine.readiness import Readiness
from pdcluster_connector.protocol.engine_id import EngineId
from pdcluster_connector.protocol.launcher_documents import (
    CanaryState,
    EngineReport,
    EngineState,
    LinkState,
)
from pdcluster_operator.api import remedies
from pdcluster_operator.api.remedies import Remedy, Severity, next_step, table
from pdcluster_operator.api.schema.crd import crd
from pdcluster_operator.cli.main import pdcluster
from pdcluster_operator.local.preflight import Lack
from pdcluster_operator.plan.observed import engines, pods
from pdcluster_operator.plan.observed.pods import describe_end

ROOT = Path(__file__).parents[3]
ENTRIES = tuple(table().values())
NAMED = {
    *(name for names in families().values() for name in names),
    *map(str, (*EngineState, *LinkState, *CanaryState, *Lack)),
}
# What the API server itself answers; `NamedError` and the like are among the families.
OF_API_SERVERS = {
    "BadRequest", "Forbidden", "InternalError", "ServerTimeout", "ServiceUnavailable", "Timeout",
    "TooManyRequests", "Unauthorized",
}  # fmt: skip
# What safetensors 0.8 says of a file whose end is missing.
TRUNCATED_WEIGHTS = (
    "safetensors_rust.SafetensorError: Error while deserializing header: incomplete metadata, file "
    "not fully covered"
)
KUBECTL = {"auth", "describe", "get", "logs"}
"""What only looks: who runs the next command has not decided yet."""


def test_every_reason_and_rule_has_an_entry_and_nothing_else_has() -> None:
    missing = NAMED - table().keys()
    assert not missing, f"write an entry in api/remedies.yaml: {sorted(missing)}"
    assert {one.name for one in ENTRIES if one.own_reason} == NAMED | OF_API_SERVERS


def test_an_entry_is_whole_sentences_and_says_what_to_do_if_something_is_to_be_done() -> None:
    for one in ENTRIES:
        for text in (one.symptom, one.cause, *filter(None, [one.remedy])):
            assert re.fullmatch(r"(vLLM|\w+[.]\w|[A-Z`-]).*[.]", text), (one.name, text)
            assert "|" not in text, one.name
        good = one.severity is Severity.GOOD
        assert (not one.remedy, not one.next) == (good, good), one.name
    assert len({one.name.lower() for one in ENTRIES}) == len(ENTRIES), "an anchor is given twice"


def parsed(words: list[str]) -> click.Context:
    """Read a command line without running it; a wrong one raises."""
    command: click.Command | None = pdcluster
    while isinstance(command, click.Group):
        command = command.get_command(click.Context(command), words.pop(0))
    assert command is not None
    return command.make_context(command.name, words)


@pytest.mark.parametrize("one", [one for one in ENTRIES if one.next], ids=lambda one: one.name)
@pytest.mark.parametrize("local", [False, True], ids=["cluster", "local"])
def test_the_next_command_exists(one: Remedy, *, local: bool) -> None:
    command = next_step(one.name, "llama", "team-a", file="llama.yaml", local=local)
    assert not re.search(r"\b[A-Z]{4,}\b", command), "a placeholder is left"
    program, *words = shlex.split(command)
    if program == "pdcluster":
        parsed(words)
    else:
        assert not local, "there is no Kubernetes"
        assert (program, words[0] in KUBECTL) == ("kubectl", True)
        assert "delete" not in words


def test_a_field_of_the_spec_that_an_entry_names_exists() -> None:
    schema = crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    parts = "|".join(schema["properties"])
    named = re.compile(rf"(?<![\w./])(?:spec\.)?((?:{parts})(?:\.[a-zA-Z]+)+)")
    found = 0
    for one in ENTRIES:
        for path in named.findall(f"{one.symptom} {one.cause} {one.remedy}"):
            part, found = schema, found + 1
            for name in path.split("."):
                assert name in part.get("properties", {}), f"{one.name}: {path}"
                part = part["properties"][name]
    assert found > 30


def test_more_leads_to_a_heading_of_a_page() -> None:
    for one in ENTRIES:
        file, _, anchor = one.more.partition("#")
        text = (ROOT / "docs" / file).read_text() if file else ""
        headings = re.findall(r"^##+ (.+)$", text, re.MULTILINE)
        anchors = {re.sub(r"[^a-z0-9-]", "", head.lower().replace(" ", "-")) for head in headings}
        assert not anchor or anchor in anchors, one.more


def test_names_are_put_where_they_belong() -> None:
    assert next_step("Paused", "llama", "team-a") == "pdcluster rollout resume llama -n team-a"
    pods = next_step("ImageUnavailable", "llama", "team-a")
    assert pods == "kubectl describe pods -l pdcluster.dev/cluster=llama -n team-a"
    pod = next_step("ImageUnavailable", "llama", "team-a", pod="llama-prefill-7f9c4-0-0")
    assert pod == "kubectl describe pods llama-prefill-7f9c4-0-0 -n team-a"
    assert next_step("NodeLocalModel", "x", "y", file="a b.yaml") == "pdcluster lint 'a b.yaml'"
    assert next_step("Ready", "llama", "team-a") == ""
    assert next_step("Ready", "llama", "team-a", local=True) == ""
    links = next_step("ModelMismatch", "llama", "team-a", local=True)
    assert links == "pdcluster links llama --local"
    pods = next_step("ImageUnavailable", "llama", "team-a", local=True)
    assert pods == "pdcluster logs llama --local --since 10m"
    for reason in ("InsufficientCapacity", "TemplateRefused", "Invalid", "BadRequest"):
        against = next_step(reason, "llama", "team-a", file="a.yaml")
        assert against == "pdcluster plan a.yaml -n team-a --against"
        local = next_step(reason, "llama", "team-a", file="a.yaml", local=True)
        assert local == "pdcluster plan a.yaml"
    gpus = next_step("GpuMissing", "llama", "team-a", local=True)
    assert gpus == "pdcluster doctor --machine"
    unknown = next_step("OfANewerVersion", "llama", "team-a")
    assert unknown == "kubectl describe pdcluster llama -n team-a"


def port_in_use() -> str:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = before_start.Port("127.0.0.1", taken.getsockname()[1], "the API", "pass another")
        return "; ".join(before_start.port_problems(port))


def truncated(folder: Path) -> str:
    (folder / "config.json").write_text('{"architectures": [')
    return "; ".join(before_start.model_problems(str(folder)))


def frozen(monkeypatch: pytest.MonkeyPatch) -> EngineReport:
    """What a launcher reports of an engine that accepts connections and answers nothing."""
    arguments = ["/models/x", "--kv-transfer-config", '{"kv_role": "kv_consumer"}']
    command = engine_command(arguments, engine_id="one/1", role="decode")
    readiness = Readiness(EngineId("one", "1"), "decode", command, {})
    readiness.healthy()
    monkeypatch.setattr(supervisor, "_SERVING_POLL", 0.0)

    class Frozen:
        async def health(self) -> None:
            if not readiness.ready:
                raise asyncio.CancelledError
            raise TimeoutError

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(supervisor.watch_health(cast("EngineApi", Frozen()), readiness, lambda: 0))
    return readiness.report()


def test_a_frozen_engine_is_found_by_what_its_launcher_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    report = frozen(monkeypatch)
    found = remedies.find(engines.REPORTED_STATES[report.state], report.message)
    assert found, report.message
    assert found.name == "EngineFrozen"


@pytest.mark.parametrize("message", ["", "starting vLLM", "KV cache for 8 tokens allocated"])
@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("vLLM's process EngineCore was killed by SIGKILL", "EngineRestarted"),
        ("ValueError: no", "EngineRestarted"),
        ("OSError: [Errno 98] Address already in use", "PortInUse"),
    ],
)
def test_an_engine_that_starts_again_does_not_only_start(
    message: str, words: str, name: str
) -> None:
    container = {"name": "engine", "lastState": {"terminated": {"exitCode": 1, "message": words}}}
    said = pods.started_again({"status": {"containerStatuses": [container]}}, message)
    found = remedies.find("Starting", said)
    assert found, said
    assert found.name == name
    assert found.severity is Severity.FAULT
    assert remedies.find("Starting", message) is table()["Starting"]


def emptied(cache: Path) -> str:
    """What an engine says whose weights were removed after the Job had downloaded them."""
    [problem] = before_start.cache_problems(
        ("org/llama",), {"HF_HUB_CACHE": str(cache), "HF_HUB_OFFLINE": "1"}
    )
    return problem


def test_a_symptom_is_found_in_what_our_programs_say(tmp_path: Path) -> None:
    killed = {"exitCode": 137, "reason": "OOMKilled"}
    said = {
        "OutOfMemory": (
            last_words.death(137, None, out_of_memory=True),
            describe_end(killed),
            "starting again; its last process ended: " + describe_end(killed),
        ),
        "PortInUse": (port_in_use(),),
        "WeightsTruncated": (truncated(tmp_path), str(last_words.choose([TRUNCATED_WEIGHTS]))),
        "ModelNotFound": ("; ".join(before_start.model_problems("/no/such/folder")),),
        "WeightsGone": (
            "the engine died: " + emptied(tmp_path),
            "starting again; its last process ended: " + emptied(tmp_path) + " (exit code 78)",
        ),
        "SharedMemoryTooSmall": ("; ".join(before_start.shm_problems(Path("/dev/shm"), 10**6)),),
        "UnknownArgument": (
            str(last_words.choose(["vllm serve: error: unrecognized arguments: --no-such-flag"])),
        ),
    }
    for name, messages in said.items():
        for message in messages:
            found = remedies.find("EngineFailed", message)
            assert found, message
            assert found.name == name, message
    # These are the scheduler's and the API server's words.
    for reason, message, name in (
        ("Unschedulable", "0/3 nodes are available: 3 Insufficient nvidia.com/gpu.", "GpuMissing"),
        ("TemplateRefused", 'pods "x" is forbidden: exceeded quota: team-a', "QuotaExceeded"),
        ("Forbidden", 'violates PodSecurity "restricted:latest": x', "PodSecurityRefuses"),
        ("LocalPrefill", "mostly because of NoTicket: the requests carry", "PromptsPastRouter"),
    ):
        found = remedies.find(reason, message)
        assert found, message
        assert found.name == name


def test_a_message_changes_nothing_where_nothing_is_wrong() -> None:
    assert remedies.find("Complete", "out of memory") is table()["Complete"]
    assert remedies.find("Nonsense", "no word of it") is None
    assert remedies.find(Reason.BACKEND_ERROR, "no word of it") is table()["BackendError"]
