"""The words of ``extraArgs`` as flags of ``vllm serve``.

vLLM takes ``--flag value`` and ``--flag=value``, underscores for hyphens, short names,
``--no-`` for off, dotted keys of JSON flags, and (by argparse) unambiguous beginnings of
a long name. All of these are resolved here. Otherwise a flag of the operator could be overridden.
"""

import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from typing import Final

SHORT_NAMES = {
    "-tp": "--tensor-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-dp": "--data-parallel-size",
    "-dpn": "--data-parallel-rank",
    "-dpr": "--data-parallel-start-rank",
    "-dpl": "--data-parallel-size-local",
    "-dpa": "--data-parallel-address",
    "-dpp": "--data-parallel-rpc-port",
    "-dpb": "--data-parallel-backend",
    "-dph": "--data-parallel-hybrid-lb",
    "-dpe": "--data-parallel-external-lb",
    "-dpm": "--data-parallel-multi-port-external-lb",
    "-dcp": "--decode-context-parallel-size",
    "-pcp": "--prefill-context-parallel-size",
    "-ep": "--enable-expert-parallel",
    "-n": "--nnodes",
    "-r": "--node-rank",
    "-q": "--quantization",
    "-sc": "--speculative-config",
    "-cc": "--compilation-config",
    "-ac": "--attention-config",
    "-dc": "--diffusion-config",
    "-asc": "--api-server-count",
    "-O": "--optimization-level",
}
_NUMBER = re.compile(r"-\d")


def _read_flags() -> tuple[str, dict[str, str], dict[str, str]]:
    """Return the release, the flags and their values, which ``dev/vllm_flags.py`` writes."""
    lines = files(__package__).joinpath("vllm_flags.txt").read_text().splitlines()
    release, *rows = (line for line in lines if not line.startswith("#"))
    words = [row.split(" ") for row in rows]
    return release, {one[0]: one[1] for one in words}, {one[0]: one[2] for one in words if one[2:]}


_TABLE = _read_flags()
VLLM_RELEASE: Final = _TABLE[0]
VLLM_FLAGS: Final[Mapping[str, str]] = _TABLE[1]
"""Flag of that release -> how many values it takes. The table's head explains them."""
FLAG_VALUES: Final[Mapping[str, str]] = _TABLE[2]
"""Flag -> int, float, json or the words that its value may be."""


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag with its values.

    Attributes:
        name: long name with hyphens and without ``--no-``; a dotted key keeps its dots.
        words: the flag as it was written.
        values: its values, as text.
        negated: written as ``--no-…``.
        place: index of its first word in the list.
    """

    name: str
    words: tuple[str, ...]
    values: tuple[str, ...]
    negated: bool
    place: int

    @property
    def value(self) -> str:
        """The values in one string."""
        return " ".join(self.values)

    @property
    def head(self) -> str:
        """The name before any dot."""
        return self.name.partition(".")[0]


@lru_cache(maxsize=256)
def parse_flags(words: tuple[str, ...]) -> tuple[Flag, ...]:
    """Group words by flag. Cached: each rule reads them, and most clusters have the same ones.

    Words that stand before any flag are in none.
    """
    starts = [place for place, word in enumerate(words) if _is_flag(word)]
    spans = itertools.pairwise([*starts, len(words)])
    return tuple(_flag(words[start:stop], start) for start, stop in spans)


def _is_flag(word: str) -> bool:
    # argparse takes a word with a blank in its name for a value. vLLM reads dotted names itself.
    name = word.partition("=")[0]
    spaced = " " in name and "." not in name
    return word.startswith("-") and len(word) > 1 and not _NUMBER.match(word) and not spaced


def _flag(words: tuple[str, ...], place: int) -> Flag:
    written, equals, inline = words[0].partition("=")
    head, dot, rest = written.partition(".")
    if written.startswith("--"):
        name = head.replace("_", "-") + dot + rest
    elif written not in SHORT_NAMES and written[:2] in SHORT_NAMES:
        # argparse takes -n2 for -n 2, but only where the short name is one letter.
        name, inline = SHORT_NAMES[written[:2]], words[0][2:].removeprefix("=")
    else:
        name = SHORT_NAMES.get(_short(head), head) + dot + rest
    negated = name.startswith("--no-")
    values = ((inline,) if equals or inline else ()) + words[1:]
    return Flag("--" + name[5:] if negated else name, words, values, negated, place)


def _short(written: str) -> str:
    """Return the short name that argparse takes an abbreviation for: ``-t`` is ``-tp``."""
    meant = [name for name in SHORT_NAMES if name.startswith(written)]
    return meant[0] if len(meant) == 1 and written not in SHORT_NAMES else written


def merge_flags(shared: tuple[str, ...], role: tuple[str, ...]) -> tuple[str, ...]:
    """Return the shared words, then the role's. A flag of the role replaces the shared one."""
    ours = parse_flags(role)
    replaced = {flag.name for flag in ours}
    kept = [flag for flag in parse_flags(shared) if flag.name not in replaced]
    return tuple(word for flag in (*kept, *ours) for word in flag.words)


