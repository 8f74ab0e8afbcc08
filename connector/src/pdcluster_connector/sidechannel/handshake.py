"""What a peer is asked: one handshake, or once whether it lives; and how long it is silent.

Outcomes are values: metadata, a :class:`Failure` that trying again will not change, or
:class:`TryAgain`.
"""

import asyncio
import errno
import ssl
import time
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Any, TypeVar

import aiohttp

from pdcluster_connector.certificate_files import Tls, tls_arguments
from pdcluster_connector.compat.check import check
from pdcluster_connector.compat.reasons import Reason
from pdcluster_connector.compat.shape import EngineShape
from pdcluster_connector.protocol import host_port, messages, validation
from pdcluster_connector.protocol.failure import Failure, failure_of, refusal_of

T = TypeVar("T")

SILENT_SECONDS = 5.0  # whoever asks after a longer silence does not wait for the lease's end
MOST_ADDRESSES = 4096
ATTEMPT = aiohttp.ClientTimeout(total=60.0, sock_connect=3.0, sock_read=15.0)
_REFUSED = {
    400: (Reason.PROTOCOL_VERSION_MISMATCH, "could not read the handshake"),
    403: (Reason.AUTHENTICATION_FAILED, "does not trust this engine"),
}
_NO_WAY = {errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ETIMEDOUT}
NETWORK_ERRORS = (aiohttp.ClientError, OSError, TimeoutError, asyncio.IncompleteReadError)


@dataclass(frozen=True, slots=True)
class TryAgain:
    """The attempt failed; a later one may succeed.

    Attributes:
        reason: what to report when there is no time for a later one.
        refused: whether nobody listens there: the connection was refused.
        silent: whether nobody has answered at all. A network that drops packets looks the same as
            a process that is stopped or starved.
    """

    message: str
    reason: Reason = Reason.SIDE_CHANNEL_UNREACHABLE
    refused: bool = False
    silent: bool = False


class Silence:
    """The questions that are not answered yet, of a peer book and of links. Thread-safe."""

    def __init__(self) -> None:
        self._asked_at: dict[tuple[str, int], float] = {}

    async def asking(self, address: tuple[str, int], question: Awaitable[T]) -> T:
        """Await a question to ``address``, and note whether it is answered."""
        if len(self._asked_at) >= MOST_ADDRESSES:  # of engines that are long gone
            self._asked_at.clear()
        asked = time.monotonic()
        is_first = self._asked_at.setdefault(address, asked) == asked
        is_answered = is_first  # a question that is given up says nothing
        try:
            outcome = await question
            is_answered = not (isinstance(outcome, TryAgain) and outcome.silent)
        finally:
            if is_answered:
                self._asked_at.pop(address, None)
        return outcome

    def hear(self, address: tuple[str, int], seconds: float) -> None:
        """Note that another rank has had no answer for so many seconds."""
        self._asked_at.setdefault(address, time.monotonic() - seconds)

    def seconds(self, address: tuple[str, int]) -> float:
        """Return for how many seconds questions to an address have had no answer."""
        since = self._asked_at.get(address)
        return 0.0 if since is None else time.monotonic() - since

    def is_long(self, address: tuple[str, int], since: float | None = None) -> bool:
        """Whether nothing new is begun with a peer before it answers.

        ``since``: when what asks began; it is not new if it began before the peer was silent.
        """
        asked = self._asked_at.get(address)
        begun = time.monotonic() if since is None else since
        return asked is not None and begun - asked >= SILENT_SECONDS


def introduction(engine_id: str, shape: EngineShape) -> messages.HandshakeRequest:
    """Return how this engine introduces itself to peers."""
    versions = messages.PROTOCOL_OLDEST, messages.PROTOCOL_NEWEST
    return messages.HandshakeRequest(versions, engine_id, shape)


