"""The best weights of a run, by one of its figures."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_VALUE = struct.Struct("<d")


@dataclass(frozen=True)
class Wanted:
    """What a ``checkpoint_callback`` asks for.

    Attributes:
        monitor: name of the figure, ``val_`` before it for the validation's.
        mode: ``min``, ``max``, or ``auto``: as the metric knows itself.
        threshold: what has to be bettered from the beginning, or None.
    """

    monitor: str
    mode: str = "auto"
    threshold: float | None = None


def falls(wanted: Wanted, metrics: Sequence[Any]) -> bool:
    """Returns whether a smaller figure is better.

    Args:
        wanted: which figure.
        metrics: the model's.

    Raises:
        ValueError: that is not known.
    """
    name = wanted.monitor.removeprefix("val_")
    if wanted.mode in ("min", "max"):
        return wanted.mode == "min"
    if name.endswith("loss"):
        return True
    for metric in (each for group in metrics for each in getattr(group, "metrics", [group])):
        way = getattr(metric, "_direction", None)
        if way is not None and (name == metric.name or name.endswith(f"_{metric.name}")):
            return bool(way == "down")
    raise ValueError(
        f"checkpoint_callback with monitor={wanted.monitor!r} and mode='auto' was found, and that metric does not say "
        "whether more of it is better; pass mode='max' or mode='min'"
    )


def logs_of(record: dict[str, Any]) -> dict[str, Any]:
    """Returns an epoch's figures by the names that Keras's callbacks know."""
    validation = record.get("validation") or {}
    return {**record["train"], **{f"val_{name}": value for name, value in validation.items()}}


class Best:
    """Keeps the best weights.

    Args:
        wanted: by which figure.
        metrics: the model's.

    Attributes:
        weights: the best so far, on rank 0; empty before there are any.
    """

    def __init__(self, wanted: Wanted, metrics: Sequence[Any]) -> None:
        self.wanted, self._falls = wanted, falls(wanted, metrics)
        self.value = wanted.threshold if wanted.threshold is not None else (math.inf if self._falls else -math.inf)
        self.weights = b""

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
        if not (value < self.value if self._falls else value > self.value):
            return False
        self.value = value
        return True

    def keep(self, weights: bytes) -> None:
        """Takes the weights of that epoch."""
        self.weights = weights

    def to_bytes(self) -> bytes:
        """Returns what a checkpoint holds."""
        return _VALUE.pack(self.value) + self.weights

    def load(self, content: bytes) -> None:
        """Takes what :meth:`to_bytes` returned."""
        (self.value,), self.weights = _VALUE.unpack_from(content), content[_VALUE.size :]
