"""How an answer to a handshake is judged, and in which words a failed one is told."""

from __future__ import annotations

import errno
import ssl
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, Self

import aiohttp
import pytest
from loopback_engines import PREFILL, SHAPE, shards_of
from msgspec.structs import replace

from pdcluster_connector.compat.reasons import Reason
from pdcluster_connector.protocol import messages as m
from pdcluster_connector.protocol.failure import Failure
from pdcluster_connector.sidechannel.handshake import (
    TryAgain,
    ask_health,
    describe,
    introduction,
    judge,
    read_bounded,
    restarted,
    shake_hands,
    unreachable,
)

WHERE = "10.0.0.1:5600"
ME = introduction("ns.c.decode.r.0/dd", SHAPE)
TOLD = m.EngineMetadata(3, PREFILL, SHAPE, shards_of(PREFILL))


def failed(
    reply: m.EngineMetadata | m.Refusal | m.Malformed, me: m.HandshakeRequest = ME
) -> Failure:
    found = judge(reply, me, PREFILL, WHERE)
    assert isinstance(found, Failure)
    return found


def test_an_engine_introduces_itself_with_its_rank_and_its_protocols() -> None:
    asked = m.decode_handshake_request(m.encode(ME))
    assert asked == m.HandshakeRequest((3, 3), "ns.c.decode.r.0/dd", SHAPE)


def test_metadata_of_the_engine_that_was_asked_is_taken() -> None:
    assert judge(TOLD, ME, PREFILL, WHERE) is TOLD


@pytest.mark.parametrize("protocol", [2, 4])
def test_metadata_of_another_protocol_is_not_read(protocol: int) -> None:
    assert failed(replace(TOLD, protocol=protocol)) == Failure(
        Reason.PROTOCOL_VERSION_MISMATCH, f"{WHERE} answered in protocol {protocol}"
    )


def test_an_answer_that_cannot_be_read_is_told_with_where_it_came_from() -> None:
    assert failed(m.Malformed("cut off")) == Failure(
        Reason.PROTOCOL_VERSION_MISMATCH, f"{WHERE} sent an answer that cannot be read: cut off"
    )


def test_another_engine_at_the_address_is_told_with_both_names() -> None:
    other = "ns.c.prefill.r.0/00000000000000bb"
    expected = Failure(Reason.PEER_RESTARTED, f"{PREFILL} is gone; {other} listens on {WHERE} now")
    assert failed(replace(TOLD, engine_id=other)) == expected == restarted(PREFILL, other, WHERE)


def test_the_peer_is_judged_as_prefill_and_this_engine_as_decode() -> None:
    """The rules name both, and whoever reads that changes one of them."""
    packed = replace(SHAPE, token_sliceable=False, packing="x")
    told = replace(TOLD, shape=replace(packed, kv_dtype="bfloat16"))
    failure = failed(told, introduction(ME.engine_id, packed))
    assert failure.reason is Reason.KV_DTYPE_MISMATCH
    assert "prefill bfloat16, decode float32" in failure.message


@pytest.mark.parametrize(
    ("why", "failure"),
    [
        (
            TryAgain("h:1: no answer in time"),
            Failure(
                Reason.SIDE_CHANNEL_UNREACHABLE,
                (
                    "the side channel at h:1: no answer in time. Check that the engine runs, and "
                    "that network policies and firewalls allow the port of its side channel"
                ),
            ),
        ),
        (
            TryAgain("h:1 ended the TLS connection.", Reason.AUTHENTICATION_FAILED),
            Failure(
                Reason.AUTHENTICATION_FAILED, "the side channel at h:1 ended the TLS connection."
            ),
        ),
    ],
    ids=["silent", "does not trust us"],
)
def test_only_a_silent_peer_is_looked_for_in_the_network(why: TryAgain, failure: Failure) -> None:
    assert unreachable(why) == failure


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (TimeoutError("x"), "no answer in time"),
        (aiohttp.ServerTimeoutError("x"), "no answer in time"),
        (ValueError("x" * 1000), "x" * 200),
        (ValueError(), "ValueError"),
        (
            aiohttp.ClientConnectorError(
                SimpleNamespace(host="h", port=1, ssl=True),  # type: ignore[arg-type]
                OSError(errno.ECONNREFUSED, "Connect call failed ('127.0.0.1', 1)"),
            ),
            "Connect call failed ('127.0.0.1', 1)",
        ),
    ],
    ids=["timeout", "aiohttp's timeout", "long", "without words", "refused"],
)
def test_a_network_error_is_told_in_few_words(error: Exception, said: str) -> None:
    assert describe(error) == said


