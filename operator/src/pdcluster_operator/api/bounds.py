"""Bounds that several fields of the API share."""

from __future__ import annotations

from .fields import Text

DNS_SUBDOMAIN = r"^[a-z0-9]([-.a-z0-9]*[a-z0-9])?$"
REPOSITORY = r"^[A-Za-z0-9][A-Za-z0-9_.-]*(/[A-Za-z0-9][A-Za-z0-9_.-]*)?$"

NAME = Text(253, pattern=DNS_SUBDOMAIN, says="a lower-case Kubernetes object name")
IMAGE = Text(500, pattern=r"^\S+$", says="an image reference without spaces")
RELATIVE = Text(1024, pattern=r"^[^/].*$", says="a path relative to the volume's root")
LABEL_KEY = Text(
    316,
    pattern=r"^([a-z0-9]([-.a-z0-9]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$",
    says="the key of a label",
)
LABEL_VALUE = Text(
    63,
    shortest=0,
    pattern=r"^([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?$",
    says="the value of a label",
)
CIDR = Text(64, pattern=r"^[0-9A-Fa-f.:]+/[0-9]{1,3}$", says="a CIDR, e.g. 10.0.0.0/8")
