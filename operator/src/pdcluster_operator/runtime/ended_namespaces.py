"""The namespaces that are being deleted, as far as the API server's refusals have told.

Kubernetes deletes what a namespace holds kind by kind. As long as the PDClusters are there, each
object that is gone looks like one to make again, and each pod that is gone like trouble to tell of.
No watch says that a namespace ends: the operator may not be allowed to read namespaces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable


class EndedNamespaces:
    """Namespaces in which nothing can be created any more.

    A namespace of the same name may come later. So the PDClusters that were there are remembered.

    Args:
        uids: returns the UIDs of the PDClusters that a namespace has now.
    """

    def __init__(self, uids: Callable[[str], Iterable[str]]) -> None:
        self._uids = uids
        self._ended: dict[str, frozenset[str]] = {}

    def add(self, namespace: str) -> None:
        """Take in that a namespace is being deleted. Forget those that are gone."""
        self._ended = {
            name: uids for name, uids in self._ended.items() if uids.intersection(self._uids(name))
        }
        self._ended[namespace] = frozenset(self._uids(namespace))

    def had(self, namespace: str, uid: str) -> bool:
        """Whether a PDCluster goes with its namespace."""
        return uid in self._ended.get(namespace, ())
