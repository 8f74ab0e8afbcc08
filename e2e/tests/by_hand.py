"""The shell snippets of the README's part "The connector by hand", as they stand there."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"


def snippet(heading: str) -> str:
    """The one shell snippet below a heading of the README."""
    part = re.split(rf"^### {re.escape(heading)}$", README.read_text(), flags=re.MULTILINE)[1]
    part = re.split(r"^##+ ", part, flags=re.MULTILINE)[0]
    [text] = re.findall(r"^```bash\n(.+?)^```$", part, re.MULTILINE | re.DOTALL)
    return str(text)


def transfer_configs(text: str) -> list[dict[str, Any]]:
    """Every --kv-transfer-config of a snippet, read as the JSON that it must be."""
    found = re.findall(r"--kv-transfer-config '(.+?)'", text, re.DOTALL)
    return [json.loads(config) for config in found]


def background(text: str, program: str) -> list[list[str]]:
    """The words after a program, of each command that runs in the background."""
    found = re.findall(rf"\b{program} (.+?) &$", text, re.MULTILINE | re.DOTALL)
    return [shlex.split(words.replace("\\\n", " ")) for words in found]


def request(text: str) -> str:
    """The request that is sent once the router is ready, and how its readiness is asked."""
    return text[text.index("until curl") :]
