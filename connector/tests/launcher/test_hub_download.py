"""The program of a download Job, against a server that speaks the Hub's API of files."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from pdcluster_connector.launcher import hub_download
from pdcluster_connector.launcher.before_start import cache_problems

pytestmark = pytest.mark.process

REPO = "some-lab/tiny"
COMMIT = hashlib.sha1(b"tiny").hexdigest()
MEGABYTE = 1 << 20
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "model-00001-of-00002.safetensors": os.urandom(2 * MEGABYTE),
    "model-00002-of-00002.safetensors": os.urandom(MEGABYTE),
    "pytorch_model.bin": b"old",
    "original/consolidated.00.pth": b"older",
}
READ = {name for name in FILES if name.endswith((".json", ".safetensors"))}
LARGE = "model-00001-of-00002.safetensors"


class Hub(ThreadingHTTPServer):
    """Serves one repository; may stop in the middle of a file, and refuse whoever has no token.

    Attributes:
        cut: how many bytes of the large file are sent before the server hangs; None for all.
        half: set when the server hangs so.
        go_on: set to let it hang up.
        rest: set to let it send the rest.
        asked: (method, path, first byte) of each request.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.cut: int | None = None
        self.token = ""
        self.half, self.go_on, self.rest = (threading.Event() for _ in range(3))
        self.asked: list[tuple[str, str, int]] = []


