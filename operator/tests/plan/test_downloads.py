"""A Job downloads the weights before there are engines that read them."""

from __future__ import annotations

import math
from copy import deepcopy
from dataclasses import replace

import pytest
from simulated_cluster import SimulatedCluster, manifest

from pdcluster_operator.api.rules.validate import check_manifest
from pdcluster_operator.plan.name_conflicts import NAME_CONFLICT
from pdcluster_operator.plan.planner import make_plan
from pdcluster_operator.plan.status.progress import with_failure
from pdcluster_operator.plan.types import Place, TryOut

CACHE = {"persistentVolumeClaim": {"claimName": "hub", "path": "llama"}, "downloadedBy": "Job"}
TOKEN = {"name": "hub-token", "key": "token"}


def spec(revision="v1", **more):
    hub = {"repo": "org/llama", "revision": revision, "tokenSecretRef": TOKEN}
    return {"model": {"source": {"huggingFace": hub}, "cache": CACHE}, **more}


def world(**more):
    found = SimulatedCluster(manifest(**spec(**more)))
    found.downloads = False
    return found


def job(world):
    [found] = [one for (kind, _), one in world.children.items() if kind == "Job"]
    return found


def ends(world, kind="Complete"):
    message = "Job has reached the specified backoff limit" if kind == "Failed" else ""
    conditions = [{"type": kind, "status": "True", "message": message}]
    job(world)["status"] = {"conditions": conditions}


def attempt(world, state, name="llama-weights-x"):
    owner = {"kind": "Job", "apiVersion": "batch/v1", "controller": True}
    owner |= {"name": job(world)["metadata"]["name"], "uid": job(world)["metadata"]["uid"]}
    world.pods[name] = {
        "kind": "Pod",
        "metadata": {"name": name, "creationTimestamp": name, "ownerReferences": [owner]},
        "status": {"containerStatuses": [{"name": "download", "state": state}]},
    }


def kinds(plan):
    return [one.manifest["kind"] for one in plan.steps if hasattr(one, "manifest")]


def engines(world):
    return {name for kind, name in world.children if kind == "StatefulSet"}


def told(world, kind="PrefillReady"):
    found = world.condition(kind)
    return found["status"], found["reason"]


def test_engines_wait_until_the_job_has_ended_well():
    found = world()
    plan = found.step()
    assert kinds(plan).count("Job") == 1
    assert not [one for one in plan.steps if isinstance(one, TryOut)]
    assert found.settle().steps == ()
    assert engines(found) == set()
    assert told(found) == told(found, "Ready") == ("False", "DownloadingWeights")
    assert told(found, "Progressing") == ("True", "DownloadingWeights")
    ends(found)
    found.settle()
    assert len(engines(found)) == 2
    assert told(found) == ("False", "PodsMissing")
    assert job(found), "a Job that has ended well stays: it says that the weights are there"


def test_the_job_has_the_token_and_engines_have_neither_token_nor_hub():
    found = world(
        engine={
            "env": [
                {"name": "HF_ENDPOINT", "value": "http://m"},
                {"name": "UCX_TLS", "value": "tcp"},
            ]
        },
        prefill={
            "podTemplate": {"spec": {"imagePullSecrets": [{"name": "login"}], "hostIPC": True}}
        },
    )
    found.step()
    pod = job(found)["spec"]["template"]["spec"]
    [box] = pod["containers"]
    given = {one["name"]: one.get("value", one.get("valueFrom")) for one in box["env"]}
    assert given["HF_TOKEN"] == {"secretKeyRef": TOKEN}
    assert (given["HF_HOME"], given["HF_ENDPOINT"]) == ("/models/cache", "http://m")
    assert "UCX_TLS" not in given
    assert box["args"] == ["org/llama", "--revision", "v1"]
    assert pod["imagePullSecrets"] == [{"name": "login"}]
    assert "hostIPC" not in pod
    assert pod["securityContext"]["runAsNonRoot"] is True
    [own] = [one for one in box["volumeMounts"] if one["name"] == "cache"]
    assert own == {
        "name": "cache",
        "mountPath": "/models/cache",
        "subPath": "llama",
        "readOnly": False,
    }
    ends(found)
    found.settle()
    for name in engines(found):
        [box] = found.children["StatefulSet", name]["spec"]["template"]["spec"]["containers"]
        given = {one["name"]: one.get("value") for one in box["env"]}
        assert not {"HF_TOKEN", "HF_HOME"} & set(given)
        assert (given["HF_HUB_CACHE"], given["HF_HUB_OFFLINE"]) == ("/models/cache/hub", "1")
        [mount] = [one for one in box["volumeMounts"] if one["name"] == "cache"]
        assert mount["readOnly"] is True


