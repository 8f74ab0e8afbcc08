"""The example of docs/testing.md runs, and prints what the page says."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

from pdcluster_connector.testing.nixl import Behaviour

PAGE = (Path(__file__).parents[3] / "docs" / "testing.md").read_text()


def test_the_example_prints_what_the_page_says() -> None:
    (example,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    printed = re.search(r"It prints:\n\n```\n(.*?)```", PAGE, re.DOTALL)
    assert printed is not None
    ended = subprocess.run(
        [sys.executable, "-c", example], capture_output=True, text=True, timeout=240, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == printed[1]


def test_every_behaviour_is_on_the_page() -> None:
    named = set(re.findall(r"`(\w+)=", PAGE))
    assert {field.name for field in dataclasses.fields(Behaviour)} <= named
