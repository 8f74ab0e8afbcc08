"""Rules of ``spec.autoscaling``: bounds that fit together, and a target to scale for."""

from collections.abc import Iterator

from pdcluster_operator.api.findings import FieldError, Rule
from pdcluster_operator.api.rules.engines import MOST_LINKS
from pdcluster_operator.api.spec.types import Cluster, Role

PATH = "spec.autoscaling"


def autoscaling_errors(cluster: Cluster) -> Iterator[FieldError]:
    """Yield bounds that contradict each other or the links, and targets that are missing."""
    wanted = cluster.spec.autoscaling
    if wanted is None:
        return
    bounds = {Role.PREFILL: wanted.prefill, Role.DECODE: wanted.decode}
    for role, allowed in bounds.items():
        if allowed.min > allowed.max:
            yield FieldError(
                f"{PATH}.{role}.min",
                str(allowed.min),
                Rule.MIN_ABOVE_MAX,
                f"is above {PATH}.{role}.max, which is {allowed.max}",
                "Set max to at least min.",
                (f"{PATH}.{role}.max",),
            )
    links = wanted.prefill.max * wanted.decode.max
    if links > MOST_LINKS:
        yield FieldError(
            f"{PATH}.decode.max",
            str(wanted.decode.max),
            Rule.OUT_OF_RANGE,
            f"{wanted.prefill.max} prefill x {wanted.decode.max} decode engines would be {links} "
            f"links; {MOST_LINKS} are allowed",
            "Set a smaller max of a role.",
            (f"{PATH}.prefill.max",),
        )
    if wanted.ttft_ms is None and wanted.itl_ms is None:
        yield FieldError(
            PATH,
            "",
            Rule.NO_TARGET,
            "has neither ttftMs nor itlMs, so nothing says how many engines are enough",
            "Set ttftMs, itlMs or both, in milliseconds.",
            (f"{PATH}.ttftMs", f"{PATH}.itlMs"),
        )
