"""Runs a model once on the driver, on a few rows of zeros, to see that data, model, loss and labels fit together."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from sparkvod import log
from sparkvod.errors import DataError
from sparkvod.estimators import trying
from sparkvod.estimators.columns import ColumnLike, Input, Label, OutputSpec
from sparkvod.estimators.torch import model_io
from sparkvod.estimators.torch.losses import LossTerm
from sparkvod.estimators.trying import ROWS

_LOG = log.get("estimators")

_FOR_ONE = " (for two classes and one output per row, BCEWithLogitsLoss is the loss)"


def default_dtype(model: nn.Module) -> str:
    """Returns the dtype of the model's first floating-point parameter, float32 if it has none."""
    for parameter in model.parameters():
        if parameter.dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
            return str(parameter.dtype).removeprefix("torch.")
    return "float32"


def output_specs(
    model: nn.Module,
    inputs: Sequence[Input],
    columns: Sequence[ColumnLike],
    terms: Sequence[LossTerm] | None,
    tails: Sequence[tuple[int, ...] | None],
    weighted: bool,
    metrics: Sequence[Any] = (),
) -> tuple[list[OutputSpec], tuple[Label, ...]]:
    """Returns the model's outputs, one per label, and how label columns make labels.

    Args:
        model: a model that may be used up: in training it would be another copy.
        inputs: how the feature columns make its inputs.
        columns: the label columns.
        terms: the losses, one per label; None when they are made on the workers.
        tails: the labels' shapes without the rows, None where none was given.
        weighted: whether there are sample weights.
        metrics: the groups of metrics; they may be used up too.

    Raises:
        DataError: the model cannot take the inputs, or what it returns fits neither labels nor losses.
    """
    outputs = _forward_zeros(model, inputs)
    trying.require_one_per_label(len(outputs), columns, "return a tuple with one tensor per label")
    for output, column in zip(outputs, columns, strict=True):
        trying.require_rows(output.shape, f" for label {column.name!r}")
    found = [model_io.spec(output) for output in outputs]
    default = default_dtype(model)
    if terms is None:
        return found, tuple(Label(c.name, tail, default) for c, tail in zip(columns, tails, strict=True))
    labels = []
    for column, term, output, tail in zip(columns, terms, outputs, tails, strict=True):
        labels.append(_label(column, term, output, tail, default))
        if labels[-1].is_mean:
            term.take_as_mean()
        if weighted and not term.takes_weights:
            raise DataError(
                f"the loss {term.name} returns one number per batch, and sample_weight_col needs one per row: use a "
                "torch.nn loss as it is, or a function with a keyword `reduction` that returns a number per row for "
                "reduction='none'"
            )
        for group in metrics:
            metric = group[len(labels) - 1] if isinstance(group, (list, tuple)) else group
            _try_metric(metric, term, labels[-1], output, column)
    return found, tuple(labels)


def _forward_zeros(model: nn.Module, inputs: Sequence[Input]) -> list[torch.Tensor]:
    try:
        result = forward(model, inputs, trying.zeros(inputs))
    except Exception as error:
        raise trying.cannot_take(inputs, error) from error
    return model_io.outputs(result)


def forward(model: nn.Module, inputs: Sequence[Input], arrays: Sequence[np.ndarray]) -> Any:
    """Returns what the model makes of these inputs in evaluation mode; it is left in the modes that it was in."""
    tensors = [model_io.tensor(array, item.dtype) for array, item in zip(arrays, inputs, strict=True)]
    modes = {module: module.training for module in model.modules()}
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            return model.eval()(*tensors)
    finally:
        for module, training in modes.items():
            module.training = training


def _label(
    column: ColumnLike, term: LossTerm, output: torch.Tensor, tail: tuple[int, ...] | None, default: str
) -> Label:
    """Returns how a column makes the label that its loss takes, tried on zeros."""
    width = math.prod(column.shape)
    shape = column.shape if tail is None else tail
    same = width * ROWS == output.numel()
    if term.pairs and not same:
        raise _unfit(column, output, shape, term, "as many numbers in both were expected")
    wants_classes = term.takes_classes and (not same or output.ndim == 1)
    if wants_classes and output.ndim < 2:
        raise _unfit(column, output, shape, term, f"one output per class was expected{_FOR_ONE}")
    if term.takes_classes and output.shape[1:2] == (1,):
        # As class probabilities of a single class this would pass, and the loss would be 0 whatever the model says.
        raise _unfit(column, output, shape, term, f"one output per class, two at least, was expected{_FOR_ONE}")
    if wants_classes:
        kinds = ["int64"]
    elif term.takes_classes or term.pairs or np.dtype(column.dtype).kind not in "iu":
        kinds = [default]
    else:
        kinds = [default, "int64"]  # a user's own loss: floating-point numbers, as the peer has it, if it takes them
    for number, kind in enumerate(kinds):
        label = Label(column.name, tail, kind)
        try:
            is_mean = _try(term, label, output, column)
        except Exception as error:  # a user's own loss raises anything
            if number + 1 < len(kinds):
                continue  # it may take the other kind of numbers, and if not, its words for that are told
            unusable = isinstance(error, _UnusableLossError)
            words = str(error) if unusable else f"{type(error).__name__}: {error}"
            said = _unfit(column, output, shape, term, f"the loss failed on them ({words})")
            raise (said if unusable else trying.CannotTakeRows(str(said))) from error
        return replace(label, is_mean=is_mean)
    raise AssertionError("unreachable")