class Response:
    """An answer of a peer, whose body comes in pieces."""

    def __init__(self, status: int, *chunks: bytes) -> None:
        self.status = status
        self.content = self
        self.read = 0
        self._chunks = chunks

    async def iter_any(self) -> AsyncIterator[bytes]:
        for chunk in self._chunks:
            self.read += len(chunk)
            yield chunk

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None: ...


@pytest.mark.parametrize(
    ("chunks", "body", "read"),
    [
        ((b"abcd",), b"abcd", 4),
        ((b"ab", b"cd"), b"abcd", 4),
        ((b"abcd", b"e", b"f"), b"abcde", 5),
        ((b"abcdefgh", b"i"), b"abcde", 8),
        ((), b"", 0),
    ],
    ids=str,
)
async def test_of_a_body_that_is_too_long_one_byte_more_is_returned_and_no_more_is_read(
    chunks: tuple[bytes, ...], body: bytes, read: int
) -> None:
    """That byte tells a parser that the limit was passed."""
    response = Response(200, *chunks)
    assert await read_bounded(response, 4) == body  # type: ignore[arg-type]
    assert response.read == read


class Session:
    """Answers, or raises, and keeps how it was asked."""

    def __init__(self, outcome: Response | Exception) -> None:
        self.outcome = outcome
        self.asked: list[tuple[str, dict[str, Any]]] = []

    def request(self, method: str, url: str, **arguments: Any) -> Response:
        assert method == ("GET" if url.endswith("/healthz") else "POST")
        self.asked.append((url, arguments))
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


async def shaken(outcome: Response | Exception) -> object:
    session: Any = Session(outcome)
    found = await shake_hands(session, ME, PREFILL, "10.0.0.1", 5600)
    [(url, arguments)] = session.asked
    assert url == "http://10.0.0.1:5600/v1/handshake"
    assert arguments["data"] == m.encode(ME)
    assert arguments["allow_redirects"] is False
    return found


@pytest.mark.parametrize(
    ("outcome", "expected"),
    [
        (
            Response(400, b"bad " * 100),
            Failure(
                Reason.PROTOCOL_VERSION_MISMATCH,
                f"{WHERE} could not read the handshake: {('bad ' * 50)}",
            ),
        ),
        (
            Response(403, b"you are no peer"),
            Failure(
                Reason.AUTHENTICATION_FAILED,
                f"{WHERE} does not trust this engine: you are no peer",
            ),
        ),
        (Response(503, b"not yet"), TryAgain(f"{WHERE} answered 503: not yet")),
        (Response(404, b"\xff?"), TryAgain(f"{WHERE} answered 404: \ufffd?")),
        (TimeoutError(), TryAgain(f"{WHERE}: no answer in time", silent=True)),
        (ConnectionResetError("reset"), TryAgain(f"{WHERE}: reset")),
        (
            ValueError("no host"),
            Failure(Reason.SIDE_CHANNEL_UNREACHABLE, f"{WHERE} is not an address: no host"),
        ),
    ],
    ids=["400", "403", "503", "404", "timeout", "reset", "no address"],
)
async def test_what_may_change_is_tried_again_and_what_may_not_is_a_failure(
    outcome: Response | Exception, expected: object
) -> None:
    assert await shaken(outcome) == expected


@pytest.mark.parametrize("status", [200, 409])
async def test_metadata_and_refusals_are_judged(status: int) -> None:
    assert await shaken(Response(status, m.encode(TOLD))) == TOLD
    found = await shaken(Response(status, m.encode(m.Refusal("ModelMismatch", "no"))))
    assert found == Failure(Reason.MODEL_MISMATCH, "no")


