"""What no single condition shows: an engine that is frozen, or a network that is cut. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

from pdcluster_operator.api.conditions import ConditionType, Status, find_condition, seconds
from pdcluster_operator.api.spec.pod_templates import ENGINE_CONTAINER, as_mapping
from pdcluster_operator.cli.status_document import Engine
from pdcluster_operator.plan.observed import pods as seen
from pdcluster_operator.plan.observed.pods import text_of
from pdcluster_operator.plan.types import Manifest

CONDITIONS = {"prefill": ConditionType.PREFILL_READY, "decode": ConditionType.DECODE_READY}
SILENT = "the launcher does not answer"
UNREACHABLE = ("SideChannelUnreachable", "TransferStalled", "PeerRestarted")
"""Reasons of links that an engine which is frozen and a network that is cut both have."""
ENDS = ("prefill", "decode")


def diagnose(status: Mapping[str, Any], engines: Sequence[Engine]) -> list[str]:
    """Return what the links show together: an engine that is frozen, or a network that is cut."""
    states = {engine.name: engine.state for engine in engines}
    links = [
        link
        for link in map(as_mapping, status.get("linkStates") or ())
        # Why an engine that is not ready has no links is known.
        if {states.get(text_of(link.get(side)), "") for side in ENDS} <= {"Ready", "Unknown", ""}
    ]
    found = []
    for side, other in (ENDS, ENDS[::-1]):
        for name in dict.fromkeys(text_of(link.get(side)) for link in links):
            own = [link for link in links if link.get(side) == name]
            if not all(link.get("reason") in UNREACHABLE for link in own):
                continue
            others = [link for link in links if link.get(side) != name]
            fine = [link for link in others if link.get("state") == "Established"]
            state = states.get(name, "")
            if state == "Unknown":
                found.append(
                    f"{name}: neither its peers nor the operator reach it: its node or its "
                    "network is cut, or the whole pod is frozen"
                )
            elif state == "Ready" and (fine or (len(own) > 1 and not others)):
                found.append(
                    f"{name}: every link to it fails"
                    f"{' and other links stand' if fine else ''}, but the operator reaches its "
                    f"launcher: vLLM is frozen there, or the network cuts only the side channel "
                    f"and KV ports between it and the {other} engines"
                )
    if not found and (pairs := [one for one in links if one.get("reason") in UNREACHABLE]):
        first = pairs[0]
        found.append(
            f"{text_of(first.get('decode'))} does not reach {text_of(first.get('prefill'))}: the "
            "engine is frozen, or the network between their nodes is cut"
        )
    return found


def frozen(
    status: Mapping[str, Any], engines: Sequence[Engine], pods: Sequence[Manifest]
) -> dict[str, str]:
    """Return the engines whose process ran before their role was ready last, and is silent now.

    An engine that starts is silent, too. But then its role was not ready since its process began.
    """
    by_engine, found = seen.pods_by_engine(pods), {}
    for engine in engines:
        condition = find_condition(status, CONDITIONS.get(engine.role, ""))
        since = seconds(condition.get("lastTransitionTime"))
        if SILENT not in engine.message or condition.get("status") != Status.FALSE or not since:
            continue
        begun = [_begun(pod) for pod in by_engine.get(engine.name, ())]
        if begun and all(moment and moment < since for moment in begun):
            found[engine.name] = (
                f"{engine.name}: its process was ready, still runs, and answers neither the "
                "operator nor its probes: it is frozen, or its node or its network is cut"
            )
    return found


def _begun(pod: Manifest) -> float | None:
    """Return when the process of a pod's engine began; None if none runs."""
    for container in seen.status_of(pod).get("containerStatuses") or ():
        if container.get("name") == ENGINE_CONTAINER:
            running = as_mapping(as_mapping(container.get("state")).get("running"))
            return seconds(running.get("startedAt"))
    return None
