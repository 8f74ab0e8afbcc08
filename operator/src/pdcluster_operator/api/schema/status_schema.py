"""The status' OpenAPI schema.

The API server shows a default status of a PDCluster until the operator writes one. In a crowd the
operator waits before it does, and an empty status would look like an operator that does not run.
"""

from collections.abc import Iterable
from typing import Any

from pdcluster_operator.api.conditions import ConditionType, Status, StatusReason, timestamp
from pdcluster_operator.api.spec.autoscaling_types import Limit
from pdcluster_operator.api.spec.types import Certificates

MAX_ENGINES = 64
MAX_FAILED_LINKS = 16
MAX_LINKS = 128
"""Enough for the links of one pairing key among 64 engines of each role."""
FIRST_CONDITIONS = (ConditionType.PROGRESSING, ConditionType.READY)


def status_schema() -> dict[str, Any]:
    """Return the schema. Lists are maps by key, so that several field managers can share them."""
    return {
        "type": "object",
        "description": "status is what the operator observed.",
        "default": {"conditions": [_not_seen(kind) for kind in FIRST_CONDITIONS]},
        "properties": {
            "observedGeneration": _count(
                "observedGeneration is the generation that the status describes.", "int64"
            ),
            "model": _text("model is the name that clients ask for.", 200),
            "endpoint": _text("endpoint is the base URL for clients in the cluster.", 512),
            "selector": _text("selector finds the decode pods, for the scale subresource.", 512),
            "replicas": _count("replicas is the number of decode engines that exist.", "int32"),
            "prefill": _text(
                "prefill counts the prefill engines: those ready and those wanted, as in 1/2.",
                32,
            ),
            "decode": _text(
                "decode counts the decode engines: those ready and those wanted, as in 1/2.",
                32,
            ),
            "links": _text(
                "links counts the links: those established and those wanted, as in 1/4.", 32
            ),
            "progressingSince": _time(
                "progressingSince is when the change that is on its way began. "
                "rollout.progressDeadlineSeconds counts from then."
            ),
            "transfer": _transfer(),
            "scaling": _scaling(),
            "conditions": _list(
                "conditions say what is true of the cluster. Ready summarizes the others.",
                32,
                ["type"],
                "One condition.",
                ["type", "status", "reason", "message", "lastTransitionTime"],
                type=_text("type is the name of the condition.", 64),
                status=_choice("status is True, False or Unknown.", ["True", "False", "Unknown"]),
                reason=_text("reason says why, in one CamelCase word.", 256),
                message=_text("message says why, in sentences.", 32768),
                observedGeneration=_count(
                    "observedGeneration is the generation of the judged spec.", "int64"
                ),
                lastTransitionTime=_time("lastTransitionTime is when status last flipped."),
            ),
            "engines": _list(
                f"engines are the wanted engines, at most {MAX_ENGINES}.",
                MAX_ENGINES,
                ["name"],
                "One engine.",
                ["name", "role", "state"],
                name=_text("name is the engine's StatefulSet.", 63),
                role=_choice("role says what the engine does.", ["prefill", "decode"]),
                state=_text("state is Ready, Unknown, or the reason why it is not ready.", 64),
                engineId=_text("engineId names the running incarnation.", 512),
                message=_text("message explains the state.", 1024),
            ),
            "linkStates": _list(
                f"linkStates are the wanted links, at most {MAX_LINKS}.",
                MAX_LINKS,
                ["prefill", "decode"],
                "One link.",
                ["prefill", "decode", "state"],
                prefill=_text("prefill is the prefill engine.", 63),
                decode=_text("decode is the decode engine.", 63),
                state=_choice(
                    "state says how far the link has come.",
                    ["Pending", "Established", "Failed", "Unknown"],
                ),
                reason=_text(
                    "reason says why the link is not established, in one CamelCase word.", 256
                ),
                canary=_choice(
                    "canary is the result of the last canary since the link was established.",
                    ["Pending", "Passed", "Failed", "Unknown"],
                ),
                megabytesPerSecond=_count(
                    "megabytesPerSecond is the bandwidth that was measured when the link was "
                    "established, in MB/s. It is left out if none was measured.",
                    "int64",
                ),
                descriptors=_count(
                    "descriptors is how many NIXL descriptors the KV of 1,000 tokens takes on the "
                    "worker that needs most. It is left out if it is not known.",
                    "int64",
                ),
                message=_text("message says what makes an established link slow.", 1024),
                verifiedTime=_time(
                    "verifiedTime is when KV was first seen to move over the link since it was "
                    "established. It is left out while the last canary has not passed."
                ),
                lastProofTime=_time(
                    "lastProofTime is when KV was last seen to move, if engines were too busy for "
                    "canaries since then. It is left out until a canary is ten minutes late; "
                    "verification.canary.intervalSeconds says how often they are sent."
                ),
            ),
            "failedLinks": _list(
                "failedLinks are links that failed, or whose canary moved no KV; "
                f"at most {MAX_FAILED_LINKS}.",
                MAX_FAILED_LINKS,
                ["prefill", "decode"],
                "One failed link.",
                ["prefill", "decode", "reason"],
                prefill=_text("prefill is the prefill engine.", 63),
                decode=_text("decode is the decode engine.", 63),
                reason=_text("reason says why, in one CamelCase word.", 256),
                message=_text("message says why, with the values of both engines.", 1024),
                lastTransitionTime=_time(
                    "lastTransitionTime is when the link began to fail for this reason."
                ),
            ),
        },
    }


