"""The site of docs/: every link leads somewhere, every page is reached, nothing is fetched."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("mkdocs")  # newer Pythons may lack it
    folder = tmp_path_factory.mktemp("site")
    words = ["build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", *words],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return folder


def test_links_stay_in_the_site(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 40
    for page in pages:
        for whole in re.findall(r'(?:href|src)="([^"]+)"', page.read_text()):
            link = re.split(r"[#?]", whole)[0]
            if not link or re.match(r"\w+:", link):
                continue
            target = (page.parent / link.lstrip("/")) if page.name != "404.html" else site
            found = target / "index.html" if target.is_dir() else target
            assert found.exists(), f"{page.relative_to(site)}: {link}"


def test_the_front_page_is_the_readme(site: Path) -> None:
    front = (site / "index.html").read_text()
    assert "and the proof that KV moves between them" in front
    assert 'href="operations/"' in front


def test_a_reader_fetches_nothing_from_elsewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        fetched = re.findall(
            r'<(?:script|link|img|iframe)[^>]+(?:src|href)="(https?://[^"]+)', page.read_text()
        )
        assert fetched == [], page.relative_to(site)