class Answers(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        first = int((re.findall(r"bytes=(\d+)", self.headers.get("Range") or "") or [0])[0])
        path = self.path.partition("?")[0]
        self.server.asked.append((self.command, path, first))
        if self.server.token not in self.headers.get("Authorization", ""):
            return self.answer(401, b"{}", {"X-Error-Code": "GatedRepo"})
        if path == f"/api/models/{REPO}/tree/{COMMIT}":
            rows = [
                {"type": "file", "path": name, "size": len(data), "oid": etag(data)}
                for name, data in FILES.items()
            ]
            return self.answer(200, json.dumps(rows).encode())
        if path in (
            f"/api/models/{REPO}",
            *(f"/api/models/{REPO}/revision/{one}" for one in ("main", COMMIT)),
        ):
            rows = [{"rfilename": name, "size": len(data)} for name, data in FILES.items()]
            about = {"id": REPO, "modelId": REPO, "sha": COMMIT, "siblings": rows}
            return self.answer(200, json.dumps(about).encode())
        found = re.fullmatch(rf"/{REPO}/resolve/[^/]+/(.+)", path)
        if found and found[1] in FILES:
            return self.file(found[1], first)
        kind = "RevisionNotFound" if f"/{REPO}/" in path else "RepoNotFound"
        return self.answer(404, b"{}", {"X-Error-Code": kind})

    def file(self, name: str, first: int) -> None:
        data = FILES[name]
        head = {"X-Repo-Commit": COMMIT, "ETag": f'"{etag(data)}"', "Accept-Ranges": "bytes"}
        if first:
            head["Content-Range"] = f"bytes {first}-{len(data) - 1}/{len(data)}"
        cut = self.server.cut if name == LARGE and self.command == "GET" else None
        self.answer(206 if first else 200, data[first:], head, cut)

    def answer(
        self, status: int, body: bytes, head: dict[str, str] | None = None, cut: int | None = None
    ) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", **(head or {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        self.wfile.write(body[:cut])
        if cut is not None:
            self.wfile.flush()
            self.server.half.set()
            while not (self.server.go_on.wait(0.02) or self.server.rest.is_set()):
                pass
            if self.server.rest.is_set():
                self.wfile.write(body[cut:])
            self.close_connection = True

    def log_message(self, *_: Any) -> None:
        pass


def etag(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.fixture
def hub() -> Iterator[Hub]:
    server = Hub()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.go_on.set()
    server.shutdown()
    server.server_close()


class Run:
    """The program as a Job starts it."""

    def __init__(self, hub: Hub, home: Path, *arguments: str, **variables: str) -> None:
        environment = {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": os.pathsep.join(one for one in sys.path if one.endswith("/src")),
            "HF_HOME": str(home),
            "HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}",
            **variables,
        }
        command = [sys.executable, "-m", "pdcluster_connector.launcher.hub_download", *arguments]
        self.process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def end(self) -> tuple[int, str]:
        """Exit code, and the last line."""
        out, error = self.process.communicate(timeout=180)
        assert "Traceback" not in error, error
        return self.process.returncode, (error.strip() or out.strip()).splitlines()[-1]


def snapshot(home: Path) -> Path:
    return home / f"hub/models--{REPO.replace('/', '--')}/snapshots/{COMMIT}"


def test_a_download_that_is_killed_goes_on_with_the_files_that_lack(hub, tmp_path):
    hub.cut = MEGABYTE
    killed = Run(hub, tmp_path, REPO)
    assert hub.half.wait(180), killed.process.poll()
    complete = snapshot(tmp_path)
    wait_for(
        lambda: len(list(complete.glob("*"))) == len(READ) - 1, lambda: list(tmp_path.rglob("*"))
    )
    killed.process.terminate()
    assert killed.end()[0] == 143
    assert not list((tmp_path / "hub" / hub_download.MARKS).glob("*")), "the mark comes last"
    hub.cut = None
    hub.go_on.set()
    for part in tmp_path.rglob("*.incomplete"):
        os.utime(part, (0, 0))
    asked = len(hub.asked)
    assert Run(hub, tmp_path, REPO).end() == (
        0, f"downloaded {REPO} as commit {COMMIT}",
    )  # fmt: skip
    again = {
        path.rpartition("/")[2]
        for way, path, _ in hub.asked[asked:]
        if way == "GET" and "/resolve/" in path
    }
    assert again == {LARGE}, "what was complete is not asked for again"
    assert not list(tmp_path.rglob("*.incomplete")), "what the killed one left is gone"
    there = {
        str(p.relative_to(snapshot(tmp_path))) for p in snapshot(tmp_path).rglob("*") if p.is_file()
    }
    assert there == READ
    assert all((snapshot(tmp_path) / name).read_bytes() == FILES[name] for name in READ)


def wait_for(check: Callable[[], bool], explain: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 180
    while not check():
        assert time.monotonic() < deadline, explain()


def test_two_jobs_that_share_a_claim_download_a_file_once(hub, tmp_path):
    """Each PDCluster has a Job of its own. The second waits for the file that the first has."""
    hub.cut = MEGABYTE
    first = Run(hub, tmp_path, REPO)
    assert hub.half.wait(180), first.process.poll()
    second = Run(hub, tmp_path, REPO, "--revision", COMMIT)
    wait_for(lambda: len(asked_for(hub, LARGE, "HEAD")) == 2, lambda: hub.asked)
    hub.rest.set()
    assert {first.end()[0], second.end()[0]} == {0}
    assert len(asked_for(hub, LARGE, "GET")) == 1
    assert all((snapshot(tmp_path) / name).read_bytes() == FILES[name] for name in READ)
    engine = {"HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}
    words = [(REPO,), (REPO, "--revision", COMMIT)]
    assert not [problem for one in words for problem in cache_problems(one, engine)]
    marks = {path.name for path in (tmp_path / "hub" / hub_download.MARKS).iterdir()}
    assert marks == {f"some-lab--tiny--{revision}" for revision in ("main", COMMIT)}
    shutil.rmtree(tmp_path / "hub")
    assert len([problem for one in words for problem in cache_problems(one, engine)]) == 2


def test_marks_that_are_written_at_once_are_whole(tmp_path):
    """Containers share a claim and not the numbers of processes."""
    mark = tmp_path / "mark"
    contents = [{"commit": str(number) * 40} for number in range(8)]
    with ThreadPoolExecutor(len(contents)) as pool:
        list(pool.map(write_often, [mark] * len(contents), contents))
    assert json.loads(mark.read_text()) in contents
    assert list(tmp_path.iterdir()) == [mark]


def write_often(mark: Path, content: dict[str, str]) -> None:
    for _ in range(20):
        hub_download._write_mark(mark, content)


def asked_for(hub: Hub, name: str, way: str) -> list[str]:
    return [path for one, path, _ in hub.asked if one == way and path.endswith(f"/{name}")]


def test_what_is_there_is_not_asked_for_again(hub, tmp_path):
    assert Run(hub, tmp_path, REPO).end()[0] == 0
    asked = len(hub.asked)
    code, said = Run(hub, tmp_path, REPO, HF_ENDPOINT="http://127.0.0.1:9").end()
    assert (code, said) == (0, f"{REPO} is in the cache already, as commit {COMMIT}")
    (snapshot(tmp_path) / "config.json").resolve().unlink()
    assert Run(hub, tmp_path, REPO).end()[0] == 0, "a file that is gone comes again"
    assert (snapshot(tmp_path) / "config.json").read_bytes() == FILES["config.json"]
    weights = [path for way, path, _ in hub.asked[asked:] if way == "GET" and LARGE in path]
    assert weights == []


@pytest.mark.parametrize(
    ("repo", "more", "token", "code", "said"),
    [
        (REPO, [], "right", 2, "does not give out some-lab/tiny (HTTP 401)"),
        ("some-lab/other", [], "", 2, "does not give out some-lab/other (HTTP 404)"),
        (REPO, ["--revision", "v9"], "", 2, "the Hub has no revision v9 of some-lab/tiny"),
        ("a/b/c", [], "", 2, "a/b/c is no name of a model"),
    ],
)
def test_what_the_hub_refuses_is_one_sentence(hub, tmp_path, repo, more, token, code, said):
    hub.token = token
    found = Run(hub, tmp_path, repo, *more, HF_TOKEN="wrong-secret").end()
    assert found[0] == code
    assert said in found[1]
    assert "wrong-secret" not in found[1]


def test_a_hub_that_does_not_answer_may_answer_later(hub, tmp_path):
    code, said = Run(hub, tmp_path, REPO, HF_ENDPOINT="http://127.0.0.1:9").end()
    assert (code, said.partition(":")[0]) == (1, "the download from the Hub stopped")


def test_a_disk_without_room_is_named_before_anything_comes(hub, tmp_path, monkeypatch):
    usage = type("Usage", (), {"free": MEGABYTE})()
    monkeypatch.setattr(hub_download.shutil, "disk_usage", lambda _: usage)
    blobs = tmp_path / "hub/m/blobs"
    with pytest.raises(hub_download._DownloadError, match=r"0\.0 GB are still .* 0\.0 GB free"):
        hub_download._check_space(blobs, {"a": 2 * MEGABYTE})
    hub_download._check_space(blobs, {"a": MEGABYTE})
    # Another commit has most of it, or another Job brings it now.
    blobs.mkdir(parents=True)
    for name in ("0123", "4567.incomplete"):
        (blobs / name).write_bytes(bytes(MEGABYTE))
    hub_download._check_space(blobs, {"a": MEGABYTE, "b": 2 * MEGABYTE})


@pytest.mark.parametrize(
    ("names", "read"),
    [
        (
            ["a.safetensors", "pytorch_model.bin", "tokenizer.model"],
            ["a.safetensors", "tokenizer.model"],
        ),
        (["pytorch_model.bin", "config.json"], ["pytorch_model.bin", "config.json"]),
        (["pytorch_model.bin", "1_P/a.safetensors"], ["pytorch_model.bin", "1_P/a.safetensors"]),
        (
            ["b.pth", "adapter_model.safetensors"],
            ["b.pth", "adapter_model.safetensors"],
        ),
        (["a.gguf", "b.gguf"], ["a.gguf", "b.gguf"]),
        (["original/a.pth", "onnx/model.onnx", "params.json"], ["params.json"]),
    ],
)
def test_only_what_vllm_reads_is_downloaded(names, read):
    assert list(hub_download.wanted_files(dict.fromkeys(names, 1))) == read
