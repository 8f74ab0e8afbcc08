"""What `make docs` adds to the folder docs/: pages of other folders, and links between them.

A hook of mkdocs. Each page is one file of this repository, which is also read without the site; so
its links are those of the repository. Here they are turned into those of the site. A link to a
file that is on no page leads to REPOSITORY_URL, if that is set; otherwise its words stay.
"""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
# Pages of the site whose files are not in docs/.
ELSEWHERE = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "reporting.md",
    "examples/README.md": "examples.md",
}
# The index of docs/ is the site's navigation.
MEANT = {"docs/README.md": "README.md", "examples": "examples/README.md"}
LINK = re.compile(r"\[(?P<words>(?:[^\[\]]|\[[^\]]*\])*)\]\((?P<link>[^)\s]+)\)")
CODE = re.compile(r"(^ *```.*?^ *```|`[^`\n]+`)", re.MULTILINE | re.DOTALL)


def on_files(files: Files, config: Any) -> Files:
    """Add the pages of other folders."""
    for path, page in ELSEWHERE.items():
        files.append(File.generated(config, page, content=(ROOT / path).read_text()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turn the links of a page into those of the site."""
    at = source_of(page.file.src_uri)
    parts = CODE.split(markdown)
    # Every second part is code.
    parts[::2] = [LINK.sub(site_link(at, page.file.src_uri), text) for text in parts[::2]]
    return "".join(parts)


def source_of(page: str) -> str:
    """Return the path in the repository of a page of the site."""
    return next((path for path, name in ELSEWHERE.items() if name == page), f"docs/{page}")


def site_link(source: str, page: str) -> Callable[[re.Match[str]], str]:
    """Return what replaces each link of a file in the repository, for its page of the site."""

    def replaced(found: re.Match[str]) -> str:
        words, link = found["words"], found["link"]
        if "://" in link or link.startswith(("#", "mailto:")):
            return found[0]
        target, mark, anchor = link.partition("#")
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        path = MEANT.get(path, path)
        there = ELSEWHERE.get(path)
        if there is None and path.startswith("docs/") and (ROOT / path).is_file():
            there = path.removeprefix("docs/")
        if there is not None:
            near = posixpath.relpath(there, posixpath.dirname(page) or ".")
            return f"[{words}]({near}{mark}{anchor})"
        url = os.environ.get("REPOSITORY_URL")
        return f"[{words}]({url}/blob/main/{path})" if url else words

    return replaced
