"""``pdcluster up`` with the tests' small engines in the connector's place, and a lean router."""

from __future__ import annotations

import signal
import sys
from pathlib import Path


def run() -> int:
    from fake_engine import fake_connector
    from lean_router import lean_environment

    from pdcluster_operator.cli import plan
    from pdcluster_operator.cli.main import main
    from pdcluster_operator.local import cluster

    plan.shipped_connector = fake_connector  # type: ignore[misc, assignment]
    cluster.container_environment = lean_environment
    return main(["up", *sys.argv[1:]])


# As the command does before its own imports.
signal.signal(signal.SIGINT, signal.SIG_DFL)
print("begins", flush=True)
sys.path.insert(0, str(Path(__file__).parents[1] / "local"))
sys.exit(run())
