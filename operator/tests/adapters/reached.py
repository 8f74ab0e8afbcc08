"""How our client of the API server reaches a server of a test."""

from __future__ import annotations

from aiohttp.test_utils import TestServer
from kubernetes.aio import client as kubernetes


def reaching(server: TestServer) -> kubernetes.Configuration:
    """Return the configuration of a client of this server, without TLS."""
    configuration = kubernetes.Configuration()
    configuration.host = str(server.make_url("")).rstrip("/")
    return configuration
