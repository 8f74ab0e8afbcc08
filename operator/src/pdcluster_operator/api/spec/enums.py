"""The closed sets of values in the API."""

from enum import StrEnum


class Role(StrEnum):
    """What an engine is for."""

    PREFILL = "prefill"
    DECODE = "decode"


class Switch(StrEnum):
    """On or off. A third value may come later."""

    ENABLED = "Enabled"
    DISABLED = "Disabled"


class TlsMode(StrEnum):
    """Whether engines speak TLS, and where their certificates come from."""

    ENABLED = "Enabled"
    MOUNTED = "Mounted"
    DISABLED = "Disabled"


class Certificates(StrEnum):
    """The source of the engines' certificates, in the status."""

    OPERATOR = "Operator"
    MOUNTED = "Mounted"
    NONE = "None"
    MIXED = "Mixed"
    UNKNOWN = "Unknown"


class Device(StrEnum):
    """Where KV lives: in GPU memory or in host memory."""

    CUDA = "CUDA"
    CPU = "CPU"


class Backend(StrEnum):
    """NIXL's transport backends in the schema. Not all of them can carry KV."""

    UCX = "UCX"
    GDS = "GDS"


class LoadFailurePolicy(StrEnum):
    """What happens to a request whose KV did not arrive."""

    FAIL = "Fail"
    RECOMPUTE = "Recompute"


class ConnectorSource(StrEnum):
    """Where the connector's code comes from."""

    BUNDLED = "Bundled"
    IMAGE = "Image"


class RouterPolicy(StrEnum):
    """How the router picks engines."""

    ROUND_ROBIN = "RoundRobin"
    RANDOM = "Random"
    CACHE_AWARE = "CacheAware"
    POWER_OF_TWO = "PowerOfTwo"
    CONSISTENT_HASH = "ConsistentHash"


class SelectorOperator(StrEnum):
    """How a label is compared with values."""

    IN = "In"
    NOT_IN = "NotIn"
    EXISTS = "Exists"
    DOES_NOT_EXIST = "DoesNotExist"


class Visibility(StrEnum):
    """Whether clients see something."""

    HIDDEN = "Hidden"
    SHOWN = "Shown"


class RolloutType(StrEnum):
    """How engines are replaced when their revision changes."""

    SURGE = "Surge"
    REPLACE = "Replace"
    RECREATE = "Recreate"
