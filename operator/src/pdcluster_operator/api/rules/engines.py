"""Rules of the engines: how many and how large, and whether the two roles can exchange KV.

The rules about KV are in the connector's ``compat/``, because the handshake applies the same ones.
This module adds the field of the spec that a refusal comes from. A rule that compares two engines
needs values that a manifest may leave out. Such a rule is checked when the engines connect to each
other.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from math import isqrt

from msgspec import structs

from pdcluster_connector.compat.check import check, check_engine
from pdcluster_connector.compat.findings import Finding, Verdict, counted
from pdcluster_connector.compat.shape import EngineShape
from pdcluster_connector.compat.supported import IMAGES_NUMBERED
from pdcluster_operator.api.findings import FieldError, Findings, Rule, shown
from pdcluster_operator.api.rules.model import is_replaced
from pdcluster_operator.api.spec.fields import camel
from pdcluster_operator.api.spec.flags import Flag, parse_flags
from pdcluster_operator.api.spec.model_config import Model
from pdcluster_operator.api.spec.resolve import (
    DRAFT_FLAGS,
    PROMPT_FLAGS,
    Engine,
    drafts_with_kv,
    engine_shape,
    flag_path,
    prompt_setting,
    resolve_engine,
    speculation,
)
from pdcluster_operator.api.spec.types import Cluster, Role

LARGEST_ENGINE = 4096
MOST_LINKS = 4096
# Links that one decode worker keeps open: one to each data-parallel rank of prefill.
MOST_SIDE_CHANNELS = 1024


def size_errors(cluster: Cluster) -> Iterator[FieldError]:
    """Yield numbers of workers, pods and links that do not fit together, or are too large."""
    for role in Role:
        yield from _workers(cluster, role)
    prefill, decode = cluster.spec.prefill.replicas, cluster.spec.decode.replicas
    if prefill * decode > MOST_LINKS:
        yield FieldError(
            "spec.decode.replicas",
            str(decode),
            Rule.TOO_MANY_LINKS,
            f"{prefill} prefill x {decode} decode engines are {prefill * decode} links; "
            f"{MOST_LINKS} are allowed",
            "Use fewer, larger engines, or several clusters.",
        )
    ranks = cluster.spec.prefill.parallelism.data
    if prefill * ranks > MOST_SIDE_CHANNELS:
        yield FieldError(
            "spec.prefill.parallelism.data",
            str(ranks),
            Rule.TOO_MANY_LINKS,
            f"{prefill} prefill engines x {ranks} data-parallel ranks are {prefill * ranks} side "
            f"channels that each decode worker keeps a link to; {MOST_SIDE_CHANNELS} are allowed",
            "Use fewer data-parallel ranks or replicas, or several clusters.",
        )


def within_links(
    cluster: Cluster, findings: Findings, there: Mapping[Role, int]
) -> tuple[Cluster, Findings]:
    """Return a cluster with as many engines as its links allow; too many are a warning then.

    An autoscaler may have set the numbers, and no webhook has seen them. To refuse the whole spec
    because of them would hold back every other change. Engines that are ``there`` stay.
    """
    spec, ranks = cluster.spec, cluster.spec.prefill.parallelism.data
    many = [error for error in findings.errors if error.rule == Rule.TOO_MANY_LINKS]
    if not many:
        return cluster, findings
    prefills = min(spec.prefill.replicas, MOST_SIDE_CHANNELS // ranks)
    decodes = spec.decode.replicas
    most = MOST_LINKS // max(1, min(isqrt(MOST_LINKS), prefills, decodes))
    prefill, decode = min(prefills, most), min(decodes, most)
    old_prefills = min(prefills, there[Role.PREFILL])
    old_decodes = min(decodes, there[Role.DECODE])
    # A rollout has more of them for a while. If these are too many, the longer side is cut.
    if old_prefills > prefill and old_decodes <= decode:
        prefill = min(old_prefills, MOST_LINKS // max(1, old_decodes))
        decode = min(decodes, MOST_LINKS // prefill)
    elif old_decodes > decode and old_prefills <= prefill:
        decode = min(old_decodes, MOST_LINKS // max(1, old_prefills))
        prefill = min(prefills, MOST_LINKS // decode)
    made = replace(
        spec,
        prefill=replace(spec.prefill, replicas=prefill),
        decode=replace(spec.decode, replicas=decode),
    )
    words = f" ({prefill} prefill and {decode} decode engines are made)"
    return replace(cluster, spec=made), replace(
        findings,
        errors=tuple(error for error in findings.errors if error not in many),
        warnings=(*(replace(one, path=one.path + words) for one in many), *findings.warnings),
    )


def _workers(cluster: Cluster, role: Role) -> Iterator[FieldError]:
    path = f"spec.{role}.parallelism"
    parallel = cluster.spec.role(role).parallelism
    workers, sizes = parallel.workers, parallel.sizes
    if workers % parallel.nodes:
        yield FieldError(
            f"{path}.nodes",
            str(parallel.nodes),
            Rule.NODES_DIVIDE_WORKERS,
            f"{sizes} = {counted(workers, 'worker')} cannot be spread evenly over "
            f"{counted(parallel.nodes, 'pod')}",
            "Choose nodes so that it divides the workers.",
            (path,),
        )
    elif workers > LARGEST_ENGINE:
        yield FieldError(
            path,
            sizes,
            Rule.OUT_OF_RANGE,
            f"{workers} workers in one engine; {LARGEST_ENGINE} are allowed",
            "Use smaller engines and more replicas.",
        )


def numbered_image_errors(cluster: Cluster) -> Iterator[FieldError]:
    """Yield a cache of images that is off where prefix caching is off too."""
    for role in Role:
        engine = resolve_engine(cluster, role)
        cache, shape = engine.last("--mm-processor-cache-gb"), engine_shape(cluster, engine)
        is_off = cache and not cache.value.strip("0.") and not shape.prefix_caching
        off = engine.last("--enable-prefix-caching")
        if cache and is_off and engine.last("--language-model-only") is None:
            yield FieldError(
                flag_path(cluster, role, cache.name),
                shown(" ".join(cache.words)),
                Rule.FLAG_UNSUPPORTED,
                f"in the {role} engines {IMAGES_NUMBERED}",
                f"Remove {cache.head}, or "
                + (f"{off.words[0]}." if off else "set engine.prefixCaching: Enabled."),
                (f"spec.{role}.engine.prefixCaching", "spec.engine.prefixCaching"),
            )


def idle_warnings(cluster: Cluster) -> Iterator[FieldError]:
    """Yield each role without engines: the other role's engines then serve nothing."""
    for role in Role:
        if cluster.spec.role(role).replicas == 0:
            yield FieldError(
                f"spec.{role}.replicas",
                "0",
                Rule.NOTHING_TO_PAIR,
                f"without {role} engines nothing is served",
                "Set at least 1 to serve.",
            )


