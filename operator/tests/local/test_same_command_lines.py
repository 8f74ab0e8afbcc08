"""What runs locally is what a cluster would run, but for three substitutions."""

from __future__ import annotations

import ast
import io
import json
import re
import stat
import time
import tokenize
from functools import partial
from pathlib import Path

from fake_engine import fake_connector
from manifests import tiny

from loopback import free_network
from pdcluster_connector.certificate_files import Tls, tls_files
from pdcluster_connector.sidechannel.ticket_key_file import parse_keys
from pdcluster_operator.adapters.engine_authority import EngineAuthority, with_certificates
from pdcluster_operator.local import container_process, kubelet
from pdcluster_operator.local.addresses import AddressBook, resolve
from pdcluster_operator.local.api_server import LocalApi
from pdcluster_operator.local.cluster import Workloads
from pdcluster_operator.local.container_process import expand, substitute
from pdcluster_operator.local.kubelet import Kubelet, PodRun
from pdcluster_operator.plan.planner import make_plan
from pdcluster_operator.plan.types import Apply, Observed, TryOut, WriteCertificates, WriteTicketKey
from pdcluster_operator.runtime.cluster_secrets import with_a_new_key


async def test_arguments_and_environment_equal_the_clusters(tmp_path: Path) -> None:
    manifest = tiny(tmp_path)
    manifest["spec"]["prefill"] |= {"parallelism": {"tensor": 2}}
    manifest["spec"]["engine"]["extraArgs"] = ["--dtype", "float32", "--seed", "$(SEED)"]
    manifest["spec"]["engine"]["env"].append({"name": "SEED", "value": "7"})
    api, (authority, _) = LocalApi(), EngineAuthority.new(time.time())
    live = api.apply({**manifest, "metadata": {"name": "tiny", "namespace": "default"}})
    plan = make_plan(Observed(live, (), (), {}, {}, fake_connector()), time.time())
    for step in plan.steps:
        assert isinstance(step, Apply | TryOut | WriteTicketKey | WriteCertificates)
        if isinstance(step, WriteTicketKey):
            api.apply(with_a_new_key(step, None))
        elif isinstance(step, WriteCertificates):
            api.apply(with_certificates(step, authority))
        else:
            api.apply(dict(step.manifest))
    Workloads(api).sync()
    book = AddressBook((), print, first=f"{free_network()}.2")
    for program in ("python3", "vllm-router"):
        (tmp_path / program).touch(mode=0o755)
    kubelet = Kubelet(
        api, book, tmp_path / "run", partial(resolve, api, book.address), {"PATH": str(tmp_path)}
    )
    runs = list(kubelet._pods.values())
    assert len(runs) == 3
    keys: list[bytes] = []
    for run in runs:
        run._task.cancel()
        container = run.pod["spec"]["containers"][0]
        address = book.address(run.name)
        assert run._prepare() == {}
        [process] = run.containers
        assert back(process.command, run, tmp_path) == by_kubernetes(
            [*container["command"], *container["args"]], container, address, book
        )
        given = {name: process.environment[name] for name in names_of(container)}
        assert dict(zip(given, back(list(given.values()), run, tmp_path), strict=True)) == {
            name: by_kubernetes([value], container, address, book)[0]
            for name, value in literal(container, address).items()
        }
        assert process.environment.keys() - given.keys() == {"PATH"}
        if "--kv-transfer-config" in process.command:
            keys.append(ticket_key(process.command))
            assert certificate_of(process.command)
    assert len(keys) == 2
    assert parse_keys(keys[0]) == parse_keys(keys[1]), "engines of a cluster share a ticket key"
    book.close()


def ticket_key(command: list[str]) -> bytes:
    """What stands in the key file that an engine's command line names."""
    config = json.loads(command[command.index("--kv-transfer-config") + 1])
    return Path(config["kv_connector_extra_config"]["ticket_key_file"]).read_bytes()


