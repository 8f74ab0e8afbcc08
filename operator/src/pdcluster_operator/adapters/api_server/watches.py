"""Watches every kind, and hands on what the API server reports.

Each watch begins with a LIST, goes on from its version, and is opened again from the last version
that it reported. A server that has forgotten this version is listed again. What is kept and is not
in the LIST was deleted meanwhile.

kopf could watch, too. It keeps a record, a queue and a task for each object, and prepares the calls
of handlers that we do not have. That was two thirds of what an event cost.
"""

from __future__ import annotations

import asyncio
import logging
import random
import signal
from collections.abc import Callable, Collection, Iterable
from collections.abc import Set as AbstractSet
from contextlib import suppress
from typing import Any

import msgspec

from pdcluster_operator.adapters.api_server.client import (
    KubeClient,
    NotFound,
    classified,
    document_of,
    without_depths,
)
from pdcluster_operator.adapters.api_server.kinds import WATCHED, Kind, Same, as_kept, slim
from pdcluster_operator.runtime.errors import ApiError

log = logging.getLogger(__name__)

See = Callable[[str, dict[str, Any]], None]
"""Called with ADDED, MODIFIED or DELETED and the object. It must not raise."""
Listed = Callable[[str, str | None, AbstractSet[tuple[str, str]], str], Iterable[dict[str, Any]]]
"""See ``runtime.store.Store.listed``."""
Serves = Callable[[str], bool]
"""Whether the API server has a kind, as far as is known. A sweep finds out when that changes."""

OPEN_SECONDS = 600
"""After so many seconds the server ends a watch, as it does with everybody's."""
FIRST, LONGEST = 1.0, 10.0
"""Seconds, at most, between two attempts to open a watch: three times as long after each failure.

A server that refuses everything is asked by a dozen watches for each namespace.
"""
FORGOTTEN = frozenset({"Expired", "Gone", "Http410"})
"""What a server answers that does not know the version any more (410)."""
REPORTED = frozenset({"ADDED", "MODIFIED", "DELETED"})


class _Metadata(msgspec.Struct):
    name: str = ""
    namespace: str = ""
    uid: str = ""
    resource_version: str = msgspec.field(name="resourceVersion", default="")


class _Head(msgspec.Struct):
    """What an object is called, and its version."""

    metadata: _Metadata = msgspec.field(default_factory=_Metadata)


class _Line(msgspec.Struct):
    """A line of a watch. The object is parsed only if it is needed."""

    type: str
    object: msgspec.Raw


_LINE, _HEAD = msgspec.json.Decoder(_Line), msgspec.json.Decoder(_Head)


def _read(text: bytes) -> tuple[_Line, _Head]:
    try:
        line = _LINE.decode(text)
        return line, _HEAD.decode(line.object)
    except RecursionError:
        line = _LINE.decode(without_depths(text))
        return line, _HEAD.decode(line.object)


class _Forgotten(Exception):  # noqa: N818 - says what happened
    """The server does not know the version any more."""


class Watch:
    """The watch of one kind, in one namespace or in all of them."""

    def __init__(
        self,
        client: KubeClient,
        kind: Kind,
        namespace: str | None,
        see: See,
        same: Same,
        serves: Serves,
        listed: Listed,
    ) -> None:
        self._client = client
        self._kind = kind
        self._namespace = namespace
        self._path = kind.path(namespace)
        self._see = see
        self._same = same
        self._serves = serves
        self._listed = listed
        self._version = ""
        self._failures = 0
        self._said = ""

    async def run(self) -> None:
        """Watch, whatever the server answers; never return."""
        while True:
            try:
                if not self._version:
                    await self._list()
                if await self._follow():
                    continue
                self._failures += 1  # the server ends what it has just begun
            except _Forgotten:
                self._version = ""
                self._failures += 1  # a list may take so long that its version is forgotten again
            except NotFound as error:
                self._version = ""
                self._say(error)
                await asyncio.sleep(LONGEST)
                while self._kind.optional and not self._serves(self._kind.name):  # noqa: ASYNC110
                    await asyncio.sleep(LONGEST)
                continue
            except ApiError as error:
                self._failures += 1
                self._say(error)
            await asyncio.sleep(self._pause())

    async def _list(self) -> None:
        query = {**self._selector(), "limit": str(self._kind.page)}
        names: set[tuple[str, str]] = set()
        while True:
            page = await self._client.call("GET", self._path, query=query)
            for item in page.get("items") or ():
                names.add((item["metadata"].get("namespace", ""), item["metadata"]["name"]))
                self._see("MODIFIED", as_kept(item, self._kind, self._same))
            metadata = page["metadata"]
            if not metadata.get("continue"):
                break
            query["continue"] = metadata["continue"]
        version = str(metadata["resourceVersion"])
        for gone in self._listed(self._kind.name, self._namespace, names, version):
            self._see("DELETED", gone)
        self._version = version

    async def _follow(self) -> bool:
        """Follow a watch until the server ends it; return whether it reported anything."""
        query = {
            **self._selector(),
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": self._version,
            "timeoutSeconds": str(OPEN_SECONDS),
        }
        spoke = False
        try:
            async for line in self._client.lines(self._path, query):
                self._take(line)
                spoke, self._failures, self._said = True, 0, ""
        except ValueError as error:
            raise ApiError("ApiServerUnreachable", f"GET {self._path}: {error}") from error
        except ApiError as error:
            if error.reason in FORGOTTEN:
                raise _Forgotten from error
            raise
        return spoke

    def _take(self, text: bytes) -> None:
        line, head = _read(text)
        if line.type == "ERROR":
            failure = document_of(line.object)
            raise classified(int(failure.get("code") or 0), failure)
        self._version = head.metadata.resource_version
        if line.type not in REPORTED:
            return
        found = self._same(self._kind.name, {"metadata": msgspec.to_builtins(head.metadata)})
        if found is None:
            found = slim(document_of(line.object), self._kind)
        self._see(line.type, found)

    def _selector(self) -> dict[str, str]:
        return {"labelSelector": self._kind.selector} if self._kind.selector else {}

    def _pause(self) -> float:
        most = min(LONGEST, FIRST * 3.0 ** min(self._failures - 1, 10))
        return random.uniform(most / 2, most)  # noqa: S311 - no secret

    def _say(self, error: ApiError) -> None:
        if str(error) != self._said:
            self._said = str(error)
            log.warning("the watch of %s has to wait: %s", self._path, error)


async def watch(
    client: KubeClient,
    see: See,
    *,
    namespaces: Collection[str],
    stop: asyncio.Event,
    same: Same,
    serves: Serves,
    listed: Listed,
) -> None:
    """Watch every kind until ``stop`` or a signal, in all namespaces if none is given.

    Args:
        client: has a connection for each watch.
        same: returns what is kept already, so that nothing is made of it again.
    """
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    places: Collection[str | None] = namespaces or (None,)
    watches = [
        asyncio.create_task(
            Watch(client, kind, place, see, same, serves, listed).run(),
            name=f"watch-{kind.name}",
        )
        for kind in WATCHED
        for place in places
    ]
    stopped = asyncio.create_task(stop.wait())
    try:
        ended, _ = await asyncio.wait((*watches, stopped), return_when=asyncio.FIRST_COMPLETED)
        for one in ended:
            one.result()
    finally:
        for one in (*watches, stopped):
            one.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.gather(*watches, stopped, return_exceptions=True)
