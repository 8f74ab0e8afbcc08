"""A connector whose worker is of another engine, as a node that was started by mistake."""

from __future__ import annotations

from typing import Any

from pdcluster_connector.vllm.connector import PDClusterConnector


class Stranger(PDClusterConnector):
    def get_handshake_metadata(self) -> Any:
        metadata: Any = super().get_handshake_metadata()
        if metadata is not None:
            metadata.engine_id += "-of-another-node"
        return metadata
