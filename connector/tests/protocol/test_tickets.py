"""Tickets: round trips, totality, signatures, and the prompt they are bound to."""

from __future__ import annotations

import hmac
import json
import random
import re
import tracemalloc
from base64 import b64decode, b64encode
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from pdcluster_connector.compat.reasons import Reason
from pdcluster_connector.protocol.failure import Failure
from pdcluster_connector.protocol.ticket import (
    FORMAT,
    MAX_BLOCKS,
    MAX_TICKET_BYTES,
    BlockIds,
    Ticket,
    decode,
    encode,
    kv_transfer_params,
    passed_on,
    ticket_of,
)
from pdcluster_connector.sidechannel.ticket_key_file import parse_keys

EXAMPLES = settings().max_examples  # `make soak` asks for ten times as many
KEYS = parse_keys(b"5a" * 32)
OTHERS = parse_keys(b"a5" * 32)

TICKET = Ticket(
    engine_id="ns.c.prefill.r.0/0123456789abcdef",
    host="127.0.0.2",
    port=5600,
    request_id="cmpl-1-0",
    token=2**64 - 1,
    blocks=((3, 4, -1, 9),),
    block_size=16,
    tokens=50,
    prompt_digest=bytes(range(16)),
    expires_at=1_800_000_000.5,
    tensor=2,
)
ids = st.text(st.characters(codec="utf-8"), min_size=1, max_size=60)
tickets = st.builds(
    Ticket,
    engine_id=ids,
    host=ids,
    port=st.integers(1, 65535),
    request_id=ids,
    token=st.integers(0, 2**64 - 1),
    blocks=st.lists(st.lists(st.integers(-1, 2**31 - 1), max_size=30).map(tuple), max_size=4).map(
        tuple
    ),
    block_size=st.integers(1, 4096),
    tokens=st.integers(0, 2**31 - 1),
    prompt_digest=st.binary(min_size=16, max_size=16),
    expires_at=st.floats(allow_nan=False, allow_infinity=False),
    tensor=st.integers(1, 4096),
    pipeline=st.integers(1, 4096),
    fence_slot=st.integers(-1, 2**31 - 1),
    lease_seconds=st.floats(1, 3600),
    audience=st.text(st.characters(codec="utf-8"), max_size=60),
)


def body_of(ticket: Ticket, **changes: object) -> bytes:
    """The body as it is sent, with any values in the place of some."""
    fields = {name: getattr(ticket, name) for name in Ticket.__struct_fields__}
    fields["blocks"] = [BlockIds(ids).packed() for ids in ticket.blocks]
    return msgspec.msgpack.encode(fields | changes)


def signed(body: bytes, number: int = FORMAT) -> str:
    """A ticket of any body, with a signature that is good."""
    envelope = msgspec.msgpack.encode([number, body, KEYS.sign(body)])
    return b64encode(envelope).decode()


def reason(found: object) -> Reason:
    assert isinstance(found, Failure), found
    assert found.message
    return found.reason


@settings(max_examples=2 * EXAMPLES)
@given(tickets)
def test_round_trip(ticket: Ticket) -> None:
    text = encode(ticket, KEYS)
    assert text.isascii()
    assert decode(text, KEYS, ticket.audience) == ticket
    params = json.loads(json.dumps(kv_transfer_params(ticket, KEYS)))
    assert ticket_of(params, KEYS, ticket.audience) == ticket
    assert decode(encode(ticket, None), None, ticket.audience) == ticket, "allow_insecure"


@settings(max_examples=3 * EXAMPLES)
@given(st.text(max_size=200) | st.binary(max_size=200).map(lambda b: b64encode(b).decode()))
def test_any_text_is_rejected(text: str) -> None:
    for keys in (KEYS, None):
        assert isinstance(decode(text, keys), Failure)


@settings(max_examples=2 * EXAMPLES)
@given(st.binary(max_size=200))
def test_any_body_that_is_signed_is_rejected(body: bytes) -> None:
    """What an engine with our key may send, by a fault of its own."""
    assert isinstance(decode(signed(body), KEYS), Failure)


