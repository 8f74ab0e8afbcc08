"""Rules of extraArgs and env: flags and variables that are refused, or that have no effect.

Refused are flags and variables that the operator sets itself, flags with which the connector does
not start, and flags that contradict a field of the spec.
"""

import re
from collections.abc import Iterator, Mapping

from pdcluster_connector.compat.supported import ANY_VERSION, REFUSED_FLAGS
from pdcluster_connector.protocol.api_key import VARIABLE as API_KEY_VARIABLE
from pdcluster_operator.api.findings import FieldError, Rule, shown
from pdcluster_operator.api.rules import network
from pdcluster_operator.api.rules.pod_template import env_source_errors
from pdcluster_operator.api.spec.fields import camel
from pdcluster_operator.api.spec.flags import OWNED_FLAGS, Flag, owned_flag, parse_flags
from pdcluster_operator.api.spec.pod_templates import containers, pod_templates
from pdcluster_operator.api.spec.resolve import READ_FLAGS, engine_places, flag_path, resolve_engine
from pdcluster_operator.api.spec.resources import gpu_transports
from pdcluster_operator.api.spec.types import Cluster, Device, Role

OWNED_PREFIX = "PDCLUSTER_"
# Flag -> the field of EngineOverride that it may not contradict.
TYPED_FLAGS = {
    "--block-size": "block_size",
    "--kv-cache-dtype": "kv_cache_dtype",
    "--max-model-len": "max_model_len",
    "--attention-backend": "attention_backend",
}
CHECKED_FLAGS = READ_FLAGS | TYPED_FLAGS.keys()


def argument_errors(cluster: Cluster) -> Iterator[FieldError]:
    """Yield flags and variables that are not allowed in extraArgs and env."""
    ours = owned_variables(cluster)
    for path, engine in engine_places(cluster):
        flags = parse_flags(engine.extra_args)
        stray = range(flags[0].place if flags else len(engine.extra_args))
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
            if owned := owned_flag(flag):
                yield _owned(here, flag, owned)
            else:
                yield from _abbreviated(here, flag)
        for place, var in enumerate(engine.env):
            # With ANY_VERSION a user lets the launcher start an unsupported version.
            prefixed = var.name.startswith(OWNED_PREFIX) and var.name != ANY_VERSION
            if var.name in ours or prefixed:
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
    """Yield API keys in pod templates: router and engines would require different keys."""
    for path, template, ours in pod_templates(cluster):
        for place, entry in containers(template):
            env = entry.get("env") if entry.get("name") == ours else None
            for number, var in enumerate(env if isinstance(env, list | tuple) else ()):
                if isinstance(var, Mapping) and var.get("name") == API_KEY_VARIABLE:
                    where = f"{path}.{place}.env[{number}].name"
                    yield _owned_variable(where, API_KEY_VARIABLE)


