"""Real engines and tickets that a client changed: refused, and nobody else gets wrong tokens."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fork_host import Engine

pytest.importorskip("vllm")

from engine_pair import Pair, connector_config, prompt

from models.tiny import model_path
from pdcluster_connector.certificate_files import LOOK_SECONDS
from pdcluster_connector.compat.reasons import Reason
from pdcluster_connector.protocol.ticket import Ticket, decode, encode
from pdcluster_connector.sidechannel.ticket_key_file import ROTATION_SECONDS, parse_keys
from ticket_key import KEYS

pytestmark = pytest.mark.engine

MINE, THEIRS = prompt(96, 1), prompt(96, 2)
TOKENS = 12
STRANGER = parse_keys(b"99" * 32)


@pytest.fixture(scope="module")
def expected(engines: Callable[..., Engine]) -> dict[str, list[int]]:
    """A single engine's greedy tokens for both prompts."""
    single = engines("single", model=str(model_path("llama")), enable_prefix_caching=False)
    single.wait_ready()
    found = {
        "mine": single.generate(MINE, TOKENS).tokens,
        "theirs": single.generate(THEIRS, TOKENS).tokens,
    }
    single.stop()
    assert found["mine"] != found["theirs"]
    return found


def without_transfer(engine: Engine) -> dict[str, float]:
    return {
        name.split("reason=")[1].rstrip("}"): value
        for name, value in engine.metrics().items()
        if name.startswith("pdcluster_kv_prompts_total{outcome=local,")
    }


def changed(params: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """What a client can make of a ticket: any field, and no signature of ours."""
    true = decode(params["ticket"], KEYS)
    assert isinstance(true, Ticket)
    return {**params, "ticket": encode(msgspec.structs.replace(true, **fields), STRANGER)}


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_another_requests_blocks_in_a_ticket_are_not_read(
    engines: Callable[..., Engine], expected: dict[str, list[int]], policy: str
) -> None:
    """They would be hashed as this prompt's, and others would get wrong tokens without a ticket."""
    model = str(model_path("llama"))
    prefill = engines("p", connector_config("kv_producer"), model=model)
    decoder = engines("d", connector_config("kv_consumer", policy), model=model)
    pair = Pair(prefill.wait_ready(), decoder.wait_ready())
    theirs, mine = pair.ticket(THEIRS), pair.ticket(MINE)
    other = decode(theirs["ticket"], KEYS)
    assert isinstance(other, Ticket)
    answer = decoder.generate(MINE, TOKENS, changed(mine, blocks=other.blocks))
    assert answer.tokens == expected["mine"], "it needs no KV from elsewhere: it is computed here"
    assert (answer.path["outcome"], answer.path["reason"]) == ("local", Reason.FORGED)
    assert answer.path["bytes"] == 0
    assert "none of this engine's ticket keys" in answer.path["message"]
    assert without_transfer(decoder) == {Reason.FORGED: 1}
    # Another user's request with the same prompt and no ticket; then one with a true ticket.
    assert decoder.generate(MINE, TOKENS).tokens == expected["mine"]
    answer = decoder.generate(THEIRS, TOKENS, theirs)
    assert answer.tokens == expected["theirs"]
    assert answer.path["outcome"] == "transferred"
    answer = decoder.generate(MINE, TOKENS, mine, "own")
    assert answer.tokens == expected["mine"]
    for engine in (prefill, decoder):
        engine.stop()


def test_keys_are_replaced_while_engines_run(
    engines: Callable[..., Engine], expected: dict[str, list[int]], tmp_path: Path
) -> None:
    """The two engines see the new file at different times, as pods do."""
    model = str(model_path("llama"))
    old, new = "0a" * 32, "0b" * 32
    files = {role: tmp_path / role for role in ("p", "d")}

    def write(role: str, *keys: str, age: float = 0.0) -> None:
        fresh = files[role].with_suffix(".new")
        fresh.write_text("\n".join(keys))
        written = fresh.stat().st_mtime - age
        os.utime(fresh, (written, written))
        fresh.rename(files[role])

    for role in files:
        write(role, old)
    prefill = engines(
        "p", connector_config("kv_producer", ticket_key_file=str(files["p"])), model=model
    )
    decoder = engines(
        "d", connector_config("kv_consumer", ticket_key_file=str(files["d"])), model=model
    )
    pair = Pair(prefill.wait_ready(), decoder.wait_ready())

    def hand_off(salt: str) -> bytes:
        """One request through both engines; returns the key that signed its ticket."""
        params = pair.ticket(MINE, salt)
        answer = decoder.generate(MINE, TOKENS, params, salt)
        assert answer.tokens == expected["mine"]
        assert answer.path["outcome"] == "transferred", answer.path
        signed = [
            key for key in (old, new)
            if isinstance(decode(params["ticket"], parse_keys(key.encode())), Ticket)
        ]  # fmt: skip
        assert len(signed) == 1
        return signed[0].encode()

    assert hand_off("before") == old.encode()
    before = pair.ticket(MINE, "kept")
    write("p", new, old)
    assert hand_off("prefill has the new key, decode does not") == old.encode()
    write("d", new, old)
    assert hand_off("both have both") == old.encode()
    for role in files:
        write(role, new, old, age=ROTATION_SECONDS)
    time.sleep(LOOK_SECONDS + 0.1)
    assert hand_off("the new key signs") == new.encode()
    answer = decoder.generate(MINE, TOKENS, before, "kept")
    assert answer.path["outcome"] == "transferred", "a ticket of before is still good"
    write("d", new, age=ROTATION_SECONDS)
    write("p", old)
    time.sleep(LOOK_SECONDS + 0.1)
    answer = decoder.generate(MINE, TOKENS, pair.ticket(MINE, "gone"), "gone")
    assert answer.tokens == expected["mine"]
    assert (answer.path["outcome"], answer.path["reason"]) == ("local", Reason.FORGED)
    for engine in (prefill, decoder):
        engine.stop()
