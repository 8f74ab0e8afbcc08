"""Known traps: settings that vLLM or UCX accept, but that do not do what the user means."""

from __future__ import annotations

from collections.abc import Iterator

from pdcluster_connector.compat.transports import why_not
from pdcluster_operator.api.findings import FieldError, Rule, shown
from pdcluster_operator.api.rules.extra_args import engine_places, flag_path
from pdcluster_operator.api.spec.enums import Device, Role
from pdcluster_operator.api.spec.fields import Free
from pdcluster_operator.api.spec.pod_templates import amounts, engine_container
from pdcluster_operator.api.spec.resolve import resolve_engine
from pdcluster_operator.api.spec.resources import is_accelerator
from pdcluster_operator.api.spec.types import Cluster

CUDA_TRANSPORTS = {"cuda", "cuda_copy", "cuda_ipc", "all"}


def trap_errors(cluster: Cluster) -> Iterator[FieldError]:
    """Yield settings with which vLLM does not start, or stops at the first request."""
    for place, backend in enumerate(cluster.spec.transfer.backends):
        if why := why_not(backend):
            yield FieldError(
                f"spec.transfer.backends[{place}]",
                shown(backend),
                Rule.BACKEND_CARRIES_NOTHING,
                f"NIXL's {backend} {why}",
                "Use UCX, which carries RDMA, NVLink and TCP.",
            )
    if cluster.spec.transfer.device is Device.CPU:
        yield from _eager_pipeline(cluster)
        return
    for path, engine in engine_places(cluster):
        for place, var in enumerate(engine.env):
            value = (var.value or "").lower().replace(" ", "")
            if var.name.startswith("PYTORCH_") and "expandable_segments:true" in value:
                yield FieldError(
                    f"{path}.env[{place}].value",
                    shown(var.value),
                    Rule.EXPANDABLE_SEGMENTS,
                    "vLLM refuses expandable segments together with any KV connector",
                    "Remove expandable_segments.",
                    ("spec.transfer.device",),
                )


def _eager_pipeline(cluster: Cluster) -> Iterator[FieldError]:
    for role in Role:
        engine = resolve_engine(cluster, role)
        eager = engine.last("--enforce-eager")
        if engine.parallelism.pipeline == 1 or eager is None or eager.negated:
            continue
        yield FieldError(
            flag_path(cluster, role, eager.name),
            shown(" ".join(eager.words)),
            Rule.EAGER_PIPELINE,
            f"the {role} engines have pipeline stages: with this flag vLLM's CPU runner skips the "
            "profile run that creates their buffers, and the first request stops the engine",
            """Write --compilation-config, '{"mode":3,"backend":"eager"}' instead.""",
        )


def trap_warnings(cluster: Cluster) -> Iterator[FieldError]:
    """Yield what is legal but suspicious."""
    for path, engine in engine_places(cluster):
        for place, var in enumerate(engine.env):
            yield from _variable(cluster, f"{path}.env[{place}]", var.name, var.value)
    for role in Role:
        spec = cluster.spec.role(role)
        path = f"spec.{role}.podTemplate"
        yield from _overlay(spec.pod_template, path, "engine")
        if spec.replicas == 0:
            yield FieldError(
                f"spec.{role}.replicas",
                "0",
                Rule.NOTHING_TO_PAIR,
                f"without {role} engines nothing is served",
                "Set at least 1 to serve.",
            )
    yield from _overlay(cluster.spec.router.pod_template, "spec.router.podTemplate", "router")
    yield from _tcp(cluster)


def _tcp(cluster: Cluster) -> Iterator[FieldError]:
    """Yield a warning if engines span machines without RDMA: their KV goes over TCP."""
    transfer = cluster.spec.transfer
    if transfer.device is not Device.CUDA or transfer.rdma is not None:
        return
    for role in Role:
        spec = cluster.spec.role(role)
        _, overlay = engine_container(cluster, role)
        devices = {*spec.resources.limits, *amounts(overlay, "limits")}
        if spec.parallelism.nodes > 1 and all(
            is_accelerator(name) for name in devices if "/" in name
        ):
            yield FieldError(
                "spec.transfer.rdma",
                "",
                Rule.NO_RDMA,
                f"the {role} engines span {spec.parallelism.nodes} pods and ask for no RDMA "
                "device: KV goes over TCP",
                "Name the RDMA resource of your nodes, e.g. rdma: {resource: rdma/ib}.",
                (f"spec.{role}.parallelism", f"spec.{role}.resources"),
            )
            return


def _variable(cluster: Cluster, path: str, name: str, value: str | None) -> Iterator[FieldError]:
    on_gpus = cluster.spec.transfer.device is Device.CUDA
    if name == "UCX_TLS" and on_gpus and value is not None:  # else a Secret or the like has it
        transports = set(value.split(","))
        if not value.startswith("^") and not transports & CUDA_TRANSPORTS:
            yield FieldError(
                f"{path}.value",
                shown(value),
                Rule.TRANSPORT_WITHOUT_CUDA,
                "without a CUDA transport UCX does not recognise GPU memory",
                "Add cuda_copy and cuda_ipc.",
                ("spec.transfer.device",),
            )
    if name.startswith("VLLM_NIXL_SIDE_CHANNEL_"):
        yield FieldError(
            f"{path}.name",
            name,
            Rule.CONFLICTING_SETTINGS,
            "belongs to vLLM's stock connector and does nothing here",
            "Remove it.",
        )


def _overlay(template: Free | None, path: str, container: str) -> Iterator[FieldError]:
    spec = template.get("spec") if template is not None else None
    containers = spec.get("containers") if isinstance(spec, dict) else None
    for place, entry in enumerate(containers if isinstance(containers, list) else ()):
        if not isinstance(entry, dict) or entry.get("name") != container:
            continue
        for field in ("command", "args"):
            if field in entry:
                yield FieldError(
                    f"{path}.spec.containers[{place}].{field}",
                    shown(entry[field]),
                    Rule.ARGUMENTS_OVERLAID,
                    f"replaces the operator's own {field}, and no rule checks it",
                    "Use engine.extraArgs instead if you can.",
                )
