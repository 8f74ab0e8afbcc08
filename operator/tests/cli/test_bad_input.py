"""Every command that asks an API server, on each bad day: one sentence and the exit code.

The commands are those of the table, so a new one is tried, too.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import click
import pytest
import yaml
from played_server import Answer, kubeconfig, serving, status

from pdcluster_operator.adapters.api_server import client, kubeconfig as connecting
from pdcluster_operator.adapters.api_server.kinds import PDCLUSTER
from pdcluster_operator.cli.commands import Command
from pdcluster_operator.cli.main import COMMANDS, main, pdcluster

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
EXAMPLE = str(EXAMPLES / "tiny-cpu.yaml")
VALUES = {"NAME": "tiny", "FILE": EXAMPLE}


def every() -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """The words and the command of each line of the table, and of what is below."""
    root = click.Context(pdcluster)
    for name in COMMANDS:
        command = pdcluster.get_command(root, name)
        assert command is not None
        if isinstance(command, click.Group):
            for verb in command.list_commands(root):
                if (below := command.get_command(root, verb)) is not None:
                    yield (name, verb), below
        else:
            yield (name,), command


def on_a_cluster() -> list[tuple[str, ...]]:
    """A command line for each command that asks an API server."""
    found = []
    for words, command in every():
        names = {one.name for one in command.params}
        arguments = [one for one in command.params if isinstance(one, click.Argument)]
        if not names & {"against", "context"}:
            continue
        given = tuple(VALUES[str(one.metavar)] for one in arguments if one.required)
        if "against" in names:
            found.append((*words, *given, "--against"))
        else:
            found.append((*words, *given))
    return found


REPORTS = {"doctor"}
"""Commands whose report names what does not answer, among other things."""
LINES = [words for words in on_a_cluster() if words[0] not in REPORTS]
OF_ONE = [words for words in LINES if "tiny" in words]
every_line = pytest.mark.parametrize("words", LINES, ids=" ".join)
every_name = pytest.mark.parametrize("words", OF_ONE, ids=" ".join)


every_report = pytest.mark.parametrize("command", sorted(REPORTS))


def test_the_table_has_commands_that_ask_an_api_server() -> None:
    assert {words[0] for words in LINES} >= {"plan", "rollout", "check"}
    assert ("rollout", "status", "tiny") in OF_ONE


@pytest.fixture(autouse=True)
def _outside_of_a_pod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(connecting, "ACCOUNT", tmp_path / "none")
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str]]:
    """Run a command that fails; returns its exit code and its one sentence.

    With ``-o json``, too, nothing but documents may be on standard output.
    """

    def run(words: tuple[str, ...], url: str | None = None) -> tuple[int, str]:
        if url is not None:
            monkeypatch.setenv("KUBECONFIG", str(kubeconfig(tmp_path, url)))
        code = main(words)
        printed = capsys.readouterr()
        [said] = printed.err.splitlines()
        assert said.startswith("error: ")
        assert "Traceback" not in printed.out
        command = pdcluster.get_command(click.Context(pdcluster), words[0])
        if isinstance(command, Command) and command.document is not None:
            assert main([*words, "-o", "json"]) == code
            for line in filter(None, [capsys.readouterr().out.strip()]):
                json.loads(line)
        return code, said

    return run


@pytest.mark.parametrize(
    ("text", "context", "says"),
    [
        (None, (), "set KUBECONFIG"),
        ("\n", (), "it is empty"),
        ("", ("--context", "there"), "it is empty"),
        (None, ("--context", "their"), "it has no context 'their'; there are: there"),
    ],
)
def test_a_kubeconfig_says_what_it_lacks(
    text: str | None,
    context: tuple[str, ...],
    says: str,
    ended: Callable[..., tuple[int, str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = kubeconfig(tmp_path, "http://127.0.0.1:1")
    if not context:
        file.unlink()
    if text is not None:
        file.write_text(text)
    monkeypatch.setenv("KUBECONFIG", str(file))
    code, said = ended(("status", "tiny", *context))
    assert code == 6
    assert says in said
    assert ("ServiceAccount" in said) is (text is None and not context)


@every_line
@pytest.mark.parametrize("kind", ["missing", "folder", "garbage", "no context"])
def test_a_kubeconfig_that_cannot_be_used(
    words: tuple[str, ...],
    kind: str,
    ended: Callable[..., tuple[int, str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = tmp_path / "config"
    monkeypatch.setenv("KUBECONFIG", str(file))
    if kind == "folder":
        file.mkdir()
    elif kind != "missing":
        file.write_text({"garbage": "a: [b", "no context": "kind: Config"}[kind])
    code, said = ended(words)
    assert code == 6
    assert said.startswith(f"error: cannot reach the API server: {file}: ")
    assert "set KUBECONFIG" in said


def forbidden(method: str, path: str) -> Answer:
    del method, path
    return status(403, "Forbidden", 'pdclusters is forbidden: User "x" cannot get it')


def expired(method: str, path: str) -> Answer:
    del method, path
    return status(401, "Unauthorized", "Unauthorized")


def broken(method: str, path: str) -> Answer:
    del method, path
    return 502, "<html>a proxy's page</html>"


@every_line
@pytest.mark.parametrize(
    ("answer", "words_of_server", "remedy"),
    [
        (forbidden, 'User "x" cannot get it', "kubectl auth can-i --list -n team"),
        (expired, "Unauthorized", "kubectl auth whoami"),
        (broken, "a proxy's page", ""),
    ],
)
def test_a_server_that_refuses(
    words: tuple[str, ...],
    answer: Callable[[str, str], Answer],
    words_of_server: str,
    remedy: str,
    ended: Callable[..., tuple[int, str]],
) -> None:
    with serving(answer) as server:
        code, said = ended(words, server.url)
        place = ("there",) if "--against" in words else ("--context", "there")
        there = ended((*words, *place, "-n", "other"), server.url)[1]
    assert code == 4
    assert words_of_server in said
    assert said.endswith(remedy)
    assert there.endswith(remedy and f"{remedy.replace('team', 'other')} --context there")


def test_a_page_of_a_proxy_is_its_status_and_first_line(
    ended: Callable[..., tuple[int, str]],
) -> None:
    with serving(lambda *_: (502, "<html>\r\n<body>\nmany lines</body></html>")) as server:
        code, said = ended(("status", "tiny"), server.url)
    assert (code, said) == (4, "error: the API server: HTTP 502: <html>")


def test_without_logs_the_next_command_asks_the_same_place(
    ended: Callable[..., tuple[int, str]],
) -> None:
    found = {"metadata": {"name": "tiny", "namespace": "other"}, "items": []}
    with serving(lambda *_: (200, found)) as server:
        code, said = ended(("logs", "tiny", "-n", "other", "--context", "there"), server.url)
    assert code == 4
    assert said.endswith("see `pdcluster status tiny -n other --context there`")


def at_rest(method: str, path: str) -> Answer:
    """A PDCluster whose rollout is paused, whose images are missing, and that has no pods."""
    del method
    if path.partition("?")[0].endswith("/pdclusters/tiny"):
        body = yaml.safe_load(Path(EXAMPLE).read_text())
        body["metadata"] = {"name": "tiny", "namespace": "other", "uid": "u", "generation": 1}
        body["spec"]["rollout"] = {"paused": True}
        reasons = {"Ready": "NoVerifiedPair", "PrefillReady": "ImageUnavailable"}
        reasons |= {"DecodeReady": "ModelMismatch", "Progressing": "Paused"}
        body["status"] = {
            "observedGeneration": 1,
            "conditions": [
                {"type": kind, "status": "False", "reason": reason, "message": "x"}
                for kind, reason in reasons.items()
            ],
        }
        return 200, body
    if path == "/version":
        return 200, {"major": "1", "minor": "36"}
    if path.partition("?")[0].endswith(("/pods", "/controllerrevisions", "/deployments")):
        return 200, {"metadata": {}, "items": []}
    return status(404, "NotFound", "no such thing")


def asks_there(command: str) -> bool:
    """Whether a command that a person copies asks a cluster, and names the context."""
    program, *words = shlex.split(command)
    if program != "pdcluster":
        return words[-2:] == ["--kube-context" if program == "helm" else "--context", "there"]
    found: click.Command | None = pdcluster
    while isinstance(found, click.Group):
        found = found.get_command(click.Context(found), words.pop(0))
    assert found is not None
    given = found.make_context(found.name, words).params
    return "there" in (given.get("context"), given.get("against"))


OF_REPORTS = [(name,) for name in sorted(REPORTS)]
IN_SENTENCES = {"pdcluster lint FILE", "pdcluster rollout restart"}
PAGES = {"ui"}
"""Commands that serve until somebody ends them."""


@pytest.mark.parametrize("answer", [at_rest, forbidden], ids=["at rest", "forbidden"])
def test_each_command_that_is_printed_asks_the_same_context(
    answer: Callable[[str, str], Answer],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    printed: dict[str, list[str]] = {}
    with serving(answer) as server:
        monkeypatch.setenv("KUBECONFIG", str(kubeconfig(tmp_path, server.url)))
        for words in (*LINES, *OF_REPORTS):
            if words[0] in PAGES and answer is at_rest:
                continue
            place = ("there",) if "--against" in words else ("--context", "there")
            main((*words, *place, "-n", "other"))
            said = "".join(capsys.readouterr()).replace(" says why", "")
            found = re.findall(r"(?<!#)\b(?:pdcluster|kubectl|helm) [a-z][^`\n]*", said)
            printed[" ".join(words)] = [one for one in found if one not in IN_SENTENCES]
    wrong = {words: found for words, found in printed.items() if not all(map(asks_there, found))}
    assert not wrong
    silent = {words for words, found in printed.items() if not found}
    if answer is forbidden:
        assert not silent
    else:  # these say what is, or what is done
        verbs = ("links", "logs", "plan", "rollout pause", "rollout resume", "rollout status")
        assert {words for words in silent if not words.startswith(verbs)} == set()


@every_line
def test_a_server_that_is_down(
    words: tuple[str, ...], ended: Callable[..., tuple[int, str]]
) -> None:
    with socket.socket() as reserved:  # bound, but nobody listens
        reserved.bind(("127.0.0.1", 0))
        code, said = ended(words, f"http://127.0.0.1:{reserved.getsockname()[1]}")
    assert code == 4
    assert "Cannot connect to host 127.0.0.1" in said
    assert "next: kubectl get --raw /readyz" in said


@every_line
def test_a_server_that_is_silent(
    words: tuple[str, ...],
    ended: Callable[..., tuple[int, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client, "CALL", aiohttp.ClientTimeout(total=0.1))
    with serving(lambda *_: None) as server:
        code, said = ended(words, server.url)
    assert code == 4
    assert "no answer in 0.1 s" in said


def clusters_of(*names: str) -> Callable[[str, str], Answer]:
    """A server with PDClusters of these names in the namespace other."""

    def answer(method: str, path: str) -> Answer:
        path, _, query = path.partition("?")
        if method == "GET" and path.endswith("/pdclusters"):
            most = int(dict(one.split("=") for one in query.split("&"))["limit"])
            found = [name for name in names if "/namespaces/team/" not in path]
            listed: list[Any] = [{"metadata": {"name": n, "namespace": "other"}} for n in found]
            return 200, {"kind": "PDClusterList", "metadata": {}, "items": listed[:most]}
        return status(404, "NotFound", "there is no such object")

    return answer


@every_name
@pytest.mark.parametrize(
    ("names", "says"),
    [
        ((), "nor in another one; apply its manifest first"),
        (("a", "b"), "other namespaces have other/a, other/b: name one with -n"),
        (tuple(f"c{n}" for n in range(30)), "other/c8, other/c9: name one with -n"),
    ],
)
def test_a_name_that_is_wrong(
    words: tuple[str, ...],
    names: tuple[str, ...],
    says: str,
    ended: Callable[..., tuple[int, str]],
) -> None:
    with serving(clusters_of(*names)) as server:
        code, said = ended(words, server.url)
        assert code == 4
        assert said.startswith('error: there is no PDCluster "tiny" in namespace "team"')
        assert said.endswith(says)
        assert ended((*words, "-n", "other"), server.url)[0] == 4
        known = ended((*words, "-n", "other"), server.url)[1]
    assert not names or f"; there are: {', '.join(names[:10])}" in known


@every_name
def test_a_cluster_without_the_crd(
    words: tuple[str, ...], ended: Callable[..., tuple[int, str]]
) -> None:
    with serving(lambda *_: (404, "404 page not found\n")) as server:
        code, said = ended(words, server.url)
    assert code == 4
    assert "does not know PDClusters: install the operator with its chart" in said


@every_line
def test_ctrl_c_while_it_waits(
    words: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def interrupt(*_: str) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    with serving(interrupt) as server:
        monkeypatch.setenv("KUBECONFIG", str(kubeconfig(tmp_path, server.url)))
        assert main(words) == 130
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("", "")


@pytest.mark.parametrize("name", ["", "a/b", "..", "x?y", "Tiny"])
@every_name
def test_a_name_that_no_pdcluster_can_have_asks_nothing(
    words: tuple[str, ...], name: str, ended: Callable[..., tuple[int, str]]
) -> None:
    with serving(clusters_of("tiny")) as server:
        code, said = ended(tuple(name if one == "tiny" else one for one in words), server.url)
    assert (code, server.asked) == (2, [])
    assert f"for NAME: {name!r} " in said


@pytest.mark.parametrize("namespace", ["", "a/b", "..", "x?y"])
@every_line
def test_a_namespace_that_cannot_be_asks_nothing(
    words: tuple[str, ...], namespace: str, ended: Callable[..., tuple[int, str]]
) -> None:
    with serving(clusters_of("tiny")) as server:
        code, said = ended((*words, "-n", namespace), server.url)
    assert (code, server.asked) == (2, [])
    assert f"{namespace!r} must be 1 to 63 lower-case letters" in said


def test_the_page_of_no_pdcluster_is_not_that_of_all(ended: Callable[..., tuple[int, str]]) -> None:
    assert ended(("ui", ""))[0] == ended(("ui", "", "--local"))[0] == 2


def test_a_path_quotes_what_a_kubeconfig_names() -> None:
    path = PDCLUSTER.path("a/b?", "x/../y")
    assert path.endswith("/namespaces/a%2Fb%3F/pdclusters/x%2F..%2Fy")


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("until: !!timestamp 2026-02-30", "day is out of range for month"),
        (f"seed: !!int {'1' * 4301}", "4300 digits"),
        ("on: !!bool perhaps", "perhaps"),
        ("at: !!timestamp soon", ""),
        ("n: !!int ''", ""),
    ],
)
def test_a_value_that_yaml_cannot_make(
    line: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.yaml").write_text(Path(EXAMPLE).read_text())
    (file := tmp_path / "b.yaml").write_text(f"{line}\n")
    assert main(["lint", str(tmp_path)]) == 1
    text = capsys.readouterr().out
    assert f"{file} is not YAML: a date, a number or a tag" in text
    assert says in text
    assert "write text in quotes" in text


@every_report
@pytest.mark.parametrize("answer", [expired, broken, lambda *_: (200, "<html>"), None])
def test_no_report_without_an_api_server(
    command: str,
    answer: Callable[[str, str], Answer] | None,
    ended: Callable[..., tuple[int, str]],
) -> None:
    with serving(answer or forbidden) as server:
        url = server.url if answer else "http://127.0.0.1:1"
        code, said = ended((command,), url)
    assert code == 4
    assert said.startswith("error: the API server: ")


@every_report
@pytest.mark.parametrize("answer", [forbidden])
def test_a_report_of_a_bad_day(
    command: str,
    answer: Callable[[str, str], Answer],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with serving(answer) as server:
        monkeypatch.setenv("KUBECONFIG", str(kubeconfig(tmp_path, server.url)))
        code = main([command])
        text = capsys.readouterr().out
        assert main([command, "-o", "json"]) == code
    assert "Traceback" not in text
    json.loads(capsys.readouterr().out)


OFFLINE = [
    ("lint", EXAMPLE), ("lint", EXAMPLE, "-o", "json"), ("lint", str(EXAMPLES), "-o", "yaml"),
    ("plan", EXAMPLE), ("plan", EXAMPLE, "-o", "json"), ("plan", EXAMPLE, "-o", "yaml"),
    ("explain",), ("--help",), ("rollout", "--help"), ("--version",),
]  # fmt: skip


@pytest.mark.parametrize("words", OFFLINE, ids=lambda words: " ".join(words).replace(EXAMPLE, "x"))
def test_a_pipe_that_nobody_reads_ends_with_0(words: tuple[str, ...]) -> None:
    """A reader that has seen enough, as ``head`` has, makes no good manifest a refused one."""
    read, write = os.pipe()
    os.close(read)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pdcluster_operator", *words],
            stdout=write, stderr=subprocess.PIPE, text=True, timeout=240, check=False,
        )  # fmt: skip
    finally:
        os.close(write)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("form", "encoding"),
    [("text", "ascii"), ("text", "utf-8"), ("json", "ascii"), ("yaml", "ascii")],
)
def test_what_no_terminal_can_show_is_escaped(form: str, encoding: str) -> None:
    manifest = (
        'apiVersion: pdcluster.dev/v1alpha1\nkind: PDCluster\nmetadata: {name: "\\ud800\\u00e4"}\n'
    )
    done = subprocess.run(
        [sys.executable, "-m", "pdcluster_operator", "lint", "-", "/none/\udcff", "-o", form],
        env={**os.environ, "PYTHONIOENCODING": f"{encoding}:strict", "PYTHONUTF8": "0"},
        input=manifest.encode(), capture_output=True, timeout=240, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (1, b"")
    for words in (b"/none/\\udcff", b"\\ud800"):
        assert words in done.stdout.replace(b"\\uD800", b"\\ud800").replace(b"\\uDCFF", b"\\udcff")
