"""Bounds that several fields of the API share."""

from __future__ import annotations

from pdcluster_operator.api.spec.fields import Text

DNS_SUBDOMAIN = r"^[a-z0-9]([-.a-z0-9]*[a-z0-9])?$"
REPOSITORY = r"^[A-Za-z0-9][A-Za-z0-9_.-]*(/[A-Za-z0-9][A-Za-z0-9_.-]*)?$"

NAME = Text(253, pattern=DNS_SUBDOMAIN, says="a lower-case Kubernetes object name")
CLASS = Text(
    32,
    pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$",
    says="lower-case letters, digits and hyphens",
)
QUEUE = Text(63, pattern=DNS_SUBDOMAIN, says="the name of a LocalQueue")
# A path's parts: anything but "..", which would lead out of the folder. One slash a step keeps
# the pattern linear.
_PART = r"(\.|[^./][^/]*|\.[^./][^/]*|\.\.[^/]+)"

IMAGE = Text(500, pattern=r"^\S+$", says="an image reference without spaces")
RELATIVE = Text(
    1024,
    pattern=rf"^{_PART}(/{_PART}?)*$",
    says="a path inside the volume, without '..' in it",
)
ABSOLUTE = Text(1024, pattern=rf"^(/{_PART}?)+$", says="an absolute path, without '..' in it")
# Words of a command line. One that begins with a hyphen would be read as a flag.
WORD = Text(
    200, pattern=r"^[^-\s]\S*$", says="a word without spaces; it may not begin with a hyphen"
)
EXTENDED_RESOURCE = Text(
    253,
    pattern=r"^[a-z0-9]([-.a-z0-9]*[a-z0-9])?/[A-Za-z0-9]([-._A-Za-z0-9]*[A-Za-z0-9])?$",
    says="an extended resource name, domain/name, e.g. rdma/ib",
)
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
