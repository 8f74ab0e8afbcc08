"""What no single condition shows: an engine that is frozen, or a network that is cut. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

from pdcluster_operator.api.spec.pod_templates import as_mapping
from pdcluster_operator.cli.status_document import Engine
from pdcluster_operator.plan.observed.pods import text_of

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
