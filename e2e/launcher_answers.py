"""Readers of ``/readyz`` and ``/v1/links`` alone. The operator reads both in ``/v1/changes``."""

from functools import partial

from pdcluster_connector.protocol import launcher_documents as documents
from pdcluster_connector.protocol.field_by_field import reader_of
from pdcluster_connector.protocol.messages import bounded

decode_engine, decode_links = (
    partial(
        bounded,
        limit=documents.MAX_ANSWER_BYTES,
        decoder=reader_of(kind, documents.PARTS, documents.MAX_LINKS),
    )
    for kind in (documents.EngineReport, documents.LinksReport)
)
