"""The objects of a PDCluster as an API server has them, for tests of the page that shows them."""

from __future__ import annotations

import calendar
import time
from typing import Any

from pdcluster_operator.api.conditions import timestamp
from pdcluster_operator.api.object_names import API_VERSION, KIND, EngineName, engine_labels
from pdcluster_operator.api.spec.types import Role

NOW = float(calendar.timegm(time.strptime("2026-11-22 12:00:00", "%Y-%m-%d %H:%M:%S")))
UNREACHABLE = "the side channel at 10.244.1.7:5600: no answer in time. Check that the engine runs"
BLOCKED = "no answer: a NetworkPolicy does not let it in"
HOSTILE = "<img src=x onerror=alert(1)>\"'`\r\nevent: head\ndata: owned</td>&amp;\u202e"


def engines(role: str, count: int) -> list[EngineName]:
    revision = "5d8bf" if role == "prefill" else "7f9c4"
    return [EngineName("llm", "llama", Role(role), revision, index) for index in range(count)]


def condition(kind: str, status: str, reason: str, message: str = "", ago: float = 600) -> dict:
    return {
        "type": kind,
        "status": status,
        "reason": reason,
        "message": message,
        "lastTransitionTime": timestamp(NOW - ago),
    }


def cluster(
    prefill: int = 1, decode: int = 1, conditions: list[dict] | None = None, **status: Any
) -> dict[str, Any]:
    """A PDCluster that is Ready unless conditions say otherwise."""
    told = {
        kind: condition(kind, "True", reason)
        for kind, reason in (
            ("Accepted", "PartiallyChecked"),
            ("PrefillReady", "EnginesReady"),
            ("DecodeReady", "EnginesReady"),
            ("KVLinksEstablished", "LinksEstablished"),
            ("KVPathVerified", "CanaryPassed"),
            ("TransportHealthy", "NoThreshold"),
            ("Available", "Serving"),
            ("Progressing", "Complete"),
            ("Ready", "Ready"),
        )
    }
    told["Progressing"]["status"] = "False"
    told |= {one["type"]: one for one in conditions or ()}
    names = [*engines("prefill", prefill), *engines("decode", decode)]
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": {"name": "llama", "namespace": "llm", "generation": 3},
        "spec": {},
        "status": {
            "observedGeneration": 3,
            "model": "llama",
            "endpoint": "http://llama-router.llm.svc:8000",
            "prefill": f"{prefill}/{prefill}",
            "decode": f"{decode}/{decode}",
            "links": f"{prefill * decode}/{prefill * decode}",
            "conditions": list(told.values()),
            "engines": [
                {"name": one.stateful_set, "role": one.role.value, "state": "Ready", "message": ""}
                for one in names
            ],
            **status,
        },
    }


def pod(name: EngineName, *, key: str = "k1", **status: Any) -> dict[str, Any]:
    container = {"name": "engine", "restartCount": 0, "state": {"running": {}}}
    gpus = {"resources": {"limits": {"nvidia.com/gpu": "2"}}}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name.pod(),
            "namespace": "llm",
            "labels": engine_labels(name, key),
            "creationTimestamp": timestamp(NOW - 3600),
        },
        "spec": {"containers": [{"name": "engine", **gpus}]},
        "status": {
            "conditions": [
                {
                    "type": "Ready",
                    "status": "True",
                    "lastTransitionTime": timestamp(NOW - 3500),
                }
            ],
            "containerStatuses": [container],
            **status,
        },
    }


def pods(prefill: int = 1, decode: int = 1) -> list[dict[str, Any]]:
    return [pod(name) for name in (*engines("prefill", prefill), *engines("decode", decode))]


def links(prefill: int, decode: int, **failed: str) -> dict[str, list[dict[str, Any]]]:
    """The links of all pairs, as the status has them; ``failed`` has reasons, by `p0d1`."""
    found: dict[str, list[dict[str, Any]]] = {"linkStates": [], "failedLinks": []}
    for p in engines("prefill", prefill):
        for d in engines("decode", decode):
            names = {"prefill": p.stateful_set, "decode": d.stateful_set}
            if reason := failed.get(f"p{p.index}d{d.index}"):
                why = {"reason": reason, "message": UNREACHABLE}
                found["linkStates"].append({**names, "state": "Failed", "reason": reason})
                found["failedLinks"].append({**names, **why})
                continue
            seen = {"canary": "Passed", "verifiedTime": timestamp(NOW - 900), "descriptors": 96}
            speed = 12_500 + p.index * 1000
            found["linkStates"].append(
                {**names, "state": "Established", "megabytesPerSecond": speed, **seen}
            )
    return found
