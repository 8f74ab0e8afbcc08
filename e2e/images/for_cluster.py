"""Where the images and the model come from.

Into the cluster of the tests, images are imported. For a cluster that KUBECONFIG names, these
variables name them:

* ``PDCLUSTER_OPERATOR_IMAGE``: the image of ``operator/Dockerfile``, REPOSITORY:TAG;
* ``PDCLUSTER_ENGINE_IMAGE``: holds vLLM for CPU, nixl and vllm-router;
* ``PDCLUSTER_MODEL_FOLDER``: on every node, what ``make model`` prints.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from cluster import lifecycle
from cluster.session import Cluster
from images.engine_image import CONTAINERS, engine_image, for_this_machine, pod_template
from images.operator_image import operator_image
from models.tiny import model_path

VARIABLES = ("PDCLUSTER_OPERATOR_IMAGE", "PDCLUSTER_ENGINE_IMAGE", "PDCLUSTER_MODEL_FOLDER")


def missing_variables() -> list[str]:
    """The variables that another cluster needs and that are not set; none for our own cluster."""
    if not lifecycle.users_own():
        return []
    return [name for name in VARIABLES if not os.environ.get(name)]


def operator_values(cluster: Cluster) -> dict[str, Any]:
    """Return the chart's ``image`` values. When this returns, our node has the image."""
    if not cluster.ours:
        repository, _, tag = os.environ["PDCLUSTER_OPERATOR_IMAGE"].rpartition(":")
        return {"repository": repository, "tag": tag}
    image = operator_image()
    cluster.load(image.archive)
    return {"repository": image.repository, "tag": image.tag, "pullPolicy": "Never"}


def load_engine_image(cluster: Cluster, build: str = "") -> str:
    """Return the engines' image. When this returns, our node has the image.

    ``build`` is part of its tag. Another cluster has only one build.
    """
    if not cluster.ours:
        return os.environ["PDCLUSTER_ENGINE_IMAGE"]
    image = engine_image(build=build)
    cluster.load(image.archive)
    return image.name


def placed(document: Mapping[str, Any]) -> dict[str, Any]:
    """A PDCluster with images and a model that the cluster of the tests has."""
    if not lifecycle.users_own():
        return for_this_machine(document, model_path("llama"))
    spec = dict(document["spec"])
    model = {"hostPath": {"path": os.environ["PDCLUSTER_MODEL_FOLDER"]}}
    image = os.environ["PDCLUSTER_ENGINE_IMAGE"]
    spec["model"] = {**spec["model"], "source": model}
    spec["engine"] = {**spec.get("engine", {}), "image": image}
    spec["router"] = {**spec.get("router", {}), "image": image}
    return {**document, "spec": spec}


def template(part: str) -> dict[str, Any]:
    """What a part's pods need beside the builders' template."""
    return {} if lifecycle.users_own() else pod_template(CONTAINERS[part])
