"""Tickets: round trips, totality, and the prompt they are bound to."""

from __future__ import annotations

import json
import random
import tracemalloc
from base64 import urlsafe_b64encode

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdcluster_connector.protocol.block_ids import MAX_BLOCKS, BlockIds
from pdcluster_connector.protocol.messages import Malformed
from pdcluster_connector.protocol.prompt_digest import DIGEST_BYTES, prompt_digest
from pdcluster_connector.protocol.ticket import (
    MAX_TICKET_BYTES,
    Ticket,
    decode,
    encode,
    kv_transfer_params,
    signed_bytes,
    ticket_of,
)

TICKET = Ticket(
    engine_id="ns.c.prefill.r.0/0123456789abcdef",
    host="127.0.0.2",
    port=5600,
    request_id="cmpl-1-0",
    token=2**64 - 1,
    blocks=((3, 4, -1, 9),),
    block_size=16,
    tokens=50,
    prompt_digest=prompt_digest([1, 2, 3]),
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
    signature=st.binary(max_size=64),
)


@settings(max_examples=500, deadline=None)
@given(tickets)
def test_round_trip(ticket: Ticket) -> None:
    text = encode(ticket)
    assert text.isascii()
    assert decode(text) == ticket
    assert ticket_of(json.loads(json.dumps(kv_transfer_params(ticket)))) == ticket


@settings(max_examples=1000, deadline=None)
@given(st.text(max_size=200) | st.binary(max_size=200).map(lambda b: urlsafe_b64encode(b).decode()))
def test_any_text_is_malformed_or_a_ticket(text: str) -> None:
    assert isinstance(decode(text), Malformed)


def test_mutations_never_raise() -> None:
    rng = random.Random(7)
    text = encode(TICKET)
    raw = bytearray(text.encode())
    for _ in range(5000):
        mutant = bytearray(raw)
        for _ in range(rng.randint(1, 6)):
            mutant[rng.randrange(len(mutant))] = rng.randrange(128)
        assert isinstance(decode(mutant.decode()), Ticket | Malformed)
    for length in range(len(text)):
        assert isinstance(decode(text[:length]), Malformed)


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
    ],
    ids=str,
)
def test_values_out_of_bounds(change: dict[str, object]) -> None:
    ticket = msgspec.structs.replace(TICKET, **change)
    assert isinstance(decode(encode(ticket)), Malformed)


@pytest.mark.parametrize("number", [0, 3])
def test_a_ticket_of_another_format_says_so(number: int) -> None:
    envelope = msgspec.msgpack.encode([number, signed_bytes(TICKET), b""])
    outcome = decode(urlsafe_b64encode(envelope).decode())
    assert isinstance(outcome, Malformed)
    assert f"format {number}; this version reads 1 to 2" in outcome.message


@settings(max_examples=100, deadline=None)
@given(tickets)
def test_the_first_format_is_still_read(ticket: Ticket) -> None:
    """As an engine with an older connector writes it: every block id by itself."""
    fields = {name: getattr(ticket, name) for name in Ticket.__struct_fields__}
    body = msgspec.msgpack.encode(fields | {"signature": b""})
    envelope = msgspec.msgpack.encode([1, body, ticket.signature])
    assert decode(urlsafe_b64encode(envelope).decode()) == ticket


@pytest.mark.parametrize("ids", [[True], [1.0], ["1"], [None], [[1]], "1", 1, {}, [2**31], [-2]])
def test_what_lists_no_block_ids_is_malformed(ids: object) -> None:
    fields = {name: getattr(TICKET, name) for name in Ticket.__struct_fields__}
    body = msgspec.msgpack.encode(fields | {"blocks": [ids]})
    envelope = msgspec.msgpack.encode([1, body, b""])
    assert isinstance(decode(urlsafe_b64encode(envelope).decode()), Malformed)


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
    body = json.dumps(kv_transfer_params(ticket))
    assert len(body) < (1_400_000 if scattered else 2_000)
    found = ticket_of(json.loads(body))
    assert isinstance(found, Ticket)
    assert [list(ids) for ids in found.blocks] == groups


def test_a_ticket_that_nobody_would_read_is_not_written() -> None:
    dice = np.random.default_rng(5)
    ids = BlockIds(dice.integers(1, 2**31 - 1, MAX_BLOCKS).astype(np.int32))
    ticket = msgspec.structs.replace(TICKET, blocks=(ids,))
    with pytest.raises(ValueError, match=rf"more than {MAX_TICKET_BYTES}"):
        encode(ticket)
    ticket = msgspec.structs.replace(TICKET, blocks=(BlockIds(range(MAX_BLOCKS)), (7,)))
    with pytest.raises(ValueError, match=rf"{MAX_BLOCKS + 1} block ids in one ticket"):
        encode(ticket)


@pytest.mark.parametrize("in_format_1", [False, True])
def test_groups_of_a_ticket_share_one_bound(in_format_1: bool) -> None:
    """5 KB of runs would otherwise stand for 256 groups of a million ids each, which is 1 GiB."""
    run = BlockIds(range(MAX_BLOCKS)).packed()
    more: list[object] = [[1]] if in_format_1 else [run] * 255
    fields = {name: getattr(TICKET, name) for name in Ticket.__struct_fields__}

    def told(blocks: list[object]) -> Ticket | Malformed:
        body = msgspec.msgpack.encode(fields | {"blocks": blocks})
        return decode(urlsafe_b64encode(msgspec.msgpack.encode([2, body, b""])).decode())

    whole = told([run])
    assert isinstance(whole, Ticket)
    assert len(whole.blocks[0]) == MAX_BLOCKS
    tracemalloc.start()
    outcome = told([run, *more])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert isinstance(outcome, Malformed)
    assert "more than" in outcome.message
    assert peak < 64 * MAX_BLOCKS


