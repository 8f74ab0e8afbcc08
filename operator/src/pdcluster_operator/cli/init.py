"""``pdcluster init``: a first manifest for a model on some GPUs, with the arithmetic."""

import os
import re
import sys
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from pdcluster_connector.compat.findings import counted
from pdcluster_operator.api.object_names import API_VERSION, KIND
from pdcluster_operator.api.rules.validate import check_manifest
from pdcluster_operator.api.schema.crd import to_yaml
from pdcluster_operator.api.spec.engine_types import SharedEngine
from pdcluster_operator.api.spec.model_config import UnknownModel
from pdcluster_operator.api.spec.resources import GPU_RESOURCE
from pdcluster_operator.cli import model_shape, sizing
from pdcluster_operator.cli.commands import Command, Finite
from pdcluster_operator.cli.exits import Exit, UserError

GIB = 1 << 30
POD_GIB, GPU_GIB = 16, 8
"""Memory of a pod beside the weights: of the pod, with 8 Gi of shared memory, and for each GPU."""
POD_CPUS, GPU_CPUS = 4, 4
LEAST_LEASE, MOST_LEASE = 60, 3600
LEASE_SHARE = 20
"""A lease lasts so many times as long as the KV of a prompt is estimated to take."""
LEAST_SHARE = 0.1
"""A link that has less than this share of the assumed rate has probably fallen back to TCP."""
WIDTH = 98
IMAGE = SharedEngine().image
LONGEST_NAME = 30
TOKEN_SECRET = "hub-token"  # noqa: S105 - the name of a Secret


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What the command line says beside the numbers.

    Attributes:
        model: a folder, or a model of the table.
        source: of the weights, if it is not the model's own: ``pvc:CLAIM[/PATH]`` or
            ``OWNER/NAME@REVISION``.
        name: of the PDCluster; None for the model's.
        fabric: a key of :data:`.sizing.FABRICS`.
    """

    model: str
    source: str | None
    name: str | None
    fabric: str
    gpu_resource: str
    image: str
    networks: tuple[str, ...]


def manifest(
    choice: Choice, shape: model_shape.Shape, wish: sizing.Wish
) -> tuple[dict[str, Any], sizing.Sizing]:
    """Return the manifest and what it was computed from.

    Raises:
        UnknownModel, Impossible: see there.
    """
    sized = sizing.size(shape, wish)
    source, name = _source(choice)
    spec: dict[str, Any] = {
        "model": {"source": source},
        "engine": {
            "image": choice.image,
            # Room for the longest request; vLLM would reserve the model's own longest context.
            "maxModelLen": min(shape.longest or wish.tokens, -(-wish.tokens // 1024) * 1024),
        },
    }
    transfer: dict[str, Any] = {}
    lease = min(MOST_LEASE, round(sized.fabric_seconds * LEASE_SHARE))
    if lease > LEAST_LEASE:
        transfer["leaseSeconds"] = lease
    if choice.fabric != "none":
        least = round(wish.fabric.gigabytes * LEAST_SHARE * 1000)
        transfer["minBandwidthMBps"] = min(1_000_000, max(1, least))
    if wish.fabric.resource:
        transfer["rdma"] = {"resource": wish.fabric.resource}
        if choice.fabric == "efa":
            transfer["backends"] = ["LIBFABRIC"]
        if choice.networks:
            transfer["rdma"]["networks"] = list(choice.networks)
    if transfer:
        spec["transfer"] = transfer
    spec["rollout"] = {"type": _rollout(sized, wish)}
    for role, replicas in (("prefill", sized.prefill), ("decode", sized.decode)):
        spec[role] = {"replicas": replicas, **_engine(choice, shape, sized)}
    metadata = {"name": choice.name or name}
    return {"apiVersion": API_VERSION, "kind": KIND, "metadata": metadata, "spec": spec}, sized


def _rollout(sized: sizing.Sizing, wish: sizing.Wish) -> str:
    """Return the way to replace engines that needs no more GPUs than there are."""
    places = sizing.places(wish, sized.tensor)  # of GPUs on one node, not just any
    if places - sized.prefill - sized.decode >= 2:
        return "Surge"
    return "Replace" if min(sized.prefill, sized.decode) > 1 else "Recreate"


def _engine(choice: Choice, shape: model_shape.Shape, sized: sizing.Sizing) -> dict[str, Any]:
    """Return what both roles have alike: parallelism and resources."""
    gpus = sized.tensor // sized.nodes
    memory = f"{POD_GIB + GPU_GIB * gpus + -(-shape.weights // sized.nodes // GIB)}Gi"
    parallelism = {"tensor": sized.tensor, **({"nodes": sized.nodes} if sized.nodes > 1 else {})}
    limits = {"memory": memory}
    if choice.gpu_resource != GPU_RESOURCE:
        limits[choice.gpu_resource] = str(gpus)
    requests = {"cpu": str(POD_CPUS + GPU_CPUS * gpus), "memory": memory}
    return {"parallelism": parallelism, "resources": {"requests": requests, "limits": limits}}


def _source(choice: Choice) -> tuple[dict[str, Any], str]:
    """Return ``spec.model.source``, and a name for the PDCluster."""
    folder = Path(choice.model)
    if choice.source is None and os.path.isdir(folder):
        return {"hostPath": {"path": os.path.abspath(folder)}}, _as_name(folder.resolve().name)
    if choice.source is None:
        known = model_shape.family(choice.model)
        hub: dict[str, Any] = {"repo": known.repo, "revision": known.revision}
        if known.gated:
            hub["tokenSecretRef"] = {"name": TOKEN_SECRET, "key": "token"}
        return {"huggingFace": hub}, _as_name(choice.model.rpartition("/")[2])
    kind, _, rest = choice.source.partition(":")
    if kind == "pvc" and rest:
        claim, _, path = rest.partition("/")
        found = {"claimName": claim, **({"path": path} if path else {})}
        return {"persistentVolumeClaim": found}, _as_name(folder.name)
    repo, at, revision = choice.source.partition("@")
    if not (at and revision and "/" in repo):
        raise sizing.Impossible(
            f"--source = {choice.source[:80]}: write pvc:CLAIM/FOLDER for a claim, or "
            "OWNER/NAME@COMMIT for a repository of Hugging Face"
        )
    return {"huggingFace": {"repo": repo, "revision": revision}}, _as_name(folder.name)


def _as_name(text: str) -> str:
    """Return a name for a PDCluster that is like ``text``."""
    name = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    name = name if name[:1].isalpha() else f"model-{name}"
    return name[:LONGEST_NAME].rstrip("-")


def text_of(
    choice: Choice, wish: sizing.Wish, document: Mapping[str, Any], sized: sizing.Sizing
) -> str:
    """Return the manifest as text, with what it needs and the arithmetic before it."""
    name, model = document["metadata"]["name"], document["spec"]["model"]["source"]
    title = (
        f"{_named(model)}: {counted(sized.prefill, 'prefill engine')} and "
        f"{counted(sized.decode, 'decode engine')} with {counted(sized.tensor, 'GPU')} each."
    )
    nodes = f"{counted(wish.nodes, 'node')} with {counted(wish.gpus_of_node, 'GPU')}"
    needs = [f"{nodes} of the type {wish.gpu_type}"]
    if wish.fabric.resource:
        needs.append(
            f"the RDMA resource {wish.fabric.resource} (`pdcluster doctor` lists what your nodes "
            "have)"
        )
    if choice.fabric == "efa":
        needs.append("an image whose libfabric fits its NIXL (vLLM's own image has none)")
    needs += _needs_of_source(model)
    lines = [*_wrapped(title), "#"]
    lines += _wrapped(f"Needs:  {'; '.join(needs)}.", "        ")
    lines += _wrapped(
        f"Check:  pdcluster lint FILE, then pdcluster doctor -f FILE; then kubectl apply -f FILE, "
        f"and pdcluster status {name}",
        "        ",
    )
    if choice.fabric == "nvlink":
        lines += ["#", *_wrapped(NVLINK)]
    lines += ["#", *_wrapped(ARITHMETIC)]
    memory = (
        f"memory of a pod: {POD_GIB} Gi + {GPU_GIB} Gi for each GPU + its share of the weights; it "
        "is an assumption"
    )
    for note in (*sized.notes, memory):
        first, *more = _wrapped(f"- {note}", "  ")
        lines += [first, *more]
    return "\n".join(lines) + "\n" + to_yaml(document)


def _named(source: Mapping[str, Any]) -> str:
    ((kind, found),) = source.items()
    named = {"huggingFace": "repo", "persistentVolumeClaim": "claimName", "hostPath": "path"}[kind]
    within = f"/{found['path']}" if kind == "persistentVolumeClaim" and "path" in found else ""
    return f"{found[named]}{within}"


def _needs_of_source(source: Mapping[str, Any]) -> list[str]:
    if hub := source.get("huggingFace"):
        if "tokenSecretRef" not in hub:
            return ["access to huggingface.co"]
        return [
            (
                f"access to huggingface.co, and a token of an account that may read {hub['repo']}: "
                f"kubectl create secret generic {TOKEN_SECRET} --from-literal=token=hf_…"
            )
        ]
    if claim := source.get("persistentVolumeClaim"):
        return [f"the claim {claim['claimName']} with the model's files, readable on all nodes"]
    return [f"the folder {source['hostPath']['path']} on every node (--source names another place)"]


def _wrapped(text: str, indent: str = "") -> list[str]:
    return [
        f"# {line}"
        for line in textwrap.wrap(
            text, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
        )
    ]


NVLINK = (
    "NVLink between pods needs more than this file (docs/operations.md, 'NVLink between engines "
    "on a node'). Without it KV goes over TCP, and minBandwidthMBps makes TransportHealthy False."
)
ARITHMETIC = (
    "The arithmetic. It assumes half of what the data sheet promises, and no load; `pdcluster "
    "bench` measures what is true on your cluster:"
)
DETAILS = """\
Writes a manifest for a model on some GPUs, with the arithmetic in its comments. It asks for what is
missing if standard input is a terminal.

