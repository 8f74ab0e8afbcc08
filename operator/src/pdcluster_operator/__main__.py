"""``python -m pdcluster_operator``: the same as ``pdcluster``."""

from __future__ import annotations

import sys

from pdcluster_operator.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
