"""Lists and watches every kind, and hands on what the API server reports.

A reflector lists its kind, and watches from the version of the LIST. A watch that has reached its
age ends, and its kind is listed again. So whatever a watch may miss is found within that time: an
object that the store holds and the LIST lacks was deleted meanwhile. A server that has forgotten
the version of a watch is asked for a LIST at once.

Nothing is done in a namespace whose objects are not all known: engines that a PrefillScaler has
added would be deleted. One namespace that cannot be listed keeps no other from being worked in.
Somebody may have deleted it, and the operator's rights with it.
"""

import asyncio
import logging
import math
import random
from collections.abc import Callable, Collection, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any

import msgspec

from pdcluster_operator.adapters.api_server import client as api_client
from pdcluster_operator.adapters.api_server.kinds import WATCHED, Kind, slim
from pdcluster_operator.api.object_names import GROUP
from pdcluster_operator.runtime import control_loop, store
from pdcluster_operator.runtime.interfaces import ApiError

log = logging.getLogger(__name__)

Namespace = str | None
"""A namespace; None for all of them."""

FIRST, LONGEST = 1.0, 10.0
"""Seconds, at most, between two attempts after a failure: three times as long after each failure.

A server that refuses everything is asked by a dozen reflectors for each namespace.
"""
FORGOTTEN = frozenset({"Expired", "Gone", "Http410"})
"""What a server answers that does not know the version any more (410)."""
REPORTED = frozenset({"ADDED", "MODIFIED", "DELETED"})
EVERY_VERSION = str(2**63)
"""A version that is later than each: all that is held of a kind was there before."""
SOON = 2.0
"""Seconds between a LIST of kopf and ours."""


class _Line(msgspec.Struct):
    """A line of a watch."""

    type: str
    object: dict[str, Any]


WATCHED_LINE = msgspec.json.Decoder(_Line)


def _read(text: bytes) -> _Line:
    try:
        return WATCHED_LINE.decode(text)
    except RecursionError:
        return WATCHED_LINE.decode(api_client.without_depths(text))


class HistoryLostError(Exception):
    """The API server has an earlier state than before, as after etcd was restored from a backup.

    What the store holds is not comparable with it, so the process has to start again.
    """


@dataclass(eq=False)
class Reflector:
    """Keeps the store equal to what the API server has of one kind.

    Args:
        namespace: whose objects are listed and watched; None for all.
        age: seconds after which a watch ends and its kind is listed again.
        elsewhere: whether kopf watches the kind. This reflector only lists it then, as soon as kopf
            has reported an object of it: kopf looks once for what the API server has.

    Attributes:
        why_not: why the last attempt failed; empty if it did not.
    """

    client: api_client.KubeClient
    loop: control_loop.ControlLoop
    kind: Kind
    namespace: Namespace
    age: float
    elsewhere: bool = False

    def __post_init__(self) -> None:
        self._path = self.kind.path(self.namespace)
        self._kopf_reports = False  # whether kopf has reported anything
        self._sooner = asyncio.Event()
        self._last = ""  # the version of the last LIST
        self._version = ""  # that the next watch goes on from; empty: list first
        self._due = 0.0  # when the kind is listed again
        self._failures = 0
        self._tried = self._listed = False
        self.why_not = ""

    @property
    def is_known(self) -> bool:
        """Whether work may begin as far as this kind is concerned.

        It was listed, or the API server does not have it, or it is a kind that no API server needs
        to have and cannot be listed.
        """
        spare = self.kind.optional and self.kind.group != GROUP
        return self._listed or (self._tried and spare)

    async def run(self, changed: Callable[[], None]) -> None:
        """List and watch, whatever the server answers; never return.

        Args:
            changed: is called when ``is_known`` or ``why_not`` may have changed.
        """
        while True:
            pause = 0.0
            try:
                if not self._version or _now() >= self._due:
                    await self._list()
                elif self.elsewhere and self._kopf_reports:
                    await self._wait_until_due()
                elif not await self._follow():
                    pause = self._after_a_failure()
            except api_client.NotFound as error:
                pause = self._not_served(error)
            except ApiError as error:
                pause = self._after_a_failure()
                if error.reason in FORGOTTEN:
                    self._version = ""
                else:
                    self._say(str(error))
            self._tried = True
            changed()
            await asyncio.sleep(pause)

    def see(self, event: str | None, manifest: Mapping[str, Any]) -> None:
        """Take in what kopf reports; see :meth:`Reflectors.see`."""
        self._kopf_reports = True
        self.loop.see(event or "MODIFIED", slim(manifest, self.kind))
        if event is None and self._due - _now() > SOON:
            self._due = _now() + SOON
            self._sooner.set()

    async def _list(self) -> None:
        kind, due = self.kind, _now() + self._one_age()
        names: set[tuple[str, str]] = set()
        async for page in self.client.pages(self._path, kind.selection, kind.page):
            for item in page.get("items") or ():
                names.add((item["metadata"].get("namespace", ""), item["metadata"]["name"]))
                self.loop.see("MODIFIED", slim(item, kind))
        version = str(page["metadata"]["resourceVersion"])
        if store.is_earlier(version, self._last):
            raise HistoryLostError(f"{self._path}: version {self._last} has become {version}")
        self._last = version
        for gone in self.loop.store.listed(kind.name, self.namespace, names, version):
            self.loop.see("DELETED", gone)
        self.loop.set_served(kind.name, served=True)
        self._version, self._due = version, due
        self._listed, self.why_not = True, ""

    async def _wait_until_due(self) -> None:
        while (left := self._due - _now()) > 0:
            self._sooner.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._sooner.wait(), left)

    async def _follow(self) -> bool:
        """Watch until the server ends it, at the latest when the kind is listed again.

        The watch of a kind that kopf reports ends with its next line, a bookmark at the latest.
        Return False if the server has ended what it had just begun.

        Raises:
            ApiError: the server refused, or broke the watch.
        """
        query = {
            **self.kind.selection,
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": self._version,
            "timeoutSeconds": str(math.ceil(self._due - _now())),
        }
        heard = False
        try:
            async with aclosing(self.client.lines(self._path, query)) as lines:
                async for line in lines:
                    self._take(line)
                    heard = True
                    self._failures, self.why_not = 0, ""
                    if self.elsewhere and self._kopf_reports:
                        break
        except ValueError as error:
            raise ApiError("ApiServerUnreachable", f"GET {self._path}: {error}") from error
        return heard or _now() >= self._due

    def _take(self, text: bytes) -> None:
        line = _read(text)
        if line.type == "ERROR":
            raise api_client.classified(int(line.object.get("code") or 0), line.object)
        self._version = (line.object.get("metadata") or {}).get("resourceVersion", "")
        if line.type in REPORTED:
            self.loop.see(line.type, slim(line.object, self.kind))

    def _not_served(self, error: api_client.NotFound) -> float:
        """Note that the API server does not have the kind; return when to ask again, in seconds."""
        self._version = ""
        if not self.kind.optional:
            self._say(f"the CRD of {self.kind.name} is not installed: {error}")
            return self._after_a_failure()
        for gone in self.loop.store.listed(self.kind.name, self.namespace, set(), EVERY_VERSION):
            self.loop.see("DELETED", gone)
        self.loop.set_served(self.kind.name, served=False)
        self.elsewhere = False  # kopf watches what was there when it started
        self._listed = True
        return self._one_age()

    def _one_age(self) -> float:
        return self.age * random.uniform(0.9, 1.1)  # noqa: S311 - no secret

    def _after_a_failure(self) -> float:
        self._failures += 1
        most = min(LONGEST, FIRST * 3.0 ** min(self._failures - 1, 10))
        return random.uniform(most / 2, most)  # noqa: S311 - no secret

    def _say(self, why: str) -> None:
        if why != self.why_not:
            self.why_not = why
            if self.is_known:  # else nothing is done there, which is said once for all kinds
                log.warning("the watch of %s has to wait: %s", self._path, why)


