"""The connector's hooks, signatures and imports against each supported vLLM, by its sources.

No vLLM is imported. What holds here is what ``[tool.pdcluster]`` in pyproject.toml and the
launcher may promise; the installed version is run by the other tests as well.
"""

from __future__ import annotations

import importlib.util
import os
import re
import tomllib
from pathlib import Path

import pytest
import vllm_sources
from version_contract import BASE, findings, our_hooks
from vllm_sources import Sources, SourcesMissingError

from pdcluster_connector.compat.supported import SUPPORTED

if importlib.util.find_spec("vllm") is None:
    pytest.skip("no vLLM in this environment", allow_module_level=True)

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def installed() -> Sources:
    return vllm_sources.installed()


@pytest.fixture(scope="module")
def newest() -> Sources:
    return vllm_sources.newest()


def test_the_installed_version(installed: Sources) -> None:
    assert findings(installed) == []


@pytest.mark.skipif(
    "PDCLUSTER_ASK_INDEX" not in os.environ,
    reason="the newest vLLM on the package index: `make newest-vllm` looks at it",
)
def test_the_newest_version_on_the_index(newest: Sources) -> None:
    """Fails when vLLM moved: support that version, or lower the promise below it.

    Asked for, and no part of the other tests: what passes today must pass tomorrow.
    """
    low, high = SUPPORTED["vllm"]
    found = findings(newest)
    if newest.release < high:
        assert found == [], f"vLLM {newest.version} is promised"
    else:
        assert found, f"vLLM {newest.version} fits: the promise may be raised above it"
    assert low <= newest.release


def test_the_promise_is_the_same_everywhere(installed: Sources) -> None:
    low, high = SUPPORTED["vllm"]
    assert low == installed.release, "only what the tests run is the lower end"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    promise = project["tool"]["pdcluster"]["vllm"]
    assert promise == f">={low[0]}.{low[1]},<{high[0]}.{high[1]}"
    page = (ROOT / "docs" / "features.md").read_text()
    assert f"vLLM `{promise}`" in page


CHANGES = [
    ("def on_new_request(self, request", "def on_new_request(self, request, when",
     r"on_new_request\(self, request, when\) is overridden as \(self, request\)"),
    ("def on_new_request(", "def on_request(", "on_new_request is implemented, and no hook"),
    ("def take_events(", "def take_news(", "take_news is a hook that nobody has looked at"),
    ("failed_recving", "lost", "KVConnectorTransferResults has no failed_recving"),
    ("class SupportsHMA", "class KnowsHMA", "uses SupportsHMA"),
]  # fmt: skip


@pytest.mark.parametrize(("before", "after", "finding"), CHANGES)
def test_a_change_upstream_is_found(
    installed: Sources, before: str, after: str, finding: str
) -> None:
    text = installed.text(BASE[0]) or ""
    assert before in text
    changed = Sources(installed.root, "0.32.99", {BASE[0]: text.replace(before, after)})
    assert [f for f in findings(changed) if re.search(finding, f)], findings(changed)


def test_a_changed_call_is_found(installed: Sources) -> None:
    module = "vllm.v1.core.sched.scheduler"
    text = installed.text(module) or ""
    call = "self.connector.on_new_request(request)"
    assert call in text
    changes = {module: text.replace(call, "self.connector.on_new_request(request, self.waiting)")}
    (found,) = findings(Sources(installed.root, "0.32.99", changes))
    assert re.search(r"scheduler line \d+ calls .*self.waiting.*does not fit", found)


def test_every_hook_of_ours_has_a_name_of_vllm() -> None:
    assert len(our_hooks()) > 20


def test_without_an_index_and_a_cache_it_fails_clearly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*command: str, environment: dict[str, str]) -> str:
        raise SourcesMissingError("no network")

    monkeypatch.setattr(vllm_sources, "default_cache", lambda: tmp_path / "models")
    monkeypatch.setattr(vllm_sources, "_run", fail)
    with pytest.raises(SourcesMissingError, match="no network"):
        vllm_sources.newest()
    (tmp_path / "vllm-sources" / "newest").write_text("0.33.0")
    (tmp_path / "vllm-sources" / "vllm-0.33.0").mkdir()
    assert vllm_sources.newest().version == "0.33.0", "what is there needs no network"
