"""docs/api.md: generated, complete, and each example is one that the API accepts."""

from __future__ import annotations

import copy
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import jsonschema
import pytest
import yaml
from dev import api_page
from dev.api_page_status import EXAMPLE, MEANINGS

from pdcluster_operator.api.conditions import ConditionType
from pdcluster_operator.api.rules.validate import check_manifest
from pdcluster_operator.api.schema.crd import crd
from pdcluster_operator.api.spec.fields import Example, Items, Text, describe
from pdcluster_operator.api.spec.parse import parse_cluster

PAGE = Path(__file__).parents[3] / "docs" / "api.md"
SCHEMA = crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
EXAMPLES = dict(api_page.field_examples())


def schema_fields(schema: dict[str, Any], path: str) -> list[str]:
    """The paths of every field of a schema; ``[]`` marks an item of a list."""
    found = []
    for name, part in schema.get("properties", {}).items():
        here = f"{path}.{name}"
        found += [here, *schema_fields(part, here)]
        found += schema_fields(part.get("items", {}), f"{here}[]")
    return found


FIELDS = schema_fields(SCHEMA["properties"]["spec"], "spec")


def test_the_page_in_docs_is_the_generated_one() -> None:
    assert PAGE.read_text() == api_page.page(), "run make generate"


def test_the_page_has_a_row_for_every_field_of_the_crd() -> None:
    rows: dict[str, str] = {}
    links: dict[str, str] = {}
    for part in re.split(r"^##+ ", api_page.page(), flags=re.MULTILINE)[1:]:
        home = re.match(r"`(.+?)`", part)
        if home is None:
            continue
        also = re.search(r"^Also (.+)\.$", part, re.MULTILINE)
        places = [home[1], *(re.findall(r"`(.+?)`", also[1]) if also else [])]
        if same := re.search(r"^The fields of \[`(.+?)`\]", part, re.MULTILINE):
            links |= dict.fromkeys(places, same[1])
        for name, meaning in re.findall(r"^\| `(\w+)` \|.*\| (.+?) \|$", part, re.MULTILINE):
            rows |= {f"{place}.{name}": meaning for place in places}
    for field in FIELDS:
        parent, _, name = field.rpartition(".")
        for place, home_of_fields in links.items():
            if field.startswith(f"{place}."):
                parent = home_of_fields + parent.removeprefix(place)
        meaning = rows[f"{parent}.{name}"]
        assert re.match(r"[A-Z].+\.$", meaning), field


def test_links_lead_to_headings() -> None:
    text = api_page.page()
    headings = re.findall(r"^##+ (.+)$", text, re.MULTILINE)
    anchors = {re.sub(r"[^a-z0-9_ -]", "", heading.lower()) for heading in headings}
    for anchor in re.findall(r"\]\(#(.+?)\)", text):
        assert anchor in anchors


def test_every_field_has_an_example() -> None:
    outside_of_lists = {field for field in FIELDS if "[]" not in field}
    assert set(EXAMPLES) == outside_of_lists


@pytest.mark.parametrize("path", EXAMPLES)
def test_an_example_is_read_by_its_fields_own_parser_and_fits_the_schema(path: str) -> None:
    manifest = {
        "apiVersion": "pdcluster.dev/v1alpha1",
        "kind": "PDCluster",
        "metadata": {"name": "llama"},
        "spec": {"model": {"source": {"hostPath": {"path": "/m"}}}},
    }
    # What the field cannot stand without is taken from its siblings' examples.
    *parents, last = path.split(".")
    target: dict[str, Any] = manifest
    for depth, parent in enumerate(parents):
        target = target.setdefault(parent, {})
        below = parents[depth + 1] if depth + 1 < len(parents) else last
        if parent == "source":
            target.clear()
        here = schema_at(".".join(parents[: depth + 1]))
        for needed in here.get("required", ()):
            if needed != below:
                sibling = EXAMPLES[f"{'.'.join(parents[: depth + 1])}.{needed}"]
                target.setdefault(needed, copy.deepcopy(sibling))
    target[last] = EXAMPLES[path]
    assert parse_cluster(manifest).errors == ()
    jsonschema.Draft202012Validator(SCHEMA).validate(manifest)


