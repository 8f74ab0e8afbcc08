"""Templates that take the names of pods, or the networks of RDMA, from a pod."""

from __future__ import annotations

from typing import Any

import pytest
from said_findings import check_manifest

HUB = {"source": {"huggingFace": {"repo": "a/b", "revision": "v1"}}}


def findings(**spec: Any) -> dict[str, tuple[str, bool]]:
    """Path -> (rule, whether it is an error)."""
    spec.setdefault("model", {"source": {"persistentVolumeClaim": {"claimName": "weights"}}})
    head = {"apiVersion": "pdcluster.dev/v1alpha1", "kind": "PDCluster", "metadata": {"name": "x"}}
    found = check_manifest({**head, "spec": spec})[1]
    return {one.path: (str(one.rule), False) for one in found.warnings} | {
        one.path: (str(one.rule), True) for one in found.errors
    }


def pod(**fields: Any) -> dict[str, Any]:
    return {"podTemplate": {"spec": fields}}


NAMES = ("ConflictingSettings", True)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"hostNetwork": True}, "hostNetwork"),
        ({"hostNetwork": True, "dnsPolicy": "ClusterFirst"}, "dnsPolicy"),
        ({"dnsPolicy": "Default"}, "dnsPolicy"),
        ({"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}, None),
        (
            {
                "hostNetwork": True,
                "dnsPolicy": "None",
                "dnsConfig": {"nameservers": ["10.96.0.10"]},
            },
            None,
        ),
        ({"hostNetwork": True, "dnsConfig": {"searches": ["svc.cluster.local"]}}, "hostNetwork"),
        ({"dnsPolicy": "Default", "dnsConfig": {"options": [{"name": "ndots"}]}}, "dnsPolicy"),
        ({"hostNetwork": False}, None),
        ({"dnsPolicy": "ClusterFirst"}, None),
    ],
)
def test_who_looks_up_names_asks_the_cluster(fields: dict[str, Any], field: str | None) -> None:
    """A router looks up all engines; the pods of one engine look up its first pod."""
    two = {"parallelism": {"tensor": 2, "nodes": 2}}
    for part, spec in (("router", pod(**fields)), ("decode", pod(**fields) | two)):
        found = findings(**{part: spec})
        wrong = [path for path, said in found.items() if said == NAMES]
        assert wrong == ([f"spec.{part}.podTemplate.spec.{field}"] if field else [])
    alone = findings(decode=pod(**fields))
    assert NAMES not in alone.values(), "nothing in it is found by a name"


def test_networks_of_multus_are_written_once() -> None:
    key = "k8s.v1.cni.cncf.io/networks"
    mine = {"podTemplate": {"metadata": {"annotations": {key: "storage"}}}}
    rdma = {"rdma": {"resource": "rdma/ib", "networks": ["roce-a"]}}
    path = f"spec.decode.podTemplate.metadata.annotations.{key}"
    assert findings(decode=mine, transfer=rdma)[path] == NAMES
    assert path not in findings(decode=mine, transfer={"rdma": {"resource": "rdma/ib"}})
    assert path not in findings(decode=mine)
    assert NAMES not in findings(router=mine, transfer=rdma).values(), "the router has none of rdma"


@pytest.mark.parametrize("folder", ["/root/.cache/huggingface", "/home/u/.cache/huggingface/hub/"])
def test_a_cache_that_nothing_reads_is_warned_of(folder: str) -> None:
    def box(**more: Any) -> dict[str, Any]:
        volume = {"name": "hub", "persistentVolumeClaim": {"claimName": "hub"}}
        mounts = [{"name": "hub", "mountPath": folder}]
        return pod(
            volumes=[volume], containers=[{"name": "engine", "volumeMounts": mounts, **more}]
        )

    path = "spec.decode.podTemplate.spec.containers[0].volumeMounts[0].mountPath"
    assert findings(model=HUB, decode=box())[path] == ("CacheUnused", False)
    used = [{"name": "HF_HUB_CACHE", "value": folder.rstrip("/")}]
    assert path not in findings(model=HUB, decode=box(env=used))
    assert path not in findings(model=HUB, decode=box(), engine={"env": used})
    assert path not in findings(
        model=HUB, decode=box(), engine={"extraArgs": ["--download-dir", folder]}
    )
    assert path not in findings(decode=box()), "nothing is downloaded"
    assert path in findings(model=HUB, decode=box(), prefill={"engine": {"env": used}})


@pytest.mark.parametrize("folder", ["/root/.cache", "/data/huggingface", "/models/cache"])
def test_other_folders_are_the_users_own(folder: str) -> None:
    volume = {"name": "hub", "persistentVolumeClaim": {"claimName": "hub"}}
    mounts = [{"name": "hub", "mountPath": folder}]
    decode = pod(volumes=[volume], containers=[{"name": "engine", "volumeMounts": mounts}])
    assert "CacheUnused" not in {rule for rule, _ in findings(model=HUB, decode=decode).values()}
