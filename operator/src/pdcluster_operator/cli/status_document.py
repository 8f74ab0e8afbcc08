"""The document of ``pdcluster status``, which ``-o json`` prints."""

from typing import Any

import msgspec


class Engine(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One engine.

    Attributes:
        state: Ready, Unknown, or the reason why it is not ready.
        message: what it does now, or what went wrong.
        restarts: how often containers of its pods were started again.
        ended: how its previous process ended.
        wanted: whether the spec wants it. An engine of an older revision stays for a while.
    """

    name: str
    role: str
    state: str
    message: str = ""
    restarts: int = 0
    ended: str = ""
    wanted: bool = True


class RoleCount(msgspec.Struct):
    """How far the engines of a role are: ``ready`` is like 1/2, and ``old`` engines are extra."""

    role: str
    ready: str
    old: int


class Operator(msgspec.Struct):
    """Who works on the PDCluster. ``works`` is None if this account cannot know."""

    works: bool | None
    message: str


class Gpus(msgspec.Struct):
    """GPUs that pods of engines hold, and those that pods wait for."""

    held: int
    waited_for: int = msgspec.field(name="waitedFor")


class Condition(msgspec.Struct):
    """One condition."""

    type: str
    status: str
    reason: str
    message: str
    since: str


class Failure(msgspec.Struct):
    """Something that failed, and when it was last seen."""

    time: str
    about: str
    reason: str
    message: str


class Step(msgspec.Struct):
    """What to do about one reason: the command, and the place of the manual that says more."""

    reason: str
    severity: str
    means: str
    remedy: str
    command: str
    page: str


class Status(msgspec.Struct, kw_only=True):
    """The whole.

    Attributes:
        summary: one sentence: whether it serves, and if not, why.
        serves: whether clients reach a verified pair of engines; None if nobody knows.
        diagnosis: what the links together show that no single one does.
        not_shown: how many engines are left out.
        scaling: ``status.scaling``, with ``spec.autoscaling``: how many engines are needed, the
            stage at its limit, and what was measured.
    """

    name: str
    namespace: str
    summary: str
    serves: bool | None
    ready: bool
    operator: Operator
    rollout: str
    endpoint: str
    links: str
    gpus: Gpus
    roles: list[RoleCount]
    engines: list[Engine]
    not_shown: int = msgspec.field(name="notShown")
    conditions: list[Condition]
    diagnosis: list[str]
    failures: list[Failure]
    next: list[Step]
    scaling: dict[str, Any] = {}
