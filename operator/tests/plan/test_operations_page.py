"""docs/operations.md: its examples are accepted and do what it says, its tests exist."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from simulated_cluster import CONNECTOR, START

from pdcluster_operator.api.findings import Findings
from pdcluster_operator.api.rules.validate import check_manifest
from pdcluster_operator.plan.planner import make_plan
from pdcluster_operator.plan.types import Apply, Observed

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "operations.md").read_text()
SECTIONS = {part.splitlines()[0]: part for part in PAGE.split("\n## ")[1:]}
MARK = "**Not tested on GPUs"


def examples() -> list[tuple[str, dict[str, Any]]]:
    fence = re.compile(r"^```yaml\n(.*?)^```", re.MULTILINE | re.DOTALL)
    return [
        (title, yaml.safe_load(text))
        for title, section in SECTIONS.items()
        for text in fence.findall(section)
    ]


EXAMPLES = examples()


def whole(example: dict[str, Any]) -> dict[str, Any]:
    """A cluster that the example is a part of."""
    spec = {"model": {"source": {"persistentVolumeClaim": {"claimName": "weights"}}}}
    return {
        "apiVersion": "pdcluster.dev/v1alpha1",
        "kind": "PDCluster",
        **example,
        "metadata": {"name": "llama", "namespace": "llm", "uid": "1", "generation": 1},
        "spec": spec | example["spec"],
    }


def lint(example: dict[str, Any]) -> Findings:
    return check_manifest(whole(example), host_paths=False)[1]


def plan(title: str, number: int = 0) -> dict[tuple[str, str], dict[str, Any]]:
    """What an example of a section becomes: kind and component to manifest."""
    example = [document for name, document in EXAMPLES if name == title][number]
    steps = make_plan(Observed(whole(example), (), (), {}, {}, CONNECTOR), START).steps
    made = [step.manifest for step in steps if isinstance(step, Apply)]
    component = "app.kubernetes.io/component"
    return {(m["kind"], m["metadata"]["labels"][component]): dict(m) for m in made}


def pod(made: dict[tuple[str, str], dict[str, Any]], role: str) -> dict[str, Any]:
    kind = "Deployment" if role == "router" else "StatefulSet"
    template: dict[str, Any] = made[kind, role]["spec"]["template"]["spec"]
    return template


def test_there_are_examples_in_most_sections() -> None:
    assert len(EXAMPLES) >= 9
    assert len({title for title, _ in EXAMPLES}) >= 8


@pytest.mark.parametrize(
    "example", [example for _, example in EXAMPLES], ids=[title for title, _ in EXAMPLES]
)
def test_a_default_install_admits_every_example(example: dict[str, Any]) -> None:
    found = lint(example)
    assert found.ok, [str(error) for error in found.errors]
    rules = {warning.rule for warning in found.warnings}
    assert ("HostNamespace" in rules) is ("hostPID" in str(example))


def test_the_pages_examples_do_what_the_page_says() -> None:
    key = plan("Ask for an API key")
    (router,) = pod(key, "router")["containers"]
    assert router["command"][-1].endswith(".router_gate")
    for role in ("prefill", "decode", "router"):
        (container,) = pod(key, role)["containers"]
        (entry,) = [e for e in container["env"] if e["name"] == "VLLM_API_KEY"]
        assert entry["valueFrom"]["secretKeyRef"] == {"name": "llama-api", "key": "token"}

    door = plan("Say who may reach the router")["NetworkPolicy", "router"]["spec"]["ingress"]
    assert [len(rule.get("from", ())) for rule in door if rule["ports"][0]["port"] == 8000] == [2]

    two = plan("The router's resources, and drains of nodes")
    assert two["PodDisruptionBudget", "router"]["spec"]["maxUnavailable"] == 1
    assert pod(two, "router")["containers"][0]["resources"]["limits"] == {"memory": "4Gi"}
    assert ("PodDisruptionBudget", "router") not in key

    (shm,) = [v for v in pod(plan("Shared memory"), "decode")["volumes"] if v["name"] == "shm"]
    assert shm == {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "32Gi"}}

    shared = plan("Several engines on a node")
    limits = {
        role: pod(shared, role)["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]
        for role in ("prefill", "decode")
    }
    assert limits == {"prefill": "2", "decode": "4"}

    nvlink = plan("NVLink between engines on a node", 1)
    for role in ("prefill", "decode"):
        spec = pod(nvlink, role)
        assert spec["hostPID"] is True
        assert spec["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == 0

    rdma = pod(plan("RDMA"), "prefill")["containers"][0]
    assert rdma["resources"]["limits"]["rdma/ib"] == "1"
    assert rdma["securityContext"]["capabilities"]["add"] == ["IPC_LOCK"]

    late = pod(plan("How long a start may take"), "decode")["containers"][0]["startupProbe"]
    assert late["failureThreshold"] * late["periodSeconds"] == 21_600


def test_the_table_of_downloads_is_computed() -> None:
    section = SECTIONS["How long a start may take"]
    head, _, *rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in section.splitlines()
        if line.startswith("|")
    ]
    speeds = [float(cell.split()[0]) for cell in head[1:]]
    for row in rows:
        size = float(row[0].split()[0])
        assert row[1:] == [f"{math.ceil(size * 8 / speed / 60)} min" for speed in speeds]
    (seven,) = [row for row in rows if row[0] == "700 GB"]
    one = int(seven[head.index("1 Gbit/s")].split()[0])
    assert f"leaves {120 - one} minutes" in section
    assert int(seven[head.index("0.5 Gbit/s")].split()[0]) > 120


@pytest.mark.parametrize("title", list(SECTIONS))
def test_a_section_names_tests_that_exist_or_says_that_there_are_none(title: str) -> None:
    names = re.findall(r"<!-- tested: (\w+) -->", SECTIONS[title])
    assert names, "name the tests of what this section says"
    folders = ("operator/tests", "connector/tests", "charts/tests", "e2e/tests")
    known = {
        name
        for folder in folders
        for path in (ROOT / folder).rglob("test_*.py")
        for name in re.findall(r"^(?:async )?def (test_\w+)", path.read_text(), re.MULTILINE)
    }
    assert set(names) <= known, set(names) - known


@pytest.mark.parametrize("title", ["NVLink between engines on a node", "RDMA"])
def test_what_only_gpus_could_show_is_marked(title: str) -> None:
    assert SECTIONS[title].split("\n", 2)[2].startswith(MARK)
