"""A connector's ConfigMap that holds something else than its name says.

The operator has the bytes of its own connector and compares them. Of an older one it has only the
name, which ends with the beginning of the hash of the bytes. Without a look at that, whoever may
delete and create ConfigMaps could bring code into the pods of engines.
"""

from __future__ import annotations

from pdcluster_operator.api.object_names import is_connector_name, owner_of_connector
from pdcluster_operator.plan.builders.connector_configmap import CONNECTOR_FILE
from pdcluster_operator.plan.model import Manifest
from pdcluster_operator.plan.objects.contents import MARK


def is_forged(config_map: Manifest) -> bool:
    """Whether a ConfigMap has the name of a connector, but has other bytes or can be changed.

    Args:
        config_map: as the store keeps it, with hashes. One with its contents is not judged.
    """
    name = str(config_map["metadata"]["name"])
    if not is_connector_name(name) and not owner_of_connector(name):
        return False
    held = config_map.get("binaryData") or {}
    if not all(str(content).startswith(MARK) for content in held.values()):
        return False
    only = set(held) == {CONNECTOR_FILE} and not config_map.get("data")
    digest = name.rpartition("-")[2]
    right = only and str(held[CONNECTOR_FILE]).startswith(MARK + digest)
    return not (right and config_map.get("immutable") is True)
