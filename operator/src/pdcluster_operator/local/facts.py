"""Gathers what :mod:`.preflight` judges: files, ports, memory, and the engines' Python.

The versions in the engines' Python are read by a process of that Python. It does not import vLLM,
so it takes about a second.
"""

import os
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from msgspec import json, structs

import pdcluster_connector
from pdcluster_connector.host_memory import available_bytes
from pdcluster_connector.protocol import api_key
from pdcluster_operator.api import findings, object_names
from pdcluster_operator.api.spec.pod_templates import SIDECAR_CONTAINER
from pdcluster_operator.api.spec.resolve import engine_places
from pdcluster_operator.api.spec.resources import parse_quantity
from pdcluster_operator.api.spec.types import Cluster, Role
from pdcluster_operator.local.addresses import taken_everywhere
from pdcluster_operator.local.model_files import Folder, read_folder
from pdcluster_operator.local.preflight import VISIBLE, Facts, Host, Lack
from pdcluster_operator.plan.builders.secrets import CERTIFICATE_VOLUME, TICKET_KEY_VOLUME
from pdcluster_operator.plan.rollout.desired import desire
from pdcluster_operator.plan.types import ConnectorBundle, Manifest, Observed

MODULE = "pdcluster_connector.launcher.installed_versions"
PATIENCE_SECONDS = 30.0
MODEL = "model"
OFFLINE, TRUE = "HF_HUB_OFFLINE", ("1", "ON", "YES", "TRUE")
OWN_SECRETS = (TICKET_KEY_VOLUME, CERTIFICATE_VOLUME)
"""Volumes of Secrets that the operator makes."""
FIELDS = {
    MODEL: "spec.model.source",
    "weights-credentials": "spec.model.source.objectStorage.credentialsSecretRef",
    "AWS_ACCESS_KEY_ID": "spec.model.source.objectStorage.credentialsSecretRef",
    "AWS_SECRET_ACCESS_KEY": "spec.model.source.objectStorage.credentialsSecretRef",
    "cache": "spec.model.cache",
    "HF_TOKEN": "spec.model.source.huggingFace.tokenSecretRef",
    "HF_HUB_OFFLINE": "spec.model.source.huggingFace.repo",
    "vllm-router": "spec.router",
    SIDECAR_CONTAINER: "spec.router.type",
    api_key.VARIABLE: "spec.router.apiKeySecretRef",
}
"""The field of the spec that brings a volume, a variable or a program into a pod."""


def gather(
    document: Manifest,
    cluster: Cluster,
    connector: ConnectorBundle,
    environment: Mapping[str, str],
    ports: Iterable[int],
) -> Facts:
    """Look at this machine for one manifest.

    Args:
        document: the PDCluster; ``cluster`` is the same, parsed.
        environment: variables that a container inherits.
        ports: that each pod binds.
    """
    pods: list[findings.FieldError] = []
    models: dict[Role, Folder] = {}
    asked = dict.fromkeys(Role, 0)
    for role, template, copies in _pods(document, cluster, connector):
        pods += _pod_findings(cluster, role or "router", template, environment)
        if role is not None:
            asked[role] += sum(map(_memory, template["spec"]["containers"])) * copies
            if path := _model_path(template):
                known = next((one for one in models.values() if one.path == path), None)
                models[role] = known or read_folder(path)
    python, host, silence = ask_python(environment)
    return Facts(
        python=python,
        silence=silence,
        host=structs.replace(host, chosen=VISIBLE in environment),
        models=models,
        pods=tuple(pods),
        asked=asked,
        free=available_bytes(),
        taken=taken_everywhere(ports),
    )


def _pods(
    document: Manifest, cluster: Cluster, connector: ConnectorBundle
) -> Iterator[tuple[Role | None, Manifest, int]]:
    """Yield (role, pod template, number of pods) of each workload of the plan."""
    observed = Observed(
        cluster=document, children=(), pods=(), engines={}, links={}, connector=connector
    )
    for child in desire(observed, cluster).children:
        spec = child.manifest.get("spec") or {}
        if "template" not in spec:
            continue
        engine = object_names.engine_of(child.manifest)
        yield engine.role if engine else None, spec["template"], int(spec.get("replicas", 1))


def _pod_findings(
    cluster: Cluster, owner: str, template: Manifest, environment: Mapping[str, str]
) -> Iterator[findings.FieldError]:
    """Yield why a pod cannot start here. Memory is judged for all pods together.

    Args:
        owner: ``router`` or a role. Its pod template is named for what no other field causes.
        environment: what the pod's containers inherit, PATH among it.
    """
    found = [
        *_node_problems(template["spec"]),
        *_program_problems(template["spec"], environment),
        *_variable_problems(template["spec"], environment),
        *_download_problems(template["spec"], environment),
    ]
    for rule, subject, message, remedy in found:
        path = FIELDS.get(subject, f"spec.{owner}.podTemplate")
        for place, engine in engine_places(cluster) if rule is Lack.VARIABLE_MISSING else ():
            if any(variable.name == subject for variable in engine.env):
                path = f"{place}.env"
                break
        yield findings.FieldError(path, subject, rule, message, remedy)


