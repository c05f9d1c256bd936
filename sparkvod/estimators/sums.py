"""Sums over the ranks of a few NumPy numbers, straight over the engine, with no framework between."""

from __future__ import annotations

import numpy as np

from sparkvod.core import basics
from sparkvod.core.handles import Pending
from sparkvod.core.ops import CODES, Sum

_FLOAT64 = CODES["float64"]


class PendingSum:
    """A sum over all ranks that was submitted and may be waited for later.

    Args:
        name: the operation's name, the same on all ranks, none pending with it.
        values: float64 numbers of this rank; copied.
    """

    def __init__(self, name: str, values: np.ndarray) -> None:
        self._values = np.array(values, np.float64, order="C")
        self._pending: Pending | None = None
        if basics.size() > 1 and self._values.size:
            engine, address, count = basics.engine(), self._values.ctypes.data, self._values.size
            handle = engine.allreduce(name, address, address, count, _FLOAT64, Sum, shape=[count])
            self._pending = Pending(engine, handle, None, self._values)

    def result(self) -> np.ndarray:
        """Waits, and returns the sums, float64 in the shape of what was given.

        Raises:
            HorovodInternalError: a rank was lost.
        """
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending.wait()
        return self._values


def across(name: str, values: np.ndarray) -> np.ndarray:
    """Returns the sums over all ranks of float64 ``values``, and waits for them."""
    return PendingSum(name, values).result()
