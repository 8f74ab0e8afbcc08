"""What an API server may answer with, because anybody may write such objects."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from aiohttp import ContentTypeError, web
from aiohttp.test_utils import TestServer
from hypothesis import given, strategies as st
from reached import reaching

from pdcluster_operator import handlers
from pdcluster_operator.adapters.api_server.client import (
    LEVELS,
    KubeClient,
    document_of,
    without_depths,
)
from pdcluster_operator.adapters.api_server.kinds import POD
from pdcluster_operator.adapters.api_server.kube_api import KubeApi
from pdcluster_operator.adapters.engine_authority import EngineAuthority
from pdcluster_operator.runtime.interfaces import ApiError

BOOKMARK = b'{"type": "BOOKMARK", "object": {}}\n'
DEEPEST = 9_990  # the API server refuses what has more than 10,000 levels


def nested(levels: int, opening: str = '{"a":', closing: str = "}") -> str:
    return f"{opening * levels}1{closing * levels}"


def depth(document: Any) -> int:
    levels = 0
    while isinstance(document, dict | list) and document:
        document = document["a"] if isinstance(document, dict) else document[0]
        levels += 1
    return levels


@pytest.mark.parametrize(("opening", "closing"), [('{"a":', "}"), ("[", "]"), ('{"a":[', "]}")])
def test_what_is_too_deep_is_cut_off_and_the_rest_is_read(opening: str, closing: str) -> None:
    deep = nested(DEEPEST // len(closing), opening, closing)
    text = f'{{"kind": "[{{\\"", "deep": {deep}, "next": [{{}}, {deep}], "last": "}}"}}'
    read = document_of(text.encode())
    assert (read["kind"], read["last"], read["next"][0]) == ('[{"', "}", {})
    assert depth(read["deep"]) == LEVELS - 1
    assert depth(read["next"][1]) == LEVELS - 2


def test_what_can_be_read_is_read_whole() -> None:
    assert depth(document_of(nested(LEVELS + 50).encode())) == LEVELS + 50


@pytest.mark.parametrize("text", ["", "{", nested(5_000)[:-1], "[" * 5_000])
def test_what_is_no_json_is_an_error_that_is_expected(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        document_of(text.encode())


DOCUMENTS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(DOCUMENTS)
def test_nothing_is_cut_off_that_is_not_too_deep(document: Any) -> None:
    for text in (json.dumps(document), json.dumps(document, ensure_ascii=False)):
        assert without_depths(text.encode()) == text.encode()


@pytest.mark.parametrize("text", [b"<html>Sign in</html>", b"", b"[]", b'{"items": ['])
async def test_an_answer_that_is_no_object_is_no_empty_list(text: bytes) -> None:
    """Else a sweep that meets the page of a proxy would forget every object."""

    async def answer(_: web.Request) -> web.Response:
        return web.Response(body=text)

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    async with TestServer(app) as server, KubeClient(reaching(server)) as client:
        api = KubeApi(client, EngineAuthority.new(time.time())[0])
        with pytest.raises(ApiError, match="the answer is no JSON object"):
            await api.list(POD, "ns")


async def test_kopf_is_given_documents_that_its_parser_can_read() -> None:
    """What is too deep ends kopf, and would end it again after each start."""
    deep = b'{"spec": ' * 3_000 + b"1" + b"}" * 3_000

    async def answer(request: web.Request) -> web.Response:
        if "error" in request.query:
            return web.Response(status=503, text="a page of a proxy")
        if "watch" not in request.query:
            return web.Response(body=deep, content_type="application/json")
        return web.Response(body=b'{"type": "ADDED", "object": ' + deep + b"}\n" + BOOKMARK)

    application = web.Application()
    application.router.add_get("/{path:.*}", answer)
    async with TestServer(application) as there:
        async with KubeClient(reaching(there)) as client:
            session = await client.session(handlers._Response)
        async with session:
            assert "spec" in await (await session.get(there.make_url("/"))).json()
            watch = await session.get(there.make_url("/?watch=true"))
            text = b"".join([part async for part in watch.content.iter_chunked(1)])
            lines = [json.loads(line) for line in text.splitlines()]
            assert [one.get("type") for one in lines] == ["ADDED", "BOOKMARK"]
            with pytest.raises(ContentTypeError):
                await (await session.get(there.make_url("/?error=1"))).json()
