"""What the training loop needs of a framework: one subclass per framework, used on the workers only."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from sparkvod.data import Batch
    from sparkvod.estimators.task import TrainTask


class Adapter(ABC):
    """A model in training on one rank.

    The loop deals in *sums*: float64 vectors that add up over steps and over ranks, and from which :meth:`record`
    makes means. So nothing is exchanged per batch for the sake of reporting.

    A step's gradient is this rank's share of the gradient of ``sum_i w_i l_i / sum_i w_i`` over the rows ``i`` of all
    ranks. The *normaliser* of a label is that denominator: the number of rows, unless there are sample weights, or the
    loss weighs classes. A rank without rows takes part in the step all the same.

    Args:
        task: what to train.
    """

    def __init__(self, task: TrainTask) -> None:
        self.task = task

    @property
    @abstractmethod
    def model(self) -> Any:
        """The framework's model, for callbacks."""

    @property
    @abstractmethod
    def optimizer(self) -> Any:
        """The framework's optimizer, for callbacks."""

    @abstractmethod
    def start(self) -> None:
        """Joins the world, builds model and optimizer, and takes rank 0's parameters."""

    @abstractmethod
    def seed(self, seed: int) -> None:
        """Seeds every generator that the framework and user code draw from."""

    @abstractmethod
    def prepare(self) -> None:
        """Makes the optimizer distributed, scales its learning rate if asked to, makes the schedule."""

    @property
    @abstractmethod
    def needs_normalisers(self) -> bool:
        """Whether a step's normalisers are more than the number of its rows."""

    @abstractmethod
    def normalisers(self, batch: Batch) -> np.ndarray:
        """Returns this rank's normalisers, one per label."""

    @property
    @abstractmethod
    def sums_size(self) -> int:
        """Length of the vectors of sums."""

    @property
    @abstractmethod
    def needs_rows(self) -> bool:
        """Whether a step is the user's own code, which runs on each rank: a row stands in where there is none."""

    @abstractmethod
    def train(self, batch: Batch, normalisers: np.ndarray, step: int, last: bool) -> np.ndarray:
        """Takes one step, and returns the batch's sums.

        Args:
            batch: this rank's rows, perhaps none. With :attr:`needs_rows` one row that counts for nothing stands in
                for none: ``rows`` is 0, and the columns have one.
            normalisers: sums of all ranks' normalisers, one per label.
            step: number of the step in its epoch.
            last: whether the epoch ends with it, so that gradients that accumulated are applied.
        """

    @abstractmethod
    def share_buffers(self) -> None:
        """Gives all ranks rank 0's buffers: what is no parameter and changes in training, as running statistics."""

    @abstractmethod
    def evaluate(self, batch: Batch) -> np.ndarray:
        """Returns the batch's sums without training on it."""

    @abstractmethod
    def record(self, sums: np.ndarray) -> dict[str, Any]:
        """Returns losses and metrics as plain values from the sums over all ranks and steps."""

    @abstractmethod
    def epoch_ended(self, record: dict[str, Any]) -> None:
        """Steps the learning-rate schedule."""

    def callbacks_done(self, record: dict[str, Any]) -> None:  # noqa: B027
        """Runs when the callbacks of an epoch's end have run."""

    def replicas(self) -> Iterable[tuple[str, np.ndarray]]:
        """Yields the names and values of the weights that are the same on all ranks between any two steps."""
        return ()

    @property
    @abstractmethod
    def learning_rate(self) -> float | None:
        """The current learning rate of the first group of parameters."""

    @abstractmethod
    def state(self, result: bool = False) -> dict[str, bytes]:
        """Returns the states of model, optimizer and schedule; equal on all ranks after :meth:`share_buffers`.

        Args:
            result: only what a finished run returns, in the form in which the driver takes it.
        """

    @abstractmethod
    def load_state(self, state: dict[str, bytes]) -> None:
        """Takes what :meth:`state` returned; after :meth:`prepare`."""

    @abstractmethod
    def own_state(self, within: bool) -> bytes:
        """Returns what is this rank's alone: the state of the generators that :meth:`seed` seeds, and its buffers.

        Args:
            within: whether an epoch is under way; else the buffers are those of all ranks.
        """

    @abstractmethod
    def load_own_state(self, state: bytes) -> None:
        """Takes what :meth:`own_state` returned; after :meth:`load_state`."""
