"""Which launchers are polled: node 0 of every engine that has an address."""

from __future__ import annotations

from typing import Any

from pdcluster_operator.plan.launchers import launchers_to_poll


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
                pod("c", "0"),
                {"metadata": {"name": "r", "labels": {}}},
            ]
        )
    )
    assert [target.url for target in targets] == ["http://10.0.0.1:5590"]
    [again] = launchers_to_poll(
        [pod("a", "0", podIP="10.0.0.1", containerStatuses=[{"restartCount": 1}])]
    )
    assert again.process != targets[0].process
    [six] = launchers_to_poll([pod("a", "0", podIP="fd00::1")])
    assert six.url == "http://[fd00::1]:5590"
