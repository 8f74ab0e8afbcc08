"""Hypothesis strategies for valid PDCluster manifests."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from simulated_cluster import manifest

NAMES = st.from_regex(r"[a-z]([-a-z0-9]{0,32}[a-z0-9])?", fullmatch=True)
FREE_ARGS = (
    ["--seed", "7"], ["--max-num-seqs=16"], ["--disable-log-stats"],
    ["--max_num_batched_tokens", "64"], ["--override-generation-config", '{"a": "b=c -d"}'],
    ["--no-enable-log-requests"],
)  # fmt: skip


def optional(**fields: st.SearchStrategy) -> st.SearchStrategy:
    return st.fixed_dictionaries({}, optional=fields)


SOURCES = st.one_of(
    st.just({"hostPath": {"path": "/models/x"}}),
    st.just({"persistentVolumeClaim": {"claimName": "weights", "path": "a/b"}}),
    st.just({"persistentVolumeClaim": {"claimName": "weights"}}),
    st.just({"huggingFace": {"repo": "org/model", "tokenSecretRef": {"name": "hub"}}}),
    st.just({"huggingFace": {"repo": "model", "revision": "main"}}),
    st.just({"oci": {"image": "r/m:v1", "path": "a", "pullSecretRef": {"name": "login"}}}),
    st.just({"objectStorage": {"uri": "gs://a/b", "credentialsSecretRef": {"name": "keys"}}}),
    st.just({"objectStorage": {"uri": "s3://a/b", "endpoint": "http://minio:9000"}}),
)
PEERS = st.lists(
    st.sampled_from(
        [
            {"podSelector": {}},
            {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}},
            {"podSelector": {"matchExpressions": [{"key": "app", "operator": "Exists"}]}},
            {"ipBlock": {"cidr": "10.0.0.0/8", "except": ["10.1.0.0/16"]}},
        ]
    ),
    max_size=3,
)
BOUNDS = st.fixed_dictionaries({"max": st.integers(4, 60)}, optional={"min": st.integers(1, 4)})
AUTOSCALING = st.fixed_dictionaries(
    {"prefill": BOUNDS, "decode": BOUNDS, "ttftMs": st.integers(1, 3_600_000)},
    optional={
        "itlMs": st.integers(1, 3_600_000),
        "mode": st.sampled_from(["Advise", "Apply"]),
    },
)
FROM = {"valueFrom": {"configMapKeyRef": {"name": "settings", "key": "x"}}}
ENV = st.lists(
    st.sampled_from(["A", "B", "OMP_NUM_THREADS"]).flatmap(
        lambda name: st.sampled_from([{"name": name, "value": "1"}, {"name": name, **FROM}])
    ),
    max_size=3,
    unique_by=lambda var: var["name"],
)
ARGS = st.lists(st.sampled_from(FREE_ARGS), max_size=3, unique_by=lambda words: words[0]).map(
    lambda groups: [word for group in groups for word in group]
)
COMMON = optional(
    labels=st.just({"team": "search"}), annotations=st.just({"example.com/owner": "a, b"})
)
TEMPLATES = st.sampled_from(
    [
        {},
        {"spec": {"priorityClassName": "high", "tolerations": [{"operator": "Exists"}]}},
        {"metadata": {"labels": {"team": "x"}}},
        {"spec": {"volumes": [{"name": "shm", "emptyDir": {"sizeLimit": "1Gi"}}]}},
    ]
)

SHARED_TEMPLATES = st.sampled_from([{}, {"spec": {"nodeSelector": {"pool": "inference"}}}])


SERVICES: list[dict[str, Any]] = [
    {},
    {"type": "NodePort", "externalTrafficPolicy": "Local"},
    {
        "type": "LoadBalancer",
        "loadBalancerClass": "example.com/balancer",
        "loadBalancerSourceRanges": ["10.0.0.0/8"],
        "annotations": {"example.com/scheme": "internal"},
    },
]


@st.composite
def roles(draw: st.DrawFn) -> dict:
    nodes = draw(st.integers(1, 3))
    parallelism = {
        "tensor": nodes * draw(st.integers(1, 4)),
        "pipeline": draw(st.integers(1, 3)),
        "data": draw(st.sampled_from([1, nodes, 2 * nodes])),  # each rank within one pod
        "nodes": nodes,
    }
    role = draw(
        optional(
            replicas=st.integers(0, 3),
            podTemplate=TEMPLATES,
            resources=st.just({"requests": {"cpu": 4, "memory": "1024Mi"}}),
            engine=optional(
                env=ENV,
                extraArgs=ARGS,
                maxModelLen=st.integers(1, 4096),
                image=st.just("docker.io/other/vllm:1"),
                prefixCaching=st.sampled_from(["Enabled", "Disabled"]),
            ),
        )
    )
    return {"parallelism": parallelism, **role}


@st.composite
def manifests(draw: st.DrawFn) -> dict:
    scheduling = draw(
        optional(gang=st.sampled_from(["Enabled", "Disabled"]), queueName=st.just("team-a"))
    )
    prefill, decode = draw(roles()), draw(roles())
    device = draw(st.sampled_from(["CPU", "CUDA"]))
    parallel = prefill["parallelism"]
    if device == "CUDA" and parallel["nodes"] <= parallel["data"] and draw(st.booleans()):
        prefill.setdefault("engine", {})["kvOffload"] = {"cpuMemory": "3Gi"}
        prefill["resources"] = {"limits": {"memory": "256Gi"}}
        prefill.pop("podTemplate", None)  # it may hold a small /dev/shm
    if scheduling.get("gang") == "Enabled" and "podTemplate" in prefill:
        decode["podTemplate"] = prefill["podTemplate"]  # pods of a gang have one priority
    elif scheduling.get("gang") == "Enabled":
        decode.pop("podTemplate", None)
    return manifest(
        draw(NAMES),
        model={
            "source": draw(SOURCES),
            **draw(
                optional(
                    name=st.just("served/name"),
                    cache=st.sampled_from(
                        [
                            {"persistentVolumeClaim": {"claimName": "cache"}},
                            {
                                "persistentVolumeClaim": {"claimName": "cache", "path": "hub"},
                                "downloadedBy": "Job",
                            },
                        ]
                    ),
                    configMapRef=st.just({"name": "config", "key": "config.json"}),
                )
            ),
        },
        transfer={
            "device": device,
            **draw(
                optional(
                    loadFailurePolicy=st.sampled_from(["Fail", "Recompute"]),
                    leaseSeconds=st.integers(5, 3600),
                    kvLayout=st.sampled_from(["Auto", "LBHNC"]),
                    internalNames=st.sampled_from(["Hidden", "Shown"]),
                    tls=st.sampled_from(["Enabled", "Disabled"]),
                    nixlThreads=st.integers(0, 64),
                    localTokensPerStep=st.integers(0, 1_048_576),
                    backends=st.sampled_from([["UCX"], ["LIBFABRIC"]]),
                    minBandwidthMBps=st.integers(1, 100),
                    rdma=st.just({"resource": "rdma/ib", "perGPU": 2, "networks": ["a"]}),
                )
            ),
        },
        engine=draw(
            optional(
                blockSize=st.sampled_from([1, 16, 32, 128]),
                prefixCaching=st.sampled_from(["Enabled", "Disabled"]),
                kvCacheDtype=st.sampled_from(["auto", "float32", "bfloat16"]),
                attentionBackend=st.just("FLASH_ATTN"),
                connector=st.sampled_from(["Bundled", "Image"]),
                startupTimeoutSeconds=st.integers(60, 604_800),
                extraArgs=ARGS,
                env=ENV,
            )
        ),
        **draw(optional(podTemplate=SHARED_TEMPLATES)),
        requestTimeoutSeconds=draw(st.integers(10, 43_200)),
        monitoring=draw(optional(scrapeFrom=PEERS)),
        **draw(optional(operatorClass=st.just("blue"), commonMetadata=COMMON)),
        rollout=draw(
            optional(
                type=st.sampled_from(["Recreate", "Surge", "Replace"]),
                maxSurge=st.integers(1, 64),
                paused=st.booleans(),
                progressDeadlineSeconds=st.integers(3600, 86_400),
                scheduleTimeoutSeconds=st.integers(30, 86_400),
                renew=st.sampled_from(["2026-11-22", "a.b:c"]),
                revisionHistoryLimit=st.integers(0, 100),
            )
        ),
        scheduling=scheduling,
        **draw(optional(autoscaling=AUTOSCALING)),
        verification=draw(
            optional(
                canary=st.fixed_dictionaries({"intervalSeconds": st.integers(5, 86_400)}),
                maxLocalShare=st.integers(0, 100),
            )
        ),
        prefill=prefill,
        decode=decode,
        router=draw(
            optional(
                replicas=st.integers(0, 3),
                policy=st.sampled_from(["RoundRobin", "CacheAware"]),
                prefillPolicy=st.sampled_from(["RoundRobin", "PowerOfTwo"]),
                decodePolicy=st.sampled_from(["Random", "CacheAware"]),
                logLevel=st.sampled_from(["Debug", "Error"]),
                extraArgs=st.just(["--cache-threshold", "0.5"]),
                resources=st.just({"limits": {"memory": "4Gi"}}),
                service=st.sampled_from(SERVICES),
                allowFrom=st.just([{"namespaceSelector": {}}, {"ipBlock": {"cidr": "10.0.0.0/8"}}]),
                apiKeySecretRef=st.just({"name": "api"}),
                podTemplate=TEMPLATES,
            )
            | st.fixed_dictionaries(
                {"type": st.just("LLMD")},
                optional={
                    "sidecarImage": st.just("registry.example/sidecar:1"),
                    "apiKeySecretRef": st.just({"name": "api"}),
                    "allowFrom": st.just([{"namespaceSelector": {}}]),
                },
            )
        ),
    )