@settings(max_examples=2 * EXAMPLES)
@given(
    st.sampled_from(Ticket.__struct_fields__),
    st.recursive(
        st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats()
        | st.text(max_size=20) | st.binary(max_size=20),
        lambda inner: st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=5), inner, max_size=4),
        max_leaves=10,
    ),
)  # fmt: skip
def test_any_value_of_any_field_is_read_or_rejected(name: str, value: object) -> None:
    assert isinstance(decode(signed(body_of(TICKET, **{name: value})), KEYS), Ticket | Failure)


@pytest.mark.parametrize("name", Ticket.__struct_fields__)
def test_each_field_is_signed(name: str) -> None:
    """One bit of one field, and the signature of the ticket as prefill made it."""
    value = getattr(TICKET, name)
    if name == "blocks":
        changed: object = ((value[0][0] ^ 1, *value[0][1:]),)
    elif isinstance(value, str):
        changed = (value[:-1] + chr(ord(value[-1]) ^ 1)) if value else "\1"
    elif isinstance(value, bytes):
        changed = value[:-1] + bytes([value[-1] ^ 1])
    elif isinstance(value, float):
        changed = float(int(value) ^ 4)
    else:
        changed = value ^ 4 if value >= 0 else 0
    body = body_of(msgspec.structs.replace(TICKET, **{name: changed}))
    raw = msgspec.msgpack.encode([FORMAT, body, KEYS.sign(body_of(TICKET))])
    text = b64encode(raw).decode()
    assert reason(decode(text, KEYS)) is Reason.FORGED
    assert isinstance(decode(signed(body), KEYS, changed if name == "audience" else ""), Ticket)


