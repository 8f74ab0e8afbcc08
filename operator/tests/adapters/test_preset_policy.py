"""The example of presets: an API server that fills in what a PDCluster leaves out."""

from __future__ import annotations

import copy
import io
import json
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from operator_runs import GROUP, Operator, create, until
from real_api import CRDS, RealApi
from test_admission import configuration, keep, tried  # noqa: F401 (fixtures)

from cluster import binaries
from cluster.places import Places
from conftest import new_namespace
from pdcluster_operator.api.rules.validate import check_manifest
from pdcluster_operator.cli.main import main

pytestmark = pytest.mark.cluster

PRESETS = Path(__file__).parents[3] / "examples" / "presets"
REGISTRATION = "/apis/admissionregistration.k8s.io/v1"
PATHS = {
    "MutatingAdmissionPolicy": f"{REGISTRATION}/mutatingadmissionpolicies",
    "MutatingAdmissionPolicyBinding": f"{REGISTRATION}/mutatingadmissionpolicybindings",
    "CustomResourceDefinition": CRDS,
}
PLACE = "/apis/platform.example.com/v1/namespaces/{}/enginepresets"
LABEL = "platform.example.com/preset"
SYSTEM = "pdcluster-system"
DEFAULT = yaml.safe_load(
    (PRESETS.parents[1] / "crds" / "pdcluster.dev_pdclusters.yaml").read_text()
)
MERGE = "application/merge-patch+json"
JSON_PATCH = "application/json-patch+json"


def documents(name: str) -> list[dict[str, Any]]:
    return [one for one in yaml.safe_load_all((PRESETS / name).read_text()) if one]


def chat(**spec: Any) -> dict[str, Any]:
    """The example of a team, with other fields."""
    [manifest] = documents("team-a/chat.yaml")
    manifest["spec"] |= spec
    return manifest


[PRESET] = documents("preset.yaml")
GIVEN = PRESET["spec"]
IMAGE = GIVEN["engine"]["image"]
POD = GIVEN["prefill"]["podTemplate"]["spec"]


@pytest.fixture(scope="module")
def policy(real: RealApi) -> Iterator[None]:
    """The policy of the example, its bindings and the preset of the cluster, in force."""
    namespace = new_namespace(real)
    real.call("POST", "/api/v1/namespaces", {"metadata": {"name": SYSTEM}})
    made = documents("policy.yaml")
    for one in made:
        status, answer = real.call("POST", PATHS[one["kind"]], one)
        assert status == 201, answer
    preset = PLACE.format(SYSTEM)
    until(lambda: real.call("POST", preset, PRESET)[0] == 201, 60, lambda: real.call("GET", preset))

    def has(image: str) -> bool:
        # Two of them: a server reads new policies a moment later.
        asked = [tried(real, namespace, chat()) for _ in range(2)]
        return all(s == 201 and a["spec"]["engine"]["image"] == image for s, a in asked)

    until(lambda: has(IMAGE), 60, lambda: tried(real, namespace, chat()))
    yield
    for one in reversed(made):
        real.call("DELETE", f"{PATHS[one['kind']]}/{one['metadata']['name']}")
    until(lambda: has(default_image()), 60, lambda: tried(real, namespace, chat()))


def default_image() -> str:
    schema = DEFAULT["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    found: str = schema["properties"]["spec"]["properties"]["engine"]["properties"]["image"][
        "default"
    ]
    return found


def labelled(real: RealApi, value: str) -> str:
    """A new namespace with this label, once the policies see it."""
    name = new_namespace(real)
    labels = {"metadata": {"labels": {LABEL: value}}}
    assert real.call("PATCH", f"/api/v1/namespaces/{name}", labels, MERGE)[0] == 200
    return name


def replaced(spec: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"op": "replace", "path": "/spec", "value": spec}]


