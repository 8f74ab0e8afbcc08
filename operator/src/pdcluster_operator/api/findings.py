"""Findings: errors and warnings about the fields of a manifest, and how they show values.

:func:`json_errors` finds what no other code has to expect in a manifest.
"""

import difflib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

LONGEST_VALUE = 200
NEAR = 0.7
"""Likeness from which on a known name may be what is meant. That of GPU and CPU is 0.67."""


class Rule(StrEnum):
    """Rules of the API itself. The rules about KV are in ``compat.reasons.Reason``."""

    REQUIRED = "Required"
    UNKNOWN_FIELD = "UnknownField"
    TOO_LARGE = "TooLarge"
    WRONG_TYPE = "WrongType"
    OUT_OF_RANGE = "OutOfRange"
    NOT_ALLOWED = "NotAllowed"
    BAD_FORMAT = "BadFormat"
    EXACTLY_ONE = "ExactlyOne"
    DUPLICATE = "Duplicate"
    NAME_UNUSABLE = "NameUnusable"
    OWNED_FLAG = "OwnedFlag"
    OWNED_VARIABLE = "OwnedVariable"
    UNREADABLE_FLAG = "UnreadableFlag"
    UNKNOWN_FLAG = "UnknownFlag"
    NODES_DIVIDE_WORKERS = "NodesDivideWorkers"
    GPU_COUNT_MISMATCH = "GpuCountMismatch"
    GPU_BESIDE_CLAIM = "GpuBesideClaim"
    TOO_MANY_LINKS = "TooManyLinks"
    CONFLICTING_SETTINGS = "ConflictingSettings"
    TRANSPORT_WITHOUT_CUDA = "TransportWithoutCuda"
    EXPANDABLE_SEGMENTS = "ExpandableSegments"
    EAGER_PIPELINE = "EagerPipeline"
    NODE_LOCAL_MODEL = "NodeLocalModel"
    ARGUMENTS_OVERLAID = "ArgumentsOverlaid"
    NOT_IN_POD = "NotInPod"
    PROBE_FAILS = "ProbeFails"
    READINESS_REPLACED = "ReadinessReplaced"
    OWN_FIELD_REMOVED = "OwnFieldRemoved"
    NOTHING_TO_PAIR = "NothingToPair"
    HOST_PATH_NOT_ADMITTED = "HostPathNotAdmitted"
    HOST_NAMESPACE = "HostNamespace"
    INSECURE_SIDE_CHANNEL = "InsecureSideChannel"
    CERTIFICATE_NOT_MOUNTED = "CertificateNotMounted"
    CERTIFICATE_HIDDEN = "CertificateHidden"
    CERTIFICATE_NOT_RENEWED = "CertificateNotRenewed"
    MOUNTED_NOT_SUPPORTED = "MountedNotSupported"
    REQUEST_LIMIT_MISMATCH = "RequestLimitMismatch"
    NO_MEMORY_REQUEST = "NoMemoryRequest"
    KV_OFFLOAD_UNSUPPORTED = "KvOffloadUnsupported"
    KV_OFFLOAD_TOO_LARGE = "KvOffloadTooLarge"
    NO_RDMA = "NoRdma"
    GRACE_TOO_SHORT = "GraceTooShort"
    FLAG_UNSUPPORTED = "FlagUnsupported"
    SET_ON_ONE_ROLE = "SetOnOneRole"
    CACHE_UNUSED = "CacheUnused"
    WEIGHTS_NOT_PINNED = "WeightsNotPinned"
    WEIGHTS_UNSEEN = "WeightsUnseen"
    IMAGE_NOT_PINNED = "ImageNotPinned"
    IMAGES_DIFFER = "ImagesDiffer"
    PEER_UNUSABLE = "PeerUnusable"
    ROUTER_FIELD_UNUSED = "RouterFieldUnused"
    ROUTER_EXPOSED = "RouterExposed"
    SIDECAR_OPEN = "SidecarOpen"
    GANG_MIXED = "GangMixed"
    MIN_ABOVE_MAX = "MinAboveMax"
    NO_TARGET = "NoTarget"
    POD_GROUPS_NOT_SERVED = "PodGroupsNotServed"
    MODEL_NOT_CHECKED = "ModelNotChecked"


