"""Where folders of the nodes are forbidden, no place of a spec may mount one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from said_findings import check_manifest

from pdcluster_operator.api.rules.pod_template import HOST_PATH_REMEDY
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
    assert flags == ["--allow-host-path-models"]
    for command in (["run"], ["webhook", "--certificate-folder", "/x"]):
        assert parser().parse_args([*command, *flags]).host_path_models is True
    values = yaml.safe_load((ROOT / "charts" / "pdcluster" / "values.yaml").read_text())
    (named,) = re.findall(r"operator\.([A-Za-z]+)", HOST_PATH_REMEDY)
    assert named in values["operator"]