@pytest.mark.parametrize("rollout", ["Surge", "Replace", "Recreate"])
def test_old_engines_serve_until_other_weights_are_there(rollout):
    two = {"replicas": 2}  # Replace ends none of a role's last engines
    found = world(rollout={"type": rollout}, prefill=two, decode=two)
    found.step()
    ends(found)
    found.settle()
    found.run_pods()
    found.speak()
    found.link()
    found.route()
    found.settle()
    before, first = engines(found), job(found)["metadata"]["name"]
    found.edit(**spec("v2"))
    found.settle()
    assert engines(found) == before
    assert job(found)["metadata"]["name"] != first
    assert told(found, "Ready") == ("False", "DownloadingWeights")
    assert told(found, "Available") == ("True", "Serving")
    ends(found, "Failed")
    found.settle()
    assert engines(found) == before
    assert told(found, "Ready") == told(found, "Progressing") == ("False", "DownloadFailed")
    ends(found)
    for _ in range(20):
        found.step()
        found.run_pods()
        found.speak()
        found.link()
        found.route()
        found.reap()
    assert not engines(found) & before
    assert len(engines(found)) == 4


@pytest.mark.parametrize("rollout", ["Surge", "Replace", "Recreate"])
def test_old_engines_serve_until_the_weights_of_a_stored_revision_are_there_again(rollout):
    """The Job of a revision goes with it, and another one may have emptied the claim since."""
    two = {"replicas": 2}
    found = world(rollout={"type": rollout}, prefill=two, decode=two)

    def turns():
        for _ in range(20):
            found.step()
            found.run_pods()
            found.speak()
            found.link()
            found.route()
            found.reap()

    found.step()
    ends(found)
    turns()
    first = engines(found)
    found.edit(**spec("v2"))
    found.settle()
    ends(found)
    turns()
    second = engines(found)
    assert len(second) == 4
    assert not first & second
    found.edit(**spec("v1"))
    turns()
    assert engines(found) == second
    assert told(found, "Ready") == ("False", "DownloadingWeights")
    assert told(found, "Available") == ("True", "Serving")
    ends(found, "Failed")
    turns()
    assert engines(found) == second
    ends(found)
    turns()
    assert engines(found) == first
    assert told(found, "Ready")[0] == "True"


def test_a_job_without_a_pod_says_so():
    found = world()
    found.step()
    found.settle()
    assert found.condition("Ready")["message"].endswith("has no pod yet")
    ends(found, "Suspended")
    found.settle()
    assert found.condition("Ready")["message"].endswith("is suspended")
    ends(found, "FailureTarget")
    found.settle()
    assert told(found, "Ready") == ("False", "DownloadFailed")


def test_a_job_that_is_refused_explains_why_nothing_runs():
    found = world()
    found.step()
    status = found.settle().status
    failed = with_failure(
        status, {"metadata": {"generation": 1}}, NAME_CONFLICT, "Job x is somebody's", 0.0, math.inf
    )
    ready = next(one for one in failed["conditions"] if one["type"] == "Ready")
    assert (ready["reason"], ready["message"]) == (NAME_CONFLICT, "Job x is somebody's")


