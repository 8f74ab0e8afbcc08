"""What README and the pages say of versions, sizes and each other."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import yaml

from pdcluster_connector.launcher.before_start.installed_versions import SUPPORTED

ROOT = Path(__file__).parents[3]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "examples/README.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]
README = (ROOT / "README.md").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
# The tiny Llama of the examples: layers x heads x (K and V) x head size x float32.
BYTES_A_TOKEN = 4 * 4 * 2 * 32 * 4
every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


@every_page
def test_links_lead_to_files(page: Path) -> None:
    for link in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        if "://" not in link:
            assert (page.parent / link).exists(), link


def test_every_page_and_the_index_of_examples_are_linked() -> None:
    for page in PAGES[1:]:
        assert f"]({page.relative_to(ROOT)})" in README, page


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
    assert {"README.md", "docs/features.md"} <= {name for name, ranges in found.items() if ranges}
    for name, ranges in found.items():
        assert set(ranges) <= {wanted}, name
    low, high = (".".join(map(str, end)) for end in SUPPORTED["vllm"])
    assert wanted == f">={low},<{high}"
    for line in re.findall(r"^\| vLLM \|.*$", README, re.MULTILINE):
        assert f"the tests run {low};" in line


def test_the_range_of_nixl_is_the_one_in_the_code() -> None:
    (low, minor), (high, _) = SUPPORTED["nixl"]
    assert f"| NIXL | `>={low}.{minor},<{high}`:" in README
    assert f"nixl>={low}.{minor}" in PROJECT["project"]["optional-dependencies"]["connector"]


def test_the_pythons_are_those_of_the_package() -> None:
    classifiers = " ".join(PROJECT["project"]["classifiers"])
    versions = re.findall(r"Python :: (3\.\d+)", classifiers)
    assert f"| Python | {versions[0]} – {versions[-1]} |" in README
    assert f"Python ≥ {versions[0]}" in README


def test_the_size_of_the_kv_cache_is_that_of_the_example() -> None:
    text = (ROOT / "examples" / "tiny-cpu.yaml").read_text()
    words = yaml.safe_load(text)["spec"]["engine"]["extraArgs"]
    mebibytes = int(words[words.index("--kv-cache-memory-bytes") + 1].removesuffix("M"))
    tokens = f"{mebibytes * 2**20 // BYTES_A_TOKEN:,} tokens"
    assert f"{mebibytes} MiB of KV cache an engine ({tokens} of this model)" in text
    assert f"KV cache for {tokens} allocated" in README
    assert set(re.findall(r"KV cache for ([\d,]+ tokens)", README)) == {tokens}


def test_the_first_paragraphs_say_that_no_gpu_has_run_it() -> None:
    before_the_first_table = README.partition("\n|")[0]
    assert "No GPU has run it yet" in before_the_first_table


def test_pip_installs_the_commands_that_the_readme_names() -> None:
    project = PROJECT["project"]
    assert {"pdcluster", "kubectl-pdcluster"} <= set(project["scripts"])
    extras = re.findall(r"pip install '\.\[(\w+)\]'", README)
    assert {"operator", "connector"} == set(extras)
    assert set(extras) <= set(project["optional-dependencies"])
