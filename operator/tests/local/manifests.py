"""Manifests for tests of local mode."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def safetensors(tensors: Mapping[str, int]) -> bytes:
    """Return the bytes of a file with tensors of these names and sizes in bytes."""
    header, end = {}, 0
    for name, size in tensors.items():
        header[name] = {"dtype": "U8", "shape": [size], "data_offsets": [end, end + size]}
        end += size
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    return struct.pack("<Q", len(text)) + text + bytes(end)


def tiny(folder: Path, name: str = "tiny", **spec: Any) -> dict[str, Any]:
    """One P, one D and a router; the model is an almost empty folder."""
    model = folder / "model"
    model.mkdir(parents=True, exist_ok=True)
    (model / "config.json").write_text("{}")
    (model / "tokenizer.json").write_text("{}")
    (model / "model.safetensors").write_bytes(safetensors({"lm_head.weight": 64}))
    fake = folder / "fake"
    fake.mkdir(exist_ok=True)
    return {
        "apiVersion": "pdcluster.dev/v1alpha1",
        "kind": "PDCluster",
        "metadata": {"name": name},
        "spec": {
            "model": {"source": {"hostPath": {"path": str(model)}}},
            "engine": {
                "blockSize": 32,
                "env": [
                    {"name": "PDFAKE", "value": str(fake)},
                    {"name": "MARK", "value": f"mark-{folder}"},
                ],
            },
            "transfer": {"device": "CPU", "tls": "Enabled"},
            "prefill": {"replicas": 1},
            "decode": {"replicas": 1},
            "router": {"replicas": 1},
            **spec,
        },
    }
