"""The TCP ports of engines and routers."""

from __future__ import annotations

HTTP_PORT = 8000
"""An engine's OpenAI API."""
LAUNCHER_PORT = 5590
ENGINE_METRICS_PORT = 5591
SIDE_CHANNEL_PORT = 5600
"""Of an engine's first data-parallel rank; the next ones have the next ports."""
MASTER_PORT = 29500
"""Where the pods of an engine of several nodes find each other."""
ROUTER_PORT = 8000
"""The OpenAI API for clients."""
ROUTER_METRICS_PORT = 29000
