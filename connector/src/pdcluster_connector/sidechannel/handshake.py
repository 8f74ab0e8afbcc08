"""One handshake attempt, and one look at a peer's health, as a client.

Outcomes are values: metadata, a :class:`Failure` that trying again will not change, or
:class:`TryAgain`.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import aiohttp

from pdcluster_connector.compat import rules
from pdcluster_connector.compat.reasons import Reason
from pdcluster_connector.compat.shape import EngineShape
from pdcluster_connector.protocol import messages
from pdcluster_connector.protocol.failure import Failure
from pdcluster_connector.protocol.messages import (
    EngineMetadata,
    HandshakeRequest,
    HealthReply,
    Malformed,
    Refusal,
)
from pdcluster_connector.protocol.refusal import failure_of, refusal_of
from pdcluster_connector.protocol.validation import validate_metadata

ATTEMPT = aiohttp.ClientTimeout(total=60.0, sock_connect=3.0, sock_read=15.0)
NETWORK_ERRORS = (aiohttp.ClientError, OSError, TimeoutError, asyncio.IncompleteReadError)


@dataclass(frozen=True, slots=True)
class TryAgain:
    """The attempt failed; a later one may succeed."""

    message: str


@dataclass(frozen=True, slots=True)
class Introduction:
    """What this engine tells peers about itself. ``rank`` is (pipeline, tensor)."""

    engine_id: str
    shape: EngineShape
    rank: tuple[int, int]

    def request(self) -> bytes:
        """Return the handshake's body."""
        return messages.encode(
            HandshakeRequest(
                protocols=(messages.PROTOCOL_OLDEST, messages.PROTOCOL_NEWEST),
                engine_id=self.engine_id,
                shape=self.shape,
                rank=self.rank,
            )
        )


def client_session() -> aiohttp.ClientSession:
    """Make a session for side channels: no proxies, no cookies, no redirect is followed."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, ttl_dns_cache=5),
        cookie_jar=aiohttp.DummyCookieJar(),
        trust_env=False,
        auto_decompress=False,
    )


def url(host: str, port: int, path: str) -> str:
    """Return the URL of a side channel's ``path``; IPv6 addresses get their brackets."""
    return f"http://[{host}]:{port}{path}" if ":" in host else f"http://{host}:{port}{path}"


async def read_bounded(response: aiohttp.ClientResponse, limit: int) -> bytes:
    """Read a body of at most ``limit`` bytes; of a longer one, ``limit + 1`` bytes."""
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) > limit:
            break
    return bytes(body[: limit + 1])


async def shake_hands(
    session: aiohttp.ClientSession, me: Introduction, engine_id: str, host: str, port: int
) -> EngineMetadata | Failure | TryAgain:
    """Ask ``host:port`` once for the metadata of ``engine_id``, and judge the answer."""
    where = f"{host}:{port}"
    try:
        async with session.post(
            url(host, port, "/v1/handshake"),
            data=me.request(),
            timeout=ATTEMPT,
            allow_redirects=False,
        ) as response:
            status = response.status
            body = await read_bounded(response, messages.MAX_REPLY_BYTES)
    except NETWORK_ERRORS as error:
        return TryAgain(f"{where}: {describe(error)}")
    except ValueError as error:  # the host is not valid in a URL
        return Failure(Reason.SIDE_CHANNEL_UNREACHABLE, f"{where} is not an address: {error}")
    if status in {200, 409}:
        return judge(messages.decode_handshake_reply(body), me, engine_id, where)
    text = body[:200].decode("utf-8", "replace")
    if status == 400:
        return Failure(
            Reason.PROTOCOL_VERSION_MISMATCH, f"{where} could not read the handshake: {text}"
        )
    return TryAgain(f"{where} answered {status}: {text}")


def judge(
    reply: EngineMetadata | Refusal | Malformed, me: Introduction, engine_id: str, where: str
) -> EngineMetadata | Failure:
    """Return the metadata if it is of the engine that was asked, sound and compatible."""
    if isinstance(reply, Malformed):
        message = f"{where} sent an answer that cannot be read: {reply.message}"
        return Failure(Reason.PROTOCOL_VERSION_MISMATCH, message)
    if isinstance(reply, Refusal):
        return failure_of(reply)
    if reply.engine_id != engine_id:
        return restarted(engine_id, reply.engine_id, where)
    if not messages.PROTOCOL_OLDEST <= reply.protocol <= messages.PROTOCOL_NEWEST:
        message = f"{where} answered in protocol {reply.protocol}"
        return Failure(Reason.PROTOCOL_VERSION_MISMATCH, message)
    refusal = refusal_of(validate_metadata(reply)) or refusal_of(rules.check(reply.shape, me.shape))
    return reply if refusal is None else failure_of(refusal)


async def ask_health(
    session: aiohttp.ClientSession, host: str, port: int, seconds: float
) -> HealthReply | TryAgain:
    """Ask ``/healthz`` once, for at most ``seconds``."""
    where = f"{host}:{port}"
    try:
        async with session.get(
            url(host, port, "/healthz"),
            timeout=aiohttp.ClientTimeout(total=seconds),
            allow_redirects=False,
        ) as response:
            reply = messages.decode_health(await read_bounded(response, 4096))
            status = response.status
    except (*NETWORK_ERRORS, ValueError) as error:
        return TryAgain(f"{where}: {describe(error)}")
    if status != 200 or isinstance(reply, Malformed):
        return TryAgain(f"{where} answered {status}, which is not the answer of a side channel")
    return reply


def unreachable(why: TryAgain) -> Failure:
    """Return the failure of a peer whose side channel does not answer."""
    message = (
        f"the side channel at {why.message}. Check that the engine runs, and that network"
        " policies and firewalls allow the port of its side channel"
    )
    return Failure(Reason.SIDE_CHANNEL_UNREACHABLE, message)


def restarted(expected: str, found: str, where: str) -> Failure:
    """Return the failure for an address where another engine or incarnation listens now."""
    return Failure(Reason.PEER_RESTARTED, f"{expected} is gone; {found} listens on {where} now")


def describe(error: BaseException) -> str:
    """Return a short sentence for a network error."""
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, aiohttp.ClientConnectorError):
        return error.strerror or str(error)
    return str(error)[:200] or type(error).__name__
