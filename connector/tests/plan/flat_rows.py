"""Strided rows as a plain list of descriptors, for the tests of this folder."""

from __future__ import annotations

import numpy as np

from pdcluster_connector.plan.descriptors import Rows


def descriptors(rows: Rows) -> Rows:
    """Return each descriptor of ``rows`` as (address, length, device), row after row."""
    flat = [
        (address + k * stride, length, device)
        for address, length, device, stride, count in rows.tolist()
        for k in range(count)
    ]
    return np.array(flat, np.uint64).reshape(-1, 3)
