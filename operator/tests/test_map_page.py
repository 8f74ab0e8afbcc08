"""docs/map.md: where a newcomer looks for a file."""

from __future__ import annotations

from pathlib import Path

import pytest
from dev import map_page

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_in_docs_is_the_generated_one() -> None:
    assert (ROOT / "docs/map.md").read_text() == map_page.page(), "run make generate"


def test_every_folder_of_the_code_is_on_the_page() -> None:
    page = (ROOT / "docs/map.md").read_text()
    for source in ("operator/src", "connector/src"):
        for file in (ROOT / source).rglob("*.py"):
            assert f"(../{file.parent.relative_to(ROOT)})" in page


def test_every_file_of_the_code_says_in_one_line_what_it_holds() -> None:
    for source in map_page.HALVES.values():
        for file in (ROOT / source).rglob("*.py"):
            assert map_page.first_line(file)


def test_a_file_without_a_docstring_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(map_page, "ROOT", tmp_path)
    silent = tmp_path / "silent.py"
    silent.write_text("x = 1\n")
    with pytest.raises(SystemExit, match=r"silent\.py has no docstring"):
        map_page.first_line(silent)


def test_roles_of_sphinx_are_written_as_code(tmp_path: Path) -> None:
    file = tmp_path / "loud.py"
    file.write_text('"""See :class:`~a.B` and ``c`` | d.\n\nMore.\n"""\n')
    assert map_page.first_line(file) == "See `a.B` and `c` \\| d."
