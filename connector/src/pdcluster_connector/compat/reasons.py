"""Why a prefill and a decode engine cannot exchange KV, or why one transfer failed.

Admission errors, handshake refusals, the link table, status conditions and metric labels all use
these names.
"""

from enum import StrEnum


class Reason(StrEnum):
    """A named cause. The member's value is what users see."""

    # Rules: decided by two engines' shapes (compat.check).
    MODEL_MISMATCH = "ModelMismatch"
    KV_DTYPE_MISMATCH = "KVDtypeMismatch"
    KV_SCALES_MISMATCH = "KVScalesMismatch"
    LAYER_MISMATCH = "LayerMismatch"
    LAYOUT_UNSUPPORTED = "LayoutUnsupported"
    BLOCK_INTERIOR_OPAQUE = "BlockInteriorOpaque"
    PREFIX_CACHING_HETEROGENEOUS_BLOCKS = "PrefixCachingHeterogeneousBlocks"
    CONTEXT_PARALLEL_UNSUPPORTED = "ContextParallelUnsupported"
    MEMORY_TYPE_UNSUPPORTED = "MemoryTypeUnsupported"
    SHARD_MISSING = "ShardMissing"
    ENGINE_ID_INCONSISTENT = "EngineIdInconsistent"
    PROTOCOL_VERSION_MISMATCH = "ProtocolVersionMismatch"
    VERSION_UNSUPPORTED = "VersionUnsupported"

    # Observations: what happened on the way.
    SIDE_CHANNEL_UNREACHABLE = "SideChannelUnreachable"
    AUTHENTICATION_FAILED = "AuthenticationFailed"
    BACKEND_ERROR = "BackendError"
    PROBE_CORRUPTED = "ProbeCorrupted"
    TRANSFER_STALLED = "TransferStalled"
    PEER_RESTARTED = "PeerRestarted"
    LEASE_EXPIRED = "LeaseExpired"
    LEASE_LOST = "LeaseLost"
    LEASE_CLAIMED = "LeaseClaimed"
    TICKET_INVALID = "TicketInvalid"
    UNSIGNED = "Unsigned"
    FORGED = "Forged"
    AUDIENCE_MISMATCH = "AudienceMismatch"
    COVERAGE_INCOMPLETE = "CoverageIncomplete"
    CANARY_FAILED = "CanaryFailed"
