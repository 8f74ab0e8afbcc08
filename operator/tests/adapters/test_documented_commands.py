"""Every command that a page tells a reader to run: run from the page, on a real API server.

Pods are played. What a page assumes stands in ``STAND_INS``; what needs more than an API server is
run by the test that ``ELSEWHERE`` names, or cannot be run here, as ``NOT_RUN`` says.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from operator_runs import Operator, cluster, edit, until
from played_nodes import PlayedNodes
from real_api import TOKEN, RealApi

from cluster import binaries
from cluster.places import Places

ROOT = Path(__file__).resolve().parents[3]
PAGES = ["README.md", "CONTRIBUTING.md", *sorted(str(p.relative_to(ROOT)) for p in
         (ROOT / "docs").glob("*.md"))]  # fmt: skip
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
PROGRAMS = (
    "kubectl helm pdcluster make curl python python3 pip git kopf vllm openssl cosign gh promtool"
)
COMMAND = re.compile(rf"^(?:[A-Z_]+=\S+ )*(?:{'|'.join(PROGRAMS.split())})\b")
ELSEWHERE = {
    "docs/connector.md": "e2e/tests/test_connector_by_hand.py",
    "docs/security.md": "connector/tests/sidechannel/test_security_page.py",
    "docs/start-laptop.md": "e2e/tests/test_start_pages.py",
    "docs/cli.md": "e2e/tests/test_local_up_once.py",
    "docs/testing.md": "connector/tests/testing/test_fault_matrix.py",
}
NOT_RUN = {
    "make image ": "it pushes; test_operator_image_files.py builds the image",
    "make router-image ": "it pushes; test_images_in_pods.py builds the image",
    "make pure PYTHON": "the hosted workflow does",
    "git ": "it publishes a release",
    "pdcluster doctor --probe": "it needs nodes; test_doctor_probe of e2e has some",
    "kubectl port-forward": "it needs a router that runs",
    "PDCLUSTER_HOST_PATH_MODELS": "test_kopf.py starts the operator so",
}
# What a page names, and what a test has in its place.
STAND_INS = {
    "examples/small-gpu.yaml": "small.yaml",
    "examples/one-node-8gpu.yaml": "llama.yaml",
    "examples/infiniband.yaml": "qwen-ib.yaml",
    # No kubelet runs the operator's pod here, and its webhook would answer nobody.
    " --wait\n": " --set webhook.enabled=false,crds.enabled=false\n",
    ",crds.enabled=false\n": ",crds.enabled=false,webhook.enabled=false\n",
    "--timeout=20m": "--timeout=240s",
    "--timeout 30m": "--timeout 240s",
}


def commands(page: str) -> list[str]:
    """The commands of a page, without what it shows of their answers."""
    found = []
    for language, block in BLOCK.findall((ROOT / page).read_text()):
        lines = iter(re.sub(r" \\\n\s*", " ", block).splitlines())
        for line in lines if language in ("", "bash") else ():
            if not COMMAND.match(line):
                continue
            if line.endswith("<<END"):
                line = "\n".join([line, *iter(lines.__next__, "END"), "END"])  # noqa: PLW2901
            found.append(f"{line}\n")
    return found


def answers(page: str) -> list[tuple[str, str]]:
    """The commands of a page that it shows with a prompt, and the first line of each answer."""
    return re.findall(r"^\$ (.+)\n(.+)$", (ROOT / page).read_text(), re.MULTILINE)


def reason_not_run(command: str) -> str:
    return next((why for start, why in NOT_RUN.items() if command.startswith(start)), "")


WALKED = ("docs/install.md", "docs/start-one-node.md", "docs/start-rdma.md", "docs/operations.md")


@pytest.mark.parametrize("page", PAGES)
def test_each_command_of_a_page_is_run_or_it_is_known_why_not(page: str) -> None:
    if page in ELSEWHERE:
        assert (ROOT / ELSEWHERE[page]).exists()
        return
    known = {command for walked in WALKED for command in commands(walked)}
    for command in commands(page):
        assert command in known or reason_not_run(command), command


@pytest.fixture
def shell(tmp_path: Path) -> list[str]:
    """A folder as the pages assume one: the repository's, with manifests beside it."""
    home = tmp_path / "home"
    home.mkdir()
    for name in ("charts", "examples"):
        (home / name).symlink_to(ROOT / name)
    for name in ("small", "llama", "qwen-ib"):
        (home / f"{name}.yaml").write_text(yaml.safe_dump(cluster(name)))
    (home / "config.json").write_text('{"model_type": "llama"}')
    programs = tmp_path / "bin"
    programs.mkdir()
    wanted = [one for one in binaries.PROGRAMS if one.name in ("kubectl", "helm4")]
    for name, path in binaries.provide(wanted, Places.of_user()).items():
        (programs / name.removesuffix("4")).symlink_to(path)
    (programs / "pdcluster").write_text(
        f'#!/bin/sh\nexec {sys.executable} -m pdcluster_operator "$@"\n'
    )
    (programs / "pdcluster").chmod(0o755)
    return [str(home), f"{programs}:{os.environ['PATH']}"]


