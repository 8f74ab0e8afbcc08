"""The namespaces that are being deleted, as far as the API server's refusals have told.

Kubernetes deletes what a namespace holds kind by kind. As long as the PDClusters are there, each
object that is gone looks like one to make again, and each pod that is gone like trouble to tell of.
No watch says that a namespace ends: the operator may not be allowed to read namespaces.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

BELIEVED_SECONDS = 240.0
"""How long a refusal is believed. One request is then made again, and refused again if need be.

If the answer came late, the namespace may be gone, and the PDClusters may be those of a new one of
its name. The time is shorter than that after which each PDCluster is looked at anew.
"""


class _Ended(NamedTuple):
    uids: frozenset[str]
    since: float


class EndedNamespaces:
    """Namespaces in which nothing can be created any more.

    A namespace of the same name may come later. So the PDClusters that were there are remembered.

    Args:
        uids: returns the UIDs of the PDClusters that a namespace has now.
        clock: seconds that only grow.
    """

    def __init__(
        self, uids: Callable[[str], Iterable[str]], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._uids = uids
        self._clock = clock
        self._ended: dict[str, _Ended] = {}

    def add(self, namespace: str, uid: str) -> None:
        """Take in that a namespace is being deleted. Forget what is not believed any more.

        Args:
            uid: of the PDCluster that was looked at. If it is gone, what was refused may have been
                of a namespace of the same name, which is gone, too.
        """
        self._ended = {name: one for name, one in self._ended.items() if self._is_believed(one)}
        there = frozenset(self._uids(namespace))
        if uid in there:
            self._ended[namespace] = _Ended(there, self._clock())

    def had(self, namespace: str, uid: str) -> bool:
        """Whether a PDCluster goes with its namespace."""
        ended = self._ended.get(namespace)
        return ended is not None and uid in ended.uids and self._is_believed(ended)

    def _is_believed(self, ended: _Ended) -> bool:
        return self._clock() - ended.since < BELIEVED_SECONDS
