from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from dev.rules_page import page

from pdcluster_connector.compat.check import RULES

CHECKED_IN = Path(__file__).parents[3] / "docs" / "rules.md"


def test_the_page_describes_every_rule() -> None:
    text = page()
    for rule in RULES:
        assert f"## `{rule.id}`" in text
        assert rule.description in text
        assert rule.remedy in text


def test_the_page_in_docs_is_the_generated_one() -> None:
    assert CHECKED_IN.read_text() == page(), "run python -m dev.rules_page > docs/rules.md"


def test_the_rules_import_nothing_but_msgspec() -> None:
    """The operator's image has neither torch nor vLLM, and admission must be quick."""
    code = (
        "import sys; before = set(sys.modules);"
        "import pdcluster_connector.compat.check;"
        "new = {name.partition('.')[0] for name in set(sys.modules) - before};"
        "print(*sorted(new - set(sys.stdlib_module_names)))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": str(Path(__file__).parents[2] / "src")},
    )
    assert set(result.stdout.split()) - {"typing_extensions"} == {"msgspec", "pdcluster_connector"}
