"""Builds the connector's zipapp once, in a process of its own: the operator never imports it."""

import hashlib
import subprocess
import sys
import tempfile
from pathlib import Path

from pdcluster_operator.plan.types import ConnectorBundle

MODULE = "pdcluster_connector.launcher.bundle"


class BundleError(Exception):
    """The connector could not be packed; the message says why."""


def build_connector() -> ConnectorBundle:
    """Return the connector that is installed beside the operator; raises BundleError."""
    with tempfile.TemporaryDirectory(prefix="pdcluster-") as folder:
        out = Path(folder, "connector.pyz")
        done = subprocess.run(
            [sys.executable, "-m", MODULE, str(out)],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        if done.returncode != 0 or not out.exists():
            last = (done.stderr.strip().splitlines() or ["no error was printed"])[-1]
            raise BundleError(
                f"the connector could not be packed: {last}; "
                "install pdcluster with its connector beside the operator"
            )
        data = out.read_bytes()
    return ConnectorBundle(hashlib.sha256(data).hexdigest(), data)
