"""Settings that must be equal on both roles, and that only one role has."""

from __future__ import annotations

from collections.abc import Iterator

from pdcluster_operator.api.findings import FieldError, Rule, shown
from pdcluster_operator.api.rules.extra_args import flag_path
from pdcluster_operator.api.spec.enums import Role
from pdcluster_operator.api.spec.resolve import resolve_engine
from pdcluster_operator.api.spec.shape import engine_shape
from pdcluster_operator.api.spec.types import Cluster

# EngineShape field -> (field in engine, flags that can say it too)
SETTINGS = {
    "block_size": ("blockSize", ("--block-size",)),
    "kv_dtype": ("kvCacheDtype", ("--kv-cache-dtype", "--dtype")),
}


def one_sided_warnings(cluster: Cluster) -> Iterator[FieldError]:
    """Yield settings of one role only: vLLM chooses the other role's, which may differ."""
    for field, (name, flags) in SETTINGS.items():
        engines = {role: resolve_engine(cluster, role) for role in Role}
        values = {
            role: getattr(engine_shape(cluster, engine), field) for role, engine in engines.items()
        }
        named = [role for role in Role if values[role] is not None]
        if len(named) != 1:
            continue
        (role,) = named
        flag = next((flag for flag in flags if engines[role].last(flag) is not None), None)
        yield FieldError(
            flag_path(cluster, role, flag) if flag else f"spec.{role}.engine.{name}",
            shown(values[role]),
            Rule.SET_ON_ONE_ROLE,
            f"only the {role} engines have it; vLLM chooses a value for the others, and engines "
            "with different values refuse each other",
            f"Set the same engine.{name} on both roles, in spec.engine.",
            (f"spec.engine.{name}", *(f"spec.{other}.engine.{name}" for other in Role)),
        )
