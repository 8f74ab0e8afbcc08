"""What ``pdcluster status`` says of ``spec.autoscaling``, as the planner judged it."""

from __future__ import annotations

import io
import re

from rich.console import Console
from test_scaling_follow import busy, minutes, slow, world
from test_status_words import objects

from pdcluster_operator.cli.status_facts import status_of
from pdcluster_operator.cli.status_view import print_status


def printed(made: object) -> str:
    out = io.StringIO()
    found = objects(made)  # type: ignore[arg-type]
    print_status(Console(file=out, width=200), status_of(found), found.now)
    return out.getvalue()


def test_how_many_engines_are_needed_and_why() -> None:
    made = world("Advise")
    minutes(made, 3, slow)
    assert status_of(objects(made)).scaling == made.cluster["status"]["scaling"]
    text = printed(made)
    assert "needed    1 prefill and 2 decode engines, because of decode; " in text
    assert "90 ms between tokens" in text
    assert re.search(r"ScalingTargetsMet +False", text)
    assert "MoreEnginesNeeded: More engines are needed than there are." in text


def test_what_is_enough_and_what_was_never_measured() -> None:
    made = world("Advise")
    assert "needed    1 prefill and 1 decode engine\n" in printed(made)
    minutes(made, 3, busy)
    assert "needed    1 prefill and 1 decode engine; first token after 600 ms" in printed(made)
    made = world("Advise")
    del made.cluster["status"]["scaling"]
    assert "needed" not in printed(made)
