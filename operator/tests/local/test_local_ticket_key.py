"""The ticket key on this machine: a file in the run's folder that the user alone can read."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
from fake_engine import fake_connector
from manifests import tiny

from pdcluster_connector.sidechannel.ticket_key_file import parse_keys
from pdcluster_operator.local.api_server import LocalApi
from pdcluster_operator.local.kubelet import volume_folder
from pdcluster_operator.plan.builders.secrets import TICKET_KEY_FILE, TICKET_KEY_VOLUME
from pdcluster_operator.plan.planner import make_plan
from pdcluster_operator.plan.types import Apply, Observed, WriteTicketKey
from pdcluster_operator.runtime.cluster_secrets import with_a_new_key


def test_the_key_is_a_file_that_the_connector_reads(tmp_path: Path) -> None:
    api = LocalApi()
    metadata = {"name": "tiny", "namespace": "default"}
    live = api.apply({**tiny(tmp_path), "metadata": metadata})
    plan = make_plan(Observed(live, (), (), {}, {}, fake_connector()), 0.0)
    [step] = [step for step in plan.steps if isinstance(step, WriteTicketKey)]
    [pod, *_] = [
        step.manifest["spec"]["template"]["spec"]
        for step in plan.steps
        if isinstance(step, Apply) and step.manifest["kind"] == "StatefulSet"
    ]
    [volume] = [volume for volume in pod["volumes"] if volume["name"] == TICKET_KEY_VOLUME]
    with pytest.raises(OSError, match="there is no such Secret"):
        volume_folder(api, "default", volume, tmp_path)
    api.apply(with_a_new_key(step, None))
    file = volume_folder(api, "default", volume, tmp_path) / TICKET_KEY_FILE
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert len(parse_keys(file.read_bytes()).accepted) == 1
    api.apply(with_a_new_key(step, api.get("Secret", "default", "tiny-ticket-key")))
    assert volume_folder(api, "default", volume, tmp_path) == file.parent
    assert len(parse_keys(file.read_bytes()).accepted) == 2
