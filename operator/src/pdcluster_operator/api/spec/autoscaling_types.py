"""The part of a spec about how many engines there are, and who decides it."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, ClassVar

from pdcluster_operator.api.spec import fields


class ScalingMode(StrEnum):
    """What becomes of the advice on how many engines are needed."""

    ADVISE = "Advise"
    APPLY = "Apply"


class Limit(StrEnum):
    """The stage of a request that limits a PDCluster, in the status."""

    NONE = "None"
    PREFILL = "Prefill"
    TRANSFER = "Transfer"
    DECODE = "Decode"
    UNKNOWN = "Unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineBounds:
    """How many engines a role may have."""

    RULES: ClassVar[tuple[fields.Cel, ...]] = (
        fields.Cel("self.min <= self.max", "min must not be above max (rule MinAboveMax)"),
    )

    min: Annotated[
        int,
        fields.Example(1),
        "is the smallest number of engines.",
        fields.Whole(1, 1000),
    ] = 1
    max: Annotated[
        int,
        fields.Example(4),
        "is the largest number of engines.",
        fields.Whole(1, 1000),
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Autoscaling:
    """How many engines there are, by what they measure."""

    RULES: ClassVar[tuple[fields.Cel, ...]] = (
        fields.Cel(
            "has(self.ttftMs) || has(self.itlMs)",
            "autoscaling needs ttftMs, itlMs or both (rule NoTarget)",
        ),
    )

    ttft_ms: Annotated[
        int | None,
        fields.Example(1500),
        "is the target of the mean time to the first token, in milliseconds. It counts from the "
        "arrival at a prefill engine to the first token of a decode engine.",
        fields.Whole(1, 3_600_000),
    ] = None
    itl_ms: Annotated[
        int | None,
        fields.Example(40),
        "is the target of the mean time between two tokens of an answer, in milliseconds.",
        fields.Whole(1, 3_600_000),
    ] = None
    prefill: Annotated[EngineBounds, "bounds the number of prefill engines."]
    decode: Annotated[EngineBounds, "bounds the number of decode engines."]
    mode: Annotated[
        ScalingMode,
        fields.Example("Apply"),
        "says who sets the numbers. With Advise, status.scaling shows how many engines are "
        "needed, and an autoscaler of yours or a person follows it. With Apply, the operator sets "
        "the replicas of the PDCluster, and those of the PrefillScaler of its name if there is "
        "one. Then no other autoscaler may set the same numbers.",
    ] = ScalingMode.ADVISE