# EngineShape field -> (field of EngineOverride, flags that can set it too)
SOURCES = {
    "model": ("", ("--model", "--revision", "--hf-overrides", "--quantization")),
    "kv_dtype": ("kv_cache_dtype", ("--kv-cache-dtype", "--dtype")),
    "block_size": ("block_size", ("--block-size",)),
    "backend": ("attention_backend", ("--attention-backend",)),
    "draft": ("", DRAFT_FLAGS),
    "prefix_caching": ("prefix_caching", ("--enable-prefix-caching",)),
    "context": ("", ("--decode-context-parallel-size", "--prefill-context-parallel-size")),
}
PARALLEL_FIELDS = ("tensor", "pipeline", "data")
# Fields of SOURCES for which vLLM chooses a value where none is given.
CHOSEN_BY_VLLM = ("block_size", "kv_dtype")
UNTOLD = "untold layers"
"""In ``Findings.unchecked``: the layers, although the spec names a config.json."""


def pair_findings(cluster: Cluster, model: Model | None = None) -> Findings:
    """Return refusals as errors, and the EngineShape fields that are not known.

    Args:
        model: what the model's config.json says; None if nobody has it.
    """
    blind = pair_findings(cluster).errors if model else ()  # admission sees no model
    shapes = {role: _shape_of(cluster, resolve_engine(cluster, role), model) for role in Role}
    findings = check(shapes[Role.PREFILL], shapes[Role.DECODE])
    refused = [finding for finding in findings if finding.verdict is Verdict.REFUSED]
    untold = {"layers": UNTOLD} if cluster.spec.model.config_map_ref else {}
    unknown = [finding.field for finding in findings if finding.verdict is Verdict.UNKNOWN]
    waiting = [untold.get(field, field) for field in unknown]
    errors = [_error(cluster, finding, shapes) for finding in refused]
    told = {(error.path, error.rule) for error in errors}
    errors += [error for error in blind if (error.path, error.rule) not in told]
    return Findings(errors=tuple(errors), unchecked=tuple(dict.fromkeys(waiting)))


