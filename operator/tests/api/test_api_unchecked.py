"""What is not checked yet is named in the words of a manifest, not in those of the code."""

from __future__ import annotations

import itertools

import pytest

from pdcluster_connector.compat.check import check
from pdcluster_connector.compat.findings import Verdict
from pdcluster_connector.compat.shape import EngineShape, Memory
from pdcluster_operator.api.rules.engines import NAMES, unchecked_message
from pdcluster_operator.api.rules.validate import check_manifest


def manifest(**engine: object) -> dict[str, object]:
    return {
        "apiVersion": "pdcluster.dev/v1alpha1",
        "kind": "PDCluster",
        "metadata": {"name": "tiny"},
        "spec": {"model": {"source": {"huggingFace": {"repo": "org/model"}}}, "engine": engine},
    }


def test_every_field_that_a_spec_can_leave_open_has_words() -> None:
    found = set()
    for kv_dtype, block_size, sliceable, hybrid in itertools.product(
        (None, "bf16"), (None, 16), (None, True, False), (None, True)
    ):
        shape = EngineShape(
            model="m",
            kv_dtype=kv_dtype,
            block_size=block_size,
            prefix_caching=True,
            memory=Memory.DRAM,
            token_sliceable=sliceable,
            hybrid=hybrid,
        )
        found |= {f.field for f in check(shape, shape) if f.verdict is Verdict.UNKNOWN}
    assert {"layers", "kv_dtype", "block_size", "token_sliceable"} <= found
    assert found <= NAMES.keys()


@pytest.mark.parametrize(
    ("field", "setting", "value"),
    [
        ("kv_dtype", "kvCacheDtype", "fp8"),
        ("block_size", "blockSize", 16),
        ("token_sliceable", "attentionBackend", "FLASH_ATTN"),
    ],
)
def test_the_setting_in_brackets_has_it_checked_now(
    field: str, setting: str, value: object
) -> None:
    assert NAMES[field][1] == f"engine.{setting}"
    assert field in check_manifest(manifest())[1].unchecked
    assert field not in check_manifest(manifest(**{setting: value}))[1].unchecked


def test_the_message_says_what_and_when_and_how_to_know_sooner() -> None:
    assert unchecked_message(["layers", "block_size"]) == (
        "Not checked yet: the model's layers (model.configMapRef), the block size of the KV cache "
        "(engine.blockSize). "
        "The engines check this when they connect to each other. "
        "Set a field in brackets to have it checked now."
    )
    assert "brackets" not in unchecked_message(["memory of another kind"])
    assert unchecked_message([]) == ""
