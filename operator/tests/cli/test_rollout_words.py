"""``pdcluster rollout`` in virtual time: what it prints, what it writes, and how it ends."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jsonschema
import pytest

import virtual_time
from pdcluster_operator.api.spec.types import Role
from pdcluster_operator.cli import connection, output, rollout
from pdcluster_operator.cli.exits import Exit, UserError
from pdcluster_operator.cli.main import pdcluster
from pdcluster_operator.cli.rollout import Announcement, Undo
from pdcluster_operator.runtime.interfaces import ApiError, Key


def run(verb: str, *words: str) -> Exit:
    """Run ``pdcluster rollout`` for the PDCluster ``ns/tiny``."""
    with pdcluster.make_context("pdcluster", ["rollout", verb, "tiny", "-n", "ns", *words]) as root:
        ended: Exit = pdcluster.invoke(root)
    return ended


class Cluster:
    """The PDCluster ``ns/tiny`` on an API server.

    Attributes:
        says: how far its rollout is, one answer after another; the last one stays.
        asked: when it was read.
        written: specs, and how they were written.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.live: dict[str, Any] | None = {"metadata": {"name": "tiny"}, "spec": {"a": 1}}
        self.says: list[Announcement | ApiError] = []
        self.asked: list[float] = []
        self.written: list[tuple[Any, dict[str, Any]]] = []
        self.stored: Undo | None = None
        self.context = "there"

        def connected(context: str | None, key: Key, command: Callable[[Any], Any], _: Any) -> Exit:
            assert (context, key) == (None, Key("ns", "tiny"))
            return virtual_time.run(command(self))

        async def read_cluster(client: Any, key: Key) -> dict[str, Any] | None:
            assert (client, key) == (self, Key("ns", "tiny"))
            self.asked.append(asyncio.get_running_loop().time())
            return self.live

        async def change_spec(client: Any, live: Any, spec: Any, **how: Any) -> None:
            assert (client, live) == (self, self.live)
            self.written.append((spec, how))

        async def observe(client: Any, key: Key, live: Any, connector: Any) -> Any:
            assert (client, key, live) == (self, Key("ns", "tiny"), self.live)
            return self.stored

        def announce(live: Any) -> Announcement:
            found = self.says.pop(0) if len(self.says) > 1 else self.says[0]
            if isinstance(found, ApiError):
                raise found
            return found

        clock = SimpleNamespace(
            monotonic=lambda: asyncio.get_running_loop().time(), time=lambda: 1_800_000_000.0
        )
        monkeypatch.setattr(rollout, "time", clock)
        monkeypatch.setattr(rollout, "undo", lambda found: found)
        for one in (change_spec, observe, announce):
            monkeypatch.setattr(rollout, one.__name__, one)
        monkeypatch.setattr(connection, "read_cluster", read_cluster)
        monkeypatch.setattr(connection, "connected", connected)

    async def call(self, method: str, path: str, query: Any) -> dict[str, Any]:
        """List the PDClusters of the namespace."""
        assert (method, path.rpartition("/")[2]) == ("GET", "pdclusters")
        return {"items": [{"metadata": {"name": name}} for name in ("big", "small")]}


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    return Cluster(monkeypatch)


def waits(line: str) -> Announcement:
    return Announcement(line, None)


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize(("complete", "code"), [(True, Exit.DONE), (False, Exit.NOT_READY)])
def test_each_change_is_a_line_until_the_end(
    cluster: Cluster, capsys: pytest.CaptureFixture[str], complete: bool, code: Exit
) -> None:
    cluster.says = [
        waits("1 of 2"),
        waits("1 of 2"),
        waits("2 of 2"),
        Announcement("end", complete),
    ]
    assert run("status") == code
    assert lines(capsys) == [f'PDCluster "tiny": {line}' for line in ("1 of 2", "2 of 2", "end")]
    assert cluster.asked == [0.0, 1.0, 2.0, 3.0]


