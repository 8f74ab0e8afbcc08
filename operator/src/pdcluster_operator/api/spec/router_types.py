"""The router before the engines, and who may reach it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from pdcluster_operator.api.spec.bounds import IMAGE
from pdcluster_operator.api.spec.enums import RouterPolicy
from pdcluster_operator.api.spec.fields import Doc, Example, Free, Items, Quantities, Whole
from pdcluster_operator.api.spec.model_types import SecretKeyRef
from pdcluster_operator.api.spec.network_types import PEERS, NetworkPeer


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterResources:
    """Compute resources of each router pod.

    The defaults are measured, see docs/operations.md. There is no CPU limit, because a router that
    is throttled delays every token of every request.
    """

    requests: Annotated[
        Quantities,
        Example({"cpu": "1", "memory": "512Mi"}),
        Doc("are the resources that Kubernetes reserves for a pod."),
    ] = field(default_factory=lambda: Quantities(cpu="250m", memory="256Mi"))
    limits: Annotated[
        Quantities,
        Example({"memory": "4Gi"}),
        Doc("are the resources that a pod may use at most."),
    ] = field(default_factory=lambda: Quantities(memory="2Gi"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Router:
    """The router before the engines: vLLM's own vllm-router."""

    replicas: Annotated[
        int, Example(2), Doc("is the number of router pods. 0 means no router."), Whole(0, 64)
    ] = 1
    policy: Annotated[
        RouterPolicy, Example("CacheAware"), Doc("is how the router picks engines.")
    ] = RouterPolicy.ROUND_ROBIN
    image: Annotated[
        str,
        Example("registry.example/team/vllm-router:0.1.17"),
        Doc(
            "is the router's container image, which must hold vllm-router. The default is a tag "
            "that moves every day, because tags with a date are deleted after two weeks. If the "
            "image must not change, name one of your own (docs/images.md)."
        ),
        IMAGE,
    ] = "docker.io/vllm/vllm-router:nightly"
    resources: Annotated[RouterResources, Doc("are the compute resources of each router pod.")] = (
        field(default_factory=RouterResources)
    )
    api_key_secret_ref: Annotated[
        SecretKeyRef | None,
        Doc(
            "is the Secret with the API key. Clients send the key as Authorization: Bearer KEY, "
            "and the router and the engines ask for it. Without this field they ask for no key."
        ),
    ] = None
    allow_from: Annotated[
        tuple[NetworkPeer, ...] | None,
        Example(PEERS),
        Doc(
            "are the peers that may reach the router, or the engines' API if replicas is 0. "
            "Without this field everybody may."
        ),
        Items(64, 1),
    ] = None
    pod_template: Annotated[
        Free | None,
        Example({"spec": {"priorityClassName": "high"}}),
        Doc(
            "is a Kubernetes pod template. It is merged over the operator's own, containers by "
            "name. The router's container is called router."
        ),
    ] = None
