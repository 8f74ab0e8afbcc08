"""Weights that may differ between the two roles."""

from __future__ import annotations

from collections.abc import Iterator

from pdcluster_operator.api.findings import FieldError, Rule
from pdcluster_operator.api.spec.enums import Role
from pdcluster_operator.api.spec.resolve import resolve_engine
from pdcluster_operator.api.spec.types import Cluster

# Branches that Hugging Face repositories are kept on.
BRANCHES = frozenset({"main", "master"})


def weight_warnings(cluster: Cluster) -> Iterator[FieldError]:
    """Yield weights that may change between two starts, and a cache that is not used."""
    model = cluster.spec.model
    if model.source.hugging_face is not None:
        yield from _not_pinned(cluster, model.source.hugging_face.revision)
    elif model.cache.persistent_volume_claim is not None:
        yield FieldError(
            "spec.model.cache",
            "",
            Rule.CACHE_UNUSED,
            "is ignored: only weights of source.huggingFace are downloaded",
            "Remove it.",
            ("spec.model.source",),
        )


def _not_pinned(cluster: Cluster, revision: str | None) -> Iterator[FieldError]:
    for role in Role:
        flag = resolve_engine(cluster, role).last("--revision")
        named = flag.value if flag is not None else revision
        if named is None or named in BRANCHES:
            yield FieldError(
                "spec.model.source.huggingFace.revision",
                named or "",
                Rule.WEIGHTS_NOT_PINNED,
                "a branch moves: an engine that starts later may load other weights, and is "
                "then refused by its peers",
                "Name a commit, or a tag that stays.",
                ("spec.model.source",),
            )
            return
