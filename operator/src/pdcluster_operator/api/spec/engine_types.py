"""The part of a spec about engines: the model that they serve, and how they run, by role."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, ClassVar

from pdcluster_operator.api.spec.fields import (
    ABSOLUTE,
    IMAGE,
    NAME,
    RELATIVE,
    REPOSITORY,
    SIZE,
    WORD,
    Cel,
    ConfigMapKeyRef,
    Example,
    Free,
    Items,
    Quantities,
    SecretKeyRef,
    SecretRef,
    Text,
    Whole,
)


class Switch(StrEnum):
    """On or off. A third value may come later."""

    ENABLED = "Enabled"
    DISABLED = "Disabled"


class Downloader(StrEnum):
    """Who downloads weights into a cache."""

    ENGINES = "Engines"
    JOB = "Job"


class ConnectorSource(StrEnum):
    """Where the connector's code comes from."""

    BUNDLED = "Bundled"
    IMAGE = "Image"


@dataclass(frozen=True, slots=True, kw_only=True)
class HuggingFaceSource:
    """A model repository on the Hugging Face hub."""

    repo: Annotated[
        str,
        Example("Qwen/Qwen2.5-0.5B-Instruct"),
        "is the repository, as owner/name.",
        Text(200, pattern=REPOSITORY, says="owner/name"),
    ]
    revision: Annotated[
        str | None,
        Example("7ae557604adf67be50417f59c2c2f167def9a775"),
        "is the branch, tag or commit. A commit keeps both roles on the same weights.",
        WORD,
    ] = None
    token_secret_ref: Annotated[
        SecretKeyRef | None, "is the Secret that holds the access token of a gated model."
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimSource:
    """A folder on a PersistentVolumeClaim."""

    claim_name: Annotated[
        str, Example("weights"), "is the name of the claim, in the cluster's namespace.", NAME
    ]
    path: Annotated[
        str | None, Example("llama-70b"), "is the folder in the volume, or else its root.", RELATIVE
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPathSource:
    """A folder on every node."""

    path: Annotated[
        str, Example("/var/lib/models/llama"), "is the absolute path of the folder.", ABSOLUTE
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class OciSource:
    """An image or artifact of a registry whose files are the model."""

    image: Annotated[
        str,
        Example("registry.example.com/models/llama-3.3-70b:v1"),
        "is the reference. Name a digest, or a tag that stays.",
        IMAGE,
    ]
    path: Annotated[
        str | None, Example("llama"), "is the folder in the image, or else its root.", RELATIVE
    ] = None
    pull_secret_ref: Annotated[
        SecretRef | None, "is the Secret of type kubernetes.io/dockerconfigjson for the registry."
    ] = None


AMAZON_KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
ENDPOINTS = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3")
GOOGLE_KEY = "credentials.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectStorageSource:
    """A folder of a bucket, of which vLLM streams the weights to the GPUs."""

    uri: Annotated[
        str,
        Example("s3://models/llama-3.3-70b"),
        "is the folder with config.json, tokenizer and *.safetensors.",
        Text(1024, shortest=6, pattern=r"^(s3|gs)://[a-z0-9][^\s@?#]*$", says="s3://… or gs://…"),
    ]
    endpoint: Annotated[
        str | None,
        Example("https://minio.storage:9000"),
        "is the address of a store of your own that speaks S3, such as MinIO.",
        Text(500, shortest=8, pattern=r"^https?://[^\s@?#]+$", says="a URL of http or https"),
    ] = None
    credentials_secret_ref: Annotated[
        SecretRef | None,
        f"is the Secret with the keys {AMAZON_KEYS[0]} and {AMAZON_KEYS[1]}, or, for gs, "
        f"{GOOGLE_KEY}. Without it, engines use the identity that the cloud gives their pods.",
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """Where the weights come from: exactly one of its fields."""

    ONE_OF: ClassVar[bool] = True

    hugging_face: Annotated[
        HuggingFaceSource | None, "is a repository on the Hugging Face hub."
    ] = None
    persistent_volume_claim: Annotated[
        ClaimSource | None, "is a folder on a PersistentVolumeClaim, mounted read-only."
    ] = None
    host_path: Annotated[
        HostPathSource | None,
        "is a folder on every node, mounted read-only. The operator must admit such folders.",
    ] = None
    # Not in the text of a source: pairing keys of before were made of it.
    oci: Annotated[
        OciSource | None,
        "is an image or artifact of a registry, mounted read-only. Kubernetes mounts images by "
        "default since 1.35.",
    ] = field(default=None, repr=False)
    object_storage: Annotated[
        ObjectStorageSource | None, "is a folder of a bucket: s3:// or gs://."
    ] = field(default=None, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCache:
    """Where downloaded weights are kept."""

    persistent_volume_claim: Annotated[
        ClaimSource | None,
        Example({"claimName": "hub-cache", "path": "llama-70b"}),
        "is a claim that keeps downloaded weights over restarts. All engines share it.",
    ] = None
    downloaded_by: Annotated[
        Downloader | None, Example("Job"), "says who downloads: each engine, or first one Job."
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """The model that the cluster serves."""

    source: Annotated[ModelSource, "is where the weights come from: exactly one field."]
    name: Annotated[
        str | None,
        Example("llama-3.3-70b"),
        "is the name that clients ask for. The default is metadata.name.",
        WORD,
    ] = None
    cache: Annotated[
        ModelCache, "is where downloaded weights are kept. The default is the pod's own disk."
    ] = ModelCache()
    config_map_ref: Annotated[
        ConfigMapKeyRef | None,
        "is the ConfigMap with the model's config.json. Rules about its heads, layers and longest "
        "context are then checked before a pod starts. Engines do not read it.",
    ] = None


STARTUP_SECONDS = 7200  # docs/operations.md says which downloads fit in


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvVar:
    """An environment variable of the engine container."""

    RULES: ClassVar[tuple[Cel, ...]] = (
        Cel("has(self.value) != has(self.valueFrom)", "needs exactly one of value and valueFrom"),
    )
    name: Annotated[
        str,
        "is the variable's name.",
        Text(256, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", says="a C identifier"),
    ]
    value: Annotated[str | None, "is the variable's value.", Text(8192, shortest=0)] = None
    value_from: Annotated[Free | None, "is a source of the value, as in a Kubernetes pod."] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class KvOffload:
    """A second place for KV: host memory of the prefill engines."""

    cpu_memory: Annotated[
        str,
        Example("64Gi"),
        "is how much host memory each pod keeps KV in. It is taken from the pod's memory, so the "
        "memory limit has to hold it beside what vLLM needs.",
        SIZE,
    ]


# The fields whose default differs between the two types below.
EngineImage = Annotated[
    str | None,
    Example("docker.io/vllm/vllm-openai:v0.32.0"),
    "is the engine's container image: vLLM with nixl.",
    IMAGE,
]
PrefixCaching = Annotated[
    Switch | None,
    Example("Disabled"),
    "says whether vLLM keeps and reuses KV of equal prompt prefixes.",
]
Connector = Annotated[
    ConnectorSource | None,
    Example("Bundled"),
    "says where the connector comes from: Bundled mounts the operator's own copy.",
]
StartupTimeout = Annotated[
    int | None,
    Example(14_400),
    "is how long an engine may take until it serves, in seconds, with download, load and "
    "compilation. After that Kubernetes restarts its container.",
    Whole(60, 604_800),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOverride:
    """How the engines of one role run, where they differ from spec.engine."""

    image: EngineImage = None
    block_size: Annotated[
        int | None,
        Example(64),
        "is the number of tokens in a KV cache block. Without it vLLM chooses: mostly 16, 32 with "
        "FLASHINFER_MLA, 64 with FLASHMLA, 128 with CUTLASS_MLA, and on CPUs 128, or 16 with MLA.",
        # Far above 1024: vLLM grows a hybrid's attention blocks until their page holds a Mamba
        # state, as 66 kernel blocks x 16 tokens = 1056 (vLLM's PR #42097).
        Whole(1, 65_536),
    ] = None
    prefix_caching: PrefixCaching = None
    kv_cache_dtype: Annotated[
        str | None,
        Example("fp8"),
        "is the element type of the KV cache, as vLLM names it.",
        Text(40, pattern=r"^[a-z0-9_]+$", says="a KV cache type of vLLM, e.g. auto or fp8"),
    ] = None
    max_model_len: Annotated[
        int | None,
        Example(32768),
        "is the longest context in tokens. The default is the model's own.",
        Whole(1, 100_000_000),
    ] = None
    attention_backend: Annotated[
        str | None,
        Example("FLASH_ATTN"),
        "is the attention backend of vLLM. Without it vLLM chooses.",
        Text(60, pattern=r"^[A-Z0-9_]+$", says="a backend of vLLM, e.g. FLASH_ATTN"),
    ] = None
    extra_args: Annotated[
        tuple[Annotated[str, Text(16384, shortest=0)], ...],
        Example(["--max-num-seqs", "128"]),
        "are further arguments of vllm serve. Shared ones come first. A role's flag replaces "
        "the shared one of the same name.",
        Items(128),
    ] = ()
    env: Annotated[
        tuple[EnvVar, ...],
        Example(
            [
                {"name": "UCX_NET_DEVICES", "value": "mlx5_0:1"},
                {"name": "NODE_NAME", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
            ]
        ),
        "are environment variables. Shared ones come first. A role's variable replaces the "
        "shared one of the same name.",
        Items(128, key="name"),
    ] = ()
    connector: Connector = None
    kv_offload: Annotated[
        KvOffload | None,
        "has vLLM keep the KV of prompts in host memory, too, and use it again for prompts that "
        "begin alike. Only prefill engines can: set it in spec.prefill.engine.",
    ] = None
    startup_timeout_seconds: StartupTimeout = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedEngine(EngineOverride):
    """How the engines of both roles run."""

    image: EngineImage = "docker.io/vllm/vllm-openai:v0.32.0"
    prefix_caching: PrefixCaching = Switch.ENABLED
    connector: Connector = ConnectorSource.BUNDLED
    startup_timeout_seconds: StartupTimeout = STARTUP_SECONDS


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallelism:
    """How one engine is spread over GPUs and pods."""

    RULES: ClassVar[tuple[Cel, ...]] = (
        Cel(
            "(self.tensor * self.pipeline * self.data) % self.nodes == 0",
            "tensor x pipeline x data must be a multiple of nodes (rule NodesDivideWorkers)",
        ),
    )

    tensor: Annotated[int, Example(8), "is the tensor parallel size.", Whole(1, 1024)] = 1
    pipeline: Annotated[int, Example(2), "is the pipeline parallel size.", Whole(1, 256)] = 1
    data: Annotated[int, Example(1), "is the data parallel size.", Whole(1, 1024)] = 1
    nodes: Annotated[int, Example(2), "is the number of pods of one engine.", Whole(1, 256)] = 1

    @property
    def workers(self) -> int:
        """Workers of one engine: GPUs, or processes on CPUs."""
        return self.tensor * self.pipeline * self.data

    @property
    def sizes(self) -> str:
        """The factors of ``workers``, for messages."""
        return f"tensor {self.tensor} x pipeline {self.pipeline} x data {self.data}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """Compute resources of each engine pod."""

    requests: Annotated[
        Quantities,
        Example({"cpu": "16", "memory": "200Gi"}),
        "are the resources that Kubernetes reserves for a pod.",
    ] = field(default_factory=Quantities)
    limits: Annotated[
        Quantities,
        Example({"memory": "200Gi", "nvidia.com/gpu": "1"}),
        "are the resources that a pod may use at most.",
    ] = field(default_factory=Quantities)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleSpec:
    """The engines of one role."""

    replicas: Annotated[int, Example(2), "is the number of engines.", Whole(0, 1000)] = 1
    parallelism: Annotated[Parallelism, "is how one engine is spread over GPUs and pods."] = (
        Parallelism()
    )
    resources: Annotated[Resources, "are the compute resources of each engine pod."] = field(
        default_factory=Resources
    )
    pod_template: Annotated[
        Free | None,
        Example(
            {
                "spec": {
                    "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
                    "volumes": [
                        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "32Gi"}}
                    ],
                }
            }
        ),
        "is a Kubernetes pod template. It is merged over spec.podTemplate and the operator's "
        "own, containers by name. The engine's container is called engine.",
    ] = None
    engine: Annotated[
        EngineOverride,
        "is how this role's engines run. A field given here replaces that of spec.engine.",
    ] = EngineOverride()
