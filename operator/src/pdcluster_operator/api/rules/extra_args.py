"""Rules of extraArgs and of environment variables.

Refused are flags and variables that the operator sets itself, flags with which the connector does
not start, and flags that contradict a field of the spec. Variables are judged alike in engine.env
and in pod templates. What containers of the user's own have is theirs.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from pdcluster_connector.compat.findings import counted
from pdcluster_connector.compat.supported import ANY_VERSION, REFUSED_FLAGS
from pdcluster_connector.protocol.api_key import VARIABLE as API_KEY_VARIABLE
from pdcluster_operator.api.findings import FieldError, Rule, did_you_mean, shown
from pdcluster_operator.api.rules import network
from pdcluster_operator.api.rules.pod_template import env_source_errors
from pdcluster_operator.api.spec import engine_types, pod_templates
from pdcluster_operator.api.spec.fields import camel
from pdcluster_operator.api.spec.flags import (
    OWNED_FLAGS,
    OWNED_ROUTER_FLAGS,
    TYPED_ROUTER_FLAGS,
    VLLM_FLAGS,
    VLLM_RELEASE,
    Flag,
    owned_flag,
    parse_flags,
)
from pdcluster_operator.api.spec.pod_templates import ENGINE_CONTAINER, ROUTER_CONTAINER
from pdcluster_operator.api.spec.resolve import (
    READ_FLAGS,
    downloads_by_job,
    engine_places,
    flag_path,
    resolve_engine,
)
from pdcluster_operator.api.spec.resources import gpu_transports
from pdcluster_operator.api.spec.router_types import Router
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
    """Yield flags that are not allowed in extraArgs."""
    routers = cluster.spec.router.extra_args
    yield from _words("spec.router.extraArgs", routers, OWNED_ROUTER_FLAGS)
    yield from _said_twice(cluster.spec.router)
    for path, engine in engine_places(cluster):
        yield from _words(f"{path}.extraArgs", engine.extra_args, OWNED_FLAGS)
        for flag in parse_flags(engine.extra_args):
            if not owned_flag(flag):
                yield from _abbreviated(f"{path}.extraArgs[{flag.place}]", flag)
    for role in Role:
        yield from _contradictions(cluster, role)


def _words(path: str, words: tuple[str, ...], ours: Mapping[str, str]) -> Iterator[FieldError]:
    """Yield words that are no flags, and flags of the operator's own."""
    flags = parse_flags(words)
    stray = range(flags[0].place if flags else len(words))
    ends = [flag.place for flag in flags if flag.head == "--"]
    for place in (*stray, *ends):
        message = "is neither a flag nor the value of one; the model is in spec.model.source"
        remedy = _two_words(words[place]) or "Begin with a flag, as in --seed 1."
        yield _unreadable(f"{path}[{place}]", words[place], message, remedy)
    for flag in flags:
        if owned := owned_flag(flag, ours):
            yield _owned(f"{path}[{flag.place}]", flag, owned, ours[owned])


def _said_twice(router: Router) -> Iterator[FieldError]:
    """Yield flags of the router that a field sets, too. argparse accepts abbreviations."""
    for flag in parse_flags(router.extra_args):
        meant = [name for name in TYPED_ROUTER_FLAGS if name.startswith(flag.head)]
        field = TYPED_ROUTER_FLAGS[meant[0]] if len(meant) == 1 else ""
        typed = getattr(router, field, None)
        if typed is not None and not owned_flag(flag, OWNED_ROUTER_FLAGS):
            where = f"spec.router.{camel(field)}"
            yield FieldError(
                f"spec.router.extraArgs[{flag.place}]",
                shown(" ".join(flag.words)),
                Rule.CONFLICTING_SETTINGS,
                f"sets again what {where} sets to {typed}",
                f"Remove {flag.head} from extraArgs.",
                (where,),
            )


def _owned(path: str, flag: Flag, owned: str, remedy: str) -> FieldError:
    means = "" if owned == flag.head else f" (it abbreviates {owned})"
    return FieldError(
        path,
        shown(" ".join(flag.words)),
        Rule.OWNED_FLAG,
        f"{flag.head} belongs to the operator{means}",
        remedy,
    )


