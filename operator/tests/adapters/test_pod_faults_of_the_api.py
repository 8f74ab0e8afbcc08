"""Faults of pod templates, given to a real API server: which ones it refuses."""

from __future__ import annotations

import pytest
from pod_faults import FAULTS
from pod_values import CHOICES, GATED, ONLY_OURS, VALUES, words_of, wrong_word
from simulated_cluster import manifest

from pdcluster_operator.api.object_names import EngineName
from pdcluster_operator.api.spec.parse import parse_cluster
from pdcluster_operator.api.spec.resolve import resolve_engine
from pdcluster_operator.api.spec.types import Role
from pdcluster_operator.plan.builders import engine_objects

pytestmark = pytest.mark.cluster


@pytest.mark.parametrize("name", FAULTS)
def test_what_is_said_of_the_server_is_so(real, namespace, name):
    fault = FAULTS[name]
    status, answer = try_out(real, namespace, fault.wrong)
    assert (status >= 400) is fault.server, answer
    status, answer = try_out(real, namespace, fault.right)
    assert status < 300, answer


def test_values_and_words_are_those_of_the_server(real, namespace):
    """What we refuse it refuses, and what we accept it accepts."""
    unlike = []

    def expect(refused, template, what):
        status, answer = try_out(real, namespace, template)
        if (status >= 400) is not refused:
            unlike.append((what, status, answer.get("message")))

    for (kind, field), build in CHOICES.items():
        for word in words_of(kind, field):
            if (kind, word) not in GATED:
                expect(False, build(word), (kind, field, word))
        if (kind, field) not in ONLY_OURS:
            expect(True, build(wrong_word(kind, field)), (kind, field))
    for name, (wrong, _, _, right) in VALUES.items():
        expect(True, wrong, name)
        expect(False, right, f"not {name}")
    assert unlike == []


def try_out(real, namespace, template):
    """Status and answer of a dry run of an engine's StatefulSet, made as the operator makes it."""
    claim = {"source": {"persistentVolumeClaim": {"claimName": "weights"}}}
    cluster = parse_cluster(manifest(model=claim, decode={"podTemplate": template})).cluster
    engine, name = (
        resolve_engine(cluster, Role.DECODE),
        EngineName(namespace, "llama", Role.DECODE, "a", 0),
    )
    pod = engine_objects.build_engine_pod(cluster, engine, name, "key", "0" * 64)
    made = engine_objects.build_engine_statefulset(cluster, name, pod, pairing_key="key", nodes=1)
    metadata = {"name": made["metadata"]["name"], "namespace": namespace}
    path = f"/apis/apps/v1/namespaces/{namespace}/statefulsets/{metadata['name']}"
    return real.call(
        "PATCH", f"{path}?fieldManager=test&force=true&dryRun=All", {**made, "metadata": metadata},
        "application/apply-patch+yaml",
    )  # fmt: skip
