"""The corpus: for each target one text file with one input a line, in base64.

``seeds`` are valid messages, from which a fuzzer learns what a message looks like.
"""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from datetime import UTC, datetime
from pathlib import Path

import msgspec
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from fuzz.targets import TARGETS
from pdcluster_connector.plan.geometry import MemoryRange
from pdcluster_connector.protocol import messages as m, ticket
from pdcluster_connector.protocol.engine_id import engine_name
from pdcluster_connector.testing.engines import Size
from ticket_key import KEYS

FOLDER = Path(__file__).with_name("corpus")
MOST_BYTES, MOST_INPUTS = 2048, 40


def read(target: str) -> list[bytes]:
    """Return the inputs of a target."""
    return [b64decode(line) for line in (FOLDER / f"{target}.txt").read_text().split()]


def write(target: str, inputs: list[bytes]) -> None:
    """Store the seeds, and the shortest of the other inputs."""
    short = sorted(
        {raw for raw in inputs if len(raw) <= MOST_BYTES}, key=lambda raw: (len(raw), raw)
    )
    kept = dict.fromkeys([*seeds(target), *short[:MOST_INPUTS]])
    FOLDER.mkdir(exist_ok=True)
    text = "".join(b64encode(raw).decode() + "\n" for raw in kept if raw)
    (FOLDER / f"{target}.txt").write_text(text)


def seeds(target: str) -> list[bytes]:
    """Return valid messages of a target, with the byte that selects the parser."""
    size = Size(num_blocks=4)
    shape = size.shape()
    regions = tuple(
        msgspec.structs.replace(region, base=1 << 20) for region in size.caches()[0].shard.regions
    )
    shard = m.ShardMetadata("p/1", (0, 0), "a", b"m", regions, MemoryRange(4096, 4096))
    parameters = {"do_remote_prefill": True, "ticket": ticket.encode(_ticket(), KEYS)}
    documents = {
        "side_channel": [
            m.encode(m.HandshakeRequest((1, 2), "d/1", shape)),
            m.encode(m.LeaseRequest("p/1", "d/1", (("r", 1),), (("s", 2),))),
            m.encode(m.LeaseReply(60.0, (("r", 1),), ())),
            m.encode_health(m.HealthReply("p/1", "prefill", 1)),
        ],
        "metadata": [
            m.encode(m.EngineMetadata(1, "p/1", shape, (shard,))),
            m.encode(shard),
        ],
        "ticket": [
            parameters["ticket"].encode(),
            ticket._BODY.encode(_ticket()),
            b"",
            json.dumps(parameters).encode(),
        ],
    }
    if target in documents:
        return [bytes([number]) + raw for number, raw in enumerate(documents[target]) if raw]
    plain = {
        "launcher": [b'\x00{"generation":1,"peers":[]}', b'\x01{"rank":[0,0],"links":[]}'],
        "extra_config": [
            (
                b'{"side_channel_port":5600,"lease_seconds":60,"backends":["UCX"],'
                b'"ticket_key_file":"/k","backend_options":{"UCX":{"a":"b"}},"num_threads":2}'
            )
        ],
        "key_file": [b"00" * 32 + b"\n" + b"ab" * 40],
        "certificate_names": [
            b"ns.c.decode.r.0/1\nlocalhost\nns.c.decode.r.0.engine.pdcluster.dev",
            b"ns.c.prefill.r.0/1\nns.c.prefill.r.0.engine.pdcluster.dev",
            b"ns.c.decode.r.0/1\nns.c.decode.role.pdcluster.dev",
        ],
        "tls_option": [b'{"ca":"/a","certificate":"/c","key":"/k","names":"hosts"}'],
        "tls_file": [_certificate(), _certificate(with_key=True)],
        "engine_status": [
            b'{"engine":"e","ready":true,"state":"Ready","versions":{"vllm":"0.32"}}',
            b'{"engine":"e","links":[{"prefill":"p","state":"Up","bytes_per_second":1}]}',
        ],
        "manifest": [
            (
                b'{"apiVersion":"pdcluster.io/v1alpha1","kind":"PDCluster","metadata":{"name":"a"},'
                b'"spec":{"model":{"name":"m"},"prefill":{"replicas":1},"decode":{"replicas":1}}}'
            )
        ],
    }
    return plain[target]


def _certificate(*, with_key: bool = False) -> bytes:
    """The same certificate each time; with its key, a file that every option accepts."""
    key = Ed25519PrivateKey.from_private_bytes(bytes(32))
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "CA")])
    names = [x509.DNSName(engine_name("ns.c.decode.r.0/1"))]
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(datetime(2026, 1, 1, tzinfo=UTC))
        .not_valid_after(datetime(2099, 1, 1, tzinfo=UTC))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .sign(key, None)
    )
    pem = certificate.public_bytes(Encoding.PEM)
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return pem + private if with_key else pem


def _ticket() -> ticket.Ticket:
    return ticket.Ticket(
        engine_id="p/1",
        host="127.0.0.1",
        port=5600,
        request_id="r",
        token=7,
        blocks=((1, 2, 3, 9),),
        block_size=16,
        tokens=60,
        prompt_digest=bytes(16),
        expires_at=1.0,
        fence_slot=3,
    )


__all__ = ["FOLDER", "TARGETS", "read", "seeds", "write"]