def client_session() -> aiohttp.ClientSession:
    """Make a session without proxies and cookies; each call has to refuse redirects."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, ttl_dns_cache=5),
        cookie_jar=aiohttp.DummyCookieJar(),
        trust_env=False,
        auto_decompress=False,
    )


async def read_bounded(response: aiohttp.ClientResponse, limit: int) -> bytes:
    """Read a body of at most ``limit`` bytes; of a longer one, ``limit + 1`` bytes."""
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) > limit:
            break
    return bytes(body[: limit + 1])


async def request(
    session: aiohttp.ClientSession,
    method: str,
    url: str,
    tls: Tls | None,
    engine_id: str | None = None,
    *,
    limit: int = messages.MAX_REPLY_BYTES,
    **arguments: Any,
) -> tuple[int, bytes]:
    """Send one request to ``engine_id``; None: to this engine's own launcher.

    Returns:
        The status, and at most ``limit + 1`` bytes of the body.

    Raises:
        NETWORK_ERRORS: no answer; ssl.SSLError: the server does not prove that it is the engine.
        ValueError: the host is not valid in a URL, or no certificate can name the engine.
    """
    arguments |= tls_arguments(tls, engine_id)
    async with session.request(method, url, allow_redirects=False, **arguments) as response:
        return response.status, await read_bounded(response, limit)


async def _ask(
    session: aiohttp.ClientSession,
    method: str,
    path: str,
    engine_id: str,
    host: str,
    port: int,
    tls: Tls | None,
    **arguments: Any,
) -> tuple[int, bytes] | Failure | TryAgain:
    """Send one request to the side channel of ``engine_id``; see :func:`request`."""
    where = host_port.join_address(host, port)
    url = host_port.url(host, port, path, secured=tls is not None)
    try:
        return await request(session, method, url, tls, engine_id, **arguments)
    except ssl.SSLError as error:
        return Failure(Reason.AUTHENTICATION_FAILED, _not_trusted(where, engine_id, error))
    except NETWORK_ERRORS as error:
        return _no_answer(where, error, tls)
    except ValueError as error:  # the host is not valid in a URL
        return Failure(Reason.SIDE_CHANNEL_UNREACHABLE, f"{where} is not an address: {error}")


async def shake_hands(
    session: aiohttp.ClientSession,
    me: messages.HandshakeRequest,
    engine_id: str,
    host: str,
    port: int,
    tls: Tls | None = None,
) -> messages.EngineMetadata | Failure | TryAgain:
    """Ask ``host:port`` once for the metadata of ``engine_id``, and judge the answer."""
    where, peer = host_port.join_address(host, port), (engine_id, host, port, tls)
    asked = messages.encode(me)
    found = await _ask(session, "POST", "/v1/handshake", *peer, data=asked, timeout=ATTEMPT)
    if not isinstance(found, tuple):
        return found
    status, body = found
    if status in {200, 409}:
        return judge(messages.decode_handshake_reply(body), me, engine_id, where)
    text = body[:200].decode("utf-8", "replace")
    if status in _REFUSED:
        reason, how = _REFUSED[status]
        return Failure(reason, f"{where} {how}: {text}")
    return TryAgain(f"{where} answered {status}: {text}")


def judge(
    reply: messages.EngineMetadata | messages.Refusal | messages.Malformed,
    me: messages.HandshakeRequest,
    engine_id: str,
    where: str,
) -> messages.EngineMetadata | Failure:
    """Return the metadata if it is of the engine that was asked, sound and compatible."""
    if isinstance(reply, messages.Malformed):
        message = f"{where} sent an answer that cannot be read: {reply.message}"
        return Failure(Reason.PROTOCOL_VERSION_MISMATCH, message)
    if isinstance(reply, messages.Refusal):
        return failure_of(reply)
    if reply.engine_id != engine_id:
        return restarted(engine_id, reply.engine_id, where)
    if not messages.PROTOCOL_OLDEST <= reply.protocol <= messages.PROTOCOL_NEWEST:
        message = f"{where} answered in protocol {reply.protocol}"
        return Failure(Reason.PROTOCOL_VERSION_MISMATCH, message)
    wrong = next(validation.contradictions(reply), None)
    refusal = refusal_of(check(reply.shape, me.shape) if wrong is None else (wrong,))
    return reply if refusal is None else failure_of(refusal)


async def ask_health(
    session: aiohttp.ClientSession,
    engine_id: str,
    host: str,
    port: int,
    seconds: float,
    tls: Tls | None = None,
) -> messages.HealthReply | Failure | TryAgain:
    """Ask ``/healthz`` of ``engine_id`` once, for at most ``seconds``."""
    peer, timeout = (engine_id, host, port, tls), aiohttp.ClientTimeout(total=seconds)
    limit = messages.MAX_HEALTH_BYTES
    found = await _ask(session, "GET", "/healthz", *peer, timeout=timeout, limit=limit)
    if not isinstance(found, tuple):
        return found
    status, reply = found[0], messages.decode_health(found[1])
    if status != 200 or isinstance(reply, messages.Malformed):
        why = f"answered {status}, which is not the answer of a side channel"
        return TryAgain(f"{host_port.join_address(host, port)} {why}")
    return reply


def _no_answer(where: str, error: Exception, tls: Tls | None) -> TryAgain:
    """Say what a broken connection may mean.

    A TLS 1.3 server judges a client's certificate when the client believes itself connected, and
    asyncio's servers close then without a word.
    """
    ended = isinstance(error, aiohttp.ServerDisconnectedError | ConnectionResetError)
    reset = isinstance(error, aiohttp.ClientOSError) and error.errno == errno.ECONNRESET
    if tls is not None and (ended or reset):
        return TryAgain(
            f"{where} ended the TLS connection. Does it trust the authority of this engine's "
            "certificate, and is the certificate still valid?",
            Reason.AUTHENTICATION_FAILED,
        )
    number = error.errno if isinstance(error, OSError) else None
    return TryAgain(
        f"{where}: {describe(error)}",
        refused=number == errno.ECONNREFUSED,
        silent=isinstance(error, TimeoutError) or number in _NO_WAY,
    )


def _not_trusted(where: str, engine_id: str, error: Exception) -> str:
    cause = error.__cause__ or error  # aiohttp's own error says less
    why = getattr(cause, "verify_message", "") or getattr(cause, "reason", "") or describe(cause)
    return (
        f"no TLS connection to {engine_id} at {where}: {why}. Both engines need certificates of "
        "the same authority that name them and are valid today"
    )


def unreachable(why: TryAgain) -> Failure:
    """Return the failure of a peer whose side channel does not answer."""
    if why.reason is not Reason.SIDE_CHANNEL_UNREACHABLE:
        return Failure(why.reason, f"the side channel at {why.message}")
    message = (
        f"the side channel at {why.message}. Check that the engine runs, and that network"
        " policies and firewalls allow the port of its side channel"
    )
    return Failure(Reason.SIDE_CHANNEL_UNREACHABLE, message, dead=why.refused)


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
