"""Which values of a label a loss takes, held against what the preparing job noted of them."""

from __future__ import annotations

from dataclasses import dataclass

from sparkvod.data.ranges import Range
from sparkvod.errors import DataError


@dataclass(frozen=True)
class Takes:
    """Which values a loss takes.

    Attributes:
        loss: its name.
        classes: number of the model's outputs, of which a label names one, from 0; None: numbers from 0 to 1.
        ignored: the label that the loss passes over.
    """

    loss: str
    classes: int | None = None
    ignored: int | None = None


def check(column: str, found: Range, takes: Takes) -> None:
    """Refuses a label with values that its loss cannot take.

    Args:
        column: name of the label.
        found: its values, as far as they are known.
        takes: those that the loss takes.

    Raises:
        DataError: there are others.
    """
    values = [value for value in found.ends if value != takes.ignored]
    if takes.classes is not None and found.whole is False:
        raise DataError(
            f"label {column!r} has fractional values{_shown(values)}, {takes.loss} needs whole class numbers; number "
            "the classes from 0 (for example with StringIndexer), or take a loss for numbers, such as the squared error"
        )
    highest = 1 if takes.classes is None else takes.classes - 1
    if not values or (values[0] >= 0 and values[-1] <= highest):
        return
    if takes.classes is None:
        raise DataError(
            f"label {column!r} has values{_shown(values)}, {takes.loss} needs numbers from 0 to 1; make it so, or take "
            "another loss (cross entropy for several classes, squared error for any numbers)"
        )
    raise DataError(
        f"label {column!r} has values{_shown(values)}, the model has {takes.classes} outputs; {takes.loss} needs one "
        f"output per class and classes numbered from 0 to {highest}: give the model's last layer more outputs, or "
        "number the classes from 0"
    )


def _shown(values: list[float]) -> str:
    return f" {values[0]:.12g}..{values[-1]:.12g}" if values else ""
