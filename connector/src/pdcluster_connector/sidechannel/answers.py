"""What a side channel answers: to whom, and in which words.

Peers learn from these answers how to read KV memory. So with TLS, what a peer says of itself has to
fit the names in its certificate.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from aiohttp import web

from pdcluster_connector.compat import rules
from pdcluster_connector.compat.reasons import Reason
from pdcluster_connector.compat.shape import EngineShape
from pdcluster_connector.protocol import messages
from pdcluster_connector.protocol.engine_id import engine_in, why_not_peer
from pdcluster_connector.protocol.failure import refusal_of
from pdcluster_connector.protocol.messages import (
    EngineMetadata,
    HandshakeRequest,
    Malformed,
    Refusal,
    ShardMetadata,
)
from pdcluster_connector.sidechannel.lease_desk import LeaseDesk

logger = logging.getLogger(__name__)

# The DNS names of a client's certificate; None where nobody is asked for one.
Names = tuple[str, ...] | None


class Answers:
    """Not thread-safe, but for :meth:`set_shards`.

    Args:
        engine_id: this engine's incarnation.
        shape: this engine's shape, all fields known.
        leases: what answers releases and renewals; None refuses them (a decode engine).
        role: of this engine.
        lease_seconds: how long this engine holds blocks for a peer.
        versions: versions by name, which peers log.
    """

    def __init__(
        self,
        engine_id: str,
        shape: EngineShape,
        *,
        leases: LeaseDesk | None,
        role: str,
        lease_seconds: float,
        versions: Mapping[str, str],
    ) -> None:
        self._engine_id = engine_id
        self._shape = shape
        self._leases = leases
        self._role = role
        self._lease_seconds = lease_seconds
        self._versions = dict(versions)
        self._shards: tuple[ShardMetadata, ...] = ()
        self._metadata: dict[int, bytes] = {}  # by protocol
        self._malformed_messages = 0

    def set_shards(self, shards: Sequence[ShardMetadata]) -> None:
        """Publish the ranks' metadata; from now on handshakes are answered with it."""
        self._metadata = {
            protocol: messages.encode(
                EngineMetadata(
                    protocol=protocol,
                    engine_id=self._engine_id,
                    shape=self._shape,
                    shards=tuple(shards),
                    lease_seconds=self._lease_seconds,
                    versions=self._versions,
                )
            )
            for protocol in range(messages.PROTOCOL_OLDEST, messages.PROTOCOL_NEWEST + 1)
        }
        self._shards = tuple(shards)

    def health(self) -> web.Response:
        """Say which incarnation listens here."""
        reply = messages.HealthReply(self._engine_id, self._role, len(self._shards))
        return web.Response(body=messages.encode_health(reply), content_type="application/json")

    def handshake(self, body: bytes, names: Names) -> web.Response:
        """Give the engine's metadata to a decode engine that can read its KV."""
        asked = messages.decode_handshake_request(body)
        if isinstance(asked, Malformed):
            return self._malformed(asked)
        if why := self._stranger("handshake", names, asked.engine_id):
            return _text(403, why)
        refusal = self.refusal(asked)
        if refusal is not None:
            logger.warning(
                "handshake of %s refused: %s: %s", asked.engine_id, refusal.reason, refusal.message
            )
            return _packed(409, messages.encode(refusal))
        if not self._shards:
            return _text(503, "the engine's memory is not registered yet")
        return _packed(200, self._metadata[min(asked.protocols[1], messages.PROTOCOL_NEWEST)])

    def lease(self, body: bytes, names: Names) -> web.Response:
        """Take a decode engine's releases and renewals in."""
        asked = messages.decode_lease_request(body)
        if isinstance(asked, Malformed):
            return self._malformed(asked)
        if why := self._stranger("lease message", names, asked.holder):  # for nobody else
            return _text(403, why)
        if asked.engine_id != self._engine_id:
            refusal = Refusal(
                Reason.PEER_RESTARTED.value,
                f"{asked.engine_id} is gone; {self._engine_id} listens here now",
                self._engine_id,
                asked.engine_id,
            )
            return _packed(409, messages.encode(refusal))
        if self._leases is None:
            return _text(404, "this engine grants no leases")
        return _packed(200, messages.encode(self._leases.answer(asked)))

    def refusal(self, asked: HandshakeRequest) -> Refusal | None:
        """Return why the two engines cannot exchange KV; None if they can."""
        oldest, newest = asked.protocols
        if oldest > messages.PROTOCOL_NEWEST or newest < messages.PROTOCOL_OLDEST:
            ours = f"{messages.PROTOCOL_OLDEST}..{messages.PROTOCOL_NEWEST}"
            theirs = f"{oldest}..{newest}"
            return Refusal(
                Reason.PROTOCOL_VERSION_MISMATCH.value,
                f"prefill speaks protocol {ours}, decode {theirs}; give both"
                " engines the same connector",
                ours,
                theirs,
            )
        return refusal_of(rules.check(self._shape, asked.shape))

    def _stranger(self, what: str, names: Names, claimed: str | None) -> str | None:
        """Return why a client may not ask this; ``claimed`` is who it says that it is."""
        if names is None:
            return None
        who = claimed or engine_in(names) or ""
        why = why_not_peer(self._engine_id, names, who, "decode")
        if why is not None:
            logger.warning("a %s was refused: %s", what, why)
        return why

    def _malformed(self, why: Malformed) -> web.Response:
        self._malformed_messages += 1
        number = self._malformed_messages
        if number & (number - 1) == 0:  # 1, 2, 4, 8 ...
            logger.warning("malformed message %d: %s", number, why.message)
        return _text(400, why.message)


def _packed(status: int, body: bytes) -> web.Response:
    return web.Response(status=status, body=body, content_type="application/msgpack")


def _text(status: int, text: str) -> web.Response:
    body = text.encode("utf-8", "replace")
    return web.Response(status=status, body=body, content_type="text/plain")