def _abbreviated(path: str, flag: Flag) -> Iterator[FieldError]:
    """Yield an abbreviated flag that rules read: argparse accepts it, but no rule sees it."""
    meant = sorted(name for name in CHECKED_FLAGS if name.startswith(flag.head))
    whole = flag.head in CHECKED_FLAGS or not re.match("--.", flag.head)
    if meant and not whole:
        message = f"abbreviates {' or '.join(meant)}, which rules check by its whole name"
        yield _unreadable(path, " ".join(flag.words), message, "Write the whole name.")


def _unreadable(path: str, value: str, message: str, remedy: str) -> FieldError:
    return FieldError(path, shown(value), Rule.UNREADABLE_FLAG, message, remedy)


def _two_words(word: str) -> str:
    """Return what to do about a flag that stands in one word with its value; empty for others."""
    name, blank, value = word.partition(" ")
    two = ", ".join(json.dumps(part) for part in (name, value) if part)
    return f"Write each as a word of its own: {two}." if blank and name.startswith("-") else ""


Releases = Mapping[Role, str]
"""The release of vLLM in each role's image; empty for one that does not say it."""


def miscounted_errors(cluster: Cluster, releases: Releases) -> Iterator[FieldError]:
    """Yield flags whose values vLLM's own image certainly refuses: too many, or none."""
    return (found for certain, found in _miscounted(cluster, releases) if certain)


def flag_warnings(cluster: Cluster, releases: Releases) -> Iterator[FieldError]:
    """Yield the same for images that may hold another vLLM, and flags that vLLM does not know."""
    yield from (found for certain, found in _miscounted(cluster, releases) if not certain)
    for path, engine in engine_places(cluster):
        for flag in parse_flags(engine.extra_args):
            here = f"{path}.extraArgs[{flag.place}]"
            if not (owned_flag(flag) or flag.head == "--" or [*_abbreviated(here, flag)]):
                yield from _unknown(here, flag)


def _unknown(path: str, flag: Flag) -> Iterator[FieldError]:
    count = VLLM_FLAGS.get(flag.head)
    if count == "0!" or (count is not None and not flag.negated):
        return
    written = flag.words[0].partition("=")[0]
    longer = [name for name in VLLM_FLAGS if len(flag.head) > 2 and name.startswith(flag.head)]
    message = f"vLLM {VLLM_RELEASE} does not know {written}, and does not start with it"
    remedy = did_you_mean(flag.head, VLLM_FLAGS) or "Remove it."
    if count is not None:
        message, remedy = f"{flag.head} of vLLM {VLLM_RELEASE} has no form with --no-", "Remove it."
    elif len(longer) == 1:
        message = f"vLLM {VLLM_RELEASE} reads {written} as {longer[0]}, and others may not"
        remedy = "Write the whole name."
    elif longer:
        message = f"{written} is the beginning of {len(longer)} flags of vLLM {VLLM_RELEASE}"
        remedy = f"Write the whole name of one: {', '.join(longer[:6])}."
    others = "" if count is None and len(longer) == 1 else " Another version of vLLM may know it."
    words = " ".join(flag.words)
    yield FieldError(path, shown(words), Rule.UNKNOWN_FLAG, message, remedy + others)


def _miscounted(cluster: Cluster, releases: Releases) -> Iterator[tuple[bool, FieldError]]:
    """Yield (whether vLLM certainly refuses it, the finding) for flags with too many or no values.

    A flag of another release may take another number of values.
    """
    for path, engine in engine_places(cluster):
        roles = [role for role in Role if path == f"spec.{role}.engine"] or Role
        certain = all(releases[role] == VLLM_RELEASE for role in roles)
        for flag in parse_flags(engine.extra_args):
            if (count := VLLM_FLAGS.get(flag.head)) and not owned_flag(flag):
                count = "1" if "." in flag.name else count.removesuffix("!")
                for found in _surplus(f"{path}.extraArgs", flag, count):
                    yield certain, found


