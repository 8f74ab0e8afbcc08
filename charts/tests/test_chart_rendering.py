"""What the chart renders, with helm 3 and helm 4 alike.

After a change that is meant, write the golden files again and read the difference:

    PDCLUSTER_REGENERATE=1 python -m pytest charts/tests/test_chart_rendering.py
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import yaml
from chart_helm import CHART, GOLDEN, KUBERNETES, NAMESPACE, HelmError, of_kind, one, pod_specs

REGENERATE = "PDCLUSTER_REGENERATE"
VALUES = {path.stem: path for path in sorted(Path(__file__).parent.glob("values/*.yaml"))}
CASES = {"default": None, **VALUES}
CRD_SOURCE = "templates/crd.yaml"

pytestmark = pytest.mark.helm


@pytest.fixture(params=CASES.values(), ids=CASES)
def values(request) -> Path | None:
    return request.param


def canonical(text: str) -> str:
    """The rendering without what helm's versions do differently: order and blank lines.

    The CRD's 900 lines are left out; they have a test of their own.
    """
    lines = "\n".join(line for line in text.splitlines() if line.strip())
    documents = [part.strip() for part in f"\n{lines}\n".split("\n---\n")]
    return (
        "---\n"
        + "\n---\n".join(sorted(part for part in documents if part and CRD_SOURCE not in part))
        + "\n"
    )


@pytest.mark.parametrize("case", CASES)
def test_rendering_is_the_golden_one(helm, case):
    text = canonical(helm.render(values=CASES[case]))
    golden = GOLDEN / f"{case}.yaml"
    if os.environ.get(REGENERATE):
        golden.write_text(text)
    assert text == golden.read_text(), f"differs; if it is meant, run with {REGENERATE}=1"


def test_no_golden_file_without_a_case():
    assert sorted(path.stem for path in GOLDEN.glob("*.yaml")) == sorted(CASES)


def test_lint_finds_nothing(helm, values):
    words = ["lint", "--strict", str(CHART), "--kube-version", KUBERNETES]
    said = helm.run(*words, *(["--values", str(values)] if values else []))
    assert "[ERROR]" not in said
    assert "[WARNING]" not in said


def test_crd_is_the_generated_one_with_labels(helm):
    rendered = one(helm.objects(), "CustomResourceDefinition")
    metadata = rendered.pop("metadata")
    generated = yaml.safe_load((CHART / "files" / "pdcluster.dev_pdclusters.yaml").read_text())
    assert metadata["name"] == generated.pop("metadata")["name"]
    assert metadata["annotations"] == {"helm.sh/resource-policy": "keep"}
    assert metadata["labels"]["app.kubernetes.io/managed-by"] == "Helm"
    assert rendered == generated


def test_crd_goes_with_the_release_if_so_wanted(helm):
    crd = one(helm.objects("--set", "crds.keep=false"), "CustomResourceDefinition")
    assert "annotations" not in crd["metadata"]
    assert not of_kind(helm.objects("--set", "crds.enabled=false"), "CustomResourceDefinition")


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ("webhok.enabled=false", "webhok"),
        ("webhook.enable=false", "enable"),
        ("webhook.failurePolicy=Never", "failurePolicy"),
        ("webhook.replicas=0", "replicas"),
        ("image.digest=sha256:short", "digest"),
        ("logging.level=loud", "level"),
        ("watchNamespaces={Team}", "watchNamespaces"),
        ("operator.allowHostPathModels=perhaps", "allowHostPathModels"),
        (f"test.namespace={NAMESPACE}", "test.namespace"),
    ],
)
def test_wrong_value_is_refused_by_name(helm, setting, named):
    with pytest.raises(HelmError, match=named):
        helm.render("--set", setting)


def test_pods_satisfy_the_restricted_standard(helm, values):
    for name, spec in pod_specs(helm.objects(values=values)).items():
        pod = spec["securityContext"]
        assert pod["runAsNonRoot"] is True, name
        assert pod["runAsUser"] == 65532, name
        assert pod["seccompProfile"] == {"type": "RuntimeDefault"}, name
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(spec), name
        for volume in spec["volumes"]:
            assert set(volume) & {"emptyDir", "secret", "configMap"}, (name, volume)
        for container in spec["containers"]:
            security = container["securityContext"]
            assert security["allowPrivilegeEscalation"] is False, name
            assert security["readOnlyRootFilesystem"] is True, name
            assert security["capabilities"] == {"drop": ["ALL"]}, name


def test_operator_runs_once(helm):
    spec = one(helm.objects(), "Deployment", "operator")["spec"]
    assert spec["replicas"] == 1
    assert spec["strategy"] == {"type": "Recreate"}


def test_selectors_do_not_change_with_the_version(helm, values):
    for deployment in of_kind(helm.objects(values=values), "Deployment"):
        labels = set(deployment["spec"]["selector"]["matchLabels"])
        assert labels == {f"app.kubernetes.io/{x}" for x in ("name", "instance", "component")}


def test_everything_namespaced_says_its_namespace(helm, values):
    cluster_wide = {
        "ClusterRole",
        "ClusterRoleBinding",
        "CustomResourceDefinition",
        "ValidatingWebhookConfiguration",
    }
    for manifest in helm.objects(values=values):
        if manifest["kind"] not in cluster_wide and not manifest["metadata"]["name"].endswith(
            "-extra"
        ):
            assert manifest["metadata"]["namespace"], manifest["metadata"]["name"]


@pytest.mark.parametrize("release", ["a" * 53, "pdcluster-" + "b" * 43])
def test_long_release_names_stay_valid_and_distinct(helm, release):
    objects = helm.objects(release=release)
    names = [(o["kind"], o["metadata"].get("namespace"), o["metadata"]["name"]) for o in objects]
    assert len(set(names)) == len(names)
    assert all(len(name) <= 63 for kind, _, name in names if kind != "CustomResourceDefinition")


def test_webhook_spares_its_own_namespace_and_what_it_need_not_judge(helm):
    (hook,) = one(helm.objects(), "ValidatingWebhookConfiguration")["webhooks"]
    assert hook["failurePolicy"] == "Fail"
    assert hook["namespaceSelector"]["matchExpressions"] == [
        {"key": "kubernetes.io/metadata.name", "operator": "NotIn", "values": [NAMESPACE]}
    ]
    (rule,) = hook["rules"]
    assert rule["resources"] == ["pdclusters"]
    assert rule["operations"] == ["CREATE", "UPDATE"]
    # A caBundle in the chart would be put back over the operator's at every upgrade.
    assert "caBundle" not in hook["clientConfig"]


def test_webhook_reaches_the_pods_that_serve_it(helm, values):
    objects = helm.objects(values=values)
    for configuration in of_kind(objects, "ValidatingWebhookConfiguration"):
        reference = configuration["webhooks"][0]["clientConfig"]["service"]
        service = one(objects, "Service", "webhook")
        assert (reference["namespace"], reference["name"]) == (
            service["metadata"]["namespace"],
            service["metadata"]["name"],
        )
        template = one(objects, "Deployment", "webhook")["spec"]["template"]
        assert service["spec"]["selector"].items() <= template["metadata"]["labels"].items()
        ports = {port["name"] for port in template["spec"]["containers"][0]["ports"]}
        assert service["spec"]["ports"][0]["targetPort"] in ports