@pytest.mark.parametrize(
    ("outcome", "expected"),
    [
        (
            Response(200, m.encode_health(m.HealthReply(PREFILL, "prefill", 2))),
            m.HealthReply(PREFILL, "prefill", 2),
        ),
        (
            Response(503, m.encode_health(m.HealthReply(PREFILL, "prefill", 2))),
            TryAgain(f"{WHERE} answered 503, which is not the answer of a side channel"),
        ),
        (
            Response(200, b"hello"),
            TryAgain(f"{WHERE} answered 200, which is not the answer of a side channel"),
        ),
        (TimeoutError(), TryAgain(f"{WHERE}: no answer in time", silent=True)),
        (
            ValueError("no host"),
            Failure(Reason.SIDE_CHANNEL_UNREACHABLE, f"{WHERE} is not an address: no host"),
        ),
    ],
    ids=["lives", "another status", "another server", "timeout", "no address"],
)
async def test_the_health_of_a_peer_is_its_answer_or_may_be_asked_again(
    outcome: Response | Exception, expected: object
) -> None:
    session: Any = Session(outcome)
    assert await ask_health(session, PREFILL, "10.0.0.1", 5600, 1.5) == expected
    [(url, arguments)] = session.asked
    assert url == "http://10.0.0.1:5600/healthz"
    assert arguments["timeout"].total == 1.5
    assert arguments["allow_redirects"] is False


class Certified:
    """Stands for this engine's certificate, which no server looks at here."""

    def client(self) -> str:
        return "context"

    def server_name(self, engine_id: str) -> str:
        return f"name of {engine_id}"


def os_error(number: int) -> aiohttp.ClientOSError:
    return aiohttp.ClientOSError(number, "broke")


@pytest.mark.parametrize(
    ("error", "is_trust"),
    [
        (aiohttp.ServerDisconnectedError(), True),
        (ConnectionResetError("reset"), True),
        (os_error(errno.ECONNRESET), True),
        (os_error(errno.EHOSTUNREACH), False),
        (TimeoutError(), False),
    ],
    ids=repr,
)
async def test_a_server_that_ends_a_tls_connection_may_not_trust_this_engine(
    error: Exception, is_trust: bool
) -> None:
    """Without TLS, the same error is one of the network alone."""
    tls: Any = Certified()
    session: Any = Session(error)
    for found in (
        await shake_hands(session, ME, PREFILL, "10.0.0.1", 5600, tls),
        await ask_health(session, PREFILL, "10.0.0.1", 5600, 1.0, tls),
    ):
        assert isinstance(found, TryAgain)
        said = f"{WHERE} ended the TLS connection. Does it trust the authority of this engine's "
        assert found.message.startswith(said) is is_trust
        assert (found.reason is Reason.AUTHENTICATION_FAILED) is is_trust
    for url, arguments in session.asked:
        assert url.startswith("https://10.0.0.1:5600/")
        assert arguments["ssl"] == "context"
        assert arguments["server_hostname"] == f"name of {PREFILL}"
    plain = await shake_hands(session, ME, PREFILL, "10.0.0.1", 5600)
    assert isinstance(plain, TryAgain)
    assert plain.reason is Reason.SIDE_CHANNEL_UNREACHABLE


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (ssl.SSLCertVerificationError("certificate has expired"), "certificate has expired"),
        (ssl.SSLError(1, "[SSL: WRONG_VERSION] wrong version number"), "wrong version number"),
    ],
    ids=["certificate", "protocol"],
)
async def test_a_peer_that_this_engine_does_not_trust_is_not_asked_again(
    error: ssl.SSLError, why: str
) -> None:
    session: Any = Session(error)
    for found in (
        await shake_hands(session, ME, PREFILL, "10.0.0.1", 5600),
        await ask_health(session, PREFILL, "10.0.0.1", 5600, 1.0),
    ):
        assert isinstance(found, Failure)
        assert found.reason is Reason.AUTHENTICATION_FAILED
        assert found.message.startswith(f"no TLS connection to {PREFILL} at {WHERE}: ")
        assert why in found.message
