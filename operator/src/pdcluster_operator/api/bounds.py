"""Bounds that several fields of the API share."""

from __future__ import annotations

from .fields import Text

DNS_SUBDOMAIN = r"^[a-z0-9]([-.a-z0-9]*[a-z0-9])?$"
REPOSITORY = r"^[A-Za-z0-9][A-Za-z0-9_.-]*(/[A-Za-z0-9][A-Za-z0-9_.-]*)?$"

NAME = Text(253, pattern=DNS_SUBDOMAIN, says="a lower-case Kubernetes object name")
IMAGE = Text(500, pattern=r"^\S+$", says="an image reference without spaces")
RELATIVE = Text(1024, pattern=r"^[^/].*$", says="a path relative to the volume's root")
