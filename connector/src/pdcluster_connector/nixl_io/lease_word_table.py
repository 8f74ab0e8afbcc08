"""The lease words of one prefill rank: what proves to a reader that a lease still stood.

Decode reads a request's word after its data has landed. If it is the ticket's token, then no
block of the lease was written before the data had been read. That holds because of the order in
which vLLM calls the two roles:

* The scheduler mints the token in ``update_state_after_alloc`` and the ticket leaves at the end of
  a later ``update_from_output``. That step's orders have the word in them, and its output is there
  only after every rank has carried them out: no decode engine can ask for a word too early.
* A lease of which a ticket is out ends on the scheduler side alone (release, expiry). Its blocks
  stay vLLM's until every rank has reported the request as sent. The same step's orders say
  "clear the word" and "report as sent", and a rank does the first before the second. So the word is
  0 on every rank before the scheduler may give a block to another request, and the worker writes
  that block one step later at the earliest, with asynchronous scheduling two.
* A request that is preempted or aborted while it computes loses its blocks at once. No ticket of
  it is out. Its word is replaced or cleared all the same.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from pdcluster_connector.nixl_io.interface import MemoryRange
from pdcluster_connector.plan.descriptors import Rows
from pdcluster_connector.protocol.lease import CLEARED, SLOTS
from pdcluster_connector.protocol.messages import LeaseWords

WORD_BYTES = 8


def word_rows(address: int, slots: int) -> Rows:
    """Return a strided descriptor list of ``slots`` lease words."""
    return np.array([[address, WORD_BYTES, 0, WORD_BYTES, slots]], np.uint64)


class LeaseWordTable:
    """Host memory with one 64-bit word a slot; 0 in a slot without a lease."""

    def __init__(self, slots: int = SLOTS) -> None:
        self._words = np.zeros(slots, np.uint64)

    @property
    def memory(self) -> MemoryRange:
        """Return the range to register."""
        return MemoryRange(self._words.ctypes.data, self._words.nbytes)

    @property
    def place(self) -> LeaseWords:
        """Return what peers need to read the words."""
        return LeaseWords(address=self._words.ctypes.data, slots=len(self._words))

    def write(self, words: Mapping[int, int]) -> None:
        """Write words by slot."""
        for slot, word in words.items():
            self._words[slot] = word

    def clear(self) -> None:
        """End every lease: this engine stops."""
        self._words[:] = CLEARED
