"""Folders of this machine that stand for a pod's volumes."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pdcluster_operator.local.api import LocalApi


def volume_folder(api: LocalApi, namespace: str, volume: Mapping[str, Any], base: Path) -> Path:
    """Make the folder of a hostPath, emptyDir, ConfigMap or Secret volume.

    Args:
        base: folder of the pod's volumes. A hostPath is used where it is.

    Raises:
        OSError: it cannot be written, or the ConfigMap or Secret is not there yet.
    """
    if "hostPath" in volume:
        return Path(volume["hostPath"]["path"])
    folder = Path(base, volume["name"])
    folder.mkdir(parents=True, exist_ok=True)
    if "configMap" in volume:
        name = volume["configMap"]["name"]
        source = api.get("ConfigMap", namespace, name)
        if source is None:
            raise FileNotFoundError(0, "there is no such ConfigMap yet", name)
        for key, text in (source.get("data") or {}).items():
            (folder / key).write_text(text)
        for key, encoded in (source.get("binaryData") or {}).items():
            (folder / key).write_bytes(base64.b64decode(encoded))
    if "secret" in volume:
        name = volume["secret"]["secretName"]
        source = api.get("Secret", namespace, name)
        if source is None:
            raise FileNotFoundError(0, "there is no such Secret", name)
        data = source.get("data") or {}
        items = volume["secret"].get("items") or [{"key": key, "path": key} for key in data]
        for item in items:
            if item["key"] not in data:
                raise FileNotFoundError(0, f"the Secret holds no {item['key']} yet", name)
            (folder / item["path"]).touch(mode=0o600)
            (folder / item["path"]).write_bytes(base64.b64decode(data[item["key"]]))
    return folder
