"""Pairs that could only exchange wrong KV: refused at lint, and at the handshake behind it.

How the handshake refuses block sizes is shown in test_cluster_refused.py.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from local_run import LocalRun, condition, manifest, mounted
from sicknesses import said_by_status

from models.tiny import model_path
from pdcluster_connector.vllm.worker_side.fingerprint import PIECE_BYTES
from pdcluster_operator.api.rules.validate import check_manifest

pytestmark = [pytest.mark.local, pytest.mark.timeout(900)]

PROMPT = "A prompt of several blocks, which both engines can compute on their own, and do. " * 2


def errors(**changes: Any) -> list[str]:
    _, findings = check_manifest(manifest(**changes))
    return [str(error) for error in findings.errors]


def test_lint_refuses_different_block_sizes() -> None:
    found = errors(decode={"engine": {"blockSize": 64}})
    assert any("PrefixCachingHeterogeneousBlocks" in text for text in found), found
    assert any("32" in text and "64" in text for text in found), found


def test_lint_refuses_different_models() -> None:
    other = str(model_path("llama-finetuned"))
    found = errors(decode={"engine": {"extraArgs": ["--model", other]}})
    assert any("ModelMismatch" in text and other in text for text in found), found


def refused_link(run: LocalRun, reason: str) -> dict[str, Any]:
    found: list[dict[str, Any]] = []

    def refused() -> bool:
        status = run.status()
        found[:] = [dict(link) for link in status.get("failedLinks", ())]
        return (
            [link["reason"] for link in found] == [reason]
            and condition(status, "Ready")["status"] == "False"
            and condition(status, "KVLinksEstablished")["reason"] == reason
        )

    run.wait(f"link refused as {reason}", refused)
    [link] = found
    assert link["reason"] == reason
    return link


def test_handshake_refuses_other_weights_and_requests_are_recomputed(tmp_path: Path) -> None:
    other = model_path("llama-finetuned")
    document = manifest(
        transfer={"loadFailurePolicy": "Recompute"},
        decode={"podTemplate": mounted(other)},
    )
    with LocalRun(document, tmp_path) as run:
        link = refused_link(run, "ModelMismatch")
        assert link["message"]
        why = r"ModelMismatch: .*: the model's digest differs: "
        said_by_status(run, why, link["reason"], "pdcluster links tiny --local")
        for role in ("decode", "router"):
            run.wait_pod(role)
        alone = run.complete(PROMPT, role="decode").completion
        reply = run.complete(PROMPT)
        assert reply.status == 200, reply.text
        assert reply.completion == alone, "recomputed with decode's own weights"
        assert reply.kv_path["outcome"] == "failed"
        assert reply.kv_path["reason"] == "ModelMismatch"


def with_holes(folder: Path) -> Path:
    """Copy the model, with zeros where no engine reads its weights to compare them.

    An interrupted copy leaves a file of the right length like this.
    """
    shutil.copytree(model_path("llama"), folder)
    [path] = folder.glob("*.safetensors")
    data = bytearray(path.read_bytes())
    begin = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(bytes(data[8:begin]))
    header.pop("__metadata__", None)
    for tensor in header.values():
        start, end = (begin + edge for edge in tensor["data_offsets"])
        middle = (end - start - PIECE_BYTES) // 2
        for first, last in (
            (start + PIECE_BYTES, start + middle),
            (start + middle + PIECE_BYTES, end),
        ):
            data[first:last] = bytes(max(0, last - first))
    path.write_bytes(data)
    return folder


@pytest.mark.soak
def test_check_finds_weights_that_no_handshake_can_tell(tmp_path: Path) -> None:
    other = with_holes(tmp_path / "model")
    document = manifest(decode={"podTemplate": mounted(other)})
    with LocalRun(document, tmp_path / "run") as run:
        run.wait_ready()
        code, said = run.command("check")
    assert code == 4, said
    assert "KV moved from prefill/0 to decode/0, but decode alone generates other tokens" in said
    assert "other weights" in said
    assert "which rounding does not explain" in said
