"""Which bytes of a peer go where: from two shapes to descriptors.

Which prefill ranks a decode rank reads which heads from: ``rank_pairs.py``. Which blocks of a
request pair: ``block_pairs.py``. Where bytes lie: ``geometry.py``; how they become descriptors:
``descriptors.py``, for each peer ``peer_plan.py``, for each request ``request_descriptors.py``. How
memory is cut for registration: ``slices.py``.
"""

from pdcluster_connector.compat.reasons import Reason


class PlanError(ValueError):
    """Two shards, or one request's blocks, do not map onto each other.

    Attributes:
        reason: the typed cause, for the request's failure or the link.
        message: one sentence with the values that clash.
    """

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(f"{reason.value}: {message}")
        self.reason = reason
        self.message = message


class CoverageError(PlanError):
    """A required token interval that a block list does not hold."""

    def __init__(self, message: str) -> None:
        super().__init__(Reason.COVERAGE_INCOMPLETE, message)