def _shape_of(cluster: Cluster, engine: Engine, model: Model | None) -> EngineShape:
    """Return the shape of one role's engines, with what the model's config tells of it."""
    shape = engine_shape(cluster, engine)
    if model is None or is_replaced(engine):
        return shape
    # vLLM takes any other type as it sees fit, and a quantized checkpoint may bring its own.
    dtype = shape.kv_dtype or (model.dtype if model.dtype == "bfloat16" else None)
    layers, hybrid = model.layers, shape.hybrid or model.hybrid
    return structs.replace(shape, kv_dtype=dtype, layers=layers, hybrid=hybrid)


def _error(cluster: Cluster, finding: Finding, shapes: Mapping[Role, EngineShape]) -> FieldError:
    path, *others = _paths(cluster, finding, shapes)
    return FieldError(
        path,
        shown(f"prefill {finding.prefill_value}, decode {finding.decode_value}"),
        finding.reason,
        finding.message,
        finding.remedy,
        tuple(others),
    )


def _paths(cluster: Cluster, finding: Finding, shapes: Mapping[Role, EngineShape]) -> list[str]:
    """Return the fields that the value came from, the role's own first."""
    field = finding.field
    if field in PARALLEL_FIELDS:
        alone = {role: [one.rule for one in check_engine(shapes[role])] for role in Role}
        at_fault = [role for role in Role if finding.rule in alone[role]] or Role
        largest = max(at_fault, key=lambda role: getattr(shapes[role], field))
        return [f"spec.{largest}.parallelism.{field}", *(f"spec.{r}.parallelism" for r in Role)]
    if field == "asked_layout":
        places = ("spec.engine", *(f"spec.{role}.engine" for role in Role))
        return ["spec.transfer.kvLayout", *(f"{place}.attentionBackend" for place in places)]
    if field not in SOURCES:
        return ["spec", "spec.model", "spec.engine"]
    attribute, flags = SOURCES[field]
    name = camel(attribute)
    found = []
    for role in (Role.DECODE, Role.PREFILL):
        own = cluster.spec.role(role).engine
        if {flag.head for flag in parse_flags(own.extra_args)} & set(flags):
            found.append(f"spec.{role}.engine.extraArgs")
        elif name and getattr(own, attribute) is not None:
            found.append(f"spec.{role}.engine.{name}")
    return [*found, f"spec.engine.{name or 'extraArgs'}"]


def one_sided_warnings(cluster: Cluster) -> Iterator[FieldError]:
    """Yield settings of one role only: vLLM chooses the other role's, which may differ."""
    engines = {role: resolve_engine(cluster, role) for role in Role}
    shapes = {role: engine_shape(cluster, engines[role]) for role in Role}
    yield from _one_sided_drafts(cluster, engines, shapes)
    for name in PROMPT_FLAGS:
        ours, theirs = (prompt_setting(engines[role], name) for role in Role)
        if ours != theirs:
            role = next(role for role in reversed(Role) if _places(cluster, role, name))
            yield FieldError(
                f"spec.{role}.engine.extraArgs",
                name,
                Rule.SET_ON_ONE_ROLE,
                "differs between the roles: the same prompt may become other tokens in decode, "
                "which then computes it again (PromptMismatch)",
                f"Set the same {name} on both roles, in spec.engine.extraArgs.",
                tuple(f"spec.{other}.engine.extraArgs" for other in Role),
            )
    for field in CHOSEN_BY_VLLM:
        attribute, flags = SOURCES[field]
        name = camel(attribute)
        named = [role for role in Role if getattr(shapes[role], field) is not None]
        if len(named) != 1:
            continue
        (role,) = named
        flag = next((flag for flag in flags if engines[role].last(flag) is not None), None)
        yield FieldError(
            flag_path(cluster, role, flag) if flag else f"spec.{role}.engine.{name}",
            shown(getattr(shapes[role], field)),
            Rule.SET_ON_ONE_ROLE,
            f"only the {role} engines have it; vLLM chooses a value for the others, and engines "
            "with different values refuse each other",
            f"Set the same {flag} on both roles, in spec.engine.extraArgs."
            if flag == "--dtype"
            else f"Set the same engine.{name} on both roles, in spec.engine.",
            (f"spec.engine.{name}", *(f"spec.{other}.engine.{name}" for other in Role)),
        )