def run(real: RealApi, shell: list[str], namespace: str, command: str) -> tuple[int, str]:
    home, path = shell
    for named, instead in STAND_INS.items():
        command = command.replace(named, instead)
    command = re.sub(r"(?<=--namespace )llm|(?<=\{)llm(?=\})", namespace, command)
    config = real.kubeconfig("admin", TOKEN)
    script = f"kubectl config set-context --current --namespace={namespace} >/dev/null\n{command}"
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=home,
        env={
            **os.environ,
            "PATH": path,
            "KUBECONFIG": str(config),
            "PYTHONPATH": os.pathsep.join(one for one in sys.path if one.endswith("/src")),
        },
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


# `doctor` finds no RDMA and no GPU here.
CODES = {"pdcluster doctor": {0, 6}}
BEFORE = {
    "docs/operations.md": ["kubectl apply -f llama.yaml\n", *commands("docs/install.md")[2:3]]
}


def prometheus_kinds(real: RealApi) -> None:
    """Let the server take the objects of the Prometheus operator, which pages assume."""
    group, path = "monitoring.coreos.com", "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
    schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    version = {"name": "v1", "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}
    for kind in ("PodMonitor", "PrometheusRule"):
        names = {"kind": kind, "plural": f"{kind.lower()}s"}
        spec = {"group": group, "scope": "Namespaced", "names": names, "versions": [version]}
        named = {"name": f"{names['plural']}.{group}"}
        body = {"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition"}
        real.call("POST", path, {**body, "metadata": named, "spec": spec})
        served = f"/apis/{group}/v1/{names['plural']}"
        until(lambda path=served: real.call("GET", path)[0] == 200, 60, dict)


@pytest.mark.cluster
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("page", WALKED)
def test_the_commands_of_a_page(
    real: RealApi, operator: Operator, namespace: str, shell: list[str], page: str
) -> None:
    for made in ("pdcluster-system", "blue-system"):
        real.call("POST", "/api/v1/namespaces", {"metadata": {"name": made}})
    prometheus_kinds(real)
    operator.start()
    with PlayedNodes(real, namespace):
        for command in [*BEFORE.get(page, ()), *commands(page)]:
            if reason_not_run(command) or command == "kubectl create namespace llm\n":
                continue
            code, said = run(real, shell, namespace, command)
            allowed = next((c for s, c in CODES.items() if command.startswith(s)), {0})
            assert code in allowed, f"{command}\n{said}"
        if page == "docs/operations.md":
            assert edit(real, namespace, {"prefill": {"replicas": 5}}, "llama")[0] == 200
            command, shown = answers(page)[0]
            assert shown[:80] in run(real, shell, namespace, command)[1]
