"""The shell snippets of docs/connector.md, unchanged."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "connector.md"


def snippet(heading: str) -> str:
    """The one shell snippet below a heading of the page."""
    part = re.split(rf"^## {re.escape(heading)}$", PAGE.read_text(), flags=re.MULTILINE)[1]
    part = re.split(r"^##+ ", part, flags=re.MULTILINE)[0]
    [text] = re.findall(r"^```bash\n(.+?)^```$", part, re.MULTILINE | re.DOTALL)
    return str(text)


def transfer_configs(text: str) -> list[dict[str, Any]]:
    """Every --kv-transfer-config of a snippet, parsed as JSON."""
    found = re.findall(r"--kv-transfer-config '(.+?)'", text, re.DOTALL)
    return [json.loads(config) for config in found]


def engines(text: str) -> list[list[str]]:
    """The arguments of both engines: the shared ones, in the array SERVE, and their own."""
    [shared] = re.findall(r"^SERVE=\((.+?)\)$", text, re.MULTILINE | re.DOTALL)
    own = re.findall(r'"\$\{SERVE\[@\]\}" (.+?) > \S+ 2>&1 &$', text, re.MULTILINE | re.DOTALL)
    return [shlex.split(f"{shared} {words}".replace("\\\n", "")) for words in own]


def router_and_request(text: str) -> str:
    """The part of a snippet after the engines."""
    return text[text.index("\nvllm-router ") :]
