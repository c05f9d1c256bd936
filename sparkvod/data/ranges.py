"""What is known of a column's values without keeping them: their ends, and whether they are whole numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Range:
    """Values of a column.

    Attributes:
        ends: the two lowest and the two highest values, ascending, each once; from footers the lowest and the highest.
            Two, because one may be a mark that a loss passes over, such as -100.
        whole: whether all are whole numbers; None when that is not known.
    """

    ends: tuple[float, ...]
    whole: bool | None

    def merged(self, other: Range) -> Range:
        """Returns what is known of both columns' values together."""
        if self.whole is False or other.whole is False:
            whole: bool | None = False
        else:
            whole = None if self.whole is None or other.whole is None else True
        return Range(_outer({*self.ends, *other.ends}), whole)

    def to_json(self) -> dict[str, Any]:
        """Returns what ``json.dumps`` takes."""
        return {"ends": list(self.ends), "whole": self.whole}

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> Range:
        """Returns the range that :meth:`to_json` was called on."""
        return Range(tuple(value["ends"]), value["whole"])


def of_values(values: np.ndarray) -> Range:
    """Returns the range of an array without NaN, of any shape."""
    if not values.size:
        return Range((), True)
    if values.dtype == bool:
        values = values.view(np.uint8)
    low, high = values.min(), values.max()
    ends = {low.item(), high.item()}
    inner = values[(values > low) & (values < high)]
    if inner.size:
        ends |= {inner.min().item(), inner.max().item()}
    return Range(_outer(ends), values.dtype.kind != "f" or bool((values == np.floor(values)).all()))


def of_statistics(low: Any, high: Any) -> Range | None:
    """Returns the range between the ends that a Parquet footer tells; None when these are no numbers."""
    ends = {value + 0 for value in (low, high) if isinstance(value, (bool, int, float)) and not math.isnan(value)}
    if not ends:
        return None
    if all(isinstance(value, int) for value in ends):
        return Range(_outer(ends), True)
    return Range(_outer(ends), False if any(math.isfinite(v) and v != math.floor(v) for v in ends) else None)


def merged(*parts: Mapping[str, Range]) -> dict[str, Range]:
    """Returns the ranges by column of several parts of one data set."""
    found: dict[str, Range] = {}
    for part in parts:
        for name, values in part.items():
            found[name] = found[name].merged(values) if name in found else values
    return found


def _outer(values: set[Any]) -> tuple[float, ...]:
    ordered = sorted(values)
    return tuple(ordered if len(ordered) <= 4 else ordered[:2] + ordered[-2:])