def _surplus(path: str, flag: Flag, count: str) -> Iterator[FieldError]:
    """Yield a value that is missing, or the first one that is too many."""
    most = {"0": 0, "1": 1, "?": 1}.get(count, len(flag.values))
    takes = f"{flag.head} takes {counted(most, 'value')}" if most else f"{flag.head} takes no value"
    if count in ("1", "+") and not flag.values:
        message = f"is without a value, and {flag.head} takes one"
        remedy = "Write the value as the next word, or remove the flag."
        yield _unreadable(f"{path}[{flag.place}]", flag.words[0], message, remedy)
    elif len(flag.values) > most:
        # A value after = is in the flag's own word.
        place = most + 1 - (len(flag.values) - len(flag.words) + 1)
        word = flag.words[place]
        message = f"is neither a flag nor the value of one: {takes}"
        remedy = _two_words(word) or ("Remove it." if place else "Write the flag alone.")
        yield _unreadable(f"{path}[{flag.place + place}]", word, message, remedy)


def _contradictions(cluster: Cluster, role: Role) -> Iterator[FieldError]:
    engine = resolve_engine(cluster, role)
    for name, attribute in TYPED_FLAGS.items():
        flag, typed, field = engine.last(name), getattr(engine, attribute), camel(attribute)
        if flag is not None and typed is not None and _meant(flag.value) != _meant(str(typed)):
            yield FieldError(
                flag_path(cluster, role, name),
                shown(" ".join(flag.words)),
                Rule.CONFLICTING_SETTINGS,
                f"contradicts {field} {typed} of the {role} engines",
                f"Remove {name} from extraArgs.",
                (f"spec.{role}.engine.{field}", f"spec.engine.{field}"),
            )


def _meant(value: str | None) -> str:
    """Return the value of a typed flag as vLLM reads it: 8k, 8_000 and 8000 are one number."""
    text = (value or "").upper()
    if match := re.fullmatch(r"(\d[\d_]*(?:\.\d+)?)([KMGT]?)", text):
        thousand = 1024 if value and value[-1] in "KMGT" else 1000
        power = " KMGT".index(match[2] or " ")
        return f"{float(match[1]) * thousand**power:.0f}"
    return text.removesuffix("_E4M3") if text.startswith("FP8") else text


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
    """Yield pipeline stages with which vLLM's CPU runner stops at the first request."""
    for role in Role if cluster.spec.transfer.device is Device.CPU else ():
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


@dataclass(frozen=True, slots=True)
class Variable:
    """A variable that a user gives the operator's containers.

    Attributes:
        path: of its entry in the spec.
        value: None if a Secret or the like has it.
        container: that has it: the engines' or the routers'.
        roles: whose engines have this value. A role's own wins, and a template's in any case.
    """

    path: str
    name: str
    value: str | None
    container: str
    roles: tuple[Role, ...]


def variables(cluster: Cluster) -> tuple[Variable, ...]:
    """Return the variables of all engine settings and of our containers in pod templates."""
    given = [
        Variable(f"{path}.env[{place}]", var.name, var.value, ENGINE_CONTAINER, _roles(path))
        for path, engine in engine_places(cluster)
        for place, var in enumerate(engine.env)
    ]
    for path, template, ours in pod_templates.pod_templates(cluster):
        for where, box in pod_templates.containers(template):
            if box.get("name") != ours or not where.startswith("spec.containers"):
                continue
            entries = map(pod_templates.as_mapping, pod_templates.as_list(box.get("env")))
            for place, entry in enumerate(entries):
                name, value = entry.get("name"), entry.get("value")
                if isinstance(name, str):
                    text = value if isinstance(value, str) else None
                    here = f"{path}.{where}.env[{place}]"
                    given.append(Variable(here, name, text, ours, _roles(path)))
    last = {(role, one.name): one for one in given for role in one.roles}
    return tuple(
        replace(one, roles=tuple(role for role in one.roles if last[role, one.name] is one))
        for one in given
    )


def _roles(path: str) -> tuple[Role, ...]:
    part = path.split(".")[1]
    return tuple(Role) if part == "engine" else tuple(role for role in Role if role == part)


def any_version(cluster: Cluster, role: Role) -> bool:
    """Whether a role's engines may try any version of vLLM."""
    named = (one for one in variables(cluster) if one.name == ANY_VERSION)
    return any(role in one.roles and one.value == "1" for one in named)


