"""A real API server takes the StatefulSets of every source of weights, and the PDClusters."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from operator_runs import CHILDREN, GROUP, cluster
from simulated_cluster import SimulatedCluster

pytestmark = pytest.mark.cluster

LOGIN = {"name": "login"}
SOURCES = {
    "oci": {"oci": {"image": "r.example.com/m/llama:v1", "path": "m", "pullSecretRef": LOGIN}},
    "s3": {
        "objectStorage": {
            "uri": "s3://models/llama",
            "endpoint": "https://minio.storage:9000",
            "credentialsSecretRef": LOGIN,
        }
    },
    "gs": {"objectStorage": {"uri": "gs://models/llama", "credentialsSecretRef": LOGIN}},
    "identity of the pod": {"objectStorage": {"uri": "gs://models/llama"}},
}


@pytest.mark.parametrize("source", list(SOURCES))
def test_a_source_of_weights_is_admitted(real, namespace, source):
    manifest = cluster(model={"source": SOURCES[source]}, transfer={"device": "CUDA"})
    path = f"{GROUP}/namespaces/{namespace}/pdclusters?dryRun=All"
    status, answer = real.call("POST", path, manifest)
    assert status == 201, answer
    assert answer["spec"]["model"]["source"] == SOURCES[source], "the CRD keeps all fields"
    manifest["metadata"] |= {"namespace": namespace, "uid": "u", "generation": 1}
    plan = SimulatedCluster(manifest).plan()
    made = [step.manifest for step in plan.steps if getattr(step, "manifest", {}).get("kind")]
    sets = [one for one in made if one["kind"] == "StatefulSet"]
    assert len(sets) == 2
    for one in sets:
        one["metadata"].pop("ownerReferences", None)
        dry = CHILDREN["StatefulSet"].format(namespace) + "?dryRun=All"
        status, answer = real.call("POST", dry, one)
        assert status == 201, answer
        kept = answer["spec"]["template"]["spec"]
        asked = one["spec"]["template"]["spec"]
        assert {v["name"] for v in kept["volumes"]} == {v["name"] for v in asked["volumes"]}
        if source == "oci":
            [model] = [volume for volume in kept["volumes"] if volume["name"] == "model"]
            assert model["image"]["reference"] == "r.example.com/m/llama:v1"
            assert kept["imagePullSecrets"] == [LOGIN]


TEAMS = Path(__file__).parents[1] / "api" / "manifests_of_teams.yaml"


def test_the_objects_of_what_teams_write_are_admitted(real, namespace):
    """What no rule refuses, no API server refuses, either: the PDCluster and all that is made."""
    teams = [one for one in yaml.safe_load(TEAMS.read_text())["teams"] if not one["refused"]]
    assert len(teams) > 20
    refused = []
    for team in teams:
        metadata = {**team["metadata"], "namespace": namespace}
        manifest = {**cluster(), "metadata": metadata, "spec": team["spec"]}
        path = f"{GROUP}/namespaces/{namespace}/pdclusters?dryRun=All"
        status, answer = real.call("POST", path, manifest)
        if status != 201:
            refused.append((team["from"], answer))
            continue
        manifest["metadata"] |= {"uid": "u", "generation": 1}
        steps = SimulatedCluster({**manifest, "spec": answer["spec"]}).plan().steps
        for one in (step.manifest for step in steps if getattr(step, "manifest", None)):
            one["metadata"].pop("ownerReferences", None)
            if one.get("kind") in CHILDREN:
                where = CHILDREN[one["kind"]].format(namespace) + "?dryRun=All"
                status, answer = real.call("POST", where, one)
                refused += [] if status == 201 else [(team["from"], answer)]
    assert refused == []
