"""Containers of tests start the real router in a tenth of the time; see ``bin/vllm-router``."""

from __future__ import annotations

from pathlib import Path

from pdcluster_operator.local.cluster import container_environment

PROGRAMS = Path(__file__).with_name("bin")


def lean_environment() -> dict[str, str]:
    """What containers of local mode inherit, with our ``vllm-router`` first on PATH."""
    environment = container_environment()
    return {**environment, "PATH": f"{PROGRAMS}:{environment['PATH']}"}