def test_a_job_that_failed_is_told_and_made_again_when_the_spec_changes():
    found = world()
    found.step()
    why = {"exitCode": 1, "message": "the download from the Hub stopped: no route"}
    attempt(found, {"terminated": why})
    found.settle()
    assert told(found) == ("False", "DownloadingWeights")
    assert (
        "and tries again: the download from the Hub stopped" in found.condition("Ready")["message"]
    )
    ends(found, "Failed")
    found.settle()
    assert found.condition("PrefillReady")["reason"] == "DownloadFailed"
    assert found.condition("Progressing")["reason"] == "DownloadFailed"
    assert "no route" in found.condition("Ready")["message"]
    old = job(found)["metadata"]["uid"]
    found.edit(**spec(engine={"image": "docker.io/vllm/vllm-openai:v0.32.1"}))
    found.settle()
    assert job(found)["metadata"]["uid"] != old
    assert told(found) == ("False", "DownloadingWeights")


def test_without_engines_the_status_still_says_how_the_job_fares():
    found = world(prefill={"replicas": 0}, decode={"replicas": 0})
    found.step()
    found.settle()
    assert told(found, "Ready") == ("False", "DownloadingWeights")
    assert told(found, "Progressing") == ("True", "DownloadingWeights")
    attempt(found, {"terminated": {"exitCode": 2, "message": "the Hub refuses org/llama"}})
    ends(found, "Failed")
    found.settle()
    assert told(found, "Ready") == told(found, "Progressing") == ("False", "DownloadFailed")
    assert "the Hub refuses org/llama" in found.condition("Ready")["message"]
    assert told(found, "Available") == ("False", "ScaledToZero")
    ends(found)
    found.settle()
    assert told(found, "Ready") == ("False", "ScaledToZero")
    assert told(found, "Progressing") == ("False", "Complete")


@pytest.mark.parametrize(
    ("waiting", "reason"),
    [("ImagePullBackOff", "ImageUnavailable"), ("CreateContainerConfigError", "PodConfigError"),
     ("ContainerCreating", "DownloadingWeights")],
)  # fmt: skip
def test_why_the_job_does_not_run_is_told(waiting, reason):
    found = world()
    found.step()
    attempt(found, {"waiting": {"reason": waiting, "message": "why"}})
    found.settle()
    assert told(found) == ("False", reason)


def test_a_job_that_is_done_is_never_made_again_and_goes_with_its_field():
    found = world()
    found.step()
    ends(found)
    found.settle()
    uid = job(found)["metadata"]["uid"]
    found.edit(**spec(engine={"image": "docker.io/vllm/vllm-openai:v0.32.1"}))
    found.settle()
    assert job(found)["metadata"]["uid"] == uid
    other = deepcopy(found.cluster["spec"])
    other["model"]["cache"].pop("downloadedBy")
    found.edit(**other)
    found.settle()
    assert not [kind for kind, _ in found.children if kind == "Job"]


def test_local_mode_makes_no_job():
    found = world()
    assert "Job" in kinds(make_plan(found.observed(), found.now))
    local = replace(found.observed(), place=Place(one_node=True))
    assert "Job" not in kinds(make_plan(local, found.now))


@pytest.mark.parametrize(
    ("engine", "path"),
    [
        ({"extraArgs": ["--tokenizer", "org/other"]}, "engine.extraArgs"),
        ({"extraArgs": ["--revision", "v2"]}, "engine.extraArgs"),
        ({"extraArgs": ["--download-dir", "/tmp/x"]}, "engine.extraArgs"),
        (
            {"extraArgs": ["--speculative-config", '{"model": "org/draft", "method": "eagle"}']},
            "engine.extraArgs",
        ),
        ({"extraArgs": ["--enable-lora", "--lora-modules", "a=/a", "b=o/b"]}, "engine.extraArgs"),
        (
            {"extraArgs": ["--enable-lora", "--lora-modules", '{"path": "org/b"}']},
            "engine.extraArgs",
        ),
        ({"extraArgs": ["--generation-config", "org/other"]}, "engine.extraArgs"),
        ({"extraArgs": ["--tokenizer-revision", "main"]}, "engine.extraArgs"),
        ({"extraArgs": ["--code-revision", "v2"]}, "engine.extraArgs"),
        ({"env": [{"name": "HF_HUB_OFFLINE", "value": "0"}]}, "engine.env[0].name"),
        ({"env": [{"name": "VLLM_USE_MODELSCOPE", "value": "True"}]}, "engine.env[0].value"),
        ({"env": [{"name": "VLLM_USE_MODELSCOPE", "value": "0"}]}, ""),
        ({"extraArgs": ["--tokenizer", "/models/tokenizer"]}, ""),
        ({"extraArgs": ["--tokenizer", "org/llama"]}, ""),
        (
            {"extraArgs": ["--enable-lora", "--lora-modules", "a=/a", '{"path": "/b"}']},
            "",
        ),
        ({"extraArgs": ["--generation-config", "vllm", "--code-revision", "v1"]}, ""),
    ],
)
def test_engines_may_read_only_what_the_job_downloads(engine, path):
    errors = check_manifest(manifest(**spec(engine=engine)))[1].errors
    assert {one.path for one in errors} == ({f"spec.{path}"} if path else set()), errors


