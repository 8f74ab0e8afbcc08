"""Engine ids, and the names in the certificates of engines.

An engine id is ``logical/incarnation``, with ``_dpN`` for a data-parallel rank. vLLM appends
``_dpN`` in each engine core of a data-parallel engine. For peers, such a rank is an engine of its
own, with its own side channel, leases and memory.

A certificate names one engine in its subjectAltName: ``LOGICAL-ID.engine.pdcluster.dev`` (DNS),
where LOGICAL-ID is ``namespace.cluster.role.revision.index``. A certificate that all engines of a
role share names the role: ``namespace.cluster.ROLE.role.pdcluster.dev``. The operator's own
certificate has the name ``operator.pdcluster.dev``. Nothing has to resolve these names. A client
compares the name that it expects before it sends a byte (RFC 9525). A server compares after the
handshake.
"""

import re
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Self

# No leading zeros: one rank has one name.
_DATA_RANK: Final = re.compile(r"(?P<rest>.*)_dp(?P<rank>0|[1-9][0-9]{0,3})", re.DOTALL)


@dataclass(frozen=True, slots=True)
class EngineId:
    """An engine id's parts.

    Attributes:
        logical: which engine, also after a restart.
        incarnation: which start of it; empty where the id has no slash.
        data_rank: which data-parallel rank; None in an engine without data parallelism.
    """

    logical: str
    incarnation: str
    data_rank: int | None = None

    @property
    def engine(self) -> str:
        """The id that all data-parallel ranks of this incarnation share."""
        return f"{self.logical}/{self.incarnation}" if self.incarnation else self.logical

    def succeeds(self, other: Self) -> bool:
        """Whether this is another incarnation of the same engine, whichever rank of it."""
        return (
            bool(self.incarnation and other.incarnation)
            and self.logical == other.logical
            and self.incarnation != other.incarnation
        )


MAX_LOGICAL_ID: Final = 200
_LOGICAL_ID: Final = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?")


def new_engine_id(logical: str) -> EngineId:
    """Return the id of a new start of an engine: peers see every restart by it.

    Raises:
        ValueError: the logical id could not stand in an address, a label or a log.
    """
    if len(logical) > MAX_LOGICAL_ID or not _LOGICAL_ID.fullmatch(logical):
        raise ValueError(
            f"{logical[:MAX_LOGICAL_ID]!r} is not a valid engine id: use letters, "
            f"digits, '.', '-' and '_' ({MAX_LOGICAL_ID} at most), such as "
            "default.llama.prefill.7f9c4.0"
        )
    return EngineId(logical, secrets.token_hex(8))


def parse_engine_id(text: str) -> EngineId:
    """Return the parts of any text. Without ``_dpN`` there is no data-parallel rank."""
    logical, slash, incarnation = text.rpartition("/")
    match = _DATA_RANK.fullmatch(incarnation)
    if match is None:
        return EngineId(logical, incarnation) if slash else EngineId(text, "")
    rest, rank = match["rest"], int(match["rank"])
    return EngineId(logical, rest, rank) if slash else EngineId(rest, "", rank)


def short_name(engine_id: str) -> str:
    """Return role and index, such as ``prefill/0``: the same after a restart and a rollout.

    It is the logical id where that has other parts, in engines that the operator did not make.
    """
    parts = _parts(engine_id)
    return f"{parts[2]}/{parts[4]}" if len(parts) == 5 else parse_engine_id(engine_id).logical


def id_of_rank(engine_id: str, data_rank: int, size: int) -> str:
    """Return what vLLM calls one data-parallel rank of an engine of ``size`` such ranks."""
    return engine_id if size == 1 else f"{engine_id}_dp{data_rank}"


ENGINE_SUFFIX: Final = ".engine.pdcluster.dev"
ROLE_SUFFIX: Final = ".role.pdcluster.dev"
OPERATOR_NAME: Final = "operator.pdcluster.dev"
_MAX_NAME: Final = 253  # RFC 1035
_MAX_LABEL: Final = 63


def engine_name(engine_id: str) -> str:
    """Return the name that the certificate of ``engine_id`` carries, whatever its incarnation.

    Raises:
        ValueError: the id's logical part cannot stand in a DNS name.
    """
    logical = parse_engine_id(engine_id).logical
    return _dns_name(logical, logical, ENGINE_SUFFIX)


def role_name(engine_id: str) -> str:
    """Return the name in the certificate that all engines of the role of ``engine_id`` share.

    Raises:
        ValueError: the id's logical part cannot stand in a DNS name.
    """
    logical = parse_engine_id(engine_id).logical
    return _dns_name(logical, ".".join(logical.split(".")[:3]), ROLE_SUFFIX)


def _dns_name(logical: str, part: str, suffix: str) -> str:
    name = f"{part}{suffix}".lower()
    labels = name.split(".")
    if len(name) > _MAX_NAME or not all(0 < len(label) <= _MAX_LABEL for label in labels):
        raise ValueError(
            f"{logical[:200]!r} cannot stand in a certificate: use labels of 1 to {_MAX_LABEL} "
            "characters with dots between them, such as default.llama.prefill.7f9c4.0"
        )
    return name


def names_in(certificate: Mapping[str, Any] | None) -> tuple[str, ...]:
    """Return the DNS names of a peer's certificate, as ``ssl.SSLSocket.getpeercert`` gives it."""
    names = (certificate or {}).get("subjectAltName", ())
    return tuple(value.lower() for kind, value in names if kind == "DNS")


def why_not_peer(mine: str, names: Iterable[str], claimed: str, role: str) -> str | None:
    """Return why a peer with these names may not speak as engine ``claimed``; None if it may.

    Args:
        mine: this engine's id.
        names: of the peer's certificate.
        claimed: the engine id that the peer gives itself.
        role: the role that the peer must have: ``prefill`` or ``decode``.
    """
    try:
        expected = {engine_name(claimed), role_name(claimed)}
    except ValueError as error:
        return str(error)
    held = tuple(names)
    if not expected.intersection(held):
        shown = ", ".join(held)[:300] or "no engine"
        return f"its certificate names {shown}, but it says that it is {claimed[:200]}"
    ours, theirs = _parts(mine), _parts(claimed)
    if ours[:2] != theirs[:2]:
        cluster = "/".join(theirs[:2])
        return f"{claimed[:200]} belongs to the PDCluster {cluster}, this engine to another one"
    if theirs[2:3] != [role]:
        return f"{claimed[:200]} is no {role} engine"
    return None


def _parts(engine_id: str) -> list[str]:
    """Split a logical id: namespace, cluster, role, revision, index."""
    return parse_engine_id(engine_id).logical.lower().split(".")
