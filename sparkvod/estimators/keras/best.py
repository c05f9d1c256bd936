"""The best weights of a run, by one of its figures."""

from __future__ import annotations

import math
import pickle
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Wanted:
    """What a ``checkpoint_callback`` asks for.

    Attributes:
        monitor: name of the figure, ``val_`` before it for the validation's.
        falls: whether smaller is better.
        threshold: what has to be bettered from the beginning, or None.
    """

    monitor: str
    falls: bool
    threshold: float | None = None


def logs_of(record: dict[str, Any]) -> dict[str, Any]:
    """Returns an epoch's figures by the names that Keras's callbacks know."""
    validation = record.get("validation") or {}
    return {**record["train"], **{f"val_{name}": value for name, value in validation.items()}}


class Best:
    """Keeps the best weights.

    Args:
        wanted: by which figure.

    Attributes:
        weights: the best so far, on rank 0; empty before there are any.
    """

    def __init__(self, wanted: Wanted) -> None:
        self.wanted = wanted
        self.value = wanted.threshold if wanted.threshold is not None else (math.inf if wanted.falls else -math.inf)
        self.weights = b""

    @classmethod
    def of(cls, wanted: Wanted | None) -> Best | None:
        """Returns one, or None where nothing is wanted."""
        return None if wanted is None else cls(wanted)

    def improved(self, record: dict[str, Any]) -> bool:
        """Tells, alike on all ranks, whether an epoch was better than all before.

        Raises:
            ValueError: there is no such figure.
        """
        logs = logs_of(record)
        if self.wanted.monitor not in logs:
            raise ValueError(
                f"checkpoint_callback with monitor={self.wanted.monitor!r} was found, one of {', '.join(sorted(logs))} "
                "was expected"
            )
        value = float(logs[self.wanted.monitor])
        if not (value < self.value if self.wanted.falls else value > self.value):
            return False
        self.value = value
        return True

    def keep(self, weights: bytes) -> None:
        """Takes the weights of that epoch."""
        self.weights = weights

    def to_bytes(self) -> bytes:
        """Returns what a checkpoint holds."""
        return pickle.dumps((self.value, self.weights))

    def load(self, content: bytes) -> None:
        """Takes what :meth:`to_bytes` returned."""
        self.value, self.weights = pickle.loads(content)
