"""Where a cluster's model comes from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from pdcluster_operator.api.spec.bounds import ABSOLUTE, NAME, RELATIVE, WORD
from pdcluster_operator.api.spec.fields import Doc, Example, Text


@dataclass(frozen=True, slots=True, kw_only=True)
class SecretKeyRef:
    """One key of a Secret in the cluster's namespace."""

    name: Annotated[str, Example("hub-token"), Doc("is the name of the Secret."), NAME]
    key: Annotated[str, Example("token"), Doc("is the key in the Secret."), Text(253)] = "token"


@dataclass(frozen=True, slots=True, kw_only=True)
class HuggingFaceSource:
    """A model repository on the Hugging Face hub."""

    repo: Annotated[
        str,
        Example("Qwen/Qwen2.5-0.5B-Instruct"),
        Doc("is the repository, as owner/name."),
        Text(
            200,
            pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*(/[A-Za-z0-9][A-Za-z0-9_.-]*)?$",
            says="owner/name",
        ),
    ]
    revision: Annotated[
        str | None,
        Example("7ae557604adf67be50417f59c2c2f167def9a775"),
        Doc("is the branch, tag or commit. A commit keeps both roles on the same weights."),
        WORD,
    ] = None
    token_secret_ref: Annotated[
        SecretKeyRef | None, Doc("is the Secret that holds the access token of a gated model.")
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimSource:
    """A folder on a PersistentVolumeClaim."""

    claim_name: Annotated[
        str,
        Example("weights"),
        Doc("is the name of a PersistentVolumeClaim in the cluster's namespace."),
        NAME,
    ]
    path: Annotated[
        str | None,
        Example("llama-3.3-70b"),
        Doc("is the folder in the volume. The default is the volume's root."),
        RELATIVE,
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPathSource:
    """A folder on every node."""

    path: Annotated[
        str,
        Example("/var/lib/pdcluster/models/tiny-llama"),
        Doc("is the absolute path of the folder on the node."),
        ABSOLUTE,
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """Where the weights come from: exactly one of its fields."""

    ONE_OF: ClassVar[bool] = True

    hugging_face: Annotated[
        HuggingFaceSource | None, Doc("is a repository on the Hugging Face hub.")
    ] = None
    persistent_volume_claim: Annotated[
        ClaimSource | None, Doc("is a folder on a PersistentVolumeClaim, mounted read-only.")
    ] = None
    host_path: Annotated[
        HostPathSource | None,
        Doc("is a folder on every node, mounted read-only. The operator must admit such folders."),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCache:
    """Where downloaded weights are kept."""

    persistent_volume_claim: Annotated[
        ClaimSource | None,
        Doc("is a claim that keeps downloaded weights over restarts. All engines share it."),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """The model that the cluster serves."""

    source: Annotated[ModelSource, Doc("is where the weights come from: exactly one field.")]
    name: Annotated[
        str | None,
        Example("llama-3.3-70b"),
        Doc("is the name that clients ask for. The default is metadata.name."),
        WORD,
    ] = None
    cache: Annotated[
        ModelCache, Doc("is where downloaded weights are kept. The default is the pod's own disk.")
    ] = field(default_factory=ModelCache)
