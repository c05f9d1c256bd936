"""What a worker is sent, and the function that it runs."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sparkvod.estimators.columns import Input, Label

if TYPE_CHECKING:
    from sparkvod.data import FilesystemStore, PreparedData


@dataclass(frozen=True)
class TrainTask:
    """All that training needs, picklable, the same for every rank. The Params' table explains the fields of its names.

    Attributes:
        adapter: ``module:Class`` of the framework's :class:`~sparkvod.estimators.adapter.Adapter`; imported on the
            worker, so that the driver needs neither it nor the engine.
        payload: what the adapter needs: model, optimizer, loss and so on, pickled by the estimator.
        data: the prepared data.
        inputs: how feature columns make the model's inputs.
        labels: how label columns make labels.
        weight_column: column of sample weights, or None.
        store: where checkpoints go.
        run_id: the run's name.
        seed: seed of the order of rows and of the framework's random numbers (plus the rank).
        fingerprint: what must be equal for a run to go on from a checkpoint.
    """

    adapter: str
    payload: bytes
    data: PreparedData
    inputs: tuple[Input, ...]
    labels: tuple[Label, ...]
    weight_column: str | None
    store: FilesystemStore
    run_id: str
    seed: int
    fingerprint: dict[str, Any]
    epochs: int = 1
    terminate_on_nan: bool = False
    global_batch_size: int = 32
    val_batch_size: int | None = None
    train_steps_per_epoch: int | None = None
    validation_steps_per_epoch: int | None = None
    checkpoint_every: int | None = None
    checkpoint_seconds: float | None = None
    shuffle: bool = True
    scale_lr: bool = False
    backward_passes_per_step: int = 1
    reader: str = "auto"
    transformation_fn: Callable[[Any], Any] | None = None
    callbacks: list[Any] = field(default_factory=list)
    use_gpu: bool = True
    verbose: int = 1

    @property
    def columns(self) -> list[str]:
        """Names of the columns that training reads."""
        names = [name for item in self.inputs for name in item.columns] + [label.column for label in self.labels]
        return list(dict.fromkeys(names + ([self.weight_column] if self.weight_column else [])))


@dataclass
class TrainResult:
    """What a rank returns; ``state`` is empty on all but rank 0.

    Attributes:
        state: the framework's states after the last step: the model's, the optimizer's.
        history: one record per epoch.
        moments: seconds since 1970, by this rank's clock: ``entered``, ``first_step``, ``trained``.
        rows: rows that this rank trained on, all epochs of this call together.
        decoded: row groups that this rank decoded for training.
        warning: what the driver has to log, if anything.
    """

    state: dict[str, bytes]
    history: list[dict[str, Any]]
    moments: dict[str, float]
    rows: int
    decoded: int
    warning: str = ""


def train(task: TrainTask) -> TrainResult:
    """Trains on this rank. Launchers run it."""
    from sparkvod.estimators.trainer import Trainer

    module, _, name = task.adapter.partition(":")
    adapter = getattr(importlib.import_module(module), name)(task)
    return Trainer(task, adapter).run()
