"""Where folders of the nodes are forbidden, no place of a spec may mount one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from said_findings import check_manifest

from pdcluster_operator.api.rules.images_and_weights import HOST_PATH_REMEDY
from pdcluster_operator.cli.operator import parser

ROOT = Path(__file__).parents[3]

CLAIM = {"persistentVolumeClaim": {"claimName": "models"}}
FOLDER = {"hostPath": {"path": "/etc"}}


def host_paths_in(**spec):
    document = {
        "apiVersion": "pdcluster.dev/v1alpha1",
        "kind": "PDCluster",
        "metadata": {"name": "llama"},
        "spec": {"model": {"source": CLAIM}, **spec},
    }
    forbidden = check_manifest(document, host_paths=False)[1]
    assert check_manifest(document, host_paths=True)[1].ok
    assert {error.rule for error in forbidden.errors} <= {"HostPathNotAdmitted"}
    return [error.path for error in forbidden.errors]


def mounting(*volumes):
    return {"podTemplate": {"spec": {"volumes": list(volumes)}}}


def test_a_spec_without_folders_of_the_node_is_accepted():
    other = {"name": "y", "emptyDir": {}, "hostPath": None}
    assert (
        host_paths_in(**{part: mounting(other) for part in ("prefill", "decode", "router")}) == []
    )


@pytest.mark.parametrize("part", ["prefill", "decode", "router"])
def test_no_pod_template_may_mount_one(part):
    volumes = [{"name": "fine", "emptyDir": {}}, {"name": "sly", **FOLDER}]
    assert host_paths_in(**{part: mounting(*volumes)}) == [
        f"spec.{part}.podTemplate.spec.volumes[1].hostPath"
    ]


def test_every_place_is_named_at_once():
    sly = mounting({"name": "a", **FOLDER}, {"name": "b", **FOLDER})
    found = host_paths_in(model={"source": FOLDER}, prefill=sly, decode=sly, router=sly)
    assert found == [
        "spec.model.source.hostPath.path",
        *(
            f"spec.{part}.podTemplate.spec.volumes[{place}].hostPath"
            for part in ("prefill", "decode", "router")
            for place in (0, 1)
        ),
    ]


def test_the_remedy_names_options_that_there_are():
    """Of the operator's command line, and of the chart's values."""
    flags = re.findall(r"--[a-z][-a-z]+", HOST_PATH_REMEDY)
    assert flags == ["--allow-host-path"]
    for command in (["run"], ["webhook", "--certificate-folder", "/x"]):
        assert parser().parse_args([*command, *flags, "/a"]).host_path_prefixes == ["/a"]
    values = yaml.safe_load((ROOT / "charts" / "pdcluster" / "values.yaml").read_text())
    (named,) = re.findall(r"operator\.([A-Za-z]+)", HOST_PATH_REMEDY)
    assert named in values["operator"]


def refused_beside(path, admitted=("/srv/models", "/data/"), *, read_only=True, whole=None):
    """Where a spec is refused whose model and whose pod template mount a folder."""
    mount = {"name": "more", "mountPath": "/more", "readOnly": read_only}
    container = {"name": "engine", "volumeMounts": [mount]}
    volume = {"name": "more", "hostPath": whole or {"path": path}}
    document = {
        "apiVersion": "pdcluster.dev/v1alpha1",
        "kind": "PDCluster",
        "metadata": {"name": "llama"},
        "spec": {
            "model": {"source": {"hostPath": {"path": path}}},
            "decode": {"podTemplate": {"spec": {"volumes": [volume], "containers": [container]}}},
        },
    }
    errors = check_manifest(document, host_paths=admitted)[1].errors
    found = [error for error in errors if error.rule == "HostPathNotAdmitted"]
    return [error.path.removeprefix("spec.") for error in found], found


@pytest.mark.parametrize(
    "path", ["/srv/models", "/srv/models/llama", "/srv//models/./llama/", "/data/x", "/data"]
)
def test_a_folder_in_an_admitted_one_is_admitted(path):
    assert refused_beside(path)[0] == []


@pytest.mark.parametrize("path", ["/srv", "/srv/models-2", "/etc", "/data-2", "/srv/model", "/"])
def test_a_folder_beside_an_admitted_one_is_refused(path):
    paths, (first, *_) = refused_beside(path)
    volume = "decode.podTemplate.spec.volumes[0].hostPath"
    assert paths == ["model.source.hostPath.path", volume]
    assert first.remedy.startswith("Use a folder in /srv/models or /data/. ")


@pytest.mark.parametrize("path", ["/srv/models/../../etc", "srv/models", None, 7, ["/data"]])
def test_no_path_of_a_pod_template_leads_out_of_an_admitted_folder(path):
    paths, _ = refused_beside("/data", whole={"path": path})
    assert paths == ["decode.podTemplate.spec.volumes[0].hostPath"]


@pytest.mark.parametrize("read_only", [False, None, "true"])
def test_an_admitted_folder_may_only_be_read(read_only):
    """A pod that writes there could make a link to any folder of the node."""
    paths, _ = refused_beside("/data", read_only=read_only)
    mount = "decode.podTemplate.spec.containers[0].volumeMounts[0].readOnly"
    assert paths == [mount]


def test_an_empty_list_admits_nothing():
    paths, _ = refused_beside("/data", ())
    assert len(paths) == 2


MODEL = "/models/model"


def refused_in(part, *, volumes=(), mounts=(), source=None, name="engine"):
    """Where a spec is refused whose model lies in an admitted folder."""
    pod = {"volumes": list(volumes), "containers": [{"name": name, "volumeMounts": list(mounts)}]}
    source = source or {"hostPath": {"path": "/data/llama"}}
    spec = {"model": {"source": source}, part: {"podTemplate": {"spec": pod}}}
    document = {
        "apiVersion": "pdcluster.dev/v1alpha1",
        "kind": "PDCluster",
        "metadata": {"name": "llama"},
        "spec": spec,
    }
    found = check_manifest(document, host_paths=("/data",))[1].errors
    return [one.path.removeprefix(f"spec.{part}.podTemplate.spec.") for one in found]


@pytest.mark.parametrize("part", ["prefill", "decode"])
@pytest.mark.parametrize(
    "mount",
    [
        {"name": "model", "mountPath": "/again"},
        {"name": "model", "mountPath": MODEL, "readOnly": False},
        {"mountPath": MODEL, "readOnly": False},
        {"mountPath": MODEL, "readOnly": None},
    ],
)
def test_the_folder_of_the_model_may_only_be_read(part, mount):
    assert refused_in(part, mounts=[mount]) == ["containers[0].volumeMounts[0].readOnly"]


@pytest.mark.parametrize(
    "mount",
    [
        {"name": "model", "mountPath": "/again", "readOnly": True},
        {"name": "model", "mountPath": MODEL},
        {"mountPath": MODEL, "subPath": "a"},
    ],
)
def test_a_mount_that_stays_read_only_is_admitted(mount):
    assert refused_in("decode", mounts=[mount]) == []


@pytest.mark.parametrize("name", ["shm", "cache"])
def test_what_the_engine_writes_to_is_no_folder_of_the_node(name):
    volume = {"name": name, "hostPath": {"path": "/data/x"}}
    source = {"huggingFace": {"repo": "a/b", "revision": "v1"}}
    assert refused_in("prefill", volumes=[volume], source=source) == ["volumes[0].name"]


def test_routers_have_no_model():
    volume = {"name": "model", "emptyDir": {}}
    mount = {"name": "model", "mountPath": MODEL}
    given = {"volumes": [volume], "mounts": [mount], "name": "router"}
    assert refused_in("router", **given) == []
    volume = {"name": "shm", "hostPath": {"path": "/data"}}
    mount = {"name": "shm", "mountPath": "/x"}
    given = {"volumes": [volume], "mounts": [mount], "name": "router"}
    assert refused_in("router", **given) == ["containers[0].volumeMounts[0].readOnly"]
    mount = {"name": "shm", "mountPath": "/x", "readOnly": True}
    assert refused_in("router", **given | {"mounts": [mount]}) == []


def test_a_template_for_all_pods_is_judged_where_it_was_written():
    volume = {"name": "more", "hostPath": {"path": "/data"}}
    mount = {"name": "more", "mountPath": "/more"}
    box = {"name": "engine", "volumeMounts": [mount]}
    shared = {"podTemplate": {"spec": {"volumes": [volume], "containers": [box]}}}
    document = {
        "apiVersion": "pdcluster.dev/v1alpha1",
        "kind": "PDCluster",
        "metadata": {"name": "llama"},
        "spec": {"model": {"source": CLAIM}, **shared},
    }
    (found,) = check_manifest(document, host_paths=("/data",))[1].errors
    assert found.path == "spec.podTemplate.spec.containers[0].volumeMounts[0].readOnly"
