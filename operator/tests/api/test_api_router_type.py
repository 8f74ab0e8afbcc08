"""spec.router.type: which fields go with which type."""

from __future__ import annotations

from typing import Any

import pytest

from pdcluster_operator.api.findings import FieldError, Findings
from pdcluster_operator.api.rules.validate import check_manifest

PEERS = [{"podSelector": {"matchLabels": {"app": "gateway"}}}]
OF_VLLMS_ROUTER: dict[str, Any] = {
    "replicas": 2,
    "policy": "CacheAware",
    "prefillPolicy": "CacheAware",
    "decodePolicy": "Random",
    "logLevel": "Debug",
    "extraArgs": ["--cache-threshold", "0.5"],
    "image": "registry.example/router:v1",
    "resources": {"requests": {"cpu": "2"}},
    "podTemplate": {"spec": {"priorityClassName": "high"}},
}
OF_EVERY_TYPE: dict[str, Any] = {"apiKeySecretRef": {"name": "api"}, "allowFrom": PEERS}


def findings(**router: Any) -> Findings:
    spec = {"model": {"source": {"persistentVolumeClaim": {"claimName": "w"}}}, "router": router}
    document = {"apiVersion": "pdcluster.dev/v1alpha1", "kind": "PDCluster"}
    return check_manifest({**document, "metadata": {"name": "c"}, "spec": spec})[1]


def refused(**router: Any) -> list[tuple[str, str]]:
    return [(one.path, one.rule) for one in findings(**router).errors]


@pytest.mark.parametrize("kind", ["LLMD", "None"])
@pytest.mark.parametrize("field", OF_VLLMS_ROUTER)
def test_a_field_of_vllms_router_is_refused_with_another_type(kind: str, field: str) -> None:
    given = {field: OF_VLLMS_ROUTER[field]}
    assert refused(type=kind, **given) == [(f"spec.router.{field}", "RouterFieldUnused")]
    assert refused(**given) == refused(type="VLLMRouter", **given) == []


@pytest.mark.parametrize("kind", ["VLLMRouter", "LLMD", "None"])
def test_the_key_the_peers_and_no_replicas_go_with_every_type(kind: str) -> None:
    assert refused(type=kind, replicas=0, **OF_EVERY_TYPE) == []
    assert refused(type=kind) == []


def test_the_sidecars_image_is_of_llmd_alone() -> None:
    image = {"sidecarImage": "registry.example/sidecar:v1"}
    assert refused(type="LLMD", **image) == []
    [error] = findings(**image).errors
    assert error.rule == "RouterFieldUnused"
    assert str(error) == (
        "spec.router.sidecarImage = registry.example/sidecar:v1: does nothing with "
        "spec.router.type VLLMRouter: it is of LLMD [RouterFieldUnused] Remove it, or set "
        "spec.router.type to LLMD."
    )


def warnings(**router: Any) -> list[FieldError]:
    return [one for one in findings(**router).warnings if one.path.startswith("spec.router")]


def test_a_sidecar_that_everybody_reaches_is_named() -> None:
    [warning] = warnings(type="LLMD")
    assert warning.rule == "SidecarOpen"
    assert warnings(type="LLMD", allowFrom=PEERS) == []
    assert warnings(type="None") == warnings() == []


def test_a_tag_of_the_sidecar_that_moves_is_named() -> None:
    image = "registry.example/sidecar:main"
    [warning] = warnings(type="LLMD", allowFrom=PEERS, sidecarImage=image)
    assert (warning.path, warning.rule) == ("spec.router.sidecarImage", "ImageNotPinned")


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("prefillPolicy", "Random", ["--prefill-policy", "random"]),
        ("decodePolicy", "CacheAware", ["--decode-policy=random"]),
        ("decodePolicy", "CacheAware", ["--decode-pol", "random"]),
        ("logLevel", "Debug", ["--log-level", "info"]),
        ("logLevel", "Debug", ["--log-l", "info"]),
    ],
)
def test_a_flag_that_a_field_sets_too_is_refused(field: str, value: str, words: list[str]) -> None:
    args = ["--cache-threshold", "0.5", *words]
    assert refused(extraArgs=args) == refused(**{field: value}) == []
    [error] = findings(**{field: value}, extraArgs=args).errors
    assert (error.path, error.rule) == ("spec.router.extraArgs[2]", "ConflictingSettings")
    assert error.message == f"sets again what spec.router.{field} sets to {value}"


def test_the_policy_of_both_roles_is_a_field_alone() -> None:
    [error] = findings(extraArgs=["--policy", "random"]).errors
    assert (error.rule, error.remedy) == ("OwnedFlag", "Use spec.router.policy.")


@pytest.mark.parametrize("word", ["$(VLLM_API_KEY)", "a$(VLLM_API_KEY)b", "$$$(VLLM_API_KEY)"])
def test_the_api_key_is_no_argument(word: str) -> None:
    key = {"apiKeySecretRef": {"name": "api"}}
    assert refused(extraArgs=["--request-id-headers", word], **key) == [
        ("spec.router.extraArgs[1]", "NotAllowed")
    ]
    assert refused(extraArgs=["--request-id-headers", "$$(VLLM_API_KEY)"], **key) == []
