"""What ``pdcluster up`` changes in a manifest before it runs on this machine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from pdcluster_operator.api.spec.enums import Visibility


def with_model(document: Any, folder: Path | None) -> Any:
    """Return the manifest with ``--model-dir`` as its model's source."""
    if folder is None or not isinstance(document, dict):
        return document
    spec = document.get("spec")
    model = spec.get("model") if isinstance(spec, dict) else None
    if not isinstance(spec, dict) or not isinstance(model, dict):
        return document
    source = {"hostPath": {"path": os.path.abspath(folder)}}
    return {**document, "spec": {**spec, "model": {**model, "source": source}}}


def with_names(document: Any) -> Any:
    """Return the manifest with ``internalNames: Shown``, unless it says otherwise."""
    spec = document.get("spec") if isinstance(document, dict) else None
    transfer = spec.get("transfer") if isinstance(spec, dict) else None
    if not isinstance(spec, dict) or not isinstance(transfer, dict | None):
        return document
    shown = {"internalNames": Visibility.SHOWN.value, **(transfer or {})}
    return {**document, "spec": {**spec, "transfer": shown}}
