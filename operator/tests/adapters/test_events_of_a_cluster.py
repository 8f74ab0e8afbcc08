"""What the operator posts as Kubernetes events: a repeat is counted, and nothing fails for one."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pdcluster_operator.adapters.api_server.client import NotFound
from pdcluster_operator.adapters.api_server.events import KubeEvents
from pdcluster_operator.plan.types import Event
from pdcluster_operator.runtime.interfaces import ApiError

CLUSTER = {"metadata": {"namespace": "ns", "name": "tiny", "uid": "u"}}
READY = Event("Normal", "Ready", "it serves")
HALF_AN_HOUR = 1800.0


class Server:
    """Takes events, and fails on demand."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str, dict[str, Any]]] = []
        self.fail: ApiError | None = None

    async def call(self, method: str, path: str, **what: Any) -> dict[str, Any]:
        if self.fail is not None:
            error, self.fail = self.fail, None
            raise error
        self.calls.append((method, path, what["body"]))
        if method == "PATCH":
            assert what["content"] == "application/merge-patch+json"
        return {}

    def posted(self) -> list[dict[str, Any]]:
        return [body for method, _, body in self.calls if method == "POST"]

    def counted(self) -> list[int]:
        return [body["series"]["count"] for method, _, body in self.calls if method == "PATCH"]


class Sink:
    def __init__(self) -> None:
        self.now, self.server = 1_800_000_000.0, Server()
        self.events = KubeEvents(self.server, lambda: self.now)  # type: ignore[arg-type]

    def publish(self, *events: Event, cluster: dict[str, Any] = CLUSTER) -> None:
        asyncio.run(self.events.publish(cluster, events))


def test_an_event_names_its_cluster() -> None:
    sink = Sink()
    sink.publish(Event("Warning", "Failed", "x" * 2000))
    [(method, path, body)] = sink.server.calls
    assert (method, path) == ("POST", "/apis/events.k8s.io/v1/namespaces/ns/events")
    assert body["regarding"] == {
        "apiVersion": "pdcluster.dev/v1alpha1", "kind": "PDCluster",
        "namespace": "ns", "name": "tiny", "uid": "u",
    }  # fmt: skip
    assert (body["type"], body["reason"]) == ("Warning", "Failed")
    assert body["note"] == "x" * 1024, "the API server takes no more"
    assert body["metadata"]["name"].startswith("tiny.")
    assert body["eventTime"] == "2027-01-15T08:00:00.000000Z"
    assert body["reportingController"] == "pdcluster.dev/operator"


def test_an_event_in_any_script_is_one_that_the_api_server_takes() -> None:
    """It counts bytes of the note, and refuses a reason that is longer than 128 characters."""
    sink = Sink()
    sink.publish(Event("Warning", "F" * 256, "x" + "…" * 1024))
    [body] = sink.server.posted()
    assert body["note"] == "x" + "…" * 341
    assert body["reason"] == "F" * 128


def test_a_repeat_within_half_an_hour_is_counted() -> None:
    sink = Sink()
    sink.publish(READY)
    for _ in range(2):
        sink.now += HALF_AN_HOUR - 1
        sink.publish(READY)
    assert (len(sink.server.posted()), sink.server.counted()) == (1, [2, 3])
    name = sink.server.posted()[0]["metadata"]["name"]
    assert sink.server.calls[-1][1].endswith(f"/events/{name}")
    assert sink.server.calls[-1][2]["series"]["lastObservedTime"] == "2027-01-15T08:59:58.000000Z"
    sink.now += HALF_AN_HOUR
    sink.publish(READY)
    names = [body["metadata"]["name"] for body in sink.server.posted()]
    assert len(set(names)) == 2, "after a pause it is another event"


@pytest.mark.parametrize(
    ("event", "uid"),
    [
        (Event("Warning", "Ready", "it serves"), "u"),
        (Event("Normal", "Served", "it serves"), "u"),
        (Event("Normal", "Ready", "it serves again"), "u"),
        (READY, "another"),
    ],
)
def test_another_event_is_no_repeat(event: Event, uid: str) -> None:
    sink = Sink()
    sink.publish(READY)
    sink.publish(event, cluster={"metadata": {**CLUSTER["metadata"], "uid": uid}})
    assert (len(sink.server.posted()), sink.server.counted()) == (2, [])


def test_an_event_that_the_server_has_forgotten_is_posted_again() -> None:
    sink = Sink()
    sink.publish(READY)
    sink.server.fail = NotFound("it is gone")
    sink.publish(READY)
    assert (len(sink.server.posted()), sink.server.counted()) == (2, [])
    sink.publish(READY)
    assert sink.server.counted() == [2], "of the new one"


def test_an_event_that_cannot_be_posted_is_lost_and_the_next_is_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    sink = Sink()
    sink.server.fail = ApiError("Forbidden", "events is forbidden")
    sink.publish(READY, Event("Normal", "Next", "it goes on"))
    assert [body["reason"] for body in sink.server.posted()] == ["Next"]
    assert caplog.messages == ["event Ready was not posted: events is forbidden"]
    sink.publish(READY)
    assert len(sink.server.posted()) == 2, "it was not posted, so it is no repeat"


def test_what_was_posted_last_is_remembered() -> None:
    sink = Sink()
    first, *others = (Event("Normal", "Told", str(number)) for number in range(4096))
    sink.publish(first, *others)
    sink.publish(first)
    assert sink.server.counted() == [2]
    sink.publish(Event("Normal", "Told", "one more"), first)
    assert sink.server.counted() == [2, 3], "it was told lately"
    sink.publish(others[0])
    assert len(sink.server.posted()) == 4096 + 2, "and this one was forgotten"


@pytest.mark.parametrize(("host", "said"), [("pod-7d", "pod-7d"), ("", "pdcluster-operator")])
def test_an_event_names_the_pod_that_reports_it(
    monkeypatch: pytest.MonkeyPatch, host: str, said: str
) -> None:
    monkeypatch.setenv("HOSTNAME", host)
    sink = Sink()
    sink.publish(READY)
    assert sink.server.posted()[0]["reportingInstance"] == said
