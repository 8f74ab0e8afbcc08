"""Whether a model's folder holds what engines load. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from pdcluster_operator.api.findings import FieldError, shown
from pdcluster_operator.api.spec.enums import Role
from pdcluster_operator.api.spec.resolve import resolve_engine
from pdcluster_operator.api.spec.types import Cluster

MODEL_UNUSABLE = "ModelUnusable"
"""The rule id of these findings."""
CONFIGS = frozenset({"config.json", "params.json"})
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
LOADED_FROM_FILES = ("auto", "safetensors")


@dataclass(frozen=True, slots=True)
class Folder:
    """A model's folder as it was found.

    Attributes:
        trouble: why it can't be read; empty if it can.
        names: what it holds.
    """

    path: str
    trouble: str
    names: frozenset[str] = frozenset()


def model_findings(
    cluster: Cluster, models: Mapping[Role, Folder], *, from_flag: bool
) -> Iterator[FieldError]:
    """Yield each model's folder that engines could not load.

    Args:
        models: the folder that each role's engines mount as their model.
        from_flag: whether ``--model-dir`` named the folder.
    """
    for role, folder in models.items():
        load_format = resolve_engine(cluster, role).last("--load-format")
        files = load_format is None or load_format.words[-1] in LOADED_FROM_FILES
        what = folder.trouble
        if not what and not folder.names & CONFIGS:
            what = "holds no config.json"
        elif not what and files and not any(name.endswith(WEIGHTS) for name in folder.names):
            what = f"holds no weights (*{', *'.join(WEIGHTS)})"
        if what:
            yield FieldError(
                "--model-dir" if from_flag else "spec.model.source.hostPath.path",
                shown(folder.path),
                MODEL_UNUSABLE,
                f"the model's folder {what}",
                "Name the folder that holds the model's config, tokenizer and weights"
                + ("." if from_flag else " with --model-dir, or put them there."),
            )