def _owned(path: str, flag: Flag, owned: str) -> FieldError:
    means = "" if owned == flag.head else f" (it abbreviates {owned})"
    return FieldError(
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
    message, remedy = "belongs to the operator, which sets it in every engine", "Remove it."
    if name == API_KEY_VARIABLE:
        message = "belongs to the operator: the router and the canary must send the key too"
        remedy = "Name the Secret in spec.router.apiKeySecretRef."
    return FieldError(path, name, Rule.OWNED_VARIABLE, message, remedy)


def _contradictions(cluster: Cluster, role: Role) -> Iterator[FieldError]:
    engine = resolve_engine(cluster, role)
    for name, attribute in TYPED_FLAGS.items():
        flag, typed, field = engine.last(name), getattr(engine, attribute), camel(attribute)
        if flag is not None and typed is not None and flag.value != str(typed):
            yield FieldError(
                flag_path(cluster, role, name),
                shown(" ".join(flag.words)),
                Rule.CONFLICTING_SETTINGS,
                f"contradicts {field} {typed} of the {role} engines",
                f"Remove {name} from extraArgs.",
                (f"spec.{role}.engine.{field}", f"spec.engine.{field}"),
            )


def flag_errors(cluster: Cluster) -> Iterator[FieldError]:
    """Yield the flags with which the connector does not run."""
    for path, engine in engine_places(cluster):
        for flag in parse_flags(engine.extra_args):
            # argparse accepts an abbreviation that fits one flag only.
            names = [name for name in REFUSED_FLAGS if name.startswith(flag.head)]
            if len(names) == 1 and not flag.negated:
                yield FieldError(
                    f"{path}.extraArgs[{flag.place}]",
                    shown(" ".join(flag.words)),
                    Rule.FLAG_UNSUPPORTED,
                    f"{names[0]} {REFUSED_FLAGS[names[0]]}",
                    f"Remove {flag.head}.",
                )


def start_errors(cluster: Cluster) -> Iterator[FieldError]:
    """Yield settings with which vLLM does not start, or stops at the first request."""
    if cluster.spec.transfer.device is Device.CPU:
        yield from _eager_pipeline(cluster)
        return
    for path, engine in engine_places(cluster):
        for place, var in enumerate(engine.env):
            value = (var.value or "").lower().replace(" ", "")
            if var.name.startswith("PYTORCH_") and "expandable_segments:true" in value:
                yield FieldError(
                    f"{path}.env[{place}].value",
                    shown(var.value),
                    Rule.EXPANDABLE_SEGMENTS,
                    "vLLM refuses expandable segments together with any KV connector",
                    "Remove expandable_segments.",
                    ("spec.transfer.device",),
                )


def _eager_pipeline(cluster: Cluster) -> Iterator[FieldError]:
    for role in Role:
        engine = resolve_engine(cluster, role)
        eager = engine.last("--enforce-eager")
        if engine.parallelism.pipeline == 1 or eager is None or eager.negated:
            continue
        yield FieldError(
            flag_path(cluster, role, eager.name),
            shown(" ".join(eager.words)),
            Rule.EAGER_PIPELINE,
            f"the {role} engines have pipeline stages: with this flag vLLM's CPU runner skips the "
            "profile run that creates their buffers, and the first request stops the engine",
            """Write --compilation-config, '{"mode":3,"backend":"eager"}' instead.""",
        )


def variables(cluster: Cluster) -> Iterator[tuple[network.Variable, frozenset[str]]]:
    """Yield the variables of all engine settings, each with the transports that its GPUs need."""
    gpus = {role: gpu_transports(cluster, role) for role in Role}
    for path, engine in engine_places(cluster):
        for place, var in enumerate(engine.env):
            reached = [role for role in Role if _reaches(cluster, path, var.name, role)]
            needed = [gpus[role] for role in reached] or [frozenset[str]()]
            yield (f"{path}.env[{place}]", var.name, var.value), frozenset.intersection(*needed)


def _reaches(cluster: Cluster, path: str, name: str, role: Role) -> bool:
    """Whether a variable at ``path`` comes to a role's engines. A role's own wins."""
    own = any(var.name == name for var in cluster.spec.role(role).engine.env)
    return path == f"spec.{role}.engine" or (path == "spec.engine" and not own)


def transport_errors(cluster: Cluster) -> Iterator[FieldError]:
    """Yield each UCX_TLS with which engines on NVIDIA's GPUs do not start."""
    return (found for certain, found in _transports(cluster) if certain)


def _transports(cluster: Cluster) -> Iterator[tuple[bool, FieldError]]:
    backends = cluster.spec.transfer.backends
    for variable, gpus in variables(cluster):
        yield from network.transport_findings([variable], gpus if "UCX" in backends else ())


def variable_warnings(cluster: Cluster) -> Iterator[FieldError]:
    """Yield variables that UCX or vLLM accept, but that harm or have no effect here."""
    yield from (found for certain, found in _transports(cluster) if not certain)
    for (path, name, _), _ in variables(cluster):
        if name.startswith("VLLM_NIXL_SIDE_CHANNEL_"):
            yield FieldError(
                f"{path}.name",
                name,
                Rule.CONFLICTING_SETTINGS,
                "belongs to vLLM's stock connector and does nothing here",
                "Remove it.",
            )
