"""Settings for the connector's tests."""

from __future__ import annotations

import os

# UCX may choose any network device of the machine. One that another test makes goes away again.
os.environ.setdefault("UCX_NET_DEVICES", "lo")
