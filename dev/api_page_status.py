"""The part of docs/api.md about the status: its fields and its conditions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pdcluster_operator.api.conditions import ConditionType
from pdcluster_operator.api.object_names import role_selector
from pdcluster_operator.api.schema.crd import to_yaml
from pdcluster_operator.api.schema.status_schema import status_schema
from pdcluster_operator.api.spec.types import Role

MEANINGS: Mapping[ConditionType, str] = {
    ConditionType.ACCEPTED: "The spec obeys every rule that can be checked before engines run.",
    ConditionType.PREFILL_READY: "All wanted prefill engines are ready.",
    ConditionType.DECODE_READY: "All wanted decode engines are ready.",
    ConditionType.KV_LINKS_ESTABLISHED: (
        "Each decode engine has read memory of each prefill engine, and found the right bytes."
    ),
    ConditionType.KV_PATH_VERIFIED: (
        "On each link the KV of a real request was seen to move, and its bytes were counted."
    ),
    ConditionType.TRANSPORT_HEALTHY: (
        "The links are not slower than `spec.transfer.minBandwidthMBps`, or than 1 GB/s if RDMA is "
        "asked for, and decode computes no more prompts itself than "
        "`spec.verification.maxLocalShare` allows."
    ),
    ConditionType.AVAILABLE: "Clients reach a verified pair of engines through the Service.",
    ConditionType.PROGRESSING: (
        "The operator works towards Ready. False means that it is done, waits for somebody, or "
        "cannot go on."
    ),
    ConditionType.SCALING_TARGETS_MET: (
        "The engines that are there hold the targets of `spec.autoscaling`. It is there only with "
        "that field, and Ready does not depend on it."
    ),
    ConditionType.READY: "What the spec wants is there and verified. It summarizes the others.",
}
UNREACHABLE = (
    "the side channel at 10.244.1.7:5600: no answer in time. Check that the engine runs, and that "
    "network policies and firewalls allow the port of its side channel"
)
SLOW = (
    "1,000 tokens take up to 5,040 descriptors on this rank: 15 ms to post at 3 µs each. Layers "
    "lie apart on prefill (LBHNC). Set on both engines: --block-size 64 (then 1,280), or "
    "transfer.kvLayout BHLNC if their attention backends have it (then 63)"
)
EXAMPLE: Mapping[str, Any] = {
    "observedGeneration": 3,
    "model": "llama",
    "endpoint": "http://llama-router.llm.svc:8000",
    "selector": role_selector("llama", Role.DECODE),
    "replicas": 1,
    "prefill": "1/1",
    "decode": "1/1",
    "links": "0/1",
    "progressingSince": "2026-11-22T11:58:00Z",
    "transfer": {
        "certificates": "Mixed",
        "notAfter": "2027-02-15T00:00:00Z",
        "message": (
            "1 of 2 engines without TLS, made before spec.transfer.tls was Enabled: whoever "
            "reaches their ports can read where their KV lies. They are being replaced."
        ),
    },
    "scaling": {
        "prefill": 2,
        "decode": 3,
        "limit": "Decode",
        "measured": {
            "prefillTokensPerSecond": 15000,
            "linkMBps": 20000,
            "decodeTokensPerSecond": 2400,
            "prefillBusyPercent": 61,
            "ttftMs": 840,
            "itlMs": 47,
            "waitingRequests": 3,
        },
        "measuredAt": "2026-11-22T11:59:00Z",
    },
    "conditions": [
        {
            "type": "Ready",
            "status": "False",
            "reason": "SideChannelUnreachable",
            "message": f"llama-prefill-5d8bf-0 -> llama-decode-7f9c4-0: {UNREACHABLE}",
            "observedGeneration": 3,
            "lastTransitionTime": "2026-11-22T12:00:00Z",
        }
    ],
    "engines": [
        {
            "name": "llama-decode-7f9c4-0",
            "role": "decode",
            "state": "Ready",
            "engineId": "llm.llama.decode.7f9c4.0/8d6f0c1b2a394e57",
            "message": "",
        }
    ],
    "linkStates": [
        {
            "prefill": "llama-prefill-5d8bf-0",
            "decode": "llama-decode-7f9c4-0",
            "state": "Failed",
            "reason": "SideChannelUnreachable",
        },
        {
            "prefill": "llama-prefill-5d8bf-1",
            "decode": "llama-decode-7f9c4-0",
            "state": "Established",
            "canary": "Passed",
            "megabytesPerSecond": 21400,
            "descriptors": 5040,
            "message": SLOW,
            "verifiedTime": "2026-11-22T12:00:00Z",
            "lastProofTime": "2026-11-22T12:55:00Z",
        },
    ],
    "failedLinks": [
        {
            "prefill": "llama-prefill-5d8bf-0",
            "decode": "llama-decode-7f9c4-0",
            "reason": "SideChannelUnreachable",
            "message": UNREACHABLE,
            "lastTransitionTime": "2026-11-22T12:00:00Z",
        }
    ],
}


def status_part() -> str:
    """Return the sections of the status as Markdown."""
    parts = ["## `status`\n\nWhat the operator observed. Users do not write it.\n"]
    for path, schema in _objects("status", status_schema()):
        if path != "status":
            parts.append(f"### `{path}`\n")
        parts += ["| field | type | meaning |", "|---|---|---|"]
        for name, field in schema["properties"].items():
            parts.append(f"| `{name}` | {_type(field)} | {_meaning(name, field)} |")
        parts.append("")
    parts += [
        f"```yaml\n{to_yaml({'status': EXAMPLE})}```\n",
        "### Conditions\n",
        "A condition starts as Unknown. An engine that the operator cannot ask is Unknown, not",
        "False. `reason` says why in one word, `message` in a sentence.\n",
        "| condition | True means |\n|---|---|",
        *(f"| `{kind.value}` | {MEANINGS[kind]} |" for kind in ConditionType),
        "",
    ]
    return "\n".join(parts)


def _objects(path: str, schema: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    yield path, schema
    for name, field in schema["properties"].items():
        if field["type"] == "array":
            yield from _objects(f"{path}.{name}[]", field["items"])
        elif field["type"] == "object":
            yield from _objects(f"{path}.{name}", field)


def _type(field: Mapping[str, Any]) -> str:
    if "enum" in field:
        return " or ".join(f"`{value}`" for value in field["enum"])
    if field.get("format") == "date-time":
        return "time"
    return "list of objects" if field["type"] == "array" else str(field["type"])


def _meaning(name: str, field: Mapping[str, Any]) -> str:
    return sentence(str(field["description"]).removeprefix(f"{name} "))


def sentence(doc: str) -> str:
    """Return a description without its verb: ``is the name.`` -> ``The name.``."""
    bare = doc.removeprefix("is ").removeprefix("are ")
    return bare[:1].upper() + bare[1:]