def test_each_bit_of_the_ticket_is_signed() -> None:
    """Nothing is read of a ticket of which one bit was changed anywhere."""
    raw = b64decode(encode(TICKET, KEYS))
    reasons = set()
    for at in range(8 * len(raw)):
        mutant = bytearray(raw)
        mutant[at // 8] ^= 1 << at % 8
        reasons.add(reason(decode(b64encode(mutant).decode(), KEYS)))
    assert reasons == {Reason.FORGED, Reason.TICKET_INVALID}


@pytest.mark.parametrize(
    ("made_with", "why", "remedy"),
    [
        (None, Reason.UNSIGNED, "not signed.*same ticket_key_file"),
        (OTHERS, Reason.FORGED, "was changed on its way, or.*another"),
    ],
)
def test_a_ticket_of_a_stranger_is_not_read(made_with: object, why: Reason, remedy: str) -> None:
    found = decode(encode(TICKET, made_with), KEYS)  # type: ignore[arg-type]
    assert reason(found) is why
    assert isinstance(found, Failure)
    assert re.search(remedy, found.message)


def test_a_forged_body_is_not_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdcluster_connector.protocol.ticket._body", None)
    assert reason(decode(encode(TICKET, OTHERS), KEYS)) is Reason.FORGED


def test_a_ticket_for_other_engines_is_refused() -> None:
    ticket = msgspec.structs.replace(TICKET, audience="ns/one/k1")
    assert decode(encode(ticket, KEYS), KEYS, "ns/one/k1") == ticket
    for audience in ("", "ns/two/k1", "ns/one/k2", "ns/one/k"):
        found = decode(encode(ticket, KEYS), KEYS, audience)
        assert reason(found) is Reason.AUDIENCE_MISMATCH
        assert isinstance(found, Failure)
        assert found.message == (
            "the ticket is meant for engines with ticket_audience 'ns/one/k1'; this one has "
            f"{audience!r}"
        )


def test_both_keys_are_accepted_while_one_replaces_the_other() -> None:
    old, new = b"0a" * 32, b"0b" * 32
    before, after = parse_keys(old), parse_keys(new)
    both, young = (parse_keys(new + b"\n" + old, age=seconds) for seconds in (180, 179))
    for made_with in (before, both, young):
        assert decode(encode(TICKET, made_with), both) == TICKET
    assert decode(encode(TICKET, young), before) == TICKET, "not every engine has the new key yet"
    assert decode(encode(TICKET, both), after) == TICKET, "the old key may go"
    assert reason(decode(encode(TICKET, both), before)) is Reason.FORGED


def test_mutations_never_raise() -> None:
    rng = random.Random(7)
    text = encode(TICKET, KEYS)
    raw = bytearray(text.encode())
    for keys in (KEYS, None):
        for _ in range(30 * EXAMPLES):
            mutant = bytearray(raw)
            for _ in range(rng.randint(1, 6)):
                mutant[rng.randrange(len(mutant))] = rng.randrange(128)
            found = decode(mutant.decode(), keys)
            assert isinstance(found, Failure) or keys is None or found == TICKET
        for length in range(len(text)):
            assert isinstance(decode(text[:length], keys), Failure)


@pytest.mark.parametrize(
    "change",
    [
        {"port": 0},
        {"port": 70000},
        {"engine_id": ""},
        {"engine_id": "x" * 513},
        {"prompt_digest": b"short"},
        {"block_size": 0},
        {"expires_at": float("nan")},
        {"expires_at": float("inf")},
        {"lease_seconds": 0.9},
        {"lease_seconds": float("nan")},
        {"lease_seconds": float("inf")},
        {"audience": "x" * 513},
    ],
    ids=str,
)
def test_values_out_of_bounds(change: dict[str, object]) -> None:
    ticket = msgspec.structs.replace(TICKET, **change)
    found = decode(encode(ticket, KEYS), KEYS, ticket.audience)
    assert reason(found) is Reason.TICKET_INVALID


@pytest.mark.parametrize(
    ("field", "good", "bad"),
    [
        ("host", ("h", "h" * 255), ("", "h" * 256)),
        ("port", (1, 65_535), (0, 65_536)),
        ("tokens", (0, 2**31 - 1), (-1, 2**31)),
        ("block_size", (1, 2**31 - 1), (0, 2**31)),
        ("prompt_digest", (b"x" * 16,), (b"x" * 15, b"x" * 17)),
        ("tensor", (1, 4096), (0, 4097)),
        ("pipeline", (1, 4096), (0, 4097)),
        ("fence_slot", (-1, 0, 2**31 - 1), (-2, 2**31)),
        ("lease_seconds", (1.0, 86_400.0), (0.999, 86_400.1)),
        ("token", (0, 2**64 - 1), (-1,)),
        ("engine_id", ("e", "e" * 512), ("", "e" * 513)),
        ("request_id", ("r", "r" * 512), ("", "r" * 513)),
    ],
)
def test_a_field_of_a_ticket_ends_at_its_bounds(field: str, good: Any, bad: Any) -> None:
    """Another version of the connector keeps to the same bounds."""
    for value in good:
        found = decode(signed(body_of(TICKET, **{field: value})), KEYS)
        assert isinstance(found, Ticket), value
        assert getattr(found, field) == value
    for value in bad:
        assert isinstance(decode(signed(body_of(TICKET, **{field: value})), KEYS), Failure), value


def test_an_audience_has_512_characters_at_most() -> None:
    most, more = "a" * 512, "a" * 513
    assert isinstance(decode(signed(body_of(TICKET, audience=most)), KEYS, most), Ticket)
    assert isinstance(decode(signed(body_of(TICKET, audience=more)), KEYS, more), Failure)


def test_what_an_older_prefill_engine_leaves_out_of_a_ticket() -> None:
    """Such a ticket has one rank, no fence, a lease of a minute, and is for anybody's engines."""
    fields = msgspec.msgpack.decode(body_of(TICKET))
    for name in ("tensor", "pipeline", "fence_slot", "lease_seconds", "audience"):
        del fields[name]
    found = decode(signed(msgspec.msgpack.encode(fields)), KEYS)
    assert isinstance(found, Ticket)
    assert (found.tensor, found.pipeline, found.fence_slot) == (1, 1, -1)
    assert (found.lease_seconds, found.audience) == (60.0, "")


@pytest.mark.parametrize("number", [0, 1, 2, 4])
def test_a_ticket_of_another_format_says_so(number: int) -> None:
    found = decode(signed(body_of(TICKET), number), KEYS)
    assert reason(found) is Reason.TICKET_INVALID
    assert isinstance(found, Failure)
    assert f"format {number}; this version reads 3: give" in found.message


@pytest.mark.parametrize("ids", [[1], [True], [], "1", 1, None, {}, b"", b"\1", b"\3\0", b"\1\1\1"])
def test_what_lists_no_block_ids_is_rejected(ids: object) -> None:
    assert reason(decode(signed(body_of(TICKET, blocks=[ids])), KEYS)) is Reason.TICKET_INVALID


@pytest.mark.parametrize("scattered", [False, True])
def test_a_million_tokens_in_four_groups(scattered: bool) -> None:
    """62,500 blocks of 16 tokens a group. The old form, of 1.5 MB, was refused by decode."""
    dice = random.Random(3)
    groups = []
    for group in range(4):
        ids = list(range(group * 70_000 + 1, group * 70_000 + 62_501))
        if scattered:
            dice.shuffle(ids)
        groups.append(ids)
    ticket = msgspec.structs.replace(
        TICKET, blocks=tuple(map(BlockIds, groups)), tokens=1_000_000, block_size=16
    )
    body = json.dumps(kv_transfer_params(ticket, KEYS))
    assert len(body) < (1_400_000 if scattered else 2_000)
    found = ticket_of(json.loads(body), KEYS)
    assert isinstance(found, Ticket)
    assert [list(ids) for ids in found.blocks] == groups


def test_a_ticket_that_nobody_would_read_is_not_written() -> None:
    dice = np.random.default_rng(5)
    ids = BlockIds(dice.integers(1, 2**31 - 1, MAX_BLOCKS).astype(np.int32))
    ticket = msgspec.structs.replace(TICKET, blocks=(ids,))
    with pytest.raises(ValueError, match=rf"more than {MAX_TICKET_BYTES}"):
        encode(ticket, KEYS)
    ticket = msgspec.structs.replace(TICKET, blocks=(BlockIds(range(MAX_BLOCKS)), (7,)))
    with pytest.raises(ValueError, match=rf"{MAX_BLOCKS + 1} block ids in one ticket"):
        encode(ticket, KEYS)


def test_a_ticket_has_256_groups_at_most_and_no_more_are_built() -> None:
    """A ticket of 4 MB can list a million empty groups, which would take five times as much."""
    one = BlockIds((1,)).packed()
    assert isinstance(decode(signed(body_of(TICKET, blocks=[one] * 256)), KEYS), Ticket)
    assert isinstance(decode(signed(body_of(TICKET, blocks=[one] * 257)), KEYS), Failure)
    text = signed(body_of(TICKET, blocks=[b""] * 1_400_000))
    assert len(text) < MAX_TICKET_BYTES
    tracemalloc.start()
    found = decode(text, KEYS)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert reason(found) is Reason.TICKET_INVALID
    assert peak < 2.5 * len(text)


def test_groups_of_a_ticket_share_one_bound() -> None:
    """5 KB of runs would otherwise stand for 256 groups of a million ids each, which is 1 GiB."""
    run = BlockIds(range(MAX_BLOCKS)).packed()
    whole = decode(signed(body_of(TICKET, blocks=[run])), KEYS)
    assert isinstance(whole, Ticket)
    assert len(whole.blocks[0]) == MAX_BLOCKS
    text = signed(body_of(TICKET, blocks=[run] * 256))
    tracemalloc.start()
    found = decode(text, KEYS)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert reason(found) is Reason.TICKET_INVALID
    assert isinstance(found, Failure)
    assert "more than" in found.message
    assert peak < 64 * MAX_BLOCKS


@pytest.mark.parametrize("piece", [b"\x90", b"\x81\x00\x90"], ids=["arrays", "maps"])
@pytest.mark.parametrize("count", [2**20, 3 * 2**20])
def test_what_stands_instead_of_block_ids_is_not_built(piece: bytes, count: int) -> None:
    """Some MB of text would otherwise become millions of objects in the engine's step."""
    body = body_of(TICKET, blocks=[[]])
    count = min(count, 3_000_000 // len(piece))
    many = b"\xdd" + count.to_bytes(4, "big") + piece * count
    text = signed(body.replace(b"\xa6blocks\x91\x90", b"\xa6blocks\x91" + many))
    tracemalloc.start()
    found = decode(text, KEYS)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert reason(found) is Reason.TICKET_INVALID
    assert isinstance(found, Failure)
    assert "$.blocks[0]" in found.message
    assert peak < 4 * len(text)


@pytest.mark.parametrize("spoil", ["{}=", "{}\n", " {}", "{}{}", "-{}", "\xe9{}"])
def test_only_base64_in_its_one_form_is_read(spoil: str) -> None:
    found = decode(spoil.replace("{}", encode(TICKET, KEYS)), KEYS)
    assert reason(found) is Reason.TICKET_INVALID
    assert isinstance(found, Failure)
    assert "not base64" in found.message


def test_too_long_is_refused_before_decoding() -> None:
    found = decode("A" * (MAX_TICKET_BYTES + 4), KEYS)
    assert isinstance(found, Failure)
    assert f"more than {4 * 1024 * 1024}" in found.message
    most = decode("A" * 4 * 1024 * 1024, KEYS)
    assert isinstance(most, Failure)
    assert "more than" not in most.message, "it is read, and is no ticket"


@pytest.mark.parametrize("ids", [(-2,), (2**31,), ("x",)], ids=str)
def test_no_ticket_is_made_of_wrong_block_ids(ids: tuple[object, ...]) -> None:
    with pytest.raises(ValueError, match="block ids"):
        encode(msgspec.structs.replace(TICKET, blocks=(ids,)), KEYS)


def test_router_keys() -> None:
    params = kv_transfer_params(TICKET, KEYS)
    assert params["do_remote_prefill"] is True
    assert params["do_remote_decode"] is False
    assert params["remote_engine_id"] == TICKET.engine_id
    assert (params["remote_host"], params["remote_port"]) == (TICKET.host, TICKET.port)
    assert params["remote_request_id"] == TICKET.request_id
    assert params["remote_block_ids"] == [[3, 4, -1, 9]]
    assert params["tp_size"] == 2
    many = msgspec.structs.replace(TICKET, blocks=((1,) * 4000, (2,) * 97))
    assert kv_transfer_params(many, KEYS)["remote_block_ids"] == [[], []], "decode reads the ticket"


@pytest.mark.parametrize(
    ("params", "kind"),
    [
        (None, type(None)),
        ({}, type(None)),
        ({"do_remote_decode": True}, type(None)),
        ({"do_remote_prefill": False, "ticket": encode(TICKET, KEYS)}, type(None)),
        ([1, 2], type(None)),
        ("text", type(None)),
        ({"do_remote_prefill": True}, Failure),
        ({"do_remote_prefill": True, "ticket": 7}, Failure),
        ({"do_remote_prefill": True, "ticket": ["x"]}, Failure),
        ({"do_remote_prefill": True, "ticket": ""}, Failure),
        ({"do_remote_prefill": True, "ticket": encode(TICKET, KEYS)}, Ticket),
        # JSON has a word for true, and only that one means that KV waits elsewhere.
        *(
            ({"do_remote_prefill": value, "ticket": encode(TICKET, KEYS)}, type(None))
            for value in ("false", "true", "", 1, 0, 1.0, None, [True], {"a": 1})
        ),
    ],
    ids=str,
)
def test_ticket_of_takes_any_params(params: object, kind: type) -> None:
    assert isinstance(ticket_of(params, KEYS), kind)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"ticket": 7}, "a ticket of type int, not a string"),
        ({"ticket": ["x"]}, "a ticket of type list, not a string"),
        ({}, "do_remote_prefill without a ticket"),
    ],
)
def test_a_client_is_told_what_is_no_ticket(params: dict[str, object], message: str) -> None:
    found = ticket_of({"do_remote_prefill": True, **params}, KEYS)
    assert found == Failure(Reason.TICKET_INVALID, message)


