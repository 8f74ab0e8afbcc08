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
CASES = {path.stem: path for path in sorted(Path(__file__).parent.glob("values/*.yaml"))}
# Each has a test of its own, and hundreds of lines.
NOT_GOLDEN = ("templates/crd.yaml", "templates/dashboards.yaml", "templates/prometheusrule.yaml")

pytestmark = pytest.mark.helm


@pytest.fixture(params=CASES.values(), ids=CASES)
def values(request) -> Path:
    return request.param


def canonical(text: str) -> str:
    """The rendering without what helm's versions do differently: order and blank lines.

    NOT_GOLDEN is left out.
    """
    lines = "\n".join(line for line in text.splitlines() if line.strip())
    documents = [part.strip() for part in f"\n{lines}\n".split("\n---\n")]
    return (
        "---\n"
        + "\n---\n".join(
            sorted(p for p in documents if p and not any(source in p for source in NOT_GOLDEN))
        )
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
    said = helm.run(*words, "--values", str(values))
    assert "[ERROR]" not in said
    assert "[WARNING]" not in said


def of_name(objects, name):
    """The one CRD of this name."""
    crds = of_kind(objects, "CustomResourceDefinition")
    [found] = [crd for crd in crds if crd["metadata"]["name"] == name]
    return found


@pytest.mark.parametrize("plural", ["pdclusters", "prefillscalers"])
def test_crd_is_the_generated_one_with_labels(helm, plural):
    rendered = of_name(helm.objects(), f"{plural}.pdcluster.dev")
    metadata = rendered.pop("metadata")
    generated = yaml.safe_load((CHART / "files" / f"pdcluster.dev_{plural}.yaml").read_text())
    assert metadata["name"] == generated.pop("metadata")["name"]
    assert metadata["annotations"] == {"helm.sh/resource-policy": "keep"}
    assert metadata["labels"]["app.kubernetes.io/managed-by"] == "Helm"
    assert rendered == generated


def test_crd_goes_with_the_release_if_so_wanted(helm):
    objects = helm.objects("--set", "crds.keep=false")
    for plural in ("pdclusters", "prefillscalers"):
        assert "annotations" not in of_name(objects, f"{plural}.pdcluster.dev")["metadata"]
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
        ("operator.allowHostPathPrefixes={models}", "allowHostPathPrefixes"),
        ("operator.allowHostPathPrefixes={/srv,/}", "allowHostPathPrefixes"),
        ("operator.allowHostPathPrefixes={/srv/../etc}", "allowHostPathPrefixes"),
        ("operator.allowHostPathPrefixes={/srv #x}", "allowHostPathPrefixes"),
        ("operator.allowHostPathPrefixes={}", "allowHostPathPrefixes"),
        (f"test.namespace={NAMESPACE}", "test.namespace"),
        ("watchNamespaces={a,b},test.namespace=c", "test.namespace"),
        ("webhook.startupCheck.timeoutSeconds=0", "timeoutSeconds"),
        ("image.repository=", "make image"),
        ("operator.resources.limits.memory=512mb", "memory"),
        ("operator.resources.limits.memory=512m", "memory"),
        ("operator.resources.limits.memory=200", "memory"),
        ("webhook.resources.requests.memory=1 Gi", "memory"),
        ("webhook.resources.requests.cpu=2 cores", "cpu"),
    ],
)
def test_wrong_value_is_refused_by_name(helm, setting, named):
    with pytest.raises(HelmError, match=named):
        helm.render("--set", setting)


def test_values_of_an_older_chart_are_enough(helm):
    """What `helm upgrade --reuse-values` has: nothing that the older chart did not know."""
    newer = ("webhook.startupCheck", "monitoring.engines", "monitoring.routers")
    reused = helm.objects("--set", ",".join(f"{name}=null" for name in newer))
    assert reused == helm.objects()


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


HOOK, EVENTS = "helm.sh/hook", "post-install,post-upgrade"


def hooks(objects: list, event: str) -> dict:
    """What helm makes at an event, by kind."""
    annotated = (o for o in objects if o["metadata"].get("annotations", {}).get(HOOK) == event)
    return {one["kind"]: one for one in annotated}


def test_startup_check_tries_in_a_namespace_that_admission_reviews(helm, values):
    objects = helm.objects(values=values)
    made = hooks(objects, EVENTS)
    if not of_kind(objects, "ValidatingWebhookConfiguration"):
        assert not made
        return
    (hook,) = one(objects, "ValidatingWebhookConfiguration")["webhooks"]
    (container,) = made["Job"]["spec"]["template"]["spec"]["containers"]
    mode, namespace, rule, seconds = container["args"]
    assert mode == "wait"
    for expression in hook["namespaceSelector"]["matchExpressions"]:
        assert (namespace in expression["values"]) is (expression["operator"] == "In")
    # What only the webhook refuses: an answer proves it also where failurePolicy is Ignore.
    assert rule == "PrefixCachingHeterogeneousBlocks"
    assert '"blockSize": 64' in made["ConfigMap"]["data"]["bad.json"]
    assert int(seconds) + 120 == made["Job"]["spec"]["activeDeadlineSeconds"]


def test_startup_check_leaves_nothing_and_comes_after_its_rights(helm):
    for event in (EVENTS, "test"):
        made = hooks(helm.objects(), event)
        last = made.pop("Job" if event == EVENTS else "Pod")
        assert set(made) == {"ServiceAccount", "Role", "RoleBinding", "ConfigMap"}
        for manifest in (*made.values(), last):
            policy = manifest["metadata"]["annotations"]["helm.sh/hook-delete-policy"]
            assert policy == "before-hook-creation,hook-succeeded"
        weights = {int(o["metadata"]["annotations"][f"{HOOK}-weight"]) for o in made.values()}
        assert max(weights) < int(last["metadata"]["annotations"][f"{HOOK}-weight"])


def test_a_pod_that_tries_admission_serves_nothing(helm, values):
    """A Service or a NetworkPolicy of the chart must not take it for the webhook's."""
    objects = helm.objects(values=values)
    check = hooks(objects, EVENTS).get("Job", {"spec": {"template": hooks(objects, "test")["Pod"]}})
    labels = check["spec"]["template"]["metadata"]["labels"]
    selectors = [service["spec"]["selector"] for service in of_kind(objects, "Service")]
    selectors += [d["spec"]["selector"]["matchLabels"] for d in of_kind(objects, "Deployment")]
    assert not any(selector.items() <= labels.items() for selector in selectors)


@pytest.mark.parametrize(
    "setting",
    [
        "webhook.enabled=false",
        "webhook.startupCheck.enabled=false",
        # Admission leaves the release's own namespace out, and nothing else is watched.
        f"watchNamespaces={{{NAMESPACE}}}",
    ],
)
def test_no_startup_check_where_it_is_off_or_nothing_is_reviewed(helm, setting):
    objects = helm.objects("--set", setting)
    assert not hooks(objects, EVENTS)
    # `helm test` then tries what the CRD alone refuses, unless the webhook is there to be tried.
    (container,) = hooks(objects, "test")["Pod"]["spec"]["containers"]
    expected = "PrefixCaching" if "startupCheck" in setting else "spec.model.source"
    assert container["args"][2].startswith(expected)
