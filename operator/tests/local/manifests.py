"""Manifests for tests of local mode."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def tiny(folder: Path, name: str = "tiny", **spec: Any) -> dict[str, Any]:
    """One P, one D and a router; the model is an almost empty folder."""
    model = folder / "model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").touch()
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
