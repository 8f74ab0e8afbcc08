"""Where the weights of a model come from, in a pod: its volumes, mounts and environment."""

from typing import Any

from pdcluster_operator.api.spec import resolve, types


def model_volumes(cluster: types.Cluster) -> list[dict[str, Any]]:
    """Return the volumes of weights: the source's, or the cache for a download."""
    source = cluster.spec.model.source
    if source.persistent_volume_claim is not None:
        claim = source.persistent_volume_claim.claim_name
        return [{"name": "model", "persistentVolumeClaim": {"claimName": claim, "readOnly": True}}]
    if source.host_path is not None:
        # With Directory a missing folder is an error of the pod. The kubelet creates no empty one.
        return [{"name": "model", "hostPath": {"path": source.host_path.path, "type": "Directory"}}]
    cache = cluster.spec.model.cache.persistent_volume_claim
    if cache is not None:
        return [{"name": "cache", "persistentVolumeClaim": {"claimName": cache.claim_name}}]
    return [{"name": "cache", "emptyDir": {}}]


def model_mounts(cluster: types.Cluster) -> list[dict[str, Any]]:
    """Return the mounts of those volumes."""
    if cluster.spec.model.source.hugging_face is None:
        return [{"name": "model", "mountPath": resolve.MODEL_FOLDER, "readOnly": True}]
    mount: dict[str, Any] = {"name": "cache", "mountPath": resolve.CACHE_FOLDER}
    cache = cluster.spec.model.cache.persistent_volume_claim
    if cache is not None and cache.path:
        mount["subPath"] = cache.path.strip("/")
    return [mount]


def model_env(cluster: types.Cluster) -> list[dict[str, Any]]:
    """Return the environment of a download: where it goes and with which token."""
    source = cluster.spec.model.source.hugging_face
    if source is None:
        return []
    env: list[dict[str, Any]] = [{"name": "HF_HOME", "value": resolve.CACHE_FOLDER}]
    if source.token_secret_ref is not None:
        ref = {"name": source.token_secret_ref.name, "key": source.token_secret_ref.key}
        env.append({"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": ref}})
    return env
