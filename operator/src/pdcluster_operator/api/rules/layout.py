"""Arithmetic of one role: workers, pods and GPUs."""

from __future__ import annotations

from collections.abc import Iterator

from pdcluster_connector.compat.counted import counted
from pdcluster_operator.api.findings import FieldError, Rule
from pdcluster_operator.api.spec.enums import Role
from pdcluster_operator.api.spec.types import Cluster

LARGEST_ENGINE = 4096
MOST_LINKS = 4096
# Links that one decode worker keeps open: one to each data-parallel rank of prefill.
MOST_SIDE_CHANNELS = 1024


def layout_errors(cluster: Cluster) -> Iterator[FieldError]:
    """Yield sizes that do not fit together, or that are too large."""
    for role in Role:
        yield from _workers(cluster, role)
    prefill, decode = cluster.spec.prefill.replicas, cluster.spec.decode.replicas
    if prefill * decode > MOST_LINKS:
        yield FieldError(
            "spec.decode.replicas",
            str(decode),
            Rule.TOO_MANY_LINKS,
            f"{prefill} prefill x {decode} decode engines are {prefill * decode} links; "
            f"{MOST_LINKS} are allowed",
            "Use fewer, larger engines, or several clusters.",
        )
    ranks = cluster.spec.prefill.parallelism.data
    if prefill * ranks > MOST_SIDE_CHANNELS:
        yield FieldError(
            "spec.prefill.parallelism.data",
            str(ranks),
            Rule.TOO_MANY_LINKS,
            f"{prefill} prefill engines x {ranks} data-parallel ranks are {prefill * ranks} side "
            f"channels that each decode worker keeps a link to; {MOST_SIDE_CHANNELS} are allowed",
            "Use fewer data-parallel ranks or replicas, or several clusters.",
        )


def _workers(cluster: Cluster, role: Role) -> Iterator[FieldError]:
    path = f"spec.{role}.parallelism"
    parallel = cluster.spec.role(role).parallelism
    workers = parallel.tensor * parallel.pipeline * parallel.data
    sizes = f"tensor {parallel.tensor} x pipeline {parallel.pipeline} x data {parallel.data}"
    if workers % parallel.nodes:
        yield FieldError(
            f"{path}.nodes",
            str(parallel.nodes),
            Rule.NODES_DIVIDE_WORKERS,
            f"{sizes} = {counted(workers, 'worker')} cannot be spread evenly over "
            f"{counted(parallel.nodes, 'pod')}",
            "Choose nodes so that it divides the workers.",
            (path,),
        )
    elif workers > LARGEST_ENGINE:
        yield FieldError(
            path,
            sizes,
            Rule.OUT_OF_RANGE,
            f"{workers} workers in one engine; {LARGEST_ENGINE} are allowed",
            "Use smaller engines and more replicas.",
        )