The result passes `pdcluster lint`. The numbers are estimates from data sheets, and each comes with
its formula. Exit codes: 0 done; 2 the command line is wrong, or nothing fits.
"""
EXAMPLES = (
    ("pdcluster init", "asks for what it needs"),
    (
        "pdcluster init --model qwen2.5-7b --gpus 8 --gpu-type L40S-48GB --fabric none",
        "one node, and a model of the table",
    ),
    (
        "pdcluster init --model ./mine --source pvc:weights/mine > cluster.yaml",
        "the folder's config.json says the sizes; the cluster has the weights on a claim",
    ),
)
ASKED: dict[str, tuple[str, click.ParamType[Any, str]]] = {
    "model": ("Model (a folder, or a name of the table)", click.STRING),
    "gpus": ("GPUs of all nodes together", click.IntRange(2, 10_000)),
    "gpu_type": ("Type of the GPUs, such as H100-80GB", click.STRING),
    "fabric": ("Fabric between the nodes", click.Choice(list(sizing.FABRICS))),
}
TOKENS = click.IntRange(1, 100_000_000)
MILLISECONDS = Finite(0.001, 3_600_000)


# fmt: off
@click.command(cls=Command, help=DETAILS, examples=EXAMPLES)
@click.option("--model", metavar="NAME|DIR", help="a model of the table, or a folder with "
              f"config.json; the table: {', '.join(model_shape.FAMILIES)}")
@click.option("--gpus", type=ASKED["gpus"][1], help="GPUs of all nodes together")
@click.option("--gpu-type", metavar="TYPE-nGB", help="the type with its memory, such as "
              f"{', '.join(sizing.DATA_SHEETS)}")
@click.option("--nodes", type=click.IntRange(1, 10_000), default=1, show_default=True,
              help="how many nodes have these GPUs")
@click.option("--fabric", type=ASKED["fabric"][1], help="what KV moves over")
@click.option("--link-gb", type=Finite(0.001, 10_000), metavar="GB/S",
              help="a measured rate of the fabric; `pdcluster doctor --probe` measures it")
@click.option("--prompt-tokens", type=TOKENS, default=4096, show_default=True,
              help="tokens of a long prompt")
@click.option("--output-tokens", type=TOKENS, default=512, show_default=True,
              help="tokens of a long answer")
@click.option("--ttft-ms", type=MILLISECONDS, default=2000, show_default=True,
              help="target: milliseconds until the first token")
@click.option("--itl-ms", type=MILLISECONDS, default=50, show_default=True,
              help="target: milliseconds between two tokens")
@click.option("--source", metavar="SOURCE", help="where the cluster has the weights: "
              "pvc:CLAIM/FOLDER, or OWNER/NAME@COMMIT of Hugging Face")
@click.option("--name", metavar="NAME", help="of the PDCluster; default: the model's")
@click.option("--image", metavar="IMAGE", default=IMAGE,
              help="of the engines; default: that of a spec without one")
@click.option("--gpu-resource", metavar="RESOURCE", default=GPU_RESOURCE, show_default=True,
              help="what the GPUs' device plugin offers")
@click.option("--rdma-resource", metavar="RESOURCE",
              help="what the RDMA device plugin offers; `pdcluster doctor` lists it")
@click.option("--network", "networks", metavar="NAME", multiple=True,
              help="a network of Multus; give it once for each device of a pod")
@click.option("--output-file", type=click.Path(dir_okay=False), metavar="FILE",
              help="write the manifest there; default: standard output")
def init(**given: Any) -> Exit:
    """Write a manifest for a model on some GPUs, with the arithmetic in its comments."""
    values = {name: _asked(name, value) for name, value in given.items()}
    fabric = sizing.FABRICS[values["fabric"]]
    rate, resource = values["link_gb"], values["rdma_resource"] or fabric.resource
    if (unused := resource or ", ".join(values["networks"])) and not fabric.resource:
        raise UserError(
            f"{unused} is not used: fabric {values['fabric']} has no RDMA devices; give --fabric "
            "rdma, roce or efa, or leave --rdma-resource and --network out",
            Exit.USAGE,
        )
    wish = sizing.Wish(
        gpus=values["gpus"], gpu_type=values["gpu_type"], nodes=values["nodes"],
        fabric=sizing.Fabric(
            rate or fabric.gigabytes,
            "--link-gb" if rate else fabric.said,
            fabric.each_gpu,
            resource,
        ),
        prompt_tokens=values["prompt_tokens"], output_tokens=values["output_tokens"],
        ttft=values["ttft_ms"] / 1000, itl=values["itl_ms"] / 1000,
    )  # fmt: skip
    choice = Choice(**{name: values[name] for name in Choice.__slots__})
    text, warnings = compose(choice, wish)
    _write(text, values["output_file"])
    for warning in warnings:
        click.echo(f"warning: {warning}", err=True)
    return Exit.DONE


def compose(choice: Choice, wish: sizing.Wish) -> tuple[str, list[str]]:
    """Return the manifest as text, and the warnings of ``lint`` that the flags cause.

    Raises:
        UserError: the flags contradict each other, or nothing fits.
    """
    try:
        document, sized = manifest(choice, model_shape.read_shape(choice.model), wish)
    except (UnknownModel, sizing.Impossible) as error:
        raise UserError(str(error), Exit.USAGE) from error
    _, findings = check_manifest(
        document, host_paths=None, mounted_certificates=None, pod_groups=None
    )
    if not findings.ok:
        raise UserError(f"these options make no valid manifest: {findings.errors[0]}", Exit.USAGE)
    return text_of(choice, wish, document, sized), [str(one) for one in findings.warnings]


def _asked(name: str, value: Any) -> Any:
    """Return an option's value; ask for one that is needed and missing."""
    if value is not None or name not in ASKED:
        return value
    question, kind = ASKED[name]
    if not sys.stdin.isatty():
        option = f"--{name.replace('_', '-')}"
        raise UserError(f"{option} is missing: {question}", Exit.USAGE)
    return click.prompt(question, type=kind, err=True)


def _write(text: str, file: str | None) -> None:
    if file is None:
        sys.stdout.write(text)
        return
    if not file:
        raise UserError("--output-file is empty: name a file", Exit.USAGE)
    try:
        with Path(file).open("x", encoding="utf-8") as opened:
            opened.write(text)
    except FileExistsError as error:
        raise UserError(
            f"--output-file = {file}: the file exists; name another one, or remove it", Exit.USAGE
        ) from error
    except OSError as error:
        raise UserError(
            f"--output-file = {file}: cannot be written: {error.strerror}", Exit.USAGE
        ) from error
