"""Losses as sums over rows, so that ranks with different numbers of rows add up to the loss of the whole batch."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

#: Losses whose label is the index of a class, unless it has the output's shape.
_CLASS_MODULES = (nn.CrossEntropyLoss, nn.NLLLoss, nn.MultiMarginLoss)
_CLASS_FUNCTIONS = (F.cross_entropy, F.nll_loss, F.multi_margin_loss)
#: Those whose mean is weighted by class, and leaves out one value of the label: -100 unless told otherwise.
_WEIGHTED_MODULES = (nn.CrossEntropyLoss, nn.NLLLoss)
_WEIGHTED_FUNCTIONS = (F.cross_entropy, F.nll_loss)
_IGNORED = -100
#: Losses whose label is a probability.
_BINARY_MODULES = (nn.BCELoss, nn.BCEWithLogitsLoss)
_BINARY_FUNCTIONS = (F.binary_cross_entropy, F.binary_cross_entropy_with_logits)
#: Losses that compare number by number: output and label must have one shape, broadcasting would be a mistake.
_PAIRED_MODULES = (
    nn.MSELoss,
    nn.L1Loss,
    nn.SmoothL1Loss,
    nn.HuberLoss,
    nn.BCELoss,
    nn.BCEWithLogitsLoss,
    nn.PoissonNLLLoss,
    nn.SoftMarginLoss,
    nn.MultiLabelSoftMarginLoss,
    nn.KLDivLoss,
)
_PAIRED_FUNCTIONS = (
    F.mse_loss,
    F.l1_loss,
    F.smooth_l1_loss,
    F.huber_loss,
    F.binary_cross_entropy,
    F.binary_cross_entropy_with_logits,
    F.poisson_nll_loss,
    F.soft_margin_loss,
    F.kl_div,
)


class LossTerm:
    """One label's loss.

    Args:
        loss: ``f(output, label)``: a module with a ``reduction``, or a function that returns a mean over rows or one
            number per row.

    Attributes:
        takes_classes: whether its label is the index of a class.
        is_binary: whether its label is a probability.
        skipped: the label that it passes over.
    """

    def __init__(self, loss: Callable[..., Any]) -> None:
        self.loss = loss
        self.reduction = _reduction(loss)
        self._per_element = _without_reduction(loss)
        inner: Any = loss.func if isinstance(loss, functools.partial) else loss
        self.takes_classes = isinstance(inner, _CLASS_MODULES) or inner in _CLASS_FUNCTIONS
        self.pairs = isinstance(inner, _PAIRED_MODULES) or inner in _PAIRED_FUNCTIONS
        self.is_binary = isinstance(inner, _BINARY_MODULES) or inner in _BINARY_FUNCTIONS
        is_weighted = isinstance(inner, _WEIGHTED_MODULES) or inner in _WEIGHTED_FUNCTIONS
        self._class_weights: torch.Tensor | None = None
        self._ignored: int | None = None
        self.skipped: int | None = None
        if is_weighted:
            given = loss.keywords if isinstance(loss, functools.partial) else {}
            self.skipped = int(given.get("ignore_index", getattr(inner, "ignore_index", _IGNORED)))
            if self.reduction == "mean":
                self._class_weights = given.get("weight", getattr(inner, "weight", None))
                self._ignored = self.skipped

    @property
    def name(self) -> str:
        """The loss's name, for messages."""
        inner: Any = self.loss.func if isinstance(self.loss, functools.partial) else self.loss
        return str(getattr(inner, "__name__", type(inner).__name__))

    @property
    def normalises_by_rows(self) -> bool:
        """Whether, without sample weights, the mean's denominator is the number of rows."""
        return self._ignored is None

    @property
    def divides(self) -> bool:
        """Whether the loss is a mean; False for ``reduction="sum"``, which is the sum over the rows of all ranks."""
        return self.reduction != "sum"

    def reduces_itself(self, output: torch.Tensor, label: torch.Tensor) -> bool:
        """Returns whether it makes one number of the batch though it is asked not to, as a subclass's own mean() does.

        Args:
            output: of a number of rows that is none of the shapes' other dimensions.
            label: for it.
        """
        if self._per_element is None:
            return True
        try:
            found = self._per_element(output, label)
            return bool(found.ndim == 0 or found.shape[0] != output.shape[0])
        except Exception:  # a user's own loss raises anything where it gets values that it did not expect
            return True

    def take_as_mean(self) -> None:
        """Takes what it returns as the mean over the rows of the batch: its weights of classes are its own business."""
        self._per_element = self._class_weights = self._ignored = None

    @property
    def takes_weights(self) -> bool:
        """Whether it can return one number per row, which sample weights need."""
        return self._per_element is not None

    def normaliser(self, label: torch.Tensor, weights: torch.Tensor | None) -> float:
        """Returns the sum of the rows' weights, by which the sum over all ranks is divided."""
        rows = label.shape[0]
        if self.normalises_by_rows or label.is_floating_point():
            return float(rows if weights is None else weights.sum())
        by_class = self._class_factors(label)
        return float((by_class if weights is None else by_class * weights.view(-1, *[1] * (label.ndim - 1))).sum())

    def total(self, output: torch.Tensor, label: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
        """Returns the differentiable sum over this rank's rows of the rows' weights times their losses."""
        if weights is None and self.normalises_by_rows:
            value = _wide(self.loss(output, label))
            if self.reduction == "sum":
                return value
            return value * label.shape[0] if value.ndim == 0 else _by_row(value).sum()
        assert self._per_element is not None
        elements = _wide(self._per_element(output, label))
        if not self.normalises_by_rows and not label.is_floating_point():
            rows = elements.reshape(elements.shape[0], -1).sum(1)  # class weights are in the elements already
        elif self.reduction in ("sum", "batchmean"):
            rows = elements.reshape(elements.shape[0], -1).sum(1)
        else:
            rows = _by_row(elements)
        return rows.sum() if weights is None else (rows * weights.to(rows.dtype)).sum()

    def _class_factors(self, label: torch.Tensor) -> torch.Tensor:
        valid = torch.ne(label, _IGNORED if self._ignored is None else self._ignored)
        if self._class_weights is None:
            return valid.double()
        return torch.where(valid, self._class_weights[label.clamp(min=0) * valid].double(), 0.0)


def _wide(values: torch.Tensor) -> torch.Tensor:
    """Returns half precision as float32: a sum over rows would soon be out of its range, or its digits."""
    return values.float() if values.dtype in (torch.float16, torch.bfloat16) else values


def _reduction(loss: Callable[..., Any]) -> str:
    """Returns how a loss makes one number of many: a module's attribute, or what a function's keyword is by default."""
    found = getattr(loss, "reduction", None)
    if found is None and not isinstance(loss, nn.Module):
        try:
            parameter = inspect.signature(loss).parameters.get("reduction")
        except (TypeError, ValueError):
            parameter = None
        found = parameter.default if parameter is not None else None
    return found if isinstance(found, str) else "mean"


def _by_row(values: torch.Tensor) -> torch.Tensor:
    return values.reshape(values.shape[0], -1).mean(1)


def _without_reduction(loss: Callable[..., Any]) -> Callable[..., Any] | None:
    if isinstance(loss, nn.Module) and hasattr(loss, "reduction"):
        per_element = copy.copy(loss)
        per_element.reduction = "none"  # type: ignore[assignment]
        return per_element
    if isinstance(loss, nn.Module):
        return None
    try:
        parameters = inspect.signature(loss).parameters
    except (TypeError, ValueError):
        return None
    return functools.partial(loss, reduction="none") if "reduction" in parameters else None


class Loss:
    """The losses of all labels together: what a training step minimises.

    Calling it returns this rank's share of the step's loss, so that the *sum* of the ranks' gradients is the gradient
    of the whole batch's loss. After a call, ``sums`` holds the terms' sums over this rank's rows.

    Attributes:
        counts: False where a row only stands in for none, on a rank that has no rows in this step: the share is then
            0, and its gradient is 0 in all parameters that the outputs depend on.
        share: this rank's rows over the rows of all ranks in this step: what a term that a user's own
            ``train_minibatch_fn`` adds must be multiplied by.

    Args:
        terms: one per label.
        weights: the terms' weights.
    """

    def __init__(self, terms: Sequence[LossTerm], weights: Sequence[float]) -> None:
        self.share, self.counts = 1.0, True
        self.terms, self.weights = list(terms), list(weights)
        self.normalisers: Sequence[float] = [1.0] * len(self.terms)
        self.sums: list[float] = [0.0] * len(self.terms)

    def __call__(
        self,
        outputs: Sequence[torch.Tensor],
        labels: Sequence[torch.Tensor],
        sample_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Returns ``sum_j weight_j * (sum of this rank's rows)_j / normaliser_j``."""
        value: Any = 0.0
        if not self.counts:
            self.sums = [0.0] * len(self.terms)
            return sum(((output * 0).sum() for output in outputs), value)
        for j, (term, output, label) in enumerate(zip(self.terms, outputs, labels, strict=True)):
            total = term.total(output, label, sample_weights)
            self.sums[j] = float(total.detach())
            factor = self.weights[j]
            if term.divides:
                factor = factor / self.normalisers[j] if self.normalisers[j] > 0 else 0.0
            value = value + total * factor
        return value


def terms_for(loss: Any, labels: int) -> list[LossTerm]:
    """Returns one term per label from the Param ``loss``: one function for all, or a list with one per label.

    Raises:
        ValueError: the list has another length.
    """
    losses = list(loss) if isinstance(loss, (list, tuple)) else [loss] * labels
    if len(losses) != labels:
        raise ValueError(
            f"loss with {len(losses)} functions was found, one per label ({labels}), or a single one, was expected"
        )
    return [LossTerm(one) for one in losses]