def schema_at(path: str) -> dict[str, Any]:
    found: dict[str, Any] = SCHEMA
    for name in path.split("."):
        found = found["properties"][name]
    return found


ROOT = PAGE.parents[1]
PAGES = sorted(one for folder in ("", "docs/**/", "examples/", "charts/*/")
               for one in ROOT.glob(f"{folder}*.md"))  # fmt: skip


def shown_parts() -> Iterator[tuple[str, dict[str, Any]]]:
    """Every PDCluster in YAML on a page, and every part of one, with the line where it stands."""
    for page in PAGES:
        text = page.read_text()
        for block in re.finditer(r"^ *```ya?ml\n(.+?)^ *```", text, re.MULTILINE | re.DOTALL):
            line = text.count("\n", 0, block.start()) + 1
            for part in yaml.safe_load_all(textwrap.dedent(block[1])):
                ours = part.get("kind", "PDCluster") == "PDCluster" and "spec" in part
                if ours:
                    yield f"{page.relative_to(ROOT)}:{line}", part


SHOWN = dict(shown_parts())


def test_most_sections_of_the_page_show_yaml() -> None:
    assert sum(place.startswith("docs/api.md:") for place in SHOWN) > 20


@pytest.mark.parametrize("place", SHOWN)
def test_yaml_on_a_page_is_accepted_where_a_manifest_has_it(place: str) -> None:
    """A reader copies a part below what the first steps have: a name, and a model."""
    part = SHOWN[place]
    manifest = {
        "apiVersion": "pdcluster.dev/v1alpha1",
        "kind": "PDCluster",
        "metadata": {"name": "llama", **part.get("metadata", {})},
        "spec": {"model": {"source": {"huggingFace": {"repo": "a/b"}}}, **part["spec"]},
    }
    jsonschema.Draft202012Validator(SCHEMA).validate(manifest)
    _, found = check_manifest(manifest, host_paths=True)
    assert [f"{one.path}: {one.message}" for one in found.errors] == []


def without_required(properties: dict[str, Any]) -> dict[str, Any]:
    """The schema of a part of a manifest: closed, and nothing has to be there."""

    def loose(schema: dict[str, Any]) -> dict[str, Any]:
        schema = {key: value for key, value in schema.items() if key != "required"}
        if "properties" in schema:
            schema["properties"] = {k: loose(v) for k, v in schema["properties"].items()}
            schema["additionalProperties"] = False
        if "items" in schema:
            schema["items"] = loose(schema["items"])
        return schema

    return loose({"type": "object", "properties": properties})


@dataclass(frozen=True)
class Item:
    name: Annotated[str, "is a name.", Text(10)]
    value: Annotated[str | None, "is a value.", Text(10)] = None


@dataclass(frozen=True)
class WithoutExample:
    plain: Annotated[str | None, "is a word.", Text(10)] = None


@dataclass(frozen=True)
class HalfAnExample:
    items: Annotated[tuple[Item, ...], "are items.", Items(4), Example([{"name": "a"}])] = ()


@pytest.mark.parametrize(
    ("cls", "names"),
    [(WithoutExample, "spec.x.plain"), (HalfAnExample, r"spec.x.items\[\].value")],
)
def test_a_field_without_an_example_is_refused_by_its_name(cls: type[Any], names: str) -> None:
    with pytest.raises(api_page.ExampleMissingError, match=f"^{names} has no example"):
        [api_page._example(field, "spec.x") for field in describe(cls)]


def test_the_status_on_the_page_names_every_field_and_condition() -> None:
    schema = SCHEMA["properties"]["status"]
    jsonschema.Draft202012Validator(without_required(schema["properties"])).validate(EXAMPLE)
    shown = {re.sub(r"\[\d+\]", "[]", path) for path in paths_of(EXAMPLE, "status")}
    assert set(schema_fields(schema, "status")) == shown
    assert set(MEANINGS) == set(ConditionType)


def paths_of(value: Any, path: str) -> list[str]:
    if isinstance(value, dict):
        children = [(f"{path}.{name}", part) for name, part in value.items()]
        return [q for child, part in children for q in (child, *paths_of(part, child))]
    if isinstance(value, list):
        return [q for n, part in enumerate(value) for q in paths_of(part, f"{path}[{n}]")]
    return []
