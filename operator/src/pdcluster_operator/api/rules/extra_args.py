"""Rules of extraArgs and env. They refuse flags and variables that the operator sets itself."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from pdcluster_connector.compat.versions import ANY_VERSION
from pdcluster_connector.protocol.api_key import VARIABLE as API_KEY_VARIABLE
from pdcluster_operator.api.findings import FieldError, Rule, shown
from pdcluster_operator.api.rules.pod_template_fields import env_source_errors
from pdcluster_operator.api.spec.arguments import OWNED_FLAGS, Flag, owned_flag, parse_flags
from pdcluster_operator.api.spec.engine_types import EngineOverride
from pdcluster_operator.api.spec.enums import Role
from pdcluster_operator.api.spec.pod_templates import containers, pod_templates
from pdcluster_operator.api.spec.resolve import resolve_engine
from pdcluster_operator.api.spec.shape import READ_FLAGS
from pdcluster_operator.api.spec.types import Cluster

OWNED_PREFIX = "PDCLUSTER_"
# With this variable a user lets the launcher start an unsupported version.
FREE_VARIABLES = frozenset({ANY_VERSION})
# Typed fields that a flag may not contradict.
TYPED_FLAGS = {
    "--block-size": ("block_size", "blockSize"),
    "--kv-cache-dtype": ("kv_cache_dtype", "kvCacheDtype"),
    "--max-model-len": ("max_model_len", "maxModelLen"),
    "--attention-backend": ("attention_backend", "attentionBackend"),
}
CHECKED_FLAGS = READ_FLAGS | TYPED_FLAGS.keys()


def engine_places(cluster: Cluster) -> Iterator[tuple[str, EngineOverride]]:
    """Yield all engine settings of a spec, each with its path."""
    yield "spec.engine", cluster.spec.engine
    for role in Role:
        yield f"spec.{role}.engine", cluster.spec.role(role).engine


def flag_path(cluster: Cluster, role: Role, name: str) -> str:
    """Return the path of the extraArgs that give a role's engines the flag ``name``."""
    own = parse_flags(cluster.spec.role(role).engine.extra_args)[0]
    place = f"spec.{role}.engine" if name in {flag.name for flag in own} else "spec.engine"
    return f"{place}.extraArgs"


def argument_errors(cluster: Cluster) -> Iterator[FieldError]:
    """Yield flags and variables that are not allowed in extraArgs and env."""
    owned = owned_variables(cluster)
    for path, engine in engine_places(cluster):
        flags, stray = parse_flags(engine.extra_args)
        ends = [flag.place for flag in flags if flag.head == "--"]
        for place in (*stray, *ends):
            yield FieldError(
                f"{path}.extraArgs[{place}]",
                shown(engine.extra_args[place]),
                Rule.UNREADABLE_FLAG,
                "is neither a flag nor the value of one; the model is named in spec.model.source",
                "Begin with a flag, as in --seed 1.",
            )
        for flag in flags:
            here = f"{path}.extraArgs[{flag.place}]"
            yield from _owned(here, flag) if owned_flag(flag) else _abbreviated(here, flag)
        for place, var in enumerate(engine.env):
            ours = var.name.startswith(OWNED_PREFIX) and var.name not in FREE_VARIABLES
            if var.name in owned or ours:
                yield _owned_variable(f"{path}.env[{place}].name", var.name)
            if (var.value is None) == (var.value_from is None):
                yield FieldError(
                    f"{path}.env[{place}]",
                    var.name,
                    Rule.EXACTLY_ONE,
                    "needs exactly one of value and valueFrom",
                    "Give one of them.",
                )
            yield from env_source_errors(f"{path}.env[{place}].valueFrom", var.value_from)
    yield from _overlaid_keys(cluster)
    for role in Role:
        yield from _contradictions(cluster, role)


def _overlaid_keys(cluster: Cluster) -> Iterator[FieldError]:
    """Yield API keys in pod templates: the processes would ask for different keys."""
    for path, template, ours in pod_templates(cluster):
        for place, entry in containers(template):
            env = entry.get("env") if entry.get("name") == ours else None
            for number, var in enumerate(env if isinstance(env, list | tuple) else ()):
                if isinstance(var, Mapping) and var.get("name") == API_KEY_VARIABLE:
                    where = f"{path}.{place}.env[{number}].name"
                    yield _owned_variable(where, API_KEY_VARIABLE)


def _owned(path: str, flag: Flag) -> Iterator[FieldError]:
    owned = owned_flag(flag)
    if owned is None:
        return
    means = "" if owned == flag.head else f" (it abbreviates {owned})"
    yield FieldError(
        path,
        shown(" ".join(flag.words)),
        Rule.OWNED_FLAG,
        f"{flag.head} belongs to the operator{means}",
        OWNED_FLAGS[owned],
    )


def _abbreviated(path: str, flag: Flag) -> Iterator[FieldError]:
    """Yield an abbreviated flag that rules read: argparse accepts it, but no rule sees it."""
    meant = sorted(name for name in CHECKED_FLAGS if name.startswith(flag.head))
    whole = flag.head in CHECKED_FLAGS or not re.match("--.", flag.head)
    if meant and not whole:
        yield FieldError(
            path,
            shown(" ".join(flag.words)),
            Rule.UNREADABLE_FLAG,
            f"{flag.head} abbreviates {' or '.join(meant)}, which rules check by its whole name",
            "Write the whole name.",
        )


def owned_variables(cluster: Cluster) -> frozenset[str]:
    """Return the variables that the operator sets in this cluster's engines."""
    source = cluster.spec.model.source.hugging_face
    download = {"HF_HOME"} if source is not None else set()
    token = {"HF_TOKEN"} if source is not None and source.token_secret_ref is not None else set()
    return frozenset({"POD_IP", "VLLM_HOST_IP", API_KEY_VARIABLE} | download | token)


def _owned_variable(path: str, name: str) -> FieldError:
    if name == API_KEY_VARIABLE:
        return FieldError(
            path,
            name,
            Rule.OWNED_VARIABLE,
            "belongs to the operator: the router and the canary must send the key too",
            "Name the Secret in spec.router.apiKeySecretRef.",
        )
    return FieldError(
        path,
        name,
        Rule.OWNED_VARIABLE,
        "belongs to the operator, which sets it in every engine",
        "Remove it.",
    )


def _contradictions(cluster: Cluster, role: Role) -> Iterator[FieldError]:
    engine = resolve_engine(cluster, role)
    for name, (attribute, field) in TYPED_FLAGS.items():
        flag, typed = engine.last(name), getattr(engine, attribute)
        if flag is not None and typed is not None and flag.value != str(typed):
            yield FieldError(
                flag_path(cluster, role, name),
                shown(" ".join(flag.words)),
                Rule.CONFLICTING_SETTINGS,
                f"contradicts {field} {typed} of the {role} engines",
                f"Remove {name} from extraArgs.",
                (f"spec.{role}.engine.{field}", f"spec.engine.{field}"),
            )
