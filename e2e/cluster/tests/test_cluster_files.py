"""The parts that need no cluster: pins, digests, archives, credentials, the audit log's lines."""

from __future__ import annotations

import io
import json
import re
import shutil
import subprocess
import tarfile
import time
from pathlib import Path

import pytest

from cluster import access, audit, binaries, certificates, images
from cluster.binaries import Program
from cluster.places import Places
from cluster.report import ClusterError


@pytest.mark.parametrize(
    "program", [*binaries.PROGRAMS, binaries.KWOK], ids=lambda program: program.name
)
def test_every_program_has_a_pinned_module(program):
    folder = binaries.TOOLS / program.tool
    assert (folder / "go.mod").exists()
    if program.package != ".":
        assert re.fullmatch(r"v\d+\.\d+\.\d+", binaries.pinned_version(program))
        assert binaries.pinned_version(program) in (folder / "go.sum").read_text()


def test_no_module_names_where_it_was_fetched():
    for path in binaries.TOOLS.glob("*/go.*"):
        text = path.read_text()
        assert "://" not in text, path
        assert not re.search(r"=> *[./]", text), path


def test_digest_changes_with_the_sources(monkeypatch, tmp_path):
    monkeypatch.setattr(binaries, "TOOLS", tmp_path)
    tool = tmp_path / "thing"
    tool.mkdir()
    (tool / "go.mod").write_text("module thing\n")
    first = binaries.digest("thing")
    (tool / "notes.txt").write_text("not built from")
    assert binaries.digest("thing") == first
    (tool / "main.go").write_text("package main\n")
    assert binaries.digest("thing") != first


@pytest.mark.parametrize(
    ("says", "found"),
    [
        ("thing v1.2.3", True),
        ("thing 1.2.3+abc", True),
        ("thing v1.2.30", False),
        ("thing v11.2.3", False),
        ("thing v1.2.4", False),
    ],
)
def test_path_is_used_at_the_pinned_version_only(monkeypatch, tmp_path, says, found):
    (tmp_path / "thing").mkdir()
    (tmp_path / "thing" / "go.mod").write_text("module x\n\nrequire example.org/thing v1.2.3\n")
    program = tmp_path / "bin" / "thing"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\necho {says}\n")
    program.chmod(0o755)
    built: list[Path] = []
    monkeypatch.setattr(binaries, "TOOLS", tmp_path)
    monkeypatch.setattr(binaries, "_build", lambda _, target: built.append(target))
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    wanted = Program("thing", "thing", "example.org/thing", ("--version",))
    paths = binaries.provide([wanted], Places(tmp_path / "home"))
    assert (paths["thing"] == program) is found
    assert bool(built) is not found


def test_a_shell_finds_helm_by_its_usual_name(monkeypatch, tmp_path):
    """The chart's notes say `helm test`, so the demo's PATH needs `helm`, not only helm3 and 4."""
    monkeypatch.setattr(binaries, "_provide", lambda program, _: tmp_path / program.name)
    places = Places(tmp_path / "home")
    for programs in (binaries.HELM_PROGRAMS, binaries.HELM_PROGRAMS[:1]):
        binaries.provide(programs, places)
        assert (places.links / "helm").readlink() == tmp_path / "helm4"


@pytest.mark.skipif(not shutil.which("go"), reason="needs Go")
def test_build_that_fails_shows_what_go_said(monkeypatch, tmp_path):
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "go.mod").write_text("module broken\n\ngo 1.24\n")
    (tmp_path / "broken" / "main.go").write_text("package main\n\nfunc main() { missing() }\n")
    monkeypatch.setattr(binaries, "TOOLS", tmp_path)
    # Beside tests that use all cores, a build that goes last waits for a minute.
    monkeypatch.setattr(binaries, "POLITELY", ())
    with pytest.raises(ClusterError, match="undefined: missing"):
        binaries.provide([Program("broken", "broken")], Places(tmp_path / "home"))
    assert not list((tmp_path / "home").rglob("broken"))


def test_archive_is_reproducible_and_holds_what_was_asked(tmp_path):
    content = {"bin/hello": b"hello", "bin/hi": images.Link("hello")}
    for name in ("one.tar", "two.tar"):
        images.write_archive(tmp_path / name, "docker.io/local/hello:1", content, ["/bin/hello"])
    assert (tmp_path / "one.tar").read_bytes() == (tmp_path / "two.tar").read_bytes()
    with tarfile.open(tmp_path / "one.tar") as archive:
        read = {name: archive.extractfile(name).read() for name in archive.getnames()}
    manifest = json.loads(read["manifest.json"])[0]
    assert manifest["RepoTags"] == ["docker.io/local/hello:1"]
    with tarfile.open(fileobj=io.BytesIO(read["layer.tar"])) as layer:
        assert layer.extractfile("bin/hello").read() == b"hello"
        assert layer.getmember("bin/hi").linkname == "hello"
        assert layer.getmember("tmp").mode == 0o1777


def test_certificates_are_signed_by_the_authority(tmp_path):
    keys = tmp_path / "keys"
    certificates.make_certificates(keys)
    for name in ("apiserver", "kubelet", "apiserver-client"):
        subprocess.run(
            ["openssl", "verify", "-CAfile", keys / "ca.crt", keys / f"{name}.crt"],
            check=True,
            capture_output=True,
        )
    text = subprocess.run(
        ["openssl", "x509", "-noout", "-text", "-in", keys / "apiserver.crt"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    assert "IP Address:10.96.0.1" in text
    assert "DNS:kubernetes.default.svc.cluster.local" in text


def test_tokens_are_the_owners_and_every_user_has_one(tmp_path):
    keys, settings = tmp_path / "keys", tmp_path
    certificates.make_certificates(keys)
    access.write_access(keys, settings)
    rows = (keys / "tokens.csv").read_text().splitlines()
    assert len({row.split(",")[0] for row in rows}) == len(access.USERS)
    for path in (keys / "tokens.csv", settings / "admin.kubeconfig"):
        assert path.stat().st_mode & 0o077 == 0


def test_audit_log_is_read_from_a_moment_on(tmp_path):
    def line(verb: str, moment: str, user: str = "operator") -> str:
        return (
            json.dumps(
                {
                    "verb": verb,
                    "user": {"username": user},
                    "requestReceivedTimestamp": moment,
                    "objectRef": {"resource": "pods", "subresource": "status", "name": "a"},
                    "responseStatus": {"code": 200},
                }
            )
            + "\n"
        )

    log = tmp_path / "audit.log"
    log.write_text(
        line("create", "2030-01-01T00:00:00.000000Z")
        + line("patch", "2030-01-01T00:00:09.500000Z")
        + line("patch", "2030-01-01T00:00:09.500000Z", user="somebody")
        + '{"verb": "upd'
    )
    since = time.mktime((2030, 1, 1, 0, 0, 9, 0, 0, 0)) - time.timezone
    writes = list(audit.read_writes(log, since, user="operator"))
    assert [(write.verb, write.resource, write.at - since) for write in writes] == [
        ("patch", "pods/status", 0.5)
    ]