def test_the_job_has_what_its_variables_name_and_those_of_the_template():
    """Kubernetes leaves $(NAME) as it is where the container has no such variable."""
    shared = [
        {"name": "PORT", "value": "80"},
        {"name": "MIRROR", "value": "m:$(PORT)"},
        {"name": "NO", "value": "$(PORT)"},
        {"name": "HF_ENDPOINT", "value": "http://$(MIRROR)"},
    ]
    own = {"name": "engine", "env": [{"name": "https_proxy", "value": "http://p"}]}
    template = {"spec": {"containers": [own]}}
    found = world(engine={"env": shared}, prefill={"podTemplate": template})
    found.step()
    [box] = job(found)["spec"]["template"]["spec"]["containers"]
    given = [
        one["name"] for one in box["env"] if one["name"] in "PORT MIRROR NO HF_ENDPOINT https_proxy"
    ]
    assert given == ["PORT", "MIRROR", "HF_ENDPOINT", "https_proxy"]


def test_the_job_has_the_certificates_that_its_variables_name():
    env = [{"name": "SSL_CERT_FILE", "value": "/ca/bundle.crt"}]
    mounts = [{"name": name, "mountPath": f"/{name}"} for name in ("ca", "c", "scratch")]
    template = {
        "spec": {
            "volumes": [
                {"name": "ca", "configMap": {"name": "company"}},
                {"name": "c", "secret": {"secretName": "other"}},
                {"name": "scratch", "emptyDir": {}},
            ],
            "containers": [{"name": "engine", "volumeMounts": mounts}],
        }
    }
    found = world(engine={"env": env}, prefill={"podTemplate": template})
    found.step()
    pod = job(found)["spec"]["template"]["spec"]
    given = pod["containers"][0]["volumeMounts"]
    assert [one for one in given if one["name"] in ("ca", "c", "scratch")] == [
        {"name": "ca", "mountPath": "/ca", "readOnly": True}
    ]
    assert {"name": "ca", "configMap": {"name": "company"}} in pod["volumes"]


def test_no_template_replaces_the_claim_of_the_job():
    volume = {"name": "cache", "emptyDir": {}}
    given = spec(decode={"podTemplate": {"spec": {"volumes": [volume]}}})
    [error] = check_manifest(manifest(**given))[1].errors
    assert error.path == "spec.decode.podTemplate.spec.volumes[0].name"


def test_a_job_needs_a_claim():
    given = spec()
    given["model"]["cache"] = {"downloadedBy": "Job"}
    [error] = check_manifest(manifest(**given))[1].errors
    assert (error.path, str(error.rule)) == ("spec.model.cache.persistentVolumeClaim", "Required")


def test_a_job_for_a_source_that_is_not_downloaded_is_warned_of():
    given = {"model": {"source": {"objectStorage": {"uri": "s3://a/b"}}}}
    given["model"]["cache"] = {"downloadedBy": "Job"}
    checked = check_manifest(manifest(**given))[1]
    assert not checked.errors
    assert [str(one.rule) for one in checked.warnings if one.path == "spec.model.cache"] == [
        "CacheUnused"
    ]
