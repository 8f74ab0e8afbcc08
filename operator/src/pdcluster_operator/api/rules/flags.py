"""Flags of ``vllm serve`` with which the connector does not start: refused at admission."""

from __future__ import annotations

from collections.abc import Iterator

from pdcluster_connector.compat.engine_flags import REFUSED_FLAGS
from pdcluster_operator.api.findings import FieldError, Rule, shown
from pdcluster_operator.api.rules.extra_args import engine_places
from pdcluster_operator.api.spec.arguments import parse_flags
from pdcluster_operator.api.spec.types import Cluster


def flag_errors(cluster: Cluster) -> Iterator[FieldError]:
    """Yield the flags with which the connector does not run."""
    for path, engine in engine_places(cluster):
        for flag in parse_flags(engine.extra_args)[0]:
            # argparse accepts an abbreviation that fits one flag only.
            names = [name for name in REFUSED_FLAGS if name.startswith(flag.head)]
            if len(names) == 1 and not flag.negated:
                yield FieldError(
                    f"{path}.extraArgs[{flag.place}]",
                    shown(" ".join(flag.words)),
                    Rule.FLAG_UNSUPPORTED,
                    f"{names[0]} {REFUSED_FLAGS[names[0]]}",
                    f"Remove {flag.head}.",
                )
