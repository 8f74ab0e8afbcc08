"""Where the weights of a model come from, in a pod: its volumes, mounts and environment."""

from typing import Any

from pdcluster_operator.api.spec import engine_types, resolve, types

CACHE = "cache"
"""The volume of downloaded weights."""


def model_volumes(cluster: types.Cluster) -> list[dict[str, Any]]:
    """Return the volumes of weights: the source's, or the cache for a download."""
    source = cluster.spec.model.source
    if source.persistent_volume_claim is not None:
        claim = source.persistent_volume_claim.claim_name
        return [{"name": "model", "persistentVolumeClaim": {"claimName": claim, "readOnly": True}}]
    if source.host_path is not None:
        # With Directory a missing folder is an error of the pod. The kubelet creates no empty one.
        return [{"name": "model", "hostPath": {"path": source.host_path.path, "type": "Directory"}}]
    if source.oci is not None:
        image = {"reference": source.oci.image, "pullPolicy": "IfNotPresent"}
        return [{"name": "model", "image": image}]
    if source.object_storage is not None:
        name = resolve.key_file_secret(source.object_storage)
        return (
            [{"name": resolve.STORAGE_CREDENTIALS, "secret": {"secretName": name}}] if name else []
        )
    cache = cluster.spec.model.cache.persistent_volume_claim
    if cache is not None:
        return [{"name": CACHE, "persistentVolumeClaim": {"claimName": cache.claim_name}}]
    return [{"name": CACHE, "emptyDir": {}}]


def model_mounts(cluster: types.Cluster) -> list[dict[str, Any]]:
    """Return the mounts of those volumes."""
    found = resolve.weights_mount(cluster.spec.model.source)
    if found is None:
        return []
    folder, volume = found
    mount: dict[str, Any] = {"name": volume, "mountPath": folder}
    if cluster.spec.model.source.hugging_face is None:
        return [{**mount, "readOnly": True}]
    cache = cluster.spec.model.cache.persistent_volume_claim
    if cache is not None and cache.path:
        mount["subPath"] = cache.path.strip("/")
    if resolve.downloads_by_job(cluster):
        mount["readOnly"] = True
    return [mount]


def model_env(cluster: types.Cluster) -> list[dict[str, Any]]:
    """Return the environment of a download: whereto or wherefrom, and the credentials."""
    source = cluster.spec.model.source
    env: list[dict[str, Any]] = []
    if resolve.downloads_by_job(cluster):
        # What an engine writes itself, such as a repository's code, is in the folder of HF_HOME.
        env.append({"name": "HF_HUB_CACHE", "value": f"{resolve.CACHE_FOLDER}/hub"})
        env.append({"name": "HF_HUB_OFFLINE", "value": "1"})
    elif source.hugging_face is not None:
        env.append({"name": "HF_HOME", "value": resolve.CACHE_FOLDER})
        env += token_env(cluster)
    if (storage := source.object_storage) is not None:
        if storage.endpoint is not None:
            env.append({"name": "AWS_ENDPOINT_URL", "value": storage.endpoint})
            # A store of one's own has no host name for each bucket.
            env.append({"name": "RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING", "value": "0"})
        if resolve.key_file_secret(storage):
            path = f"{resolve.STORAGE_FOLDER}/{engine_types.GOOGLE_KEY}"
            env.append({"name": "GOOGLE_APPLICATION_CREDENTIALS", "value": path})
        elif storage.credentials_secret_ref is not None:
            name = storage.credentials_secret_ref.name
            env += [_from_secret(key, name, key) for key in engine_types.AMAZON_KEYS]
    return env


def token_env(cluster: types.Cluster) -> list[dict[str, Any]]:
    """Return the variable with the token of a gated repository; empty without one."""
    source = cluster.spec.model.source.hugging_face
    if source is None or (token := source.token_secret_ref) is None:
        return []
    return [_from_secret("HF_TOKEN", token.name, token.key)]


def pull_secrets(cluster: types.Cluster) -> dict[str, Any]:
    """Return the pod's field with the Secret for the registry that has the weights."""
    oci = cluster.spec.model.source.oci
    if oci is None or oci.pull_secret_ref is None:
        return {}
    return {"imagePullSecrets": [{"name": oci.pull_secret_ref.name}]}


def _from_secret(variable: str, name: str, key: str) -> dict[str, Any]:
    ref = {"name": name, "key": key}
    return {"name": variable, "valueFrom": {"secretKeyRef": ref}}
