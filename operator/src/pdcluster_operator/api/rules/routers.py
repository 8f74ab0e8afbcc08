"""Rules of the router: fields that its type does not use, and llm-d's sidecar."""

from collections.abc import Iterator
from dataclasses import fields

from pdcluster_operator.api.findings import FieldError, Rule, shown
from pdcluster_operator.api.spec.fields import as_manifest, camel
from pdcluster_operator.api.spec.router_types import Router, RouterType
from pdcluster_operator.api.spec.types import Cluster

OF_EVERY_TYPE = frozenset({"type", "api_key_secret_ref", "allow_from"})
OF_LLMD = frozenset({"sidecar_image"})


def router_errors(cluster: Cluster) -> Iterator[FieldError]:
    """Yield fields that do nothing with this type of router."""
    router, untouched = cluster.spec.router, Router()
    for field in fields(Router):
        owner = RouterType.LLMD if field.name in OF_LLMD else RouterType.VLLM_ROUTER
        value = getattr(router, field.name)
        if field.name in OF_EVERY_TYPE or owner is router.type:
            continue
        # `replicas: 0` says with every type that no pod of vllm-router is wanted.
        if value == getattr(untouched, field.name) or (field.name == "replicas" and not value):
            continue
        yield FieldError(
            f"spec.router.{camel(field.name)}",
            shown(as_manifest(value)),
            Rule.ROUTER_FIELD_UNUSED,
            f"does nothing with spec.router.type {router.type.value}: it is of {owner.value}",
            f"Remove it, or set spec.router.type to {owner.value}.",
            ("spec.router.type",),
        )


def sidecar_warnings(cluster: Cluster) -> Iterator[FieldError]:
    """Yield a sidecar that everybody may tell where to send prompts."""
    router = cluster.spec.router
    if router.type is RouterType.LLMD and router.allow_from is None:
        yield FieldError(
            "spec.router.allowFrom",
            "",
            Rule.SIDECAR_OPEN,
            "everybody may reach the sidecars, which send prompts to the address in a header",
            "Name the pods of llm-d's gateway and endpoint picker.",
        )
