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


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalerSpec:
    """The spec of a PrefillScaler, which has the name of its PDCluster."""

    RULES: ClassVar[tuple[fields.Cel, ...]] = (
        fields.Cel(
            "!has(self.minPercentOfDecode) || !has(self.maxPercentOfDecode) "
            "|| self.minPercentOfDecode <= self.maxPercentOfDecode",
            "minPercentOfDecode must not be above maxPercentOfDecode (rule MinAboveMax)",
        ),
    )

    replicas: Annotated[
        int,
        fields.Example(2),
        "is the number of prefill engines. It is used instead of spec.prefill.replicas of the "
        "PDCluster. If an autoscaler sets it, leave it out of the file that you apply.",
        fields.Whole(0, 1000),
    ] = 1
    min_percent_of_decode: Annotated[
        int | None,
        fields.Example(50),
        "is a lower bound of the number, as a share of the decode engines, rounded up: with 50 and "
        "five decode engines there are at least three prefill engines.",
        fields.Whole(1, 10_000),
    ] = None
    max_percent_of_decode: Annotated[
        int | None,
        fields.Example(200),
        "is an upper bound of the number, as a share of the decode engines, rounded up.",
        fields.Whole(1, 10_000),
    ] = None