def test_each_change_is_a_document(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    cluster.says = [waits("1"), Announcement("2", None, fails=True), Announcement("3", False)]
    assert run("status", "-o", "json") == Exit.NOT_READY
    found = [json.loads(line) for line in lines(capsys)]
    for one in found:
        jsonschema.validate(one, output.schema(rollout.Rollout))
    assert [(one["state"], one["message"]) for one in found] == [
        ("Progressing", "1"), ("Failing", "2"), ("Waiting", "3"),
    ]  # fmt: skip
    cluster.says = [Announcement("4", True)]
    assert run("status", "--no-watch", "-o", "json") == Exit.DONE
    found = json.loads(capsys.readouterr().out)
    assert (found["kind"], found["namespace"], found["name"]) == ("Rollout", "ns", "tiny")
    assert (found["state"], found["message"]) == ("Complete", "4")


@pytest.mark.parametrize(
    ("said", "code"),
    [(None, Exit.DONE), (True, Exit.DONE), (False, Exit.NOT_READY)],
)
def test_who_does_not_watch_gets_one_line(
    cluster: Cluster, capsys: pytest.CaptureFixture[str], said: bool | None, code: Exit
) -> None:
    cluster.says = [Announcement("1 of 2", said)]
    assert run("status", "--no-watch") == code
    assert lines(capsys) == ['PDCluster "tiny": 1 of 2']
    assert len(cluster.asked) == 1


def test_after_the_timeout_it_says_how_far_it_is(cluster: Cluster) -> None:
    cluster.says = [waits("1 of 2")]
    with pytest.raises(UserError, match=r"^not complete after 5 s: 1 of 2$") as ended:
        run("status", "--timeout=5")
    assert ended.value.exit == Exit.NOT_READY
    assert cluster.asked[-1] == 6.0
    cluster.says = [*[waits("1 of 2")] * 7200, Announcement("end", True)]
    cluster.asked.clear()
    assert run("status") == Exit.DONE
    assert len(cluster.asked) == 7201, "without a timeout it waits for ever"


def test_a_server_that_is_away_for_a_while_ends_no_watch(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    away = ApiError("ApiServerUnreachable", "no answer")
    cluster.says = [waits("1 of 2"), away, away, Announcement("end", True)]
    assert run("status") == Exit.DONE
    assert lines(capsys)[1:] == [
        'PDCluster "tiny": waits for the API server: no answer', 'PDCluster "tiny": end',
    ]  # fmt: skip
    cluster.says = [away]
    with pytest.raises(ApiError, match="no answer"):
        run("status")


def test_a_step_that_fails_and_fails_ends_the_wait(cluster: Cluster) -> None:
    """One failure may pass, as with an API server that restarts."""
    fails = Announcement("Http500: no", None, fails=True)
    cluster.says = [*[fails] * 25, waits("1 of 2"), *[fails] * 25, Announcement("end", True)]
    assert run("status") == Exit.DONE
    cluster.says = [waits("1 of 2"), fails]
    cluster.asked.clear()
    with pytest.raises(UserError, match=r"^somebody has to act, .*: Http500: no$") as ended:
        run("status")
    assert ended.value.exit == Exit.NOT_READY
    assert 30 < cluster.asked[-1] < 33
    assert run("status", "--no-watch") == Exit.NOT_READY


def test_a_cluster_that_is_not_there_is_named(cluster: Cluster) -> None:
    cluster.live = None
    for verb in ("status", "pause", "resume", "undo", "restart"):
        said = 'no PDCluster "tiny" in namespace "ns"; there are: big, small'
        with pytest.raises(UserError, match=said) as missing:
            run(verb)
        assert missing.value.exit == Exit.REQUEST_FAILED
    assert cluster.written == []


@pytest.mark.parametrize(
    ("before", "paused", "after", "said"),
    [
        ({"a": 1}, True, {"a": 1, "rollout": {"paused": True}}, "paused"),
        ({"rollout": {"type": "Surge", "paused": False}}, True,
         {"rollout": {"type": "Surge", "paused": True}}, "paused"),
        ({"rollout": {"paused": True}}, False, {"rollout": {"paused": False}}, "resumed"),
        ({"rollout": None}, True, {"rollout": {"paused": True}}, "paused"),
        (None, True, {"rollout": {"paused": True}}, "paused"),
    ],
)  # fmt: skip
def test_a_rollout_is_held_and_let_go(
    cluster: Cluster,
    capsys: pytest.CaptureFixture[str],
    before: dict[str, Any] | None,
    paused: bool,
    after: dict[str, Any],
    said: str,
) -> None:
    cluster.live = {"spec": before}
    assert run("pause" if paused else "resume") == Exit.DONE
    assert cluster.written == [(after, {})]
    assert lines(capsys) == [f"pdcluster.pdcluster.dev/tiny {said}"]


@pytest.mark.parametrize("paused", [False, True])
def test_a_restart_asks_for_new_engines_with_the_time_of_now(
    cluster: Cluster, capsys: pytest.CaptureFixture[str], paused: bool
) -> None:
    cluster.live = {"spec": {"a": 1, "rollout": {"paused": paused, "renew": "before"}}}
    assert run("restart") == Exit.DONE
    settings = {"paused": paused, "renew": "2027-01-15T08:00:00Z"}
    assert cluster.written == [({"a": 1, "rollout": settings}, {})]
    first, *more = lines(capsys)
    assert first == "pdcluster.pdcluster.dev/tiny restarted"
    assert [line.partition(" is set")[0] for line in more] == ["rollout.paused"] * paused
    resume = "pdcluster rollout resume tiny -n ns --context there"
    assert all(line.endswith(f"until `{resume}`") for line in more)


@pytest.mark.parametrize(
    ("before", "paused", "said"),
    [({"paused": True}, True, "paused already"), ({"paused": False}, False, "not paused"),
     ({}, False, "not paused"), (None, False, "not paused")],
)  # fmt: skip
def test_what_is_so_already_is_not_written(
    cluster: Cluster, before: dict[str, Any] | None, paused: bool, said: str
) -> None:
    cluster.live = {"spec": {"rollout": before}}
    with pytest.raises(UserError, match=rf"^pdcluster.pdcluster.dev/tiny is {said}$") as ended:
        run("pause" if paused else "resume")
    assert ended.value.exit == Exit.REQUEST_FAILED
    assert cluster.written == []


BACK = {"a": 0}


@pytest.mark.parametrize("dry_run", [False, True])
@pytest.mark.parametrize("paused", [False, True])
def test_an_undo_says_what_changes_and_what_keeps_it(
    cluster: Cluster, capsys: pytest.CaptureFixture[str], dry_run: bool, paused: bool
) -> None:
    cluster.live = {"spec": {"a": 1, "rollout": {"paused": paused}}}
    cluster.stored = Undo(BACK, {Role.DECODE: "aaaaa"}, ("spec.a", "spec.b"))
    assert run("undo", *["--dry-run"] * dry_run) == Exit.DONE
    assert cluster.written == [(BACK, {"dry_run": dry_run})]
    first, changed, engines, *more = lines(capsys)
    assert first.startswith("pdcluster.pdcluster.dev/tiny rolled back")
    assert first.endswith("(dry run: nothing was written)") is dry_run
    assert (changed, engines) == ("changed: spec.a, spec.b", "decode: engines of revision aaaaa")
    assert [line.partition(" is set")[0] for line in more] == ["rollout.paused"] * paused
    resume = "pdcluster rollout resume tiny -n ns --context there"
    assert all(line.endswith(f"until `{resume}`") for line in more)


def test_without_another_revision_nothing_is_written(cluster: Cluster) -> None:
    with pytest.raises(UserError, match=r"no other revision of pdcluster\.pdcluster\.dev/tiny"):
        run("undo")
    assert cluster.written == []