@pytest.mark.parametrize(
    ("params", "repeated"),
    [
        (None, {}),
        ({}, {}),
        ({"transfer_id": "t", "other": 1}, {"transfer_id": "t"}),
        ({"transfer_id": "x" * 512}, {"transfer_id": "x" * 512}),
        ({"transfer_id": "x" * 513}, {}),
        *(({"transfer_id": value}, {}) for value in ("", 7, None, ["t"], {"t": 1})),
    ],
    ids=lambda value: str(value)[:30],
)
def test_only_a_transfer_id_is_repeated(params: object, repeated: dict[str, str]) -> None:
    assert passed_on(params) == repeated  # type: ignore[arg-type]


@pytest.mark.parametrize(("count", "listed"), [(4096, True), (4097, False)])
def test_a_router_is_told_of_so_many_blocks_and_no_more(count: int, listed: bool) -> None:
    ticket = msgspec.structs.replace(TICKET, blocks=((1,), tuple(range(1, count))))
    told = kv_transfer_params(ticket, KEYS)["remote_block_ids"]
    assert told == ([[1], list(range(1, count))] if listed else [[], []])


def test_a_ticket_of_wrong_types_is_not_made() -> None:
    with pytest.raises(TypeError):
        encode(msgspec.structs.replace(TICKET, blocks=(object(),)), KEYS)


