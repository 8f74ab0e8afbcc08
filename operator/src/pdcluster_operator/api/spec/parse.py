"""A PDCluster manifest -> typed spec, with every error at once.

Parsing goes on after an error, see :mod:`.reader`. ``ParseResult.cluster`` is therefore only
meant to be used for work when ``errors`` is empty.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pdcluster_operator.api.findings import FieldError, Rule
from pdcluster_operator.api.labels import API_VERSION, KIND
from pdcluster_operator.api.object_names import name_errors
from pdcluster_operator.api.spec.reader import Reader
from pdcluster_operator.api.spec.types import Cluster, Spec

MAX_ERRORS = 100


@dataclass(frozen=True, slots=True)
class ParseResult:
    """A parsed cluster, and the errors of its manifest."""

    cluster: Cluster
    errors: tuple[FieldError, ...]


def parse_cluster(manifest: object) -> ParseResult:
    """Parse a whole manifest. It may be any JSON value: what is wrong becomes an error.

    Unknown fields are errors in ``spec``; ``metadata`` and ``status`` belong to Kubernetes.
    """
    reader = Reader()
    if not isinstance(manifest, Mapping):
        reader.error("", manifest, Rule.WRONG_TYPE, "a manifest is an object", "Write a mapping.")
        manifest = {}
    for key, wanted in (("apiVersion", API_VERSION), ("kind", KIND)):
        if manifest.get(key) != wanted:
            reader.error(
                key, manifest.get(key), Rule.NOT_ALLOWED, f"must be {wanted}", f"Write {wanted}."
            )
    for key in manifest:
        if key not in ("apiVersion", "kind", "metadata", "spec", "status"):
            reader.unknown("", key, ["apiVersion", "kind", "metadata", "spec"])
    metadata = manifest.get("metadata")
    if not isinstance(metadata, Mapping):
        metadata = {}
    name = metadata.get("name")
    for message, remedy in name_errors(name):
        reader.error("metadata.name", name, Rule.NAME_UNUSABLE, message, remedy)
    if "spec" not in manifest:
        reader.error("spec", "", Rule.REQUIRED, "is missing", "Give at least spec.model.source.")
    spec = reader.read_object(Spec, manifest.get("spec", {}), "spec")
    generation = metadata.get("generation")
    cluster = Cluster(
        name=name if isinstance(name, str) and name else "unnamed",
        namespace=_text(metadata.get("namespace")) or "default",
        uid=_text(metadata.get("uid")),
        generation=generation if isinstance(generation, int) else 0,
        spec=spec,
    )
    return ParseResult(cluster, tuple(reader.errors[:MAX_ERRORS]))


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""
