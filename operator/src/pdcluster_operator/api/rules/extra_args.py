"""Rules of extraArgs.

Refused are flags that the operator sets itself, flags with which the connector does not start, and
flags that contradict a field of the spec.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress

from pdcluster_connector.compat.findings import counted
from pdcluster_connector.compat.supported import REFUSED_FLAGS
from pdcluster_connector.protocol.api_key import VARIABLE
from pdcluster_operator.api.findings import FieldError, Rule, did_you_mean, shown
from pdcluster_operator.api.spec.fields import camel
from pdcluster_operator.api.spec.flags import (
    FLAG_VALUES,
    OWNED_FLAGS,
    OWNED_ROUTER_FLAGS,
    TYPED_ROUTER_FLAGS,
    VLLM_FLAGS,
    VLLM_RELEASE,
    Flag,
    owned_flag,
    parse_flags,
)
from pdcluster_operator.api.spec.resolve import (
    CACHE_FOLDER,
    READ_FLAGS,
    engine_places,
    flag_path,
    resolve_engine,
)
from pdcluster_operator.api.spec.router_types import Router
from pdcluster_operator.api.spec.types import Cluster, Device, Role

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
    yield from dict.fromkeys(found for role in Role for found in _alone(cluster, role))


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
    for place, word in enumerate(words):
        if f"$({VARIABLE})" in word.replace("$$", ""):
            message = "puts the API key into the arguments, which every process can read"
            where, remedy = f"{path}[{place}]", "Remove it: the container has the variable."
            yield FieldError(where, shown(word), Rule.NOT_ALLOWED, message, remedy)


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
    parts = word.split() if " -" in word else (name, value)
    two = ", ".join(json.dumps(part) for part in parts if part)
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
            claimed = cluster.spec.model.cache.persistent_volume_claim is not None
            elsewhere = not f"{flag.value}/".startswith(f"{CACHE_FOLDER}/")
            if flag.name == "--download-dir" and claimed and elsewhere:
                message = "has the weights downloaded to this folder, and not to spec.model.cache"
                text, remedy = shown(" ".join(flag.words)), "Remove --download-dir."
                yield FieldError(here, text, Rule.CONFLICTING_SETTINGS, message, remedy)


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
    if words := _two_words(written):
        message, remedy, others = "is one word, which vLLM reads as one name", words, ""
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
                for found in _unfit(f"{path}.extraArgs[{flag.place}]", flag):
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


READERS: Mapping[str, tuple[Callable[[str], object], str]] = {
    "int": (int, "a whole number"),
    "float": (float, "a number"),
    "json": (
        lambda text: json.loads(re.sub(r"(?<=\d)[kKmMgGtT]\b", "", text)),  # some flags take 1k
        "JSON, with double quotes around keys and texts",
    ),
}
ANY_CASE = ("--moe-backend", "--linear-backend", "--sparse-indexer-topk-backend")
"""Flags whose words vLLM reads in upper case, and with hyphens, too."""


def _unfit(path: str, flag: Flag) -> Iterator[FieldError]:
    """Yield a value that vLLM's parser does not read. A JSON flag may also take a word.

    Nothing is known of a value that the kubelet replaces. vLLM reads some flags' ``None`` and empty
    text as no value.
    """
    known, value = FLAG_VALUES.get(flag.name, ""), flag.value
    if not known or len(flag.values) != 1 or (known == "json" and value[:1] not in ("{", "[")):
        return
    if "$(" in value or value in ("", "None"):
        return
    if flag.name in ANY_CASE:
        value = value.lower().replace("-", "_")
    read, what = READERS.get(known, (known.split("|").index, f"one of {known.replace('|', ', ')}"))
    with suppress(ValueError, RecursionError):
        number = read(value)
        if not flag.name.endswith("memory-utilization") or 0 < float(str(number)) <= 1:
            return
        what = "a number above 0 and at most 1"
    text, message = shown(" ".join(flag.words)), f"{flag.head} must be {what}"
    yield FieldError(path, text, Rule.UNREADABLE_FLAG, message, f"Write {what}.")


NEEDS = {
    "--enable-auto-tool-choice": "--tool-call-parser",
    "--enable-log-outputs": "--enable-log-requests",
    "--lora-modules": "--enable-lora",
}
"""Flag -> another one, without which vLLM does not start."""


def _alone(cluster: Cluster, role: Role) -> Iterator[FieldError]:
    engine = resolve_engine(cluster, role)
    for name, other in NEEDS.items():
        flag, needed = engine.last(name), engine.last(other)
        if flag is not None and not flag.negated and (needed is None or needed.negated):
            where, text = flag_path(cluster, role, name), shown(" ".join(flag.words))
            message, remedy = (
                f"needs {other}: vLLM does not start",
                f"Add {other}, or remove {name}.",
            )
            yield FieldError(where, text, Rule.CONFLICTING_SETTINGS, message, remedy)
    chunked, most = engine.last("--enable-chunked-prefill"), engine.last("--max-num-batched-tokens")
    tokens, longest = _meant(most.value if most else ""), str(engine.max_model_len or "")
    if chunked is None or not chunked.negated or most is None:
        return
    if tokens.isdigit() and longest.isdigit() and int(tokens) < int(longest):
        where, text = flag_path(cluster, role, most.name), shown(" ".join(most.words))
        message = (
            f"is less than maxModelLen {longest}, and prompts are not cut: vLLM does not start"
        )
        remedy = f"Write {longest}, or remove --no-enable-chunked-prefill."
        yield FieldError(where, text, Rule.CONFLICTING_SETTINGS, message, remedy)


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
