"""What pure functions have returned for one cluster, so that nothing is computed twice.

Most reconciles find nothing new. A plan of a PDCluster at rest takes 0.06 ms with a memo and 2.5 ms
without one; with eight engines of each role, 0.07 ms and 7 ms. The five plans of a start take 8 ms
and 15 ms. A memo cannot change a plan: a result is used again only while all inputs of its function
are equal. Whoever plans the same cluster again hands the same memo over.

Seven results are kept: the observed cluster, the checked spec, the revisions, the desired state,
its children, the hash of each child, and the outcome. Each of them saves a twentieth of a start, or
half of a plan at rest. To keep the views of engines and of pairs as well saved next to nothing.
"""

from collections.abc import Callable, Hashable
from typing import Any, TypeVar, cast

T = TypeVar("T")


class Memo:
    """One result for each name. Inputs and results must not be changed afterwards."""

    __slots__ = ("_held", "_used")

    def __init__(self) -> None:
        self._held: dict[Hashable, tuple[Any, Any]] = {}
        self._used: set[Hashable] = set()

    def get(self, name: Hashable, inputs: tuple[Any, ...], compute: Callable[..., T]) -> T:
        """Return ``compute(*inputs)``, computed now or for equal inputs before.

        Args:
            name: names the function, and the object that it is called for.
            inputs: everything that the result depends on. Comparing them is quick where they are
                the same objects.
        """
        self._used.add(name)
        known, result = self._held.get(name, (None, None))
        if known != inputs:
            result = compute(*inputs)
            self._held[name] = inputs, result
        return cast("T", result)

    def forget_unused(self) -> None:
        """Drop what was not asked for since the last call, such as a child that is gone."""
        for name in self._held.keys() - self._used:
            del self._held[name]
        self._used.clear()