def answered(real: RealApi, namespace: str, manifest: dict[str, Any]) -> dict[str, Any]:
    status, answer = tried(real, namespace, manifest)
    assert status == 201, answer
    spec: dict[str, Any] = answer["spec"]
    return spec


def test_the_policy_names_the_default_of_the_crd() -> None:
    assert f"== '{default_image()}'" in (PRESETS / "policy.yaml").read_text()


@pytest.mark.usefixtures("policy")
def test_what_is_left_out_is_filled_in_and_what_is_written_wins(
    real: RealApi, namespace: str
) -> None:
    spec = answered(real, namespace, chat())
    assert spec["engine"]["image"] == IMAGE
    assert spec["commonMetadata"]["labels"] == GIVEN["commonMetadata"]["labels"]
    assert spec["model"]["cache"] == {"persistentVolumeClaim": {"claimName": "model-cache"}}
    assert spec["prefill"]["resources"] == GIVEN["prefill"]["resources"]
    assert spec["decode"]["resources"] == chat()["spec"]["decode"]["resources"], "the team's own"
    for role in ("prefill", "decode"):
        pod = spec[role]["podTemplate"]["spec"]
        assert pod == POD
    assert "podTemplate" not in spec["router"]

    own = {
        "engine": {"image": "docker.io/vllm/vllm-openai:v0.32.1", "maxModelLen": 4096},
        "commonMetadata": {"labels": {"example.com/cost-centre": "ours", "team": "a"}},
        "podTemplate": {"spec": {"tolerations": []}},
        "prefill": {"podTemplate": {"spec": {"nodeSelector": {"a": "b"}}}},
        "decode": {"podTemplate": {"metadata": {"labels": {"a": "b"}}}},
        "model": {"source": {"persistentVolumeClaim": {"claimName": "weights"}}},
    }
    spec = answered(real, namespace, chat(**own))
    assert spec["engine"]["image"] == own["engine"]["image"]
    assert spec["commonMetadata"] == own["commonMetadata"]
    assert spec["model"] == own["model"]
    prefill, decode = (spec[role]["podTemplate"] for role in ("prefill", "decode"))
    assert prefill["spec"] == {"nodeSelector": {"a": "b"}, "affinity": POD["affinity"]}
    assert decode["metadata"] == {"labels": {"a": "b"}}
    assert decode["spec"] == {key: POD[key] for key in ("nodeSelector", "affinity")}


@pytest.mark.usefixtures("policy")
def test_a_namespace_has_the_preset_of_the_cluster_its_own_or_none(
    real: RealApi, namespace: str
) -> None:
    none, own = labelled(real, "none"), labelled(real, "own")
    until(lambda: answered(real, none, chat())["engine"]["image"] == default_image(), 60, dict)
    assert answered(real, none, chat()).keys() & {"commonMetadata", "podTemplate"} == set()
    until(lambda: tried(real, own, chat())[0] != 201, 60, dict)
    status, answer = tried(real, own, chat())
    assert (status, "no params found" in answer["message"]) == (403, True), answer
    theirs = copy.deepcopy(PRESET)
    theirs["metadata"]["namespace"] = own
    theirs["spec"]["prefill"]["podTemplate"]["spec"]["nodeSelector"] = {"example.com/pool": "own"}
    assert real.call("POST", PLACE.format(own), theirs)[0] == 201
    until(lambda: tried(real, own, chat())[0] == 201, 60, dict)
    pods = [answered(real, one, chat())["prefill"]["podTemplate"] for one in (own, namespace)]
    assert [one["spec"]["nodeSelector"]["example.com/pool"] for one in pods] == ["own", "gpu"]


