"""Counts what the agents of an in-memory NIXL hold: nobody has released or closed it."""

from __future__ import annotations

from pdcluster_connector.testing.nixl import Fabric


def open_handles(fabric: Fabric) -> int:
    """Count handles, over all agents."""
    with fabric.lock:
        return sum(len(agent.handles) for agent in fabric.agents.values())


def open_dlists(fabric: Fabric) -> int:
    """Count descriptor lists, over all agents."""
    with fabric.lock:
        return sum(len(agent.dlists) for agent in fabric.agents.values())