class _UnusableLossError(ValueError):
    """What a loss returned is of no use, whatever the rows."""


def _try(term: LossTerm, label: Label, output: torch.Tensor, column: ColumnLike) -> bool:
    """Tries a loss forward and backward, and returns whether it makes one number of the batch whatever it is asked."""
    is_mean = False
    for rows in _row_counts(label, output, column):
        made = _of_rows(output, rows)
        fitted = _zeros(term, label, made, column)
        with torch.enable_grad():
            leaf = made.detach().clone().requires_grad_(output.is_floating_point())
            value = copy.copy(term).loss(leaf, fitted)
        if not isinstance(value, torch.Tensor):
            raise _UnusableLossError(f"it returned a {type(value).__name__}: return a tensor")
        if value.ndim and value.shape[0] != rows:
            raise _UnusableLossError(
                f"it returned the shape {list(value.shape)} for {rows} rows, one number, or one per row, was expected"
            )
        if leaf.requires_grad and not value.requires_grad:
            raise _UnusableLossError("its result does not depend on the output")
        if value.requires_grad:
            value.sum().backward()
        is_mean |= copy.copy(term).reduces_itself(made.detach().clone(), fitted)
    return is_mean


def _row_counts(label: Label, output: torch.Tensor, column: ColumnLike) -> list[int]:
    return trying.row_counts(output.shape[1:], column.shape, label.tail or ())


def _of_rows(output: torch.Tensor, rows: int) -> torch.Tensor:
    """Returns an output of as many rows: its own over and over."""
    return output[torch.arange(rows) % ROWS]


def _zeros(term: LossTerm, label: Label, output: torch.Tensor, column: ColumnLike) -> torch.Tensor:
    rows = output.shape[0]
    made = model_io.labels([label], {column.name: trying.nothing(column, rows)}, rows)
    return model_io.fit_labels([term], [label], [output], made)[0]


def _try_metric(metric: Any, term: LossTerm, label: Label, output: torch.Tensor, column: ColumnLike) -> None:
    """Refuses a metric that does not make one number; one that cannot take zeros may well take data."""
    made = _of_rows(output.detach(), _row_counts(label, output, column)[0])
    try:
        with torch.no_grad():
            value = metric(made, _zeros(term, label, made, column))
    except Exception as error:  # it may well take data: if not, the worker raises it
        _LOG.debug("the metric for label %r failed on rows of zeros", column.name, exc_info=True)
        _refuse_broadcasting(metric, term, label, output, column, error)
        return
    try:
        float(value)
    except Exception as error:
        shape = f" of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else ""
        raise DataError(
            f"a metric ({_name(metric)}) that returned a "
            f"{type(value).__name__}{shape} was found for label {column.name!r}, one number for the batch was "
            "expected; return the mean over the rows"
        ) from error


def _refuse_broadcasting(
    metric: Any, term: LossTerm, label: Label, output: torch.Tensor, column: ColumnLike, error: Exception
) -> None:
    """Refuses a metric that takes as many rows as the output has numbers, and no others."""
    width = output.shape[-1]
    if output.ndim != 2 or width < 2:
        return
    square = _of_rows(output.detach(), width)
    try:
        with torch.no_grad():
            metric(square, _zeros(term, label, square, column))
    except Exception:  # so it is not the number of rows that it fails on
        return
    raise DataError(
        f"a metric ({_name(metric)}) that fails on label {column.name!r} unless the rows are as many as the output "
        f"has numbers ({width}) was found ({type(error).__name__}: {error}), one that compares them row by row was "
        "expected; change the metric, label_shapes, or the model's last layer"
    ) from error


def _name(metric: Any) -> str:
    return str(getattr(metric, "__qualname__", type(metric).__name__))


def index_hint(model: nn.Module, inputs: Sequence[Input], tensors: Sequence[torch.Tensor]) -> str:
    """Returns what to say of an index that is out of range: what the model was given, and what it has."""
    given = [
        f"{', '.join(item.columns)} with values {int(tensor.min())}..{int(tensor.max())}"
        for item, tensor in zip(inputs, tensors, strict=True)
        if tensor.numel() and not tensor.is_floating_point()
    ]
    tables = [
        f"{name or type(module).__name__} has {module.num_embeddings} rows"
        for name, module in model.named_modules()
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag))
    ]
    return (
        f"this batch's inputs of whole numbers are {'; '.join(given) or 'none'}, and of the model's embeddings "
        f"{'; '.join(tables) or 'there are none'}: indices from 0 to the rows - 1 were expected; encode the column "
        "anew, or make the embedding larger"
    )


def _unfit(column: ColumnLike, output: torch.Tensor, shape: Sequence[int], term: LossTerm, expected: str) -> DataError:
    return trying.unfit(column, output.shape[1:], shape, term.name, expected)