def certificate_of(command: list[str]) -> Tls:
    """What an engine makes of the certificate files that its command line names."""
    config = json.loads(command[command.index("--kv-transfer-config") + 1])
    option = config["kv_connector_extra_config"]["tls"]
    assert stat.S_IMODE(Path(option["key"]).stat().st_mode) == 0o600
    return Tls(tls_files(option), f"{command[command.index('--engine') + 1]}/1")


def names_of(container: dict) -> list[str]:
    return [entry["name"] for entry in container.get("env", ())]


def literal(container: dict, address: str) -> dict[str, str]:
    return {e["name"]: e.get("value", address) for e in container.get("env", ())}


def by_kubernetes(words: list[str], container: dict, address: str, book: AddressBook) -> list[str]:
    """The kubelet's own $(NAME) expansion, written here a second time."""
    values: dict[str, str] = {}
    for name, text in literal(container, address).items():
        values[name] = re.sub(r"\$\((\w+)\)", lambda m: values.get(m[1], m[0]), text)
    expanded = [re.sub(r"\$\((\w+)\)", lambda m: values.get(m[1], m[0]), word) for word in words]
    # A cluster's DNS would answer with the pods' addresses; a wildcard is the pod's own.
    return [resolved(word, book).replace("0.0.0.0", address) for word in expanded]


def resolved(word: str, book: AddressBook) -> str:
    return re.sub(r"([a-z0-9-]+)\.[a-z0-9-]+\.default\.svc\b", lambda m: book.address(m[1]), word)


def back(words: list[str], run: PodRun, tmp: Path) -> list[str]:
    """Undo the substitutions of mounts and names."""
    base = f"{tmp}/run/{run.name}"
    undone = [
        word.replace(f"{base}/volumes/connector", "/pdcluster")
        .replace(f"{base}/volumes/ticket-key", "/pdcluster-keys")
        .replace(f"{base}/volumes/certificate", "/pdcluster-tls")
        .replace(f"{tmp}/model", "/models/model")
        .replace(f"{base}/engine/termination-log", "/dev/termination-log")
        for word in words
    ]
    assert not any(str(tmp / "run") in word for word in undone)
    return undone


def test_the_three_substitutions_and_nothing_else() -> None:
    def local(text: str) -> str:
        folders = {"/models/model": "/data/pdcluster/m", "/pdcluster": "/run/c"}
        return substitute(text, "127.0.0.9", folders, {"p-0.p.ns.svc": "127.0.0.3"}.get)

    for before, after in {
        "/models/model": "/data/pdcluster/m",
        "/models/model/config.json": "/data/pdcluster/m/config.json",
        "/models/modelling": "/models/modelling",
        "/srv/models/model": "/srv/models/model",
        "python3 /pdcluster/connector.pyz": "python3 /run/c/connector.pyz",
        "http://p-0.p.ns.svc:8000": "http://127.0.0.3:8000",
        "http://p-0.p.ns.svc.cluster.local": "http://p-0.p.ns.svc.cluster.local",
        "http://unknown.ns.svc:1": "http://unknown.ns.svc:1",
        "0.0.0.0": "127.0.0.9",
        "10.0.0.0": "10.0.0.0",
        "0.0.0.01": "0.0.0.01",
        json.dumps({"host": "0.0.0.0", "file": "/pdcluster/x"}): json.dumps(
            {"host": "127.0.0.9", "file": "/run/c/x"}
        ),
        "--flag=/models/model": "--flag=/data/pdcluster/m",
    }.items():
        assert local(before) == after


def test_kubernetes_expansion() -> None:
    values = {"A": "1", "B": "$(A)"}
    assert expand("$(A)-$(B)-$(C)-$$(A)-$A", values) == "1-$(A)-$(C)-$(A)-$A"


def test_the_mini_kubelet_stays_mini() -> None:
    assert sum(code_lines(Path(part.__file__)) for part in (container_process, kubelet)) <= 400


def code_lines(path: Path) -> int:
    """Lines that hold code: no blank lines, comments or docstrings."""
    source = path.read_text()
    quiet = (
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENDMARKER,
    )
    tokens = [
        token
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type not in quiet
    ]
    lines = {line for token in tokens for line in range(token.start[0], token.end[0] + 1)}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            lines -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)
