"""What ``pdcluster plan`` shows of a course: text for people, or a document."""

import itertools
from collections.abc import Iterator

import msgspec
from rich.console import Console
from rich.text import Text

from pdcluster_operator.plan import types
from pdcluster_operator.plan.forecast.course import Course


class Step(msgspec.Struct, frozen=True, rename="camel"):
    """One step of the operator."""

    number: int
    verb: str
    kind: str
    name: str
    why: str


class Round(msgspec.Struct, frozen=True, rename="camel"):
    """Steps without a wait. ``after`` is what the operator waits for first; empty if nothing."""

    after: str
    steps: list[Step]


class Amount(msgspec.Struct, frozen=True, rename="camel"):
    """An amount now, at the peak of the change, and after it."""

    now: int
    peak: int
    after: int


class Replaced(msgspec.Struct, frozen=True, rename="camel"):
    """Engines that are replaced, and the fields of the spec that make it necessary."""

    role: str
    engines: list[str]
    fields: list[str]


class Answer(msgspec.Struct, frozen=True, rename="camel"):
    """What the API server says to new pods in a dry run. ``taken`` is null if it was not asked."""

    about: str
    taken: bool | None
    message: str


class Plan(msgspec.Struct, frozen=True, rename="camel"):
    """What the operator would do.

    ``against`` says whether it is for a PDCluster that runs. Without, the last four fields are
    empty. ``pending`` counts steps that are left for the spec as it is. ``service`` is Verified
    (a verified pair serves all the time), Interrupted, or None.
    """

    namespace: str
    name: str
    against: bool
    rounds: list[Round]
    engines: Amount
    gpus: Amount
    replaced: list[Replaced]
    accepted: str
    pending: int = 0
    service: str = ""
    complete: bool | None = None
    end: str = ""
    api_server: list[Answer] = []


def plan_of(name: tuple[str, str], course: Course, accepted: str, *, against: bool = False) -> Plan:
    """Return the document of a course.

    Args:
        name: namespace and name of the PDCluster.
        accepted: what its condition Accepted says.
    """
    served = "Verified" if course.served else "None"
    more = {
        "service": "Interrupted" if course.interrupted else served,
        "complete": course.complete,
        "end": course.end,
    }
    found = Plan(
        *name,
        against=against,
        rounds=list(_rounds(course)),
        engines=Amount(*course.engines),
        gpus=Amount(*course.gpus),
        replaced=[
            Replaced(str(one.role), [each.stateful_set for each in one.engines], list(one.fields))
            for one in course.replaced
        ],
        accepted=accepted,
    )
    return msgspec.structs.replace(found, **more) if against else found


def print_plan(console: Console, plan: Plan) -> None:
    """Print it for people."""
    _print_change(console, plan)
    for one in plan.rounds:
        if one.after:
            console.print(Text(f"when {one.after}:", "dim"))
        for step in one.steps:
            line = Text(f"{step.number:3}. {step.verb} {step.kind} ")
            console.print(line.append(step.name, "bold").append(f"  {step.why}", "dim"))
    if not plan.rounds:
        console.print("  nothing is left to do")
    for what, held in (("engines", plan.engines), ("GPUs", plan.gpus)):
        amounts = f"{held.now} now, {held.peak} at the peak, {held.after} after"
        console.print(Text(f"{what}: {amounts}"))
    if plan.accepted:
        console.print(Text(f"Accepted: {plan.accepted}", "dim"))
    _print_end(console, plan)


def _print_change(console: Console, plan: Plan) -> None:
    if plan.pending:
        console.print(
            Text(
                f"  The operator still has {plan.pending} steps to take for the spec as it is. "
                "They are among the steps below.",
                "yellow",
            )
        )
    for one in plan.replaced:
        fields = ", ".join(one.fields) or "the spec"
        console.print(Text(f"  replaces {', '.join(one.engines)}: {fields} changed"))
    if plan.against and not plan.replaced:
        console.print("  replaces no engine")


def _print_end(console: Console, plan: Plan) -> None:
    if plan.service == "Interrupted":
        console.print(Text("service: interrupted; for a while no request is served", "yellow"))
    elif plan.service == "Verified":
        console.print("service: a verified pair serves all the time")
    if plan.end:
        console.print(Text(f"the end: {plan.end}", "" if plan.complete else "yellow"))
    styles = {None: "yellow", False: "red", True: ""}
    for one in plan.api_server:
        console.print(Text(f"API server: {one.message}", styles[one.taken]))


def _rounds(course: Course) -> Iterator[Round]:
    numbers = itertools.count(1)
    for turn in course.rounds:
        steps = [Step(next(numbers), *in_words(step), step.why) for step in turn.steps]
        yield Round(turn.after, steps)


def in_words(step: types.Step) -> tuple[str, str, str]:
    """Return the verb, kind and name of a step."""
    if isinstance(step, types.Delete):
        return "delete", step.kind, step.name
    trial = "try" if isinstance(step, types.TryOut) and step.uid else "try, then apply"
    verb = {types.Apply: "apply", types.TryOut: trial}.get(type(step), "write")
    return verb, str(step.manifest["kind"]), str(step.manifest["metadata"]["name"])
