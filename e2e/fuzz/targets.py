"""Every parser of what others send, as a function of bytes that must not raise.

Where a target has several parsers, the first byte says which of them reads the rest.
"""

from __future__ import annotations

import json
import tempfile
from base64 import urlsafe_b64encode
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from launcher_answers import decode_engine, decode_links
from pdcluster_connector.certificate_files import Tls, TlsError, TlsFiles, tls_files
from pdcluster_connector.compat.check import check
from pdcluster_connector.compat.shape import EngineShape
from pdcluster_connector.launcher.inside_vllm import plain
from pdcluster_connector.plan import PlanError
from pdcluster_connector.plan.peer_plan import plan_peer
from pdcluster_connector.protocol import messages, ticket
from pdcluster_connector.protocol.engine_id import (
    engine_name,
    names_in,
    parse_engine_id,
    role_name,
    why_not_peer,
)
from pdcluster_connector.protocol.failure import refusal_of
from pdcluster_connector.protocol.launcher_documents import (
    decode_changes,
    decode_peers,
    decode_report,
)
from pdcluster_connector.protocol.messages import EngineMetadata, Malformed
from pdcluster_connector.protocol.ticket import BlockIds
from pdcluster_connector.protocol.validation import contradictions
from pdcluster_connector.sidechannel.ticket_key_file import parse_keys
from pdcluster_connector.testing.caches import LabelledCache
from pdcluster_connector.vllm.config import ConfigError, parse_options
from pdcluster_operator.api.spec.parse import parse_cluster
from ticket_key import KEYS

Target = Callable[[bytes], object]

_OURS = LabelledCache().shard
_MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None


def side_channel(raw: bytes) -> None:
    """What peers send to a side channel, and what it answers, but for the metadata."""
    _one_of(
        raw,
        (
            _handshake_request,
            messages.decode_lease_request,
            messages.decode_lease_reply,
            messages.decode_health,
        ),
    )


def _handshake_request(raw: bytes) -> None:
    asked = messages.decode_handshake_request(raw)
    if not isinstance(asked, Malformed):
        refusal_of(check(EngineShape(), asked.shape))


def metadata(raw: bytes) -> None:
    """The answer to a handshake: judged, and planned from."""
    _one_of(raw, (_metadata,))


def _metadata(raw: bytes) -> None:
    reply = messages.decode_handshake_reply(raw)
    if not isinstance(reply, EngineMetadata) or next(contradictions(reply), None):
        return
    try:
        plan_peer(_OURS, [shard.shard for shard in reply.shards])
    except PlanError:
        return


def a_ticket(raw: bytes) -> None:
    """Tickets: as a client sends them, with a true signature, and their block ids alone."""
    _one_of(raw, (_ticket_of_a_client, _signed_ticket, _block_ids, _request_parameters))


def _ticket_of_a_client(raw: bytes) -> None:
    ticket.decode(raw.decode("latin-1"), KEYS)
    ticket.decode(urlsafe_b64encode(raw).decode(), None)


def _signed_ticket(raw: bytes) -> None:
    envelope = msgspec.msgpack.encode((ticket.FORMAT, raw, KEYS.sign(raw)))
    read = ticket.decode(urlsafe_b64encode(envelope).decode(), KEYS)
    if isinstance(read, ticket.Ticket):
        assert ticket.decode(ticket.encode(read, KEYS), KEYS, read.audience) == read


def _block_ids(raw: bytes) -> None:
    try:
        BlockIds.unpacked(raw, 1000)
    except ValueError:
        return


def _request_parameters(raw: bytes) -> None:
    parameters = _json(raw)
    ticket.ticket_of(parameters, KEYS)
    ticket.passed_on(parameters)


def launcher(raw: bytes) -> None:
    """Documents that the launcher's API reads, and ids from a client's header."""
    _one_of(raw, (decode_peers, decode_report, plain, lambda rest: parse_engine_id(_text(rest))))


def extra_config(raw: bytes) -> None:
    """``kv_connector_extra_config``, as vLLM hands it over."""
    document = _json(raw)
    if not isinstance(document, dict):
        return
    try:
        parse_options(document, len(raw) % 4)
    except ConfigError:
        return


def key_file(raw: bytes) -> None:
    """The file of ticket keys."""
    try:
        keys = parse_keys(raw)
    except ValueError:
        return
    assert keys.verify(raw, keys.sign(raw))


def certificate_names(raw: bytes) -> None:
    """Names in a peer's certificate, a line each. The first line is who the peer claims to be."""
    claimed, *names = _text(raw).split("\n")
    held = names_in({"subjectAltName": tuple(("DNS", name) for name in names)})
    if why_not_peer("ns.c.prefill.r.0/1", held, claimed, "decode") is None:
        assert {engine_name(claimed), role_name(claimed)}.intersection(held)
        assert claimed.lower().partition("/")[0].split(".")[:3] == ["ns", "c", "decode"]


def tls_option(raw: bytes) -> None:
    """The option ``tls``."""
    try:
        files = tls_files(_json(raw))
    except ValueError:
        return
    assert all(str(path) for path in (files.ca, files.certificate, files.key))


def tls_file(raw: bytes) -> None:
    """A file that holds an authority, a certificate, a key, or something else."""
    with tempfile.NamedTemporaryFile(dir=_MEMORY) as file:
        file.write(raw)
        file.flush()
        path = Path(file.name)
        try:
            Tls(TlsFiles(path, path, path, named=len(raw) % 2 == 0), "ns.c.decode.r.0/1")
        except TlsError:
            return


def engine_status(raw: bytes) -> None:
    """What launchers answer to the operator."""
    _one_of(raw, (decode_engine, decode_links, decode_changes))


def manifest(raw: bytes) -> None:
    """A PDCluster, before any rule is applied."""
    parse_cluster(_json(raw))


TARGETS: dict[str, Target] = {
    "side_channel": side_channel,
    "metadata": metadata,
    "ticket": a_ticket,
    "launcher": launcher,
    "extra_config": extra_config,
    "key_file": key_file,
    "certificate_names": certificate_names,
    "tls_option": tls_option,
    "tls_file": tls_file,
    "engine_status": engine_status,
    "manifest": manifest,
}


def _one_of(raw: bytes, parsers: Sequence[Target]) -> None:
    if raw:
        parsers[raw[0] % len(parsers)](raw[1:])


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "replace")


def _json(raw: bytes) -> Any:
    """Return what JSON says; text that is no JSON is a string, as a value of the wrong type."""
    try:
        return json.loads(raw)
    except (ValueError, RecursionError):
        return _text(raw)