@pytest.mark.usefixtures("policy")
def test_only_a_change_of_the_spec_takes_the_preset(real: RealApi) -> None:
    """A PDCluster of before stays as it is when only its metadata changes."""
    name = labelled(real, "none")
    until(lambda: answered(real, name, chat())["engine"]["image"] == default_image(), 60, dict)
    create(real, name, chat())
    bare = {"metadata": {"labels": {LABEL: None}}}
    assert real.call("PATCH", f"/api/v1/namespaces/{name}", bare, MERGE)[0] == 200
    path = f"{GROUP}/namespaces/{name}/pdclusters/chat"

    def image(change: dict[str, Any]) -> str:
        status, answer = real.call("PATCH", f"{path}?dryRun=All", change, MERGE)
        assert status == 200, answer
        found: str = answer["spec"]["engine"]["image"]
        return found

    spec = {"spec": {"decode": {"replicas": 3}}}
    until(lambda: image(spec) == IMAGE, 60, lambda: image(spec))
    assert image({"metadata": {"labels": {"team": "a"}}}) == default_image()
    scale = real.call("PATCH", f"{path}/scale", {"spec": {"replicas": 3}}, MERGE)
    assert scale[0] == 200
    assert real.call("GET", path)[1]["spec"]["engine"]["image"] == default_image()
    real.call("DELETE", path)


@pytest.mark.usefixtures("policy")
async def test_a_bad_preset_is_refused_with_the_field(
    real: RealApi,
    namespace: str,
    keep: Callable[[float], Any],  # noqa: F811
    configuration: tuple[str, int],  # noqa: F811
) -> None:
    """A preset has a PDCluster's fields, so the paths of our webhook's answer are those of both."""
    place = f"{PLACE.format(SYSTEM)}/preset"
    await keep(time.time())
    words = (f"--certificate-folder={keep.folder}", f"--port={configuration[1]}")
    hook = Operator(real, "webhook", *words)
    hook.start()
    try:
        until(lambda: tried(real, namespace, chat())[0] == 201, 60, hook.said)
        bad = copy.deepcopy(GIVEN)
        bad["prefill"]["podTemplate"]["spec"]["tolerations"][0]["operator"] = "Exist"
        bad["prefill"]["resources"]["limits"] |= {"nvidia.com/gpu": "3"}
        assert real.call("PATCH", place, replaced(bad), JSON_PATCH)[0] == 200
        until(lambda: tried(real, namespace, chat())[0] == 422, 60, hook.said)
        message = tried(real, namespace, chat())[1]["message"]
        assert "spec.prefill.podTemplate.spec.tolerations[0].operator" in message, message
        assert "spec.prefill.resources.limits.nvidia.com/gpu" in message, message
    finally:
        assert real.call("PATCH", place, replaced(GIVEN), JSON_PATCH)[0] == 200
        until(lambda: tried(real, namespace, chat())[0] == 201, 60, hook.said)
        assert hook.stop() == 0


@pytest.mark.usefixtures("policy")
def test_plan_and_lint_read_what_the_dry_run_answers(
    real: RealApi,
    namespace: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    resolved = json.dumps(tried(real, namespace, chat())[1])
    for words in (["lint", "-"], ["plan", "-", "--output", "yaml"]):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(resolved.encode())))
        code, printed = main(words), capsys.readouterr().out
        assert code == 0, printed
    made = [one for one in yaml.safe_load_all(printed) if one and one["kind"] == "StatefulSet"]
    pod = made[0]["spec"]["template"]["spec"]
    assert pod["tolerations"] == POD["tolerations"]
    assert pod["containers"][0]["image"] == IMAGE


@pytest.mark.usefixtures("policy")
def test_the_component_of_kustomize_says_the_same(real: RealApi, namespace: str) -> None:
    [kubectl] = binaries.provide(
        [one for one in binaries.PROGRAMS if one.name == "kubectl"], Places.of_user()
    ).values()
    words = [str(kubectl), "kustomize", str(PRESETS / "team-a")]
    rendered = yaml.safe_load(subprocess.run(words, capture_output=True, check=True).stdout)
    cluster, findings = check_manifest(rendered)
    assert findings.ok
    assert cluster.spec == check_manifest(tried(real, namespace, chat())[1])[0].spec