def _not_seen(kind: ConditionType) -> dict[str, Any]:
    """Return a condition that nobody wrote. It has no observedGeneration: nothing was judged."""
    return {
        "type": kind.value,
        "status": Status.UNKNOWN.value,
        "reason": StatusReason.NOT_SEEN_YET.value,
        "message": "the operator has not written a status yet",
        "lastTransitionTime": timestamp(0.0),
    }


def _text(description: str, longest: int) -> dict[str, Any]:
    return {"type": "string", "maxLength": longest, "description": description}


def _count(description: str, width: str) -> dict[str, Any]:
    return {"type": "integer", "format": width, "minimum": 0, "description": description}


def _transfer() -> dict[str, Any]:
    return {
        "type": "object",
        "description": "transfer says how the engines that run are protected.",
        "properties": {
            "certificates": _choice(
                "certificates says whose certificates the engines' pods have. Operator: those "
                "that the operator signs. Mounted: files that the user's podTemplate mounts. "
                "None: they speak without TLS. Mixed: not all pods have the same. Unknown: "
                "what the pods were made from is gone. It is left out while there are no pods.",
                [source.value for source in Certificates],
            ),
            "notAfter": _time(
                "notAfter is when the first certificate in use expires: one of an engine, or one "
                "of an authority above it."
            ),
            "message": _text(
                "message says how many engines speak without TLS although the spec wants TLS, and "
                "of how many this is not known. It says why, and what helps. It is left out if "
                "there are none.",
                1024,
            ),
        },
    }


def _scaling() -> dict[str, Any]:
    measured = {
        "prefillTokensPerSecond": "prompt tokens a second of one prefill engine while it computes",
        "linkMBps": "megabytes of KV a second of one link while it carries KV",
        "decodeTokensPerSecond": "tokens a second of one decode engine while it generates",
        "prefillBusyPercent": "the share of time in which prefill engines compute",
        "ttftMs": "the mean time to the first token, in milliseconds",
        "itlMs": "the mean time between two tokens, in milliseconds",
        "waitingRequests": "requests that wait for room in engines of either role",
    }
    return {
        "type": "object",
        "description": "scaling says how many engines are needed, with spec.autoscaling.",
        "properties": {
            "prefill": _count("prefill is the number of prefill engines that are needed.", "int32"),
            "decode": _count("decode is the number of decode engines that are needed.", "int32"),
            "limit": _choice(
                "limit is the stage of a request that limits the PDCluster.", map(str, Limit)
            ),
            "measured": {
                "type": "object",
                "description": "measured are rounded values of one minute. One that is 0 is left "
                "out.",
                "properties": {
                    name: _count(f"{name} is {text}.", "int64") for name, text in measured.items()
                },
            },
            "measuredAt": _time(
                "measuredAt is when they were measured. They are written with other advice, or "
                "after ten minutes if one of them has changed."
            ),
        },
    }


def _list(
    description: str, most: int, keys: list[str], item: str, required: list[str], **fields: Any
) -> dict[str, Any]:
    """Return the schema of a list of objects, which are told apart by the fields ``keys``."""
    return {
        "type": "array",
        "description": description,
        "maxItems": most,
        "x-kubernetes-list-type": "map",
        "x-kubernetes-list-map-keys": keys,
        "items": {
            "type": "object",
            "description": item,
            "required": required,
            "properties": fields,
        },
    }


def _choice(description: str, values: Iterable[str]) -> dict[str, Any]:
    return {"type": "string", "enum": list(values), "description": description}


def _time(description: str) -> dict[str, Any]:
    return {"type": "string", "format": "date-time", "description": description}
