"""Who is told between which engines KV moved."""

from __future__ import annotations

import pytest

from pdcluster_connector.protocol.kv_path import (
    KEY_PARAMETER,
    failure,
    has_key,
    key_of,
    without_names,
)

PATH = {
    "prefill": "ns.c.prefill.r.0/aa",
    "decode": "ns.c.decode.r.0/bb",
    "tokens": 40,
    "blocks": 3,
    "bytes": 200,
    "seconds": 1.25,
    "outcome": "failed",
    "reason": "SideChannelUnreachable",
    "message": "http://10.0.0.7:5600 does not answer",
}


def test_a_client_keeps_what_moved_and_why():
    left = without_names(PATH)
    assert list(left) == ["tokens", "blocks", "bytes", "seconds", "outcome", "reason"]
    assert "10.0.0.7" not in str(left)


def test_what_the_client_of_a_failed_request_reads():
    brief = "KV was not received: SideChannelUnreachable"
    link = ", from ns.c.prefill.r.0/aa to ns.c.decode.r.0/bb"
    message = ": http://10.0.0.7:5600 does not answer"
    assert failure(PATH, "cmpl-1-0") == f"{brief}{link}{message} (request cmpl-1-0)"
    assert failure({**PATH, "message": ""}, "r") == f"{brief}{link} (request r)"
    assert failure(without_names(PATH), "cmpl-1-0") == f"{brief} (request cmpl-1-0)"


def test_the_key_is_of_the_token_and_is_not_the_token():
    assert key_of("a") == key_of("a") != key_of("b")
    assert "secret-token" not in key_of("secret-token")
    assert has_key({KEY_PARAMETER: key_of("a")}, key_of("a"))


@pytest.mark.parametrize(
    "params", [None, {}, {KEY_PARAMETER: None}, {KEY_PARAMETER: 1}, {KEY_PARAMETER: ["a"]},
               {KEY_PARAMETER: ""}, {KEY_PARAMETER: "\ud800é"}, {KEY_PARAMETER: "a"}, "text"]
)  # fmt: skip
def test_whatever_a_client_sends_is_not_the_key(params):
    assert not has_key(params, key_of("a"))
    assert not has_key(params, key_of("")), "without a launcher nobody has a key"
