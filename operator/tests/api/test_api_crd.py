"""The CRD: generated, complete, and of one mind with the parser."""

from __future__ import annotations

import copy
import re
import sys
from pathlib import Path

import jsonschema
import pytest
import yaml
from hypothesis import given

from pdcluster_operator.api.findings import Rule
from pdcluster_operator.api.rules.engines import MOST_LINKS
from pdcluster_operator.api.schema.crd import crd, render, to_yaml
from pdcluster_operator.api.spec.parse import parse_cluster

ROOT = Path(__file__).parents[3]
CRD_FILE = ROOT / "crds" / "pdcluster.dev_pdclusters.yaml"
sys.path.insert(0, str(ROOT / "operator" / "tests" / "plan"))
from valid_specs import manifests  # noqa: E402

SCHEMA = crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]


def closed(schema):
    """The schema as the API server applies it with strict field validation."""
    schema = dict(schema)
    if "properties" in schema:
        schema["properties"] = {k: closed(v) for k, v in schema["properties"].items()}
        schema["additionalProperties"] = False
    if "items" in schema:
        schema["items"] = closed(schema["items"])
    return schema


VALIDATOR = jsonschema.Draft202012Validator(
    closed({**SCHEMA, "properties": {**SCHEMA["properties"], "metadata": {"type": "object"}}})
)
VALIDATOR.schema["properties"]["metadata"] = {"type": "object"}


def properties(schema, path=""):
    for name, part in schema.get("properties", {}).items():
        yield f"{path}.{name}", name, part
        yield from properties(part, f"{path}.{name}")
    if "items" in schema:
        yield from properties(schema["items"], f"{path}[]")


def test_the_checked_in_crd_is_the_generated_one():
    assert CRD_FILE.read_text() == render(), "run `python -m pdcluster_operator.api.schema.crd`"
    assert yaml.safe_load(CRD_FILE.read_text()) == crd()


def test_every_field_is_described_beginning_with_its_name():
    for path, name, part in properties(SCHEMA):
        if path == ".metadata":
            continue
        description = part.get("description", "")
        assert description.startswith(f"{name} "), path
        assert description.endswith("."), path


def test_every_field_is_bounded():
    for path, _, part in properties(SCHEMA):
        if path in (".apiVersion", ".kind", ".metadata"):
            continue
        match part.get("type"):
            case "string":
                assert "maxLength" in part or "enum" in part or part.get("format"), path
            case "integer":
                assert "minimum" in part, path
                assert "maximum" in part or path.startswith(".status"), path
            case "array":
                assert "maxItems" in part, path
                assert "x-kubernetes-list-type" in part, path


def test_no_default_stands_on_a_roles_own_engine():
    for role in ("prefill", "decode"):
        engine = SCHEMA["properties"]["spec"]["properties"][role]["properties"]["engine"]
        assert not [path for path, _, part in properties(engine) if "default" in part]
    shared = SCHEMA["properties"]["spec"]["properties"]["engine"]
    assert shared["properties"]["prefixCaching"]["default"] == "Enabled"
    assert shared["default"] == {}


def test_rules_of_the_api_server_have_messages():
    def rules(schema):
        yield from schema.get("x-kubernetes-validations", ())
        for part in schema.get("properties", {}).values():
            yield from rules(part)
        if "items" in schema:
            yield from rules(schema["items"])

    found = list(rules(SCHEMA))
    assert all(rule["message"] and rule["rule"] for rule in found)
    text = " ".join(rule["rule"] for rule in found)
    for wanted in ("self.metadata.name", "has(self.huggingFace)", "self.nodes", "has(self.value)"):
        assert wanted in text


def test_columns_subresources_and_names():
    version = crd()["spec"]["versions"][0]
    names = [column["name"] for column in version["additionalPrinterColumns"]]
    assert names == ["Available", "Ready", "Prefill", "Decode", "Links", "Model", "Age", "Reason",
                     "Certificates"]  # fmt: skip
    wide = [one["name"] for one in version["additionalPrinterColumns"] if one.get("priority")]
    assert wide == ["Reason", "Certificates"]
    assert version["subresources"]["scale"]["specReplicasPath"] == ".spec.decode.replicas"
    assert version["subresources"]["status"] == {}
    assert crd()["spec"]["names"]["shortNames"] == ["pdc"]
    template = SCHEMA["properties"]["spec"]["properties"]["prefill"]["properties"]["podTemplate"]
    assert template["x-kubernetes-preserve-unknown-fields"] is True