def _node_problems(spec: Manifest) -> Iterator[tuple[Lack, str, str, str]]:
    """Yield (rule, subject, fault, remedy) of init containers and volumes; so do those below."""
    names = [one.get("name") for one in spec.get("initContainers") or ()]
    if SIDECAR_CONTAINER in names:
        what, remedy = "local mode runs no sidecars", "Use VLLMRouter or None, or use a cluster."
        yield Lack.NOT_SIMULATED, SIDECAR_CONTAINER, what, remedy
    elif names:
        what = "local mode runs no init containers"
        remedy = "Remove them from podTemplate, or use a cluster."
        yield Lack.NOT_SIMULATED, "initContainers", what, remedy
    for volume in spec.get("volumes") or ():
        name, path = volume["name"], (volume.get("hostPath") or {}).get("path")
        if path and name != MODEL:  # preflight.model_findings has the better message
            yield from _folder_problem(name, Path(path))
        elif not path and not volume.keys() & {"emptyDir", "configMap"} and name not in OWN_SECRETS:
            kind = next((key for key in volume if key != "name"), "unknown")
            what = f"volume {name} is a {kind}, which local mode lacks"
            remedy = "Use a hostPath, or name a model folder with --model-dir."
            yield Lack.NOT_SIMULATED, name, what, remedy


def _folder_problem(name: str, folder: Path) -> Iterator[tuple[Lack, str, str, str]]:
    remedy = "Put the model there, or name its folder with --model-dir."
    if not folder.is_dir():
        what = "is not a folder on this machine"
    elif not os.access(folder, os.R_OK | os.X_OK):
        what = "can't be read by this user"
        remedy = "Change its permissions (chmod -R a+rX), or choose another folder."
    elif not any(folder.iterdir()):
        what = "is empty"
    else:
        return
    yield Lack.VOLUME_UNUSABLE, name, f"{folder} (volume {name}) {what}", remedy


def _program_problems(
    spec: Manifest, environment: Mapping[str, str]
) -> Iterator[tuple[Lack, str, str, str]]:
    for container in spec["containers"]:
        program = (container.get("command") or [""])[0]
        if program and shutil.which(program, path=environment["PATH"]) is None:
            remedy = "Install it next to python3 (`make env` does), or put its folder on PATH."
            yield Lack.PROGRAM_MISSING, program, f"{program} is not installed", remedy


def _variable_problems(
    spec: Manifest, environment: Mapping[str, str]
) -> Iterator[tuple[Lack, str, str, str]]:
    entries = (one for container in spec["containers"] for one in container.get("env") or ())
    for name, source in ((entry["name"], entry.get("valueFrom", {})) for entry in entries):
        if name == api_key.VARIABLE and name in environment:
            if wrong := api_key.problem(environment[name]):
                what, _, remedy = wrong.partition(": ")
                remedy = f"{remedy[:1].upper()}{remedy[1:]}."
                yield Lack.VARIABLE_UNUSABLE, name, what, remedy
        elif source.keys() - {"fieldRef"} and name not in environment:
            what = f"{name} comes from a Secret or a ConfigMap, which local mode lacks"
            yield Lack.VARIABLE_MISSING, name, what, "Set it in your environment."


def _download_problems(
    spec: Manifest, environment: Mapping[str, str]
) -> Iterator[tuple[Lack, str, str, str]]:
    """A run's cache of the Hub begins empty, so engines without the Hub find no model there."""
    volumes = {volume["name"]: volume for volume in spec.get("volumes") or ()}
    given = {one["name"]: one.get("value") for one in spec["containers"][0].get("env") or ()}
    offline = str({**environment, **given}.get(OFFLINE) or "")
    if "emptyDir" in volumes.get("cache", {}) and offline.upper() in TRUE:
        what = f"{OFFLINE}={offline} forbids a download, and the cache of this run is empty"
        remedy = (
            "Name the folder of a copy with --model-dir (downloads are in "
            f"~/.cache/huggingface/hub/models--*/snapshots), or remove {OFFLINE}."
        )
        yield Lack.MODEL_UNUSABLE, OFFLINE, what, remedy


def _memory(container: Manifest) -> int:
    """Return the bytes of memory that a container requests."""
    resources = container.get("resources") or {}
    asked = {**(resources.get("limits") or {}), **(resources.get("requests") or {})}.get("memory")
    return int(parse_quantity(str(asked)) or 0) if asked else 0


def _model_path(template: Manifest) -> str:
    """Return the folder that a pod mounts as its model; empty for a model by name."""
    volumes = template["spec"].get("volumes") or ()
    model: Manifest = next((volume for volume in volumes if volume.get("name") == MODEL), {})
    return str((model.get("hostPath") or {}).get("path") or "")


def ask_python(environment: Mapping[str, str]) -> tuple[str, Host, str]:
    """Run the engines' Python; return (its path, its answer, why there is no answer)."""
    python = shutil.which("python3", path=environment["PATH"]) or "python3"
    source = str(Path(pdcluster_connector.__file__).parent.parent)
    try:
        done = subprocess.run(
            [python, "-m", MODULE],
            env={**environment, "PYTHONPATH": source},
            cwd="/",
            capture_output=True,
            text=True,
            timeout=PATIENCE_SECONDS,
            check=False,
        )
        if done.returncode == 0:
            return python, json.decode(done.stdout, type=Host), ""
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        return python, Host(), str(error)
    last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
    return python, Host(), f"it ends with code {done.returncode}: {last}"
