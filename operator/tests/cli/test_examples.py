"""examples/*.yaml: clean under our own rules, admitted by a default install, pinned."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from pdcluster_operator.adapters.metrics import Metrics
from pdcluster_operator.api.rules.validate import check_manifest
from pdcluster_operator.api.spec.resources import parse_quantity
from pdcluster_operator.api.spec.types import Role
from pdcluster_operator.cli.main import main

EXAMPLES = Path(__file__).parents[3] / "examples"
FILES = sorted(EXAMPLES.glob("*.yaml"))
every_file = pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)


def cluster_of(path: Path) -> dict[str, Any]:
    documents = [document for document in yaml.safe_load_all(path.read_text()) if document]
    [cluster] = [document for document in documents if document["kind"] == "PDCluster"]
    return cluster


def head_of(path: Path) -> str:
    """The comment that a file begins with, without its marks."""
    lines = path.read_text().splitlines()
    head = lines[: next(n for n, line in enumerate(lines) if not line.startswith("#"))]
    return "\n".join(line.removeprefix("#").removeprefix(" ") for line in head)


@every_file
def test_a_default_install_admits_it_or_the_file_says_what_to_set(path: Path) -> None:
    _, findings = check_manifest(cluster_of(path), host_paths=False)
    refused = {str(error.rule) for error in findings.errors}
    assert refused <= {"HostPathNotAdmitted"}, findings.errors
    if refused:
        assert "operator.allowHostPathModels=true" in head_of(path)


@every_file
def test_lint_finds_no_error_and_no_warning_that_the_file_does_not_name(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["lint", str(path)]) == 0
    printed = capsys.readouterr().out
    for rule in re.findall(r"\[([A-Z]\w+)\]$", printed, re.MULTILINE):
        assert rule in head_of(path), printed


@every_file
def test_it_begins_with_what_for_whom_what_it_needs_and_how_to_apply_it(path: Path) -> None:
    head = head_of(path)
    assert re.match(r"\S.+\.$", head.splitlines()[0])
    for label in ("For:", "Needs:", "Apply:"):
        assert len(re.findall(rf"^{label} +\S", head, re.MULTILINE)) == 1
    assert f"examples/{path.name}" in head or "make demo" in head
    for name in re.findall(r"--for=condition=Ready pdc/(\S+)", head):
        assert name == cluster_of(path)["metadata"]["name"]


@every_file
def test_what_it_runs_is_pinned_and_bounded(path: Path) -> None:
    """Weights by commit, the image by a release, memory by request and limit."""
    cluster, _ = check_manifest(cluster_of(path))
    source = cluster.spec.model.source.hugging_face
    if source is not None:
        assert re.fullmatch(r"[0-9a-f]{40}", source.revision or "")
    assert re.search(r":v\d+\.\d+\.\d+$", cluster.spec.engine.image or "")
    for role in Role:
        spec = cluster.spec.role(role)
        requested = parse_quantity(spec.resources.requests["memory"])
        limit = parse_quantity(spec.resources.limits.get("memory", "1Ei"))
        assert requested is not None
        assert limit is not None
        assert requested <= limit
        if spec.parallelism.nodes > 1:
            assert cluster.spec.transfer.rdma is not None


def autoscalers() -> list[tuple[Path, dict[str, Any], str]]:
    """Each autoscaler of a file, and the role whose number it sets."""
    roles = {"PDCluster": "decode", "PrefillScaler": "prefill"}
    return [
        (path, document, roles[document["spec"]["scaleTargetRef"]["kind"]])
        for path in FILES
        for document in yaml.safe_load_all(path.read_text())
        if document and document["kind"] in ("HorizontalPodAutoscaler", "ScaledObject")
    ]


def test_an_autoscaler_scales_a_cluster_of_its_file_that_leaves_the_number_to_it() -> None:
    assert len(autoscalers()) == 5
    for path, scaler, role in autoscalers():
        documents = list(yaml.safe_load_all(path.read_text()))
        kind = "PrefillScaler" if role == "prefill" else "PDCluster"
        [target] = [one for one in documents if one["kind"] == kind]
        names = {key: target[key] for key in ("apiVersion", "kind")}
        assert scaler["spec"]["scaleTargetRef"] == names | {"name": target["metadata"]["name"]}
        assert "replicas" not in cluster_of(path)["spec"].get(role, {})


def test_an_autoscaler_that_follows_the_advice_asks_for_what_the_operator_shows() -> None:
    """As many engines as the metric says, and within the bounds of the advice."""
    followers = 0
    for path, scaler, role in autoscalers():
        spec, cluster = scaler["spec"], cluster_of(path)
        if "autoscaling" not in cluster["spec"]:
            continue
        followers += 1
        name, bounds = cluster["metadata"]["name"], cluster["spec"]["autoscaling"][role]
        assert cluster["spec"]["autoscaling"]["mode"] == "Advise", "only one sets a number"
        if scaler["kind"] == "ScaledObject":
            [trigger] = spec["triggers"]
            assert (trigger["type"], trigger["metricType"]) == ("prometheus", "AverageValue")
            query = re.fullmatch(r"max\((\w+)\{(.+)\}\)", trigger["metadata"]["query"])
            assert query is not None
            metric, labels = query[1], dict(re.findall(r'(\w+)="([^"]*)"', query[2]))
            assert trigger["metadata"]["threshold"] == "1"
            # KEDA takes 0 where Prometheus has no value, and would end all engines but one.
            assert trigger["metadata"]["ignoreNullValues"] == "false"
            least, most = spec["minReplicaCount"], spec["maxReplicaCount"]
        else:
            [external] = [one["external"] for one in spec["metrics"]]
            metric, labels = (
                external["metric"]["name"],
                external["metric"]["selector"]["matchLabels"],
            )
            assert external["target"] == {"type": "AverageValue", "averageValue": "1"}
            least, most = spec["minReplicas"], spec["maxReplicas"]
        assert metric == "pdcluster_advised_engines"
        assert labels.pop("cluster_namespace", "default") == "default"
        assert labels == {"cluster": name, "role": role}
        assert {"min": least, "max": most} == bounds
    assert followers == 4
    statuses = {("ns", "auto"): {"scaling": {"prefill": 2, "decode": 5}}}
    metrics = Metrics()
    metrics._read_statuses(statuses, {})
    text = metrics.text().decode()
    for role, number in (("prefill", 2), ("decode", 5)):
        labels = f'cluster="auto",cluster_namespace="ns",role="{role}"'
        assert f"pdcluster_advised_engines{{{labels}}} {number}.0" in text


def test_the_index_lists_every_file() -> None:
    listed = re.findall(
        r"^\| \[(.+?)\]\((.+?)\)", (EXAMPLES / "README.md").read_text(), re.MULTILINE
    )
    assert sorted(name for name, _ in listed) == [path.name for path in FILES]
    assert all(name == link for name, link in listed)
    assert len(FILES) >= 11


@pytest.mark.sampled
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_printed_manifests_hold_no_yaml_aliases(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["plan", str(path), "--output", "yaml"])
    text = capsys.readouterr().out
    assert (
        "kind: StatefulSet" in text or "kind: Job" in text
    )  # which downloads before engines start
    assert not re.search(r"[:-] [&*]\w+$", text, re.MULTILINE)
