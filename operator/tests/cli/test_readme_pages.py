"""What README and the pages say of versions, sizes and each other."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import click
import pytest
import yaml

from pdcluster_connector.compat.supported import SUPPORTED
from pdcluster_operator.cli.main import pdcluster

ROOT = Path(__file__).parents[3]
PAGES = [
    *(
        ROOT / name
        for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "examples/README.md")
    ),
    *sorted((ROOT / "docs").glob("*.md")),
]
README = (ROOT / "README.md").read_text()
WHAT_WORKS = (ROOT / "docs" / "what-works.md").read_text()
CLI = (ROOT / "docs" / "cli.md").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
# The tiny Llama of the examples: layers x heads x (K and V) x head size x float32.
BYTES_A_TOKEN = 4 * 4 * 2 * 32 * 4
every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


@every_page
def test_links_lead_to_files(page: Path) -> None:
    for link in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        if "://" not in link:
            assert (page.parent / link).exists(), link


def linked_from(page: Path) -> set[Path]:
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text())
    return {(page.parent / link).resolve() for link in links}


def test_the_readme_is_short_and_leads_to_six_pages() -> None:
    assert len(README.split()) <= 900
    links = re.findall(r"(?<!!)\[[^\]]+\]\((.+?)\)", README)
    assert len(links) == len(set(links)) == 6


def test_the_readme_shows_two_commands_seven_of_the_command_line_and_eight_rows() -> None:
    sections = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", README, re.MULTILINE | re.DOTALL))
    rows = {
        title: len(re.findall(r"^\| (?!what \||command)", text, re.MULTILINE))
        for title, text in sections.items()
    }
    assert rows["Try it: no GPU, no Kubernetes"] == 2
    assert rows["The command line"] == 7
    assert rows["What works"] == 8


def test_every_page_is_linked_from_the_index_or_for_developers_from_contributing() -> None:
    index, contributing = ROOT / "docs" / "README.md", ROOT / "CONTRIBUTING.md"
    assert {index, contributing} <= linked_from(ROOT / "README.md")
    linked = linked_from(index) | linked_from(contributing)
    assert set(PAGES[1:]) - {index} <= linked
    # A user has no use for the pages about how we write code and pages.
    for name in ("plain-english.md", "new-layout.md", "map.md"):
        page = ROOT / "docs" / name
        assert page in linked_from(contributing) - linked_from(index)


def commands(of: click.Command) -> dict[str, click.Command]:
    """The commands below a command."""
    if not isinstance(of, click.Group):
        return {}
    context = click.Context(of)
    found = {name: of.get_command(context, name) for name in of.list_commands(context)}
    return {name: one for name, one in found.items() if one is not None}


@every_page
def test_the_command_line_has_the_commands_and_options_that_pages_name(page: Path) -> None:
    for line in re.findall(
        r"(?:`|^|&& )(?:kubectl )?pdcluster ([a-z][^`\n]*)", page.read_text(), re.MULTILINE
    ):
        words, of = line.split(), pdcluster
        while words and (below := commands(of)):
            names = words.pop(0).replace("\\", "").split("|")
            for name in names:
                assert name in below, line
            of = below[names[0]]
        options = {option for one in of.params for option in one.opts}
        for word in words:
            assert not word.startswith("-") or word.partition("=")[0] in options, line


def test_make_has_the_targets_that_pages_name() -> None:
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in PAGES:
        named = re.findall(r"(?:`|^|\()make (?:-s )?([a-z0-9-]+)", page.read_text(), re.MULTILINE)
        assert set(named) <= targets, page.name


def test_the_range_of_vllm_is_the_same_on_every_page_and_in_the_code() -> None:
    wanted = PROJECT["tool"]["pdcluster"]["vllm"]
    found = {
        str(page.relative_to(ROOT)): re.findall(r"`(>=0[^`]+)`", page.read_text()) for page in PAGES
    }
    named = {name for name, ranges in found.items() if ranges}
    assert {"README.md", "docs/features.md", "docs/what-works.md"} <= named
    for name, ranges in found.items():
        assert set(ranges) <= {wanted}, name
    assert f"| vLLM `{wanted}`, NIXL `" in README
    low, high = (".".join(map(str, end)) for end in SUPPORTED["vllm"])
    assert wanted == f">={low},<{high}"
    [line] = re.findall(r"^\| vLLM \|.*$", WHAT_WORKS, re.MULTILINE)
    assert f"the tests run {low};" in line


def test_the_range_of_nixl_is_the_one_in_the_code() -> None:
    (low, minor), (high, _) = SUPPORTED["nixl"]
    assert f"NIXL `>={low}.{minor},<{high}`" in README
    assert f"| NIXL | `>={low}.{minor},<{high}`:" in WHAT_WORKS
    assert f"nixl>={low}.{minor}" in PROJECT["project"]["optional-dependencies"]["connector"]


def test_the_pythons_are_those_of_the_package_and_of_the_hosted_workflow() -> None:
    classifiers = " ".join(PROJECT["project"]["classifiers"])
    versions = re.findall(r"Python :: (3\.\d+)", classifiers)
    assert f"| Python {versions[0]} – {versions[-1]} |" in README
    assert f"| Python | {versions[0]} – {versions[-1]};" in WHAT_WORKS
    assert f"Python ≥ {versions[0]}" in README
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    assert workflow["jobs"]["pure"]["strategy"]["matrix"]["python"] == versions


def test_the_size_of_the_kv_cache_is_that_of_the_example() -> None:
    text = (ROOT / "examples" / "tiny-cpu.yaml").read_text()
    words = yaml.safe_load(text)["spec"]["engine"]["extraArgs"]
    mebibytes = int(words[words.index("--kv-cache-memory-bytes") + 1].removesuffix("M"))
    tokens = f"{mebibytes * 2**20 // BYTES_A_TOKEN:,} tokens"
    assert f"{mebibytes} MiB of KV cache an engine ({tokens} of this model)" in text
    assert f"KV cache for {tokens} allocated" in CLI
    assert set(re.findall(r"KV cache for ([\d,]+ tokens)", CLI)) == {tokens}


def test_the_first_paragraphs_say_what_no_gpu_has_shown() -> None:
    before_the_first_table = README.partition("\n|")[0]
    assert "RDMA and NVLink are not tested" in before_the_first_table


def test_pip_installs_the_commands_that_the_readme_names() -> None:
    project = PROJECT["project"]
    assert {"pdcluster", "kubectl-pdcluster"} <= set(project["scripts"])
    assert "pip install '.[operator]'" in README
    extras = {
        extra
        for page in PAGES
        for extra in re.findall(r"pip install '\.\[(\w+)\]'", page.read_text())
    }
    assert {"operator", "connector"} == extras
    assert extras <= set(project["optional-dependencies"])


def test_the_version_is_the_same_everywhere_and_the_newest_of_the_changelog() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text()
    sections = re.findall(r"^## (.+)$", changelog, re.MULTILINE)
    assert sections[0] == "[Unreleased]"
    newest = re.fullmatch(r"\[(\d+\.\d+\.\d+)\] - \d{4}-\d\d-\d\d", sections[1])
    assert newest
    chart = yaml.safe_load((ROOT / "charts/pdcluster/Chart.yaml").read_text())
    assert {PROJECT["project"]["version"], chart["version"], chart["appVersion"]} == {newest[1]}
    kinds = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
    assert set(re.findall(r"^### (.+)$", changelog, re.MULTILINE)) <= kinds