def variable_errors(cluster: Cluster) -> Iterator[FieldError]:
    """Yield variables that are not allowed, or with which vLLM does not start."""
    for path, engine in engine_places(cluster):
        for place, var in enumerate(engine.env):
            if (var.value is None) == (var.value_from is None):
                yield FieldError(
                    f"{path}.env[{place}]",
                    var.name,
                    Rule.EXACTLY_ONE,
                    "needs exactly one of value and valueFrom",
                    "Give one of them.",
                )
            yield from env_source_errors(f"{path}.env[{place}].valueFrom", var.value_from)
    ours = _owned_variables(cluster)
    on_gpus = cluster.spec.transfer.device is Device.CUDA
    for one in variables(cluster):
        # With ANY_VERSION a user lets the launcher start an unsupported version.
        prefixed = one.name.startswith(OWNED_PREFIX) and one.name != ANY_VERSION
        if prefixed or one.name in ours[one.container]:
            yield _owned_variable(one)
        value = (one.value or "").lower().replace(" ", "")
        if on_gpus and one.name.startswith("PYTORCH_") and "expandable_segments:true" in value:
            yield FieldError(
                f"{one.path}.value",
                shown(one.value),
                Rule.EXPANDABLE_SEGMENTS,
                "vLLM refuses expandable segments together with any KV connector",
                "Remove expandable_segments.",
                ("spec.transfer.device",),
            )


def _owned_variables(cluster: Cluster) -> dict[str, frozenset[str]]:
    """Return the variables that the operator sets in each of its containers."""
    hub, storage = cluster.spec.model.source.hugging_face, cluster.spec.model.source.object_storage
    weights = {"HF_HOME"} if hub is not None else set()
    if downloads_by_job(cluster):
        weights = {"HF_HUB_CACHE", "HF_HUB_OFFLINE"}
    if hub is not None and hub.token_secret_ref is not None:
        weights.add("HF_TOKEN")
    weights |= set(engine_types.ENDPOINTS if storage is not None else ())
    if storage is not None and storage.credentials_secret_ref is not None:
        weights |= {*engine_types.AMAZON_KEYS, "GOOGLE_APPLICATION_CREDENTIALS"}
    gate = {"PYTHONPATH"} if cluster.spec.router.api_key_secret_ref is not None else set()
    engine = {"POD_IP", "VLLM_HOST_IP", API_KEY_VARIABLE} | weights
    return {
        ENGINE_CONTAINER: frozenset(engine),
        ROUTER_CONTAINER: frozenset({API_KEY_VARIABLE} | gate),
    }


def _owned_variable(variable: Variable) -> FieldError:
    message = f"belongs to the operator, which sets it in every {variable.container}"
    remedy = "Remove it."
    if variable.name == API_KEY_VARIABLE:
        message = "belongs to the operator: the router and the canary must send the key too"
        remedy = "Name the Secret in spec.router.apiKeySecretRef."
    if variable.name in engine_types.ENDPOINTS:
        message = "belongs to the operator: both roles must read the weights from one store"
        remedy = "Name the store in spec.model.source.objectStorage.endpoint."
    where = f"{variable.path}.name"
    return FieldError(where, variable.name, Rule.OWNED_VARIABLE, message, remedy)


def transport_errors(cluster: Cluster) -> Iterator[FieldError]:
    """Yield variables about the network with which engines on NVIDIA's GPUs do not start."""
    return (found for certain, found in _transports(cluster) if certain)


def _transports(cluster: Cluster) -> Iterator[tuple[bool, FieldError]]:
    given = variables(cluster)
    roles = (
        [(one.path, one.name, one.value) for one in given if role in one.roles] for role in Role
    )
    yield from dict.fromkeys(found for role in roles for found in network.nic_findings(role))
    gpus = {role: gpu_transports(cluster, role) for role in Role}
    for one in given if "UCX" in cluster.spec.transfer.backends else ():
        needed = [gpus[role] for role in one.roles] or [frozenset[str]()]
        variable = (one.path, one.name, one.value)
        yield from network.transport_findings([variable], frozenset.intersection(*needed))


def variable_warnings(cluster: Cluster) -> Iterator[FieldError]:
    """Yield variables that UCX or vLLM accept, but that harm or have no effect here."""
    yield from (found for certain, found in _transports(cluster) if not certain)
    for one in variables(cluster):
        if one.roles and one.name.startswith("VLLM_NIXL_SIDE_CHANNEL_"):
            yield FieldError(
                f"{one.path}.name",
                one.name,
                Rule.CONFLICTING_SETTINGS,
                "belongs to vLLM's stock connector and does nothing here",
                "Remove it.",
            )
