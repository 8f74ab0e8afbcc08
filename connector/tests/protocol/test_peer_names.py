"""Which names of a certificate say that a peer is the engine that it claims to be."""

from __future__ import annotations

import pytest

from pdcluster_connector.protocol.engine_id import (
    engine_name,
    names_in,
    role_name,
    why_not_peer,
)

PREFILL, DECODE = "ns.c.prefill.r.0/aa", "ns.c.decode.r.0/bb"
SUFFIX = "engine.pdcluster.dev"


def certificate(*names: tuple[str, str]) -> dict[str, object]:
    return {"subject": ((("commonName", f"ns.c.decode.r.0.{SUFFIX}"),),), "subjectAltName": names}


def test_only_dns_names_count_in_whatever_case() -> None:
    dns = f"NS.c.Decode.r.0.{SUFFIX}"
    held = certificate(("IP Address", "10.0.0.1"), ("DNS", dns), ("URI", f"spiffe://{dns}"))
    assert names_in(held) == (dns.lower(),)
    assert names_in(certificate()) == names_in({}) == names_in(None) == ()


def test_an_incarnation_and_a_data_parallel_rank_have_the_engines_name() -> None:
    name = f"ns.c.decode.r.0.{SUFFIX}"
    assert engine_name(DECODE) == engine_name("NS.c.decode.r.0/cc_dp3") == name


@pytest.mark.parametrize(
    "logical", ["", ".", "ns..decode.r.0", "ns.c.decode.r.0.", "a" * 64, ".".join(["a" * 50] * 5)]
)
def test_what_cannot_stand_in_a_dns_name_is_refused(logical: str) -> None:
    with pytest.raises(ValueError, match="cannot stand in a certificate"):
        engine_name(f"{logical}/bb")
    assert why_not_peer(PREFILL, (f"{logical}.{SUFFIX}",), f"{logical}/bb", "decode") is not None


def test_the_longest_name_is_accepted() -> None:
    rest = 253 - len(f".{SUFFIX}") - 3 * 64
    logical = ".".join(["a" * 63] * 3 + ["a" * rest])
    assert len(engine_name(f"{logical}/bb")) == 253
    with pytest.raises(ValueError, match="cannot stand in a certificate"):
        engine_name(f"{logical}a/bb")


@pytest.mark.parametrize(
    "names",
    [
        (),
        (f"*.c.decode.r.0.{SUFFIX}",),
        (f"*.{SUFFIX}",),
        (f"ns.c.decode.r.0.{SUFFIX}.",),
        ("ns.c.decode.r.0",),
        (f"ns.c.decode.r.1.{SUFFIX}", f"ns.c.prefill.r.0.{SUFFIX}"),
    ],
)
def test_a_name_has_to_be_the_engines_whole_name(names: tuple[str, ...]) -> None:
    why = why_not_peer(PREFILL, names, DECODE, "decode")
    assert why is not None
    assert "its certificate names" in why


@pytest.mark.parametrize(
    ("claimed", "why"),
    [
        ("ns.c.prefill.r.0/bb", "is no decode engine"),
        ("ns.other.decode.r.0/bb", "belongs to the PDCluster ns/other"),
        ("else.c.decode.r.0/bb", "belongs to the PDCluster else/c"),
        ("ns.c.b.decode.r.0/bb", "is no decode engine"),
        ("decode/bb", "belongs to the PDCluster decode"),
    ],
)
def test_the_claimed_engine_has_to_be_a_decode_engine_of_this_cluster(
    claimed: str, why: str
) -> None:
    assert why in str(why_not_peer(PREFILL, (engine_name(claimed),), claimed, "decode"))


def test_one_of_several_names_is_enough() -> None:
    names = ("localhost", engine_name(PREFILL), engine_name(DECODE))
    assert why_not_peer(PREFILL, names, DECODE, "decode") is None
    assert why_not_peer(PREFILL, names, "ns.c.decode.r.0/another_dp1", "decode") is None


def test_a_certificate_that_names_the_role_is_for_each_engine_of_it() -> None:
    role = "ns.c.decode.role.pdcluster.dev"
    assert role_name(DECODE) == role_name("NS.c.decode.other.7/cc_dp1") == role
    for engine in (DECODE, "ns.c.decode.other.7/cc"):
        assert why_not_peer(PREFILL, ("localhost", role), engine, "decode") is None
    for stranger in ("ns.c.prefill.r.0/bb", "ns.other.decode.r.0/bb", "else.c.decode.r.0/bb"):
        assert "its certificate names" in str(why_not_peer(PREFILL, (role,), stranger, "decode"))
        own = (role_name(stranger),)
        assert why_not_peer(PREFILL, own, stranger, "decode") is not None


@pytest.mark.parametrize("logical", ["", "ns..decode.r.0", f"{'a' * 64}.c.decode.r.0"])
def test_what_cannot_stand_in_a_dns_name_has_no_role_name(logical: str) -> None:
    with pytest.raises(ValueError, match="cannot stand in a certificate"):
        role_name(f"{logical}/bb")


def test_a_peer_cannot_make_a_message_long() -> None:
    """It chooses its names and what it says that it is, and the message is logged."""
    long = "x" * 10_000
    labels = ".".join(["ns.c.decode", *["r"] * 100])
    for names, claimed in (
        ((), f"{long}/bb"),
        ((long,), DECODE),
        ((engine_name(DECODE),) * 1000, f"ns.c.decode.r.1/{long}"),
        ((role_name(PREFILL),), f"ns.c.prefill.r.0/{long}"),
        ((role_name(f"a.b.{labels}"),), f"a.b.{labels}/{long}"),
    ):
        why = why_not_peer(PREFILL, names, claimed, "decode")
        assert why is not None
        assert len(why) < 700


def test_a_certificate_without_a_name_is_said_to_name_no_engine() -> None:
    why = why_not_peer(PREFILL, (), DECODE, "decode")
    assert why == f"its certificate names no engine, but it says that it is {DECODE}"


@pytest.mark.parametrize("mine", [PREFILL, PREFILL.upper()])
@pytest.mark.parametrize("claimed", [DECODE, "NS.c.Decode.r.0/bb"])
def test_names_are_compared_as_dns_does_it(mine: str, claimed: str) -> None:
    assert why_not_peer(mine, (engine_name(DECODE),), claimed, "decode") is None
