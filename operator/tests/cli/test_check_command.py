"""``pdcluster check`` against servers that give real engines' answers."""

from __future__ import annotations

import copy
import io
import json
from typing import Any

import pytest
from served_pair import RECORDED, Pair, serving

from pdcluster_operator.cli import check, reach
from pdcluster_operator.cli.exits import Exit, UserError
from pdcluster_operator.runtime.interfaces import Key

KEY = Key("default", "tiny")
ASKS = {"router": {"replicas": 1, "apiKeySecretRef": {"name": "door", "key": "k"}}}


async def run(pair: Pair, form: str = "text", *, local: bool = True, key: Key = KEY) -> Exit:
    return await check.run(pair.client, key, None, 16, form, local=local)


@pytest.mark.parametrize("local", [True, False])
async def test_one_prompt_and_what_became_of_it(
    local: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    async with serving() as pair:
        assert await run(pair, local=local) is Exit.DONE
    said = capsys.readouterr().out
    assert said.startswith(
        "default/tiny: KV moved from prefill/0 to decode/0, and decode alone generates the same "
        "tokens\n"
    )
    path = RECORDED["ours"]["kv_transfer_params"]["kv_path"]
    assert f"prefill/0 -> decode/0: {path['blocks']} blocks ({path['tokens']:,}" in said
    assert "equal to those of decode/0 alone: 16 of 16" in said
    assert "  computes the prompt" in said
    (first, ours, _), (second, alone, _) = pair.asked
    assert (first, second) == ("router", "decode")
    assert ours["prompt"] == alone["prompt"]
    assert ours["cache_salt"] != alone["cache_salt"], "a prefix hit would be compared with itself"
    assert "kv_transfer_params" not in ours
    assert alone["kv_transfer_params"] == {"local_prefill": True}


async def test_the_document_has_the_same_facts(capsys: pytest.CaptureFixture[str]) -> None:
    async with serving() as pair:
        assert await run(pair, "json") is Exit.DONE
    document = json.loads(capsys.readouterr().out)
    assert (document["apiVersion"], document["kind"]) == ("cli.pdcluster.dev/v1", "Check")
    assert document["kvMoved"] is document["comparison"]["equal"] is True
    path = RECORDED["ours"]["kv_transfer_params"]["kv_path"]
    assert document["kvPath"]["bytes"] == path["bytes"]
    assert document["phases"][0]["name"] == "whole"


async def test_an_answer_without_kv_is_another_exit_code(
    capsys: pytest.CaptureFixture[str],
) -> None:
    answer = copy.deepcopy(RECORDED["ours"])
    answer["kv_transfer_params"]["kv_path"] |= {"outcome": "local", "reason": "NoTicket"}
    async with serving() as pair:
        pair.answers["router"] = 200, answer
        pair.client.context = "the other"
        assert await run(pair, local=False) is Exit.KV_DID_NOT_MOVE
    said = capsys.readouterr().out
    assert "KV did not move (NoTicket): decode computed the prompt itself." in said
    assert said.splitlines()[-1].startswith("next: pdcluster ")
    assert said.endswith(" --context 'the other'\n")


async def test_wrong_tokens_are_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    async with serving() as pair:
        pair.answers["decode"] = 200, RECORDED["other"]
        assert await run(pair) is Exit.REQUEST_FAILED
    assert "but decode alone generates other tokens" in capsys.readouterr().out


async def refusal(pair: Pair, **options: Any) -> tuple[str, Exit]:
    with pytest.raises(UserError) as said:
        await run(pair, **options)
    return str(said.value), said.value.exit


async def test_each_failure_is_one_sentence_with_its_code() -> None:
    async with serving() as pair:
        text, code = await refusal(pair, key=Key("default", "other"))
        assert "PDCluster" in text
        assert code is Exit.REQUEST_FAILED
        pair.answers["router"] = 503, {"error": {"message": "KV was not received: LeaseLost"}}
        text, code = await refusal(pair)
        assert "answers 503" in text
        assert "KV was not received: LeaseLost" in text
        assert code is Exit.REQUEST_FAILED
        pair.answers |= {"router": (200, RECORDED["ours"]), "decode": (200, {"choices": [1]})}
        text, code = await refusal(pair)
        assert text.endswith("no completion: Expected `object`, got `int` - at `$.choices[0]`")
        assert code is Exit.REQUEST_FAILED
        pair.pods["tiny-decode-0"]["status"]["conditions"] = []
        text, code = await refusal(pair)
        assert "no decode engine of PDCluster" in text
        assert code is Exit.NOT_READY
        del pair.pods["tiny-router-0"]
        text, code = await refusal(pair)
        why = 'no router of PDCluster "tiny" is ready; `pdcluster status tiny {}` says why'
        assert text == why.format("--local")
        assert (await refusal(pair, local=False))[0] == why.format("-n default")
        assert code is Exit.NOT_READY
        pair.manifest["spec"]["router"] = {"replicas": 0}
        text, code = await refusal(pair)
        assert "has no router of the operator (spec.router)" in text
        pair.manifest["spec"]["model"] = 7
        text, code = await refusal(pair)
        assert "the spec cannot be read: " in text
        assert code is Exit.MANIFEST


async def test_an_account_that_may_not_forward_ports_learns_so() -> None:
    async with serving() as pair:
        pair.refuses_forwarding = True
        text, code = await refusal(pair, local=False)
    assert "give it the verbs get and create on pods/portforward" in text
    assert code is Exit.REQUEST_FAILED


async def test_a_pod_is_named_in_the_place_of_a_forwarded_port() -> None:
    async with serving() as pair:
        pair.answers["router"] = 503, {"error": {"message": "busy"}}
        text, _ = await refusal(pair, local=False)
        assert text.startswith("port 8000 of pod tiny-router-0, /v1/completions answers 503: ")
        pair.pods["tiny-router-0"]["status"]["podIP"] = "127.77.255.1"  # nothing listens there
        text, code = await refusal(pair, local=False)
        assert text.startswith("port 8000 of pod default/tiny-router-0: ")
        assert code is Exit.REQUEST_FAILED


async def test_the_api_key_comes_from_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(reach.KEY_VARIABLE, raising=False)
    monkeypatch.delenv(reach.ENGINES_VARIABLE, raising=False)
    async with serving(ASKS) as pair:
        text, code = await refusal(pair)
        assert text.endswith("set PDCLUSTER_API_KEY to the value of key 'k' of Secret 'door'")
        assert code is Exit.USAGE
        monkeypatch.setenv(reach.KEY_VARIABLE, "with a newline\n")
        text, code = await refusal(pair)
        assert text.startswith("PDCLUSTER_API_KEY begins or ends with white space")
        monkeypatch.setenv(reach.KEY_VARIABLE, "open-sesame")
        for local in (True, False):
            pair.asked.clear()
            assert await run(pair, local=local) is Exit.DONE
            assert [sent for *_, sent in pair.asked] == ["Bearer open-sesame"] * 2


@pytest.mark.parametrize(
    ("given", "data", "said"),
    [
        ("", b"", "the prompt is empty"),
        ("-", b"", "the prompt is empty"),
        ("-", b"\xff\xfe", "the prompt on standard input is no UTF-8"),
        ("-", b"x" * (check.MAX_PROMPT + 1), "the prompt has more than 4 MiB"),
        ("a\udcff", b"", "the prompt has bytes that are no UTF-8"),
    ],
)
def test_a_prompt_that_is_no_text(
    given: str, data: bytes, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data)))
    with pytest.raises(UserError, match=said) as error:
        check.read_prompt(given)
    assert error.value.exit is Exit.USAGE


def test_a_prompt_comes_from_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO("ä long\none".encode())))
    assert check.read_prompt("-") == "ä long\none"
    assert check.read_prompt("given") == "given"
