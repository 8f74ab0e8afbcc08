"""The images as the kubelet runs them."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys

import pytest

from images.base import base_name
from images.buildah import Buildah
from images.built import REPOSITORY, images_folder
from images.for_cluster import load_engine_image, operator_values, template
from images.operator_image import operator_image
from images.pip_settings import pip_options

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

# The chart's own security contexts.
POD_SECURITY = {
    "runAsNonRoot": True,
    "runAsUser": 65532,
    "runAsGroup": 65532,
    "seccompProfile": {"type": "RuntimeDefault"},
}
SECURITY = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}


@pytest.fixture
def run_pod(cluster):
    """Run a pod to its end; what it printed."""
    made = []

    def run(name: str, spec: dict, namespace: str = "default") -> str:
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}}
        pod["spec"] = {"restartPolicy": "Never", **spec}
        made.append((name, namespace))
        cluster.kubectl("apply", "-n", namespace, "-f", "-", stdin=json.dumps(pod))
        phase = "jsonpath={.status.phase}=Succeeded"
        cluster.kubectl("wait", "-n", namespace, f"pod/{name}", f"--for={phase}", "--timeout=180s")
        return cluster.kubectl("logs", "-n", namespace, name)

    yield run
    for name, namespace in made:
        cluster.kubectl("delete", "pod", name, "-n", namespace, "--now", "--ignore-not-found")


def test_operator_image_runs_restricted_and_packs_the_connector(cluster, run_pod):
    image = operator_values(cluster)
    script = (
        "id -u; pdcluster --version; "
        "python3 -m pdcluster_connector.launcher.bundle /tmp/connector.pyz; "
        "touch /opt/pdcluster/written 2>&1; "
        "python3 -c 'import torch' 2>&1 | tail -1"
    )
    container = {
        "name": "test",
        "image": f"{image['repository']}:{image['tag']}",
        "command": ["/bin/sh", "-c", script],
        "securityContext": SECURITY,
        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
    }
    said = run_pod(
        "operator-image",
        {
            "containers": [container],
            "securityContext": POD_SECURITY,
            "volumes": [{"name": "tmp", "emptyDir": {}}],
        },
    ).splitlines()
    assert said[0] == "65532"
    assert said[1].startswith("pdcluster ")
    assert len(said[2]) == 64  # the bundle's SHA-256
    assert "Read-only file system" in said[3]
    assert said[4] == "ModuleNotFoundError: No module named 'torch'"


def test_engine_image_holds_vllm_and_nixl_and_not_our_connector(cluster, run_pod):
    script = (
        "import sys, importlib.metadata as m\n"
        "from nixl._api import nixl_agent, nixl_agent_config\n"
        "nixl_agent('test', nixl_agent_config(backends=['UCX']))\n"
        "import vllm\n"
        "from vllm.distributed.kv_transfer import kv_transfer_state\n"
        "print('vllm', vllm.__version__, sys.prefix)\n"
        "try:\n    import pdcluster_connector\nexcept ModuleNotFoundError as e:\n    print(e)\n"
    )
    spec = template("prefill").get("spec") or {"containers": [{"name": "engine"}]}
    image = load_engine_image(cluster)
    spec["containers"][0] |= {"image": image, "command": ["python3", "-c", script]}
    said = run_pod("engine-image", spec).splitlines()
    assert said[-2].startswith("vllm 0.")
    if cluster.ours:
        assert said[-2].endswith(sys.prefix)
    assert said[-1] == "No module named 'pdcluster_connector'"


@pytest.mark.soak
@pytest.mark.parametrize(
    ("target", "command", "said"),
    [
        ("image", ["pdcluster", "--version"], "pdcluster "),
        ("router-image", ["vllm-router", "--help"], "--vllm-pd-disaggregation"),
    ],
)
def test_make_builds_what_runs_restricted(cluster, run_pod, tmp_path, target, command, said):
    if not cluster.ours:
        pytest.skip("no image can be brought to this cluster's nodes from here")
    operator_image()  # its base is in the store then
    home = images_folder()
    buildah = Buildah(home)
    name = f"registry.example/test/{target}:1"
    with pip_options(home) as options:
        words = [
            f"BUILDER={shlex.join(buildah._command)}",
            f"REPOSITORY={name.rpartition(':')[0]}",
            "TAG=1",
            f"BASE=localhost/{base_name()}",
            f"OPTIONS={shlex.join(['--isolation', 'chroot', *options])}",
        ]
        done = subprocess.run(
            ["make", "--no-print-directory", target, f"PYTHON={sys.executable}", *words],
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    assert name in done.stdout
    buildah.export(name, name, tmp_path / "image.tar")
    subprocess.run([*buildah._command, "rmi", name], capture_output=True, check=True)
    cluster.load(tmp_path / "image.tar")
    container = {"name": "test", "image": name, "command": command, "securityContext": SECURITY}
    seen = run_pod(f"made-{target}", {"containers": [container], "securityContext": POD_SECURITY})
    assert said in seen