@dataclass(frozen=True, slots=True)
class FieldError:
    """One finding about one field.

    Attributes:
        path: JSON path, e.g. ``spec.prefill.engine.extraArgs[2]``.
        value: the offending value, shortened.
        rule: rule id: a :class:`Rule` or a ``compat`` reason.
        message: the fault, in one sentence.
        remedy: how to correct it, in one sentence.
        related: other paths that the finding was computed from.
    """

    path: str
    value: str
    rule: str
    message: str
    remedy: str
    related: tuple[str, ...] = ()

    def __str__(self) -> str:
        shown = f" = {self.value}" if self.value else ""
        return f"{self.path}{shown}: {self.message} [{self.rule}] {self.remedy}".rstrip()


@dataclass(frozen=True, slots=True)
class Findings:
    """Everything that was found, errors and warnings, in the manifest's order.

    Attributes:
        unchecked: fields of ``EngineShape`` that are not known.
        model: what of the model moves for a prompt; empty without its config.json.
    """

    errors: tuple[FieldError, ...] = ()
    warnings: tuple[FieldError, ...] = ()
    unchecked: tuple[str, ...] = ()
    model: str = ""

    @property
    def ok(self) -> bool:
        """Whether nothing forbids the manifest."""
        return not self.errors


def shown(value: object) -> str:
    """Write a value for a person, in at most LONGEST_VALUE characters."""
    text = value if isinstance(value, str) else _json(value)
    text = repr(text) if not text or text != text.strip() else text
    return text if len(text) <= LONGEST_VALUE else text[: LONGEST_VALUE - 1] + "…"


def quoted(value: object) -> str:
    """Write a value for a person so that its type shows: ``"16"`` is not the number 16."""
    return shown(_json(value))


def _json(value: object) -> str:
    """Write a value as a manifest has it: ``true``, ``null``, ``{"a": 1}``."""
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):  # YAML has dates, and other keys than text
        return repr(value)


def under(path: str, parent: str) -> bool:
    """Whether a path is the parent, or is inside of it."""
    return path == parent or path.startswith((parent + ".", parent + "["))


def did_you_mean(text: str, known: Iterable[str]) -> str:
    """Ask for the known name that is nearest to a misspelt one in any case; empty if none is."""
    folded = {name.lower(): name for name in known}
    near = difflib.get_close_matches(text.lower()[:100], folded, n=1, cutoff=NEAR)
    return f"Did you mean {folded[near[0]]}?" if near else ""


DEEPEST = 64
"""Objects and lists inside of each other. A pod template has less than 16."""
MOST_ERRORS = 16
# API servers write and bound these.
NOT_READ = frozenset({"metadata.managedFields", "status"})


def json_errors(manifest: object) -> tuple[FieldError, ...]:
    """Return what of a manifest is no JSON that API servers store. YAML allows more.

    These are the first keys that are no strings, values too deep, and numbers too long. Nothing
    else can be said of such a manifest.
    """
    found: list[FieldError] = []

    def wrong(path: str, value: str, rule: Rule, message: str, remedy: str) -> None:
        where = "." if path[:1] in ("", "[") else path
        found.append(FieldError(where, value, rule, message, remedy))

    left = [("", manifest, 0)]
    while left and len(found) < MOST_ERRORS:
        path, value, depth = left.pop()
        inner: list[tuple[str, object]] = []
        if _is_long(value):
            message, remedy = "is a whole number of more than 64 bits", "Write a smaller number."
            wrong(path, "", Rule.OUT_OF_RANGE, message, remedy)
        elif isinstance(value, Mapping):
            for key, one in value.items():
                if isinstance(key, str):
                    inner.append((f"{path}.{key}".lstrip("."), one))
                    continue
                message, text = (
                    "has this key, which is no string",
                    "" if _is_long(key) else shown(key),
                )
                wrong(path, text, Rule.WRONG_TYPE, message, "Put it in quotes.")
        elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
            inner = [(f"{path}[{place}]", one) for place, one in enumerate(value)]
        if inner and depth == DEEPEST:
            message = f"is deeper than {DEEPEST} objects and lists inside of each other"
            remedy = "Write what the field needs, and no copy of another object."
            wrong(path, "", Rule.TOO_LARGE, message, remedy)
        else:
            left += [(where, one, depth + 1) for where, one in inner if where not in NOT_READ]
    return tuple(found)


def _is_long(value: object) -> bool:
    return isinstance(value, int) and not -1 << 63 <= value < 1 << 63
