"""What ``pdcluster plan --against`` prints of a course."""

from __future__ import annotations

import asyncio
import io
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from pdcluster_operator.api.object_names import EngineName
from pdcluster_operator.api.spec.types import Role
from pdcluster_operator.cli.against import ask
from pdcluster_operator.cli.exits import Exit
from pdcluster_operator.cli.plan_view import in_words, plan_of, print_plan
from pdcluster_operator.plan.forecast.course import Course, Held, Replaced, Round
from pdcluster_operator.plan.types import (
    Apply,
    Delete,
    Step,
    TryOut,
    WriteCertificates,
    WriteTicketKey,
)
from pdcluster_operator.runtime.interfaces import ApiError

SECRET = {"kind": "Secret", "metadata": {"name": "keys"}}
STORED = {"kind": "ControllerRevision", "metadata": {"name": "revision"}}
TRIAL = TryOut(({"kind": "StatefulSet"}, {"kind": "Pod"}), STORED, True, "is new")
OTHER = replace(TRIAL, manifest={**STORED, "metadata": {"name": "revision-2"}})
CASES = [
    (Apply(SECRET, "why"), ("apply", "Secret", "keys")),
    (WriteTicketKey(SECRET, rotate=False, why="why"), ("write", "Secret", "keys")),
    (WriteCertificates(SECRET, {}, 0.0, 1.0, "why"), ("write", "Secret", "keys")),
    (TRIAL, ("try, then apply", "ControllerRevision", "revision")),
    (Delete("Service", "ns", "old", "u", "1", "why"), ("delete", "Service", "old")),
    (Delete("Pod", "ns", "pod-0", "u", "1", "why"), ("delete", "Pod", "pod-0")),
    (replace(TRIAL, uid="u"), ("try", "ControllerRevision", "revision")),
]


@pytest.mark.parametrize(("step", "words"), CASES)
def test_a_step_in_words(step: Step, words: tuple[str, str, str]) -> None:
    assert in_words(step) == words


COURSE = Course((), (), Held(2, 3, 1), Held(4, 12, 3), True, False, True, "Ready is True: Ready")


def printed(course: Course) -> list[str]:
    output = io.StringIO()
    console = Console(file=output, width=40, soft_wrap=True)
    print_plan(console, plan_of(("ns", "tiny"), course, "", against=True))
    return output.getvalue().splitlines()


def test_a_course_without_steps_says_so() -> None:
    assert printed(COURSE) == [
        "  replaces no engine",
        "  nothing is left to do",
        "engines: 2 now, 3 at the peak, 1 after",
        "GPUs: 4 now, 12 at the peak, 3 after",
        "service: a verified pair serves all the time",
        "the end: Ready is True: Ready",
    ]


def test_steps_are_numbered_through_all_rounds() -> None:
    names = tuple(EngineName("ns", "tiny", Role.DECODE, "aaaaa", number) for number in (0, 1))
    apply, delete = CASES[0][0], CASES[4][0]
    course = replace(
        COURSE,
        rounds=(Round("", (apply, delete)), Round("the new engines are ready", (delete,))),
        replaced=(
            Replaced(Role.DECODE, names, ("spec.decode.image", "spec.engine.env")),
            Replaced(Role.PREFILL, names[:1], ()),
        ),
    )
    assert printed(course)[:6] == [
        (
            "  replaces tiny-decode-aaaaa-0, tiny-decode-aaaaa-1: "
            "spec.decode.image, spec.engine.env changed"
        ),
        "  replaces tiny-decode-aaaaa-0: the spec changed",
        "  1. apply Secret keys  why",
        "  2. delete Service old  why",
        "when the new engines are ready:",
        "  3. delete Service old  why",
    ]


@pytest.mark.parametrize(
    ("served", "interrupted", "said"),
    [
        (True, True, ["service: interrupted; for a while no request is served"]),
        (True, False, ["service: a verified pair serves all the time"]),
        (False, False, []),
    ],
)
def test_whether_requests_fail_meanwhile(served: bool, interrupted: bool, said: list[str]) -> None:
    found = printed(replace(COURSE, served=served, interrupted=interrupted))
    assert [line for line in found if line.startswith("service:")] == said


class Server:
    """Judges pods."""

    def __init__(self, *answers: ApiError | None) -> None:
        self.answers = list(answers)

    async def try_out(self, step: TryOut) -> None:
        assert step in (TRIAL, OTHER)
        if (error := self.answers.pop(0)) is not None:
            raise error


FORBIDDEN = ApiError("Forbidden", 'User "x" cannot create resource "pods"')
REFUSED = ApiError("TemplateRefused", "no pod may be privileged")
QUOTA = ApiError("Forbidden", "the quota is used up: cannot create a pod")


@pytest.mark.parametrize(
    ("answers", "complete", "code", "said", "taken"),
    [
        ((None, None), True, Exit.DONE, ["would take", "would take"], [True, True]),
        ((None, None), False, Exit.NOT_READY, ["would take", "would take"], [True, True]),
        ((FORBIDDEN, None), True, Exit.DONE, ["not asked about", "would take"], [None, True]),
        ((REFUSED,), True, Exit.MANIFEST, ["no pod may be privileged"], [False]),
        ((QUOTA,), True, Exit.MANIFEST, ["cannot create"], [False]),
    ],
)
def test_the_api_server_is_asked_about_new_pods(
    answers: tuple[ApiError | None, ...],
    complete: bool,
    code: Exit,
    said: list[str],
    taken: list[bool | None],
) -> None:
    server = Server(*answers)
    api: Any = server
    course = replace(
        COURSE,
        complete=complete,
        rounds=(Round("", (CASES[0][0], TRIAL)), Round("x", (TRIAL, OTHER))),
    )
    found, ended = asyncio.run(ask(api, course))
    assert ended == code
    assert [one.taken for one in found] == taken
    for one, words in zip(found, said, strict=True):
        assert words in one.message
        assert one.about.startswith("StatefulSet and Pod of revision")
        assert not one.taken or one.about in one.message
