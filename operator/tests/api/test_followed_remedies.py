"""Who does what a finding says gets a manifest that is accepted, and that does what was meant."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from pod_values import VALUES
from remedy_sentences import sentences

from pdcluster_operator.api.rule_examples import Example, examples
from pdcluster_operator.api.spec import pod_templates
from pdcluster_operator.api.spec.engine_types import EngineOverride, RoleSpec, SharedEngine
from pdcluster_operator.api.spec.fields import describe
from pdcluster_operator.api.spec.parse import where_it_belongs
from pdcluster_operator.api.spec.pod_templates import merge
from pdcluster_operator.api.spec.router_types import Router
from pdcluster_operator.api.spec.types import Spec

BASE = {
    "apiVersion": "pdcluster.dev/v1alpha1",
    "kind": "PDCluster",
    "metadata": {"name": "llama"},
    "spec": {
        "model": {"source": {"persistentVolumeClaim": {"claimName": "weights"}}},
        "prefill": {"resources": {"requests": {"memory": "64Gi"}}},
        "decode": {"resources": {"requests": {"memory": "64Gi"}}},
    },
}
FOLLOWED: list[dict[str, Any]] = yaml.safe_load(
    Path(__file__).with_name("followed_remedies.yaml").read_text()
)
JUDGES = ["api/rules/*.py", "api/spec/*.py", "api/findings.py", "api/object_names.py"]
ELSEWHERE = {
    "findings.py: Write what the field needs, and no copy of another object.": (
        "needs 64 objects inside of each other: test_api_json_values.py"
    ),
    "engines.py: The engines check this when they connect to each other.": "no remedy",
    **dict.fromkeys(
        (
            "model.py: Choose a tensor parallel size that divides {}.",
            "model.py: Set at most {}, or {}=1 in env if the model is known to take more.",
            "model.py: Use at most {} stages.",
        ),
        "needs the config.json of a model: test_api_model_config.py",
    ),
    "images_and_weights.py: Write readOnly: true.": "of some folders: test_api_host_paths.py",
    **dict.fromkeys(
        (
            "model.py: Create it: run `{}`.",
            "model.py: Let the operator and its webhook get ConfigMaps there.",
            "model.py: Put the config.json of a language model there, as Hugging Face has it.",
            "model.py: The engines check its layers when they connect.",
        ),
        "needs a ConfigMap: test_model_config_map.py",
    ),
    "model.py: The model's config.json does not say how its layers keep their KV{}.": "no remedy",
    "model.py: The model has {} with KV or states: {} bytes for one token, {} for {}. Where both "
    "roles split it alike, these are about {} descriptors in blocks of {} tokens{}{}.": "no remedy",
    **dict.fromkeys(
        (
            "validate.py: Set maxPercentOfDecode to at least this number.",
            "validate.py: There is {}.",
        ),
        "of a PrefillScaler: test_lint_command.py",
    ),
}
"""Sentences of these modules that are not followed here, and why."""


def with_nulls(part: Any) -> Any:
    """Put a null where an entry has NULL; a null itself removes a field of the base."""
    if isinstance(part, dict):
        return {key: with_nulls(value) for key, value in part.items() if value != "NULL"} | {
            key: None for key, value in part.items() if value == "NULL" and key != "spec"
        }
    return part


@pytest.mark.parametrize("entry", FOLLOWED, ids=lambda one: one["remedy"][:60])
def test_who_follows_a_remedy_is_accepted(entry: dict[str, Any]) -> None:
    admits = tuple(entry.get("admits", ()))
    wrong, right = (with_nulls(merge(BASE, entry[side])) for side in ("wrong", "right"))
    example = Example(wrong, right, admits)
    found = example.judge(wrong)
    said = {one.remedy for one in (*found.errors, *found.warnings)}
    assert entry["remedy"] in said, said
    after = example.judge(right)
    assert [str(one) for one in after.errors] == []
    assert [one.rule for one in after.warnings] == entry.get("left", [])


def test_every_remedy_in_the_source_is_followed() -> None:
    told = {one["remedy"] for one in FOLLOWED} | {one.remedy for one in examples().values()}
    for wrong, *_ in VALUES.values():  # test_api_pod_template.py follows these
        manifest = merge(BASE, {"spec": {"decode": {"podTemplate": wrong}}})
        told |= {one.remedy for one in Example({}, manifest).judge(manifest).errors}
    found = sentences(JUDGES)
    assert len(found) > 90
    missed = [
        name
        for name, pattern in found.items()
        if name not in ELSEWHERE and not any(map(pattern.fullmatch, told))
    ]
    assert not missed, "write what who follows them has, in followed_remedies.yaml"


PLACES = {
    "spec": Spec, "spec.engine": SharedEngine, "spec.decode": RoleSpec,
    "spec.decode.engine": EngineOverride, "spec.router": Router,
}  # fmt: skip
OF_SAMPLES = (
    "HostNamespace",
    "GraceTooShort",
    "ExactlyOne",
    "ReadinessReplaced",
    "ClusterFirst",
    "NVLink",
    "spec.os.name: is missing",
    "serviceAccountName",
    "setHostnameAsFQDN",
)
"""What is said of the sample itself, wherever it stands."""
SAMPLES = {"str": "x", "int": 1, "bool": True, "any": "x"}


def sample(kind: str, limit: str = "") -> Any:
    """A value of a type of Kubernetes, with the fields that every such object needs."""
    if "|" in limit:
        return limit.partition("|")[0]
    if kind.startswith("["):
        return []
    return {} if kind.startswith("{") else SAMPLES.get(kind, {})


@pytest.mark.parametrize("path", PLACES)
@pytest.mark.parametrize("kind", ["V1PodSpec", "V1Container"])
def test_a_field_of_a_pod_is_sent_to_a_place_where_nothing_is_said_of_it(
    path: str, kind: str
) -> None:
    """Of all fields of a pod and of a container, at each place of the spec."""
    sent = 0
    for field, of_type in pod_templates.FIELDS[kind].items():
        remedy = where_it_belongs(path, field, PLACES[path])
        known = {one.json_name for one in describe(PLACES[path])}
        if field in known or "podTemplate" not in remedy:
            continue
        sent += 1
        ours = "router" if path == "spec.router" else "engine"
        value = sample(of_type, pod_templates.LIMITS[kind, field])
        template: dict[str, Any] = {"spec": {field: value}}
        if f"as {field} of the container {ours}" in remedy:
            template = {"spec": {"containers": [{"name": ours, field: value}]}}
        spec = {"podTemplate": template}
        if path.startswith(("spec.decode", "spec.router")):
            spec = {path.split(".")[1]: spec}
        right = merge(BASE, {"spec": spec})
        found = Example({}, right).judge(right)
        said = [str(one) for one in (*found.errors, *found.warnings)]
        about = [one for one in said if not any(word in one for word in OF_SAMPLES)]
        assert about == [], (path, field)
    assert sent > 10
