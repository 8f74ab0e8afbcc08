"""The download Job on a real API server with Kubernetes' own Job controller, which has no nodes.

The operator has the rights of the chart. Tests say how a pod of the Job ended, as a kubelet would.
"""

from __future__ import annotations

from typing import Any

import pytest
from operator_runs import (
    CHILDREN,
    Operator,
    at_rest,
    cluster,
    condition,
    create,
    delete,
    edit,
    owned,
    until,
)
from real_api import RealApi

pytestmark = pytest.mark.cluster

HUB = {"repo": "some-lab/tiny", "revision": "v1", "tokenSecretRef": {"name": "hub"}}
CACHE = {"persistentVolumeClaim": {"claimName": "hub-cache"}, "downloadedBy": "Job"}
MODEL = {"source": {"huggingFace": HUB}, "cache": CACHE}
REFUSED = "the Hub does not give out some-lab/tiny (HTTP 401)"


def items(real: RealApi, namespace: str, kind: str) -> list[dict[str, Any]]:
    path = CHILDREN[kind].format(namespace)
    found = real.call("GET", f"{path}?labelSelector=app.kubernetes.io/component%3Dweights")[1]
    return list(found["items"])


def the_pod(real: RealApi, namespace: str, operator: Operator, job: str) -> str:
    """Name of the pod that the Job controller has made."""

    def names() -> list[str]:
        pods = items(real, namespace, "Pod")
        return [
            one["metadata"]["name"]
            for one in pods
            if one["metadata"]["ownerReferences"][0]["name"] == job
        ]

    return str(until(names, 60, operator.said)[0])


def end(real: RealApi, namespace: str, pod: str, code: int, words: str = "") -> None:
    """Let the pod's container end with this code and these last words."""
    ended = {"exitCode": code, "message": words, "reason": "Error" if code else "Completed"}
    box = {"name": "download", "state": {"terminated": ended}, "ready": False}
    box |= {"restartCount": 0, "image": "x", "imageID": "x"}
    status = {"phase": "Failed" if code else "Succeeded", "containerStatuses": [box]}
    found, answer = real.call(
        "PATCH",
        f"{CHILDREN['Pod'].format(namespace)}/{pod}/status",
        {"status": status},
        "application/merge-patch+json",
    )
    assert found == 200, answer


def says(real: RealApi, namespace: str, operator: Operator, reason: str) -> dict[str, Any]:
    """Wait for the reason of PrefillReady, and return the condition."""

    def found() -> dict[str, Any] | None:
        one = condition(real, namespace, "PrefillReady")
        return one if one.get("reason") == reason else None

    return dict(until(found, 60, lambda: (condition(real, namespace, "Ready"), operator.said())))


def the_job(real: RealApi, namespace: str, operator: Operator, *not_these: str) -> str:
    def others() -> list[str]:
        jobs = [one["metadata"]["uid"] for one in items(real, namespace, "Job")]
        return [one for one in jobs if one not in not_these]

    [uid] = until(others, 60, operator.said)
    [job] = [one for one in items(real, namespace, "Job") if one["metadata"]["uid"] == uid]
    return str(job["metadata"]["name"])


def uid_of(real: RealApi, namespace: str) -> str:
    [job] = items(real, namespace, "Job")
    return str(job["metadata"]["uid"])


def test_one_job_downloads_and_then_there_are_engines(
    real: RealApi, operator: Operator, namespace: str
) -> None:
    operator.start()
    create(real, namespace, cluster(model=MODEL))
    first = the_job(real, namespace, operator)
    said = says(real, namespace, operator, "DownloadingWeights")
    assert f"Job {first} downloads some-lab/tiny" in said["message"]
    pod = the_pod(real, namespace, operator, first)
    assert owned(real, namespace, "StatefulSet") == []

    # An operator that is killed makes no second Job.
    operator.kill()
    operator.start()
    at_rest(real, operator)
    uid = uid_of(real, namespace)
    end(real, namespace, pod, 0)
    until(lambda: len(owned(real, namespace, "StatefulSet")) == 2, 60, operator.said)
    engines = owned(real, namespace, "StatefulSet")

    # The template of a Job cannot be changed. One that has ended well is not made again for it.
    tolerations = [{"key": "gpu", "operator": "Exists"}]
    template = {"spec": {"tolerations": tolerations}}
    assert edit(real, namespace, {"prefill": {"podTemplate": template}})[0] == 200
    until(lambda: owned(real, namespace, "StatefulSet") != engines, 60, operator.said)
    at_rest(real, operator)
    assert uid_of(real, namespace) == uid

    # Another revision is another Job, and the engines stay until it has ended.
    engines = owned(real, namespace, "StatefulSet")
    assert (
        edit(real, namespace, {"model": {"source": {"huggingFace": {"revision": "v2"}}}})[0] == 200
    )
    second = the_job(real, namespace, operator, uid)
    assert second != first
    at_rest(real, operator)
    assert owned(real, namespace, "StatefulSet") == engines
    end(real, namespace, the_pod(real, namespace, operator, second), 0)
    until(lambda: owned(real, namespace, "StatefulSet") != engines, 60, operator.said)

    # All goes with the PDCluster.
    delete(real, namespace)
    until(lambda: not items(real, namespace, "Job"), 120, operator.said)
    until(lambda: not items(real, namespace, "Pod"), 120, operator.said)


def test_a_job_that_fails_says_why_and_another_template_is_another_job(
    real: RealApi, operator: Operator, namespace: str
) -> None:
    operator.start()
    create(real, namespace, cluster(model=MODEL))
    name = the_job(real, namespace, operator)
    uid = uid_of(real, namespace)
    end(real, namespace, the_pod(real, namespace, operator, name), 2, REFUSED)
    said = says(real, namespace, operator, "DownloadFailed")
    assert REFUSED in said["message"]
    assert owned(real, namespace, "StatefulSet") == []
    assert condition(real, namespace, "Ready")["reason"] == "DownloadFailed"

    # The Job's template is immutable: with another token it is deleted and made again.
    token = {"name": "other", "key": "token"}
    source = {"huggingFace": {"tokenSecretRef": token}}
    assert edit(real, namespace, {"model": {"source": source}})[0] == 200
    assert the_job(real, namespace, operator, uid) == name, (
        "it downloads the same to the same place"
    )
    says(real, namespace, operator, "DownloadingWeights")
    [job] = items(real, namespace, "Job")
    env = job["spec"]["template"]["spec"]["containers"][0]["env"]
    [given] = [one["valueFrom"]["secretKeyRef"] for one in env if one["name"] == "HF_TOKEN"]
    assert given == token

    # Whoever deletes a Job that failed gets another one.
    uid = uid_of(real, namespace)
    path = f"{CHILDREN['Job'].format(namespace)}/{name}?propagationPolicy=Background"
    assert real.call("DELETE", path)[0] == 200
    assert the_job(real, namespace, operator, uid) == name


def test_the_jobs_pod_is_admitted_where_pod_security_is_restricted(
    real: RealApi, operator: Operator, namespace: str
) -> None:
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    status, answer = real.call(
        "PATCH",
        f"/api/v1/namespaces/{namespace}",
        {"metadata": {"labels": labels}},
        "application/merge-patch+json",
    )
    assert status == 200, answer
    operator.start()
    create(real, namespace, cluster(model=MODEL))
    the_pod(real, namespace, operator, the_job(real, namespace, operator))