class Reflectors:
    """Lists and watches every kind, in all namespaces if none is given.

    Args:
        age: see :class:`Reflector`.
        elsewhere: kinds that kopf watches; see :class:`Reflector`.

    Attributes:
        ready: set when all objects of a namespace are known.
    """

    def __init__(
        self,
        client: api_client.KubeClient,
        loop: control_loop.ControlLoop,
        namespaces: Collection[str],
        age: float,
        elsewhere: Collection[Kind] = (),
    ) -> None:
        self._loop = loop
        self._of: dict[Namespace, list[Reflector]] = {
            place: [
                Reflector(client, loop, kind, place, age, elsewhere=kind in elsewhere)
                for kind in WATCHED
            ]
            for place in (*namespaces, *(() if namespaces else (None,)))
        }
        self.ready = asyncio.Event()
        self._said: dict[Namespace, str] = {}
        loop.set_unlisted(set(namespaces))

    async def run(self) -> None:
        """List and watch; never return, but with the error of a reflector that has failed."""
        everyone = (one for reflectors in self._of.values() for one in reflectors)
        await asyncio.gather(*(one.run(self._wake_namespaces) for one in everyone))

    def see(self, event: str | None, manifest: Mapping[str, Any]) -> None:
        """Take in what kopf reports of a kind that is watched elsewhere.

        kopf lists again when the API server has forgotten its version, and says nothing of what was
        deleted meanwhile. So a LIST of ours follows each of kopf's.

        Args:
            event: ADDED, MODIFIED or DELETED; None for an object of a LIST.
        """
        namespace = manifest["metadata"].get("namespace")
        for one in self._of.get(namespace) or self._of.get(None) or ():
            if one.kind.name == manifest["kind"]:
                one.see(event, manifest)

    def _wake_namespaces(self) -> None:
        """Let each namespace be worked in as soon as all of its objects are known."""
        unlisted = {place for place in self._of if not self._is_listed(place)}
        self._loop.set_unlisted({place for place in unlisted if place is not None})
        if len(unlisted) < len(self._of):
            self.ready.set()

    def _is_listed(self, place: Namespace) -> bool:
        """Whether all objects of a namespace are known. If not, log why, once for each reason."""
        first = next((one for one in self._of[place] if not one.is_known), None)
        if first is None:
            return True
        if first.why_not not in ("", self._said.get(place)):
            self._said[place] = first.why_not
            where = "" if place is None else f" in namespace {place}"
            log.warning(
                "Nothing is done for PDClusters%s until all objects are listed: %s",
                where,
                first.why_not,
            )
        return False


def _now() -> float:
    return asyncio.get_running_loop().time()