@pytest.mark.parametrize("piece", [b"\x90", b"\x81\x00\x90"], ids=["arrays", "maps"])
@pytest.mark.parametrize("count", [2**20, 3 * 2**20])
def test_what_stands_instead_of_block_ids_is_not_built(piece: bytes, count: int) -> None:
    """Some MB of text would otherwise become millions of objects in the engine's step."""
    fields = {name: getattr(TICKET, name) for name in Ticket.__struct_fields__}
    body = msgspec.msgpack.encode(fields | {"blocks": [[]]})
    count = min(count, 3_000_000 // len(piece))
    many = b"\xdd" + count.to_bytes(4, "big") + piece * count
    body = body.replace(b"\xa6blocks\x91\x90", b"\xa6blocks\x91" + many)
    text = urlsafe_b64encode(msgspec.msgpack.encode([2, body, b""])).decode()
    tracemalloc.start()
    outcome = decode(text)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert isinstance(outcome, Malformed)
    assert "$.blocks[0]" in outcome.message
    assert peak < 4 * len(text)


def test_too_long_is_refused_before_decoding() -> None:
    outcome = decode("A" * (MAX_TICKET_BYTES + 4))
    assert isinstance(outcome, Malformed)
    assert str(MAX_TICKET_BYTES) in outcome.message


def test_the_signature_covers_everything_but_itself() -> None:
    signed = msgspec.structs.replace(TICKET, signature=b"s" * 32)
    assert signed_bytes(signed) == signed_bytes(TICKET)
    for name in Ticket.__struct_fields__:
        if name == "signature":
            continue
        value = getattr(TICKET, name)
        other = value + value if isinstance(value, str | bytes | tuple) else value - 1
        changed = msgspec.structs.replace(TICKET, **{name: other})
        assert signed_bytes(changed) != signed_bytes(TICKET), name


@pytest.mark.parametrize("ids", [(-2,), (2**31,), ("x",)], ids=str)
def test_no_ticket_is_made_of_wrong_block_ids(ids: tuple[object, ...]) -> None:
    with pytest.raises(ValueError, match="block ids"):
        encode(msgspec.structs.replace(TICKET, blocks=(ids,)))


def test_router_keys() -> None:
    params = kv_transfer_params(TICKET)
    assert params["do_remote_prefill"] is True
    assert params["do_remote_decode"] is False
    assert params["remote_engine_id"] == TICKET.engine_id
    assert (params["remote_host"], params["remote_port"]) == TICKET.side_channel
    assert params["remote_request_id"] == TICKET.request_id
    assert params["remote_block_ids"] == [[3, 4, -1, 9]]
    assert params["tp_size"] == 2
    many = msgspec.structs.replace(TICKET, blocks=((1,) * 4000, (2,) * 97))
    assert kv_transfer_params(many)["remote_block_ids"] == [[], []], "decode reads the ticket"


@pytest.mark.parametrize(
    ("params", "kind"),
    [
        (None, type(None)),
        ({}, type(None)),
        ({"do_remote_decode": True}, type(None)),
        ({"do_remote_prefill": False, "ticket": encode(TICKET)}, type(None)),
        ([1, 2], type(None)),
        ("text", type(None)),
        ({"do_remote_prefill": True}, Malformed),
        ({"do_remote_prefill": True, "ticket": 7}, Malformed),
        ({"do_remote_prefill": True, "ticket": ["x"]}, Malformed),
        ({"do_remote_prefill": True, "ticket": ""}, Malformed),
        ({"do_remote_prefill": True, "ticket": encode(TICKET)}, Ticket),
        # JSON has a word for true, and only that one means that KV waits elsewhere.
        *(
            ({"do_remote_prefill": value, "ticket": encode(TICKET)}, type(None))
            for value in ("false", "true", "", 1, 0, 1.0, None, [True], {"a": 1})
        ),
    ],
    ids=str,
)
def test_ticket_of_takes_any_params(params: object, kind: type) -> None:
    assert isinstance(ticket_of(params), kind)  # type: ignore[arg-type]


def test_digest_tells_prompts_apart() -> None:
    digests = {
        prompt_digest([1, 2, 3]),
        prompt_digest([1, 2, 4]),
        prompt_digest([1, 2]),
        prompt_digest([]),
        prompt_digest([1, 2, 3], ["a"]),
        prompt_digest([1, 2, 3], ["b"]),
        prompt_digest([1, 2, 3], ["a", "b"]),
        prompt_digest([1, 2, 3], ["ab"]),
        prompt_digest([1, 2, 3], lora="a"),
        prompt_digest([1, 2, 3], lora=""),
    }
    assert len(digests) == 10
    assert all(len(digest) == DIGEST_BYTES for digest in digests)


def test_digest_does_not_depend_on_the_container() -> None:
    expected = prompt_digest([5, 6, 7])
    assert prompt_digest((5, 6, 7)) == expected
    assert prompt_digest(np.array([5, 6, 7], dtype=np.int32)) == expected  # type: ignore[arg-type]


@given(st.lists(st.integers(0, 200_000), min_size=1, max_size=50), st.data())
def test_one_changed_token_changes_the_digest(tokens: list[int], data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(tokens) - 1))
    changed = [*tokens]
    changed[at] += 1
    assert prompt_digest(changed) != prompt_digest(tokens)