# Flag -> what to do instead.
OWNED_FLAGS = {
    "--kv-transfer-config": "Remove it: the operator writes it, from spec.transfer.",
    "--kv-offloading-size": "Use spec.prefill.engine.kvOffload.",
    "--host": "Remove it: the operator sets it.",
    "--port": "Remove it: the operator sets it.",
    "--api-key": "Use spec.router.apiKeySecretRef: arguments can be read by every process.",
    "--uds": "Remove it: the API is served on a port.",
    "--grpc": "Remove it: the API is served over HTTP.",
    "--ssl-keyfile": "Remove it: router and probes speak plain HTTP. End TLS before the router.",
    "--ssl-certfile": "Remove it: router and probes speak plain HTTP. End TLS before the router.",
    "--config": "Write the flags into extraArgs, where rules can see them.",
    "--model": "Name the model in spec.model.source.",
    "--served-model-name": "Use spec.model.name.",
    "--tensor-parallel-size": "Use the role's parallelism.tensor.",
    "--pipeline-parallel-size": "Use the role's parallelism.pipeline.",
    **dict.fromkeys((
        "--data-parallel-size", "--data-parallel-size-local", "--data-parallel-rank",
        "--data-parallel-start-rank", "--data-parallel-address", "--data-parallel-rpc-port",
        "--data-parallel-backend", "--data-parallel-hybrid-lb", "--data-parallel-external-lb",
        "--data-parallel-multi-port-external-lb",
    ), "Use the role's parallelism.data."),
    **dict.fromkeys((
        "--nnodes", "--node-rank", "--master-addr", "--master-port", "--headless",
    ), "Use the role's parallelism.nodes."),
    "--distributed-executor-backend": "Remove it: engines use vLLM's own multiprocessing.",
    "--api-server-count": "Remove it: an engine has one API server.",
}  # fmt: skip

OWNED_ROUTER_FLAGS = {
    "--policy": "Use spec.router.policy.",
    "--request-timeout-secs": "Use spec.requestTimeoutSeconds.",
    "--api-key": "Use spec.router.apiKeySecretRef: arguments can be read by every process.",
    **dict.fromkeys((
        "--prefill", "--decode", "--worker-urls", "--service-discovery", "--selector",
        "--prefill-selector", "--decode-selector", "--vllm-discovery-address",
    ), "Remove it: the operator tells the router its engines."),
    **dict.fromkeys((
        "--vllm-pd-disaggregation", "--enable-igw", "--mini-lb", "--kv-connector",
    ), "Remove it: the router has to send each prompt to prefill, and then to decode."),
    **dict.fromkeys((
        "--host", "--port", "--prometheus-host", "--prometheus-port",
        "--worker-startup-timeout-secs", "--worker-startup-check-interval",
        "--health-check-interval-secs", "--health-failure-threshold", "--health-success-threshold",
    ), "Remove it: the operator sets it."),
}  # fmt: skip

# Flag of vllm-router -> the field of Router that sets it.
TYPED_ROUTER_FLAGS = {
    "--policy": "policy",
    "--prefill-policy": "prefill_policy",
    "--decode-policy": "decode_policy",
    "--log-level": "log_level",
}


def owned_flag(flag: Flag, ours: Mapping[str, str] = OWNED_FLAGS) -> str | None:
    """Return the operator's flag that a flag is or abbreviates; None if it is the user's."""
    if flag.head in ours:
        return flag.head
    # argparse accepts abbreviations. No flag of vLLM, nor one of its router, is itself the
    # beginning of an owned one.
    if not flag.head.startswith("--") or flag.head == "--":
        return None
    return next((owned for owned in ours if owned.startswith(flag.head)), None)