def test_a_signature_serves_tickets_alone() -> None:
    """Whoever has the key for another purpose, and signs with it, has signed no ticket."""
    assert not KEYS.verify(b"body", hmac.digest(bytes.fromhex("5a" * 32), b"body", "sha256"))


def test_a_ticket_without_a_signature_is_not_signed_and_one_that_is_too_long_is_not_read() -> None:
    body = body_of(TICKET)

    def sent(*envelope: object) -> object:
        return decode(b64encode(msgspec.msgpack.encode(envelope)).decode(), KEYS)

    assert reason(sent(FORMAT, body)) is Reason.UNSIGNED
    assert reason(sent(FORMAT, body, b"x" * 64)) is Reason.FORGED
    assert reason(sent(FORMAT, body, b"x" * 65)) is Reason.TICKET_INVALID


def test_the_signature_of_a_ticket_stays_the_same() -> None:
    """Prefill and decode may run two releases of the connector."""
    key = hmac.digest(bytes.fromhex("5a" * 32), b"pdcluster ticket, format 3", "sha256")
    assert KEYS.sign(b"body") == hmac.digest(key, b"body", "sha256")
    assert KEYS.verify(b"body", hmac.digest(key, b"body", "sha256"))


def test_of_two_keys_whose_age_is_not_known_the_first_one_signs() -> None:
    old, new = b"0a" * 32, b"0b" * 32
    keys = parse_keys(new + b"\n" + old)
    assert keys.sign(b"body") == parse_keys(new).sign(b"body")


@pytest.mark.parametrize(
    ("raw", "is_read"),
    [
        (b"5a" * 32, True),
        (b"5a" * 31 + b"5", False),
        (b"5a" * 128, True),
        (b"5a" * 129, False),
        ((b"5a" * 32).ljust(1024), True),
        ((b"5a" * 32).ljust(1025), False),
    ],
    ids=["32 bytes", "31.5 bytes", "128 bytes", "129 bytes", "1 KiB", "more than 1 KiB"],
)
def test_a_key_has_32_to_128_bytes_in_a_file_of_1_kib(raw: bytes, is_read: bool) -> None:
    try:
        keys = parse_keys(raw)
    except ValueError:
        assert not is_read
    else:
        assert is_read
        assert len(keys.accepted) == 1
