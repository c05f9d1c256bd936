"""What goes into a model and comes out of it, in training, in checks and in prediction alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from sparkvod.estimators.columns import Input, Label, OutputSpec
from sparkvod.estimators.torch.losses import LossTerm


def tensor(array: np.ndarray, dtype: str | None = None) -> torch.Tensor:
    """Returns a tensor over the array's memory; a copy where the array is read-only, or ``dtype`` is bfloat16."""
    made = torch.from_numpy(array if array.flags.writeable else array.copy())
    return made.bfloat16() if dtype == "bfloat16" else made


def inputs(plan: Sequence[Input], columns: Mapping[str, np.ndarray], rows: int) -> list[torch.Tensor]:
    """Returns the model's inputs."""
    return [tensor(item.array(columns, rows), item.dtype) for item in plan]


def array(output: torch.Tensor) -> np.ndarray:
    """Returns an output as an array, bfloat16, which NumPy lacks, as float32."""
    made: np.ndarray = (output.float() if output.dtype == torch.bfloat16 else output).numpy()
    return made


def spec(output: torch.Tensor) -> OutputSpec:
    """Returns what is known of an output whose first dimension is the rows."""
    return OutputSpec(tuple(output.shape[1:]), str(output.dtype).removeprefix("torch."))


def labels(plan: Sequence[Label], columns: Mapping[str, np.ndarray], rows: int) -> list[torch.Tensor]:
    """Returns the labels."""
    return [tensor(item.array(columns, rows), item.dtype) for item in plan]


def outputs(result: Any) -> list[torch.Tensor]:
    """Returns a model's outputs as a list.

    Raises:
        TypeError: the model returned something else than a tensor, or a tuple or list of them.
    """
    found = list(result) if isinstance(result, (tuple, list)) else [result]
    for item in found:
        if not isinstance(item, torch.Tensor):
            raise TypeError(
                f"a model that returns a {type(item).__name__} was found, a tensor, or a tuple or list of "
                "tensors, one per label, "
                "was expected"
            )
    return found


def fit_labels(
    terms: Sequence[LossTerm], plan: Sequence[Label], found: Sequence[torch.Tensor], labels_: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Returns labels in the outputs' shapes, where they have as many numbers and no shape was given for them."""
    return [
        label.reshape(output.shape)
        if item.tail is None
        and label.numel() == output.numel()
        and not (term.takes_classes and label.dtype == torch.int64)
        else label
        for term, item, output, label in zip(terms, plan, found, labels_, strict=True)
    ]
