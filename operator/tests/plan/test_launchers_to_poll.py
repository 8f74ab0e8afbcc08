"""Which launchers are polled: node 0 of every engine that has an address."""

from __future__ import annotations

from typing import Any

import pytest

from pdcluster_connector.protocol.launcher_documents import (
    LinkReport,
    LinksReport,
    PeerEntry,
    PeersDocument,
    PromptsReport,
)
from pdcluster_operator.api.spec.types import Certificates
from pdcluster_operator.plan.launchers import launchers_to_poll
from pdcluster_operator.plan.peers_and_canaries import has_other_peers

MADE = {
    "kind": "StatefulSet",
    "metadata": {"name": "tiny-decode-abcde-0"},
    "spec": {"template": {"metadata": {}, "spec": {"containers": []}}},
}
"""Its template has no certificates."""


def test_only_leaders_with_an_address_are_asked() -> None:
    def pod(name: str, index: str, **status: object) -> dict[str, Any]:
        return {
            "metadata": {
                "name": name,
                "namespace": "ns",
                "uid": name,
                "labels": {
                    "pdcluster.dev/engine": "tiny-decode-abcde-0",
                    "pdcluster.dev/role": "decode",
                    "pdcluster.dev/cluster": "tiny",
                    "pdcluster.dev/revision": "abcde",
                    "apps.kubernetes.io/pod-index": index,
                },
            },
            "status": status,
        }

    targets = list(
        launchers_to_poll(
            [
                pod("a", "0", podIP="10.0.0.1"),
                pod("b", "1", podIP="10.0.0.2"),
                pod("third", "2", podIP="10.0.0.3"),
                pod("c", "0"),
                {"metadata": {"name": "r", "labels": {}}},
            ],
            [MADE],
        )
    )
    assert [target.url for target in targets] == ["http://10.0.0.1:5590"]
    [again] = launchers_to_poll(
        [pod("a", "0", podIP="10.0.0.1", containerStatuses=[{"restartCount": 1}])], [MADE]
    )
    assert again.process != targets[0].process
    [six] = launchers_to_poll([pod("a", "0", podIP="fd00::1")], [MADE])
    assert six.url == "http://[fd00::1]:5590"
    [unknown] = launchers_to_poll([pod("a", "0", podIP="10.0.0.1")], [])
    assert unknown.url == "https://10.0.0.1:5590", "nothing says that it has no TLS"
    assert unknown.certificates is Certificates.UNKNOWN


@pytest.mark.parametrize(
    ("told", "linked", "other"),
    [
        ((), (), False),
        (("a", "b"), ("b", "a"), False),
        (("a",), (), True),
        (("a",), ("a", "b"), True),
        (("a",), ("b",), True),
    ],
)
def test_links_that_another_document_made(
    told: tuple[str, ...], linked: tuple[str, ...], other: bool
) -> None:
    links = tuple(LinkReport(prefill=name, prefill_engine_id="p/1") for name in linked)
    report = LinksReport("d", "d/1", links, PromptsReport(0, 0, ""))
    body = PeersDocument(1, tuple(PeerEntry(name, "h:1") for name in told))
    assert has_other_peers(body, report) is other
