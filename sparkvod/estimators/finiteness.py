"""A loss that is no longer finite: noticed step by step, warned of once per run, or the end of it on all ranks."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from sparkvod import log
from sparkvod.core import basics
from sparkvod.estimators import sums
from sparkvod.estimators.adapter import Adapter

_LOG = log.get("estimators")

_CURE = (
    "lower the learning rate, clip the gradients, or look for inputs, logarithms and divisions that make it infinite"
)


class LossWatch:
    """Looks at the loss of each step. All ranks call each method at the same point.

    Args:
        adapter: the model in training.
        terminates: whether a loss that is not finite is an error.
        logs: whether rank 0 logs the warning when it happens.

    Attributes:
        warning: the run's one warning; empty without a reason for it.
    """

    def __init__(self, adapter: Adapter, terminates: bool, logs: bool = True) -> None:
        self._adapter, self._terminates, self._logs = adapter, terminates, logs
        self.warning = ""
        self._first: int | None = None  # this rank's first step of the epoch with such a loss
        self._pending: tuple[int, int, sums.PendingSum] | None = None

    def after_step(self, epoch: int, step: int, found: np.ndarray) -> None:
        """Looks at a step's sums on this rank.

        What the ranks found travels with the next step's gradients, so nobody waits for it.

        Raises:
            FloatingPointError: the loss of the step before was not finite on some rank, and that is an error.
        """
        # A metric that is not finite is no reason to worry; most steps end at the first look.
        is_bad = not np.isfinite(found).all() and not math.isfinite(self._adapter.record(found)["loss"])
        if is_bad and self._first is None:
            self._first = step
        if self._terminates:
            self.settle()
            said = np.array([float(is_bad)])
            self._pending = epoch, step, sums.PendingSum(f"sparkvod.nonfinite.{step % 2}", said)

    def settle(self) -> None:
        """Waits for what the ranks found in the last step: before a checkpoint, and when an epoch ends.

        Raises:
            FloatingPointError: as :meth:`after_step`.
        """
        if self._pending is None:
            return
        (epoch, step, pending), self._pending = self._pending, None
        if pending.result()[0] > 0:
            raise FloatingPointError(
                f"the training loss became NaN or infinite in epoch {epoch}, step {step}, and terminate_on_nan=True "
                f"ends the run: {_CURE}"
            )

    def after_epoch(self, epoch: int, record: dict[str, Any]) -> None:
        """Looks at the epoch's figures, which are the same on all ranks.

        Raises:
            FloatingPointError: the validation's loss is not finite, and that is an error.
        """
        trained = math.isfinite(record["train"]["loss"])
        validated = math.isfinite(record.get("validation", record["train"])["loss"])
        step = None if trained else self._first_step()
        self._first = None
        if trained and validated:
            return
        where = f"epoch {epoch}" if step is None else f"epoch {epoch}, step {step}"
        which = f"training loss became NaN or infinite in {where}"
        if trained:
            which = f"validation loss is NaN or infinite after epoch {epoch}"
        if self._terminates:
            raise FloatingPointError(f"the {which}, and terminate_on_nan=True ends the run: {_CURE}")
        if not self.warning:
            self.warning = f"the {which}: {_CURE}; terminate_on_nan=True ends such a run at once"
            if self._logs and basics.rank() == 0:
                _LOG.warning("%s", self.warning)

    def _first_step(self) -> int | None:
        """Returns the first step with such a loss on any rank; None: it was before the checkpoint that was loaded."""
        said = np.zeros(basics.size())
        said[basics.rank()] = 0 if self._first is None else self._first + 1
        found = sums.across("sparkvod.nonfinite", said)
        return int(found[found > 0].min()) - 1 if found.any() else None
