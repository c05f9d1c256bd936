"""Callbacks: what a user's own code may do in the training loop, on each rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sparkvod.estimators.trainer import Trainer


class Callback:
    """Base of callbacks. Each rank has a copy; override what is needed.

    ``trainer`` has ``rank``, ``size``, ``model`` and ``optimizer`` (the framework's own objects), ``history`` (the
    records so far) and ``stop()``, which ends training after the current epoch on all ranks.
    """

    def on_train_begin(self, trainer: Trainer) -> None:
        """Runs once, before the first epoch, after a checkpoint was loaded."""

    def on_epoch_begin(self, trainer: Trainer, epoch: int) -> None:
        """Runs before epoch ``epoch``, from 0."""

    def on_batch_begin(self, trainer: Trainer, epoch: int, step: int) -> None:
        """Runs before step ``step``, from 0."""

    def on_batch_end(self, trainer: Trainer, epoch: int, step: int) -> None:
        """Runs after step ``step``, from 0."""

    def on_validation_begin(self, trainer: Trainer) -> None:
        """Runs before an epoch's validation, if there is one; the weights may be others until it ends."""

    def on_validation_batch_begin(self, trainer: Trainer, step: int) -> None:
        """Runs before step ``step`` of the validation, from 0."""

    def on_validation_batch_end(self, trainer: Trainer, step: int) -> None:
        """Runs after step ``step`` of the validation, from 0."""

    def on_validation_end(self, trainer: Trainer, record: dict[str, Any]) -> None:
        """Runs after an epoch's validation; ``record`` has its figures, the same on all ranks."""

    def on_epoch_end(self, trainer: Trainer, epoch: int, record: dict[str, Any]) -> None:
        """Runs after an epoch; ``record`` is its line of the history, the same on all ranks."""

    def on_train_end(self, trainer: Trainer) -> None:
        """Runs once, after the last epoch."""

    def state(self) -> Any:
        """Returns what rank 0's copy has to remember in a checkpoint, picklable; None: nothing."""
        return None

    def load_state(self, state: Any) -> None:
        """Takes, on each rank, what :meth:`state` returned, when a run goes on; after :meth:`on_train_begin`."""
