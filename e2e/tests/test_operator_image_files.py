"""The files of the operator's image, as it is built here."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import pytest

from cluster import lifecycle
from images.operator_image import operator_image

pytestmark = pytest.mark.cluster


def files(archive: Path) -> set[str]:
    """Every file that a layer of an image adds."""
    found: set[str] = set()
    with tarfile.open(archive) as image:
        manifest = image.extractfile("manifest.json")
        assert manifest is not None
        for layer in json.load(manifest)[0]["Layers"]:
            data = image.extractfile(layer)
            assert data is not None
            with tarfile.open(fileobj=io.BytesIO(data.read())) as content:
                found |= {member.name for member in content if member.isfile()}
    return found


@pytest.mark.skipif(
    bool(lifecycle.users_own()), reason="KUBECONFIG names a cluster with its own image"
)
def test_local_mode_is_in_no_layer() -> None:
    found = {name for name in files(operator_image().archive) if "/pdcluster_operator/" in name}
    rooms = {name.partition("/pdcluster_operator/")[2].partition("/")[0] for name in found}
    assert {"api", "plan", "runtime", "adapters", "cli"} <= rooms
    assert "local" not in rooms