def _places(cluster: Cluster, role: Role, head: str) -> list[Flag]:
    return [f for f in parse_flags(cluster.spec.role(role).engine.extra_args) if f.head == head]


def _one_sided_drafts(
    cluster: Cluster, engines: Mapping[Role, Engine], shapes: Mapping[Role, EngineShape]
) -> Iterator[FieldError]:
    """Yield drafts of one role that change its layers or, of a Mamba model, its states."""
    hybrid = any(shape.hybrid for shape in shapes.values())
    drafting = [
        role
        for role, engine in engines.items()
        if drafts_with_kv(engine) or (hybrid and speculation(engine))
    ]
    if len(drafting) == 1:
        (role,) = drafting
        own = any(_places(cluster, role, name) for name in DRAFT_FLAGS)
        yield FieldError(
            f"spec.{role}.engine.extraArgs" if own else "spec.engine.extraArgs",
            shown(json.dumps(speculation(engines[role]))),
            Rule.SET_ON_ONE_ROLE,
            f"only the {role} engines draft so, which gives them other layers or states with KV, "
            "and engines with other ones refuse each other (LayerMismatch)",
            "Set the same speculative decoding on both roles, in spec.engine.extraArgs.",
            tuple(f"spec.{other}.engine.extraArgs" for other in Role),
        )


NAMES: Mapping[str, tuple[str, str]] = {
    "kv_dtype": ("the data type of the KV cache", "engine.kvCacheDtype"),
    "block_size": ("the block size of the KV cache", "engine.blockSize"),
    "token_sliceable": ("the order of the values in a block", "engine.attentionBackend"),
    "layers": ("the model's layers", "model.configMapRef"),
    UNTOLD: ("the model's layers, of which its config.json says too little or is not known", ""),
    "kernel_blocks_per_block": ("the block size of the attention kernel", ""),
    "packing": ("how vLLM packs a block on this CPU", ""),
    "memory": ("the kind of memory of the KV cache", "transfer.device"),
}
"""EngineShape field -> its name for users, and the field of a spec that sets it; empty for none."""


def unchecked_message(fields: Iterable[str]) -> str:
    """Return a sentence about rules that only the engines can check, and how to check them earlier.

    Args:
        fields: names of ``EngineShape`` fields, from ``Findings.unchecked``.
    """
    named = [NAMES.get(field, (field, "")) for field in fields]
    if not named:
        return ""
    parts = ", ".join(f"{words} ({setting})" if setting else words for words, setting in named)
    when = "The engines check this when they connect to each other."
    sooner = " Set a field in brackets to have it checked now." if any(s for _, s in named) else ""
    return f"Not checked yet: {parts}. {when}{sooner}"


AUTOSCALING = "spec.autoscaling"


def autoscaling_errors(cluster: Cluster) -> Iterator[FieldError]:
    """Yield bounds that contradict each other or the links, and targets that are missing."""
    wanted = cluster.spec.autoscaling
    if wanted is None:
        return
    bounds = {Role.PREFILL: wanted.prefill, Role.DECODE: wanted.decode}
    for role, allowed in bounds.items():
        if allowed.min > allowed.max:
            yield FieldError(
                f"{AUTOSCALING}.{role}.min",
                str(allowed.min),
                Rule.MIN_ABOVE_MAX,
                f"is above {AUTOSCALING}.{role}.max, which is {allowed.max}",
                "Set max to at least min.",
                (f"{AUTOSCALING}.{role}.max",),
            )
    links = wanted.prefill.max * wanted.decode.max
    if links > MOST_LINKS:
        yield FieldError(
            f"{AUTOSCALING}.decode.max",
            str(wanted.decode.max),
            Rule.OUT_OF_RANGE,
            f"{wanted.prefill.max} prefill x {wanted.decode.max} decode engines would be {links} "
            f"links; {MOST_LINKS} are allowed",
            "Set a smaller max of a role.",
            (f"{AUTOSCALING}.prefill.max",),
        )
    if wanted.ttft_ms is None and wanted.itl_ms is None:
        yield FieldError(
            AUTOSCALING,
            "",
            Rule.NO_TARGET,
            "has neither ttftMs nor itlMs, so nothing says how many engines are enough",
            "Set ttftMs, itlMs or both, in milliseconds.",
            (f"{AUTOSCALING}.ttftMs", f"{AUTOSCALING}.itlMs"),
        )