def test_list_maps_have_required_keys():
    for path, _, part in properties(SCHEMA):
        for key in part.get("x-kubernetes-list-map-keys", ()):
            assert key in part["items"]["required"], path


EXAMPLES = [
    *sorted((ROOT / "operator" / "tests" / "plan" / "scenarios").glob("*.yaml")),
    *sorted((ROOT / "examples").glob("*.yaml")),
]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_are_valid(path):
    for document in yaml.safe_load_all(path.read_text()):
        if document and document.get("kind") == "PDCluster":
            VALIDATOR.validate(document)
            assert parse_cluster(document).errors == ()


@given(manifests())
def test_what_the_parser_accepts_the_schema_accepts(cluster):
    assert parse_cluster(cluster).errors == ()
    VALIDATOR.validate(cluster)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("spec.prefil", {}),
        ("spec.transfer.device", "cuda"),
        ("spec.prefill.replicas", -1),
        ("spec.prefill.replicas", "1"),
        ("spec.engine.blockSize", 0),
        ("spec.engine.image", "two words"),
        ("spec.model.source.hostPath.path", "relative"),
        ("spec.prefill.resources.limits", {"cpu": "4 cores"}),
        ("spec.engine.env", [{"value": "no name"}]),
        ("spec.rollout.type", "RollingUpdate"),
        ("spec.monitoring.scrapeFrom", [{"podSelector": {"matchLabels": {"a": "b c"}}}]),
        ("spec.monitoring.scrapeFrom", [{"podSelector": {"matchLabel": {"a": "b"}}}]),
        ("spec.monitoring.scrapeFrom", [{"ipBlock": {"cidr": "anywhere"}}]),
    ],
)
def test_what_the_schema_refuses_the_parser_refuses(path, value):
    manifest = {
        "apiVersion": "pdcluster.dev/v1alpha1",
        "kind": "PDCluster",
        "metadata": {"name": "x"},
        "spec": {"model": {"source": {"hostPath": {"path": "/m"}}}},
    }
    VALIDATOR.validate(manifest)
    *parents, last = path.split(".")
    target = manifest
    for parent in parents:
        target = target.setdefault(parent, {})
    target[last] = value
    assert not VALIDATOR.is_valid(manifest)
    assert parse_cluster(copy.deepcopy(manifest)).errors


def test_patterns_mean_the_same_to_both():
    """RE2, the API server's engine, has no look-around and no back references."""
    for path, _, part in properties(SCHEMA):
        pattern = part.get("pattern")
        if pattern:
            assert pattern.startswith("^"), path
            assert pattern.endswith("$"), path
            assert not re.search(r"\(\?[=!<]|\\[0-9]|\\w|\\d", pattern), path


def test_generated_yaml_reads_back():
    tricky = {"a": "yes", "b": ["", "x: y", "# no", "- d", "1.0", {"c": {}, "d": []}], "e": None,
              "true": True, "n": 3, "quote": 'say "x"', "multi": "a\nb"}  # fmt: skip
    assert yaml.safe_load(to_yaml(tricky)) == tricky


def test_every_whole_number_fits_the_format_that_the_schema_names():
    """Clients in Go read int32 into 32 bits."""
    for path, _, part in properties(SCHEMA["properties"]["spec"]):
        if part.get("type") == "integer":
            assert part["format"] == "int32", path
            assert part["maximum"] < 2**31, path


def test_the_rule_about_links_is_one_of_changes():
    """A spec that breaks it was stored before it was there, and its engines may become fewer."""
    (rule,) = SCHEMA["properties"]["spec"]["x-kubernetes-validations"]
    now = "self.prefill.replicas * self.decode.replicas"
    before = now.replace("self", "oldSelf")
    assert rule["rule"] == f"{now} <= {MOST_LINKS} || {now} <= {before}"
    assert f"{MOST_LINKS} links (rule {Rule.TOO_MANY_LINKS})" in rule["message"]
    for role in ("prefill", "decode"):
        part = SCHEMA["properties"]["spec"]["properties"][role]
        assert (part["default"], part["properties"]["replicas"]["default"]) == ({}, 1)
