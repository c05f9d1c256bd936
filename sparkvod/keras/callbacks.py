"""Callbacks for ``model.fit`` on many ranks."""

from __future__ import annotations

from typing import Any

import keras

from sparkvod.core import basics
from sparkvod.core.objects import any_rank, objects_by_rank
from sparkvod.core.ops import own_set_id
from sparkvod.core.process_sets import ProcessSet, global_process_set
from sparkvod.errors import MismatchError
from sparkvod.keras import backends
from sparkvod.keras.synchronized import refuse_synchronized


class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):
    """Overwrites the model's weights and the optimizer's variables with the root's, before or at the first batch.

    Args:
        root_rank: whose values they are.
        device: not used.
        local_variables: variables that stay each rank's own.
        process_set: the ranks that train together, by default all.
    """

    def __init__(
        self,
        root_rank: int,
        device: str = "",
        local_variables: Any = None,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        super().__init__()
        self.root_rank, self.device, self.process_set = root_rank, device, process_set
        self._local = {id(variable) for variable in local_variables or ()}
        self._done = False

    def register_local_var(self, var: Any) -> None:
        """Says that a variable stays each rank's own."""
        self._local.add(id(var))

    def on_train_begin(self, logs: Any = None) -> None:
        """Broadcast when all ranks have all variables already.

        A rank that loaded the model has the optimizer's variables before a rank that built it, so an optimizer that
        has none yet gets them here, and whether to wait for the first batch is decided by all ranks together.
        """
        model, optimizer = self.model, self.model.optimizer
        refuse_synchronized(model)
        if model.built and optimizer is not None and not optimizer.built:
            optimizer.build(model.trainable_variables)
        members = own_set_id(self.process_set, type(self).__name__)
        if not any_rank(not model.built, members):
            self._broadcast()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Broadcasts when the first batch has made them."""
        self._broadcast()

    def _broadcast(self) -> None:
        if self._done:
            return
        self._done = True
        _sync(self.model)
        optimizer = self.model.optimizer
        variables = [*self.model.weights, *(optimizer.variables if optimizer is not None else ())]
        shared = [variable for variable in variables if id(variable) not in self._local]
        backends.current().broadcast_variables(shared, self.root_rank, self.process_set)


def _sync(model: Any) -> None:
    # On JAX the variables have no values within an epoch: this puts them in, and makes the next step read them.
    if hasattr(model, "jax_state_sync"):
        model.jax_state_sync()


class MetricAverageCallback(keras.callbacks.Callback):
    """Averages the metrics of an epoch over the ranks, before the callbacks behind it see them.

    Args:
        device: not used.
        process_set: the ranks that train together, by default all.
    """

    def __init__(self, device: str = "", process_set: ProcessSet = global_process_set) -> None:
        super().__init__()
        self.device, self.process_set = device, process_set

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Averages ``logs`` in place.

        Raises:
            MismatchError: the ranks have different metrics.
        """
        if not logs:
            logs = {}
        mine = {name: float(value) for name, value in logs.items()}
        by_rank = objects_by_rank(mine, process_set=self.process_set)
        first, ours = next(iter(by_rank.items()))
        for rank, theirs in by_rank.items():
            if theirs.keys() != ours.keys():
                raise MismatchError(
                    f"the ranks' metrics differ: rank {first} has {sorted(ours)}, rank {rank} has {sorted(theirs)}; "
                    "the same metrics and validation data on all ranks, or none, were expected"
                )
        for name in logs:
            logs[name] = sum(theirs[name] for theirs in by_rank.values()) / len(by_rank)


class LearningRateScheduleCallback(keras.callbacks.Callback):
    """Multiplies the learning rate by a constant, or a function of the epoch, between two epochs.

    Args:
        initial_lr: what is multiplied.
        multiplier: a number, or a function of the epoch (a fraction where ``staircase`` is off).
        start_epoch: first epoch.
        end_epoch: epoch that is the first without; None: there is none.
        staircase: changes at the beginning of epochs only; else with each batch.
        momentum_correction: for compatibility: Keras 3 builds the momentum into its compiled steps as a constant.
        steps_per_epoch: batches per epoch; by default what ``fit`` says.
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: Any,
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        self.initial_lr, self.start_epoch, self.end_epoch = initial_lr, start_epoch, end_epoch
        # A constant needs no batches.
        self.staircase = staircase or not callable(multiplier)
        self.multiplier = multiplier if callable(multiplier) else lambda epoch: multiplier
        self.steps_per_epoch = steps_per_epoch
        self._epoch = 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Sets the rate of the epoch."""
        self._epoch = epoch
        if self.staircase:
            self._set(float(epoch))

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Sets the rate of the batch."""
        if self.staircase:
            return
        steps = self.steps_per_epoch or (self.params or {}).get("steps")
        if not steps:
            raise ValueError("steps_per_epoch was not found, it was expected since the data does not tell its length")
        self._set(self._epoch + batch / steps)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Writes the rate into ``logs``."""
        if logs is not None:
            logs["lr"] = float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate))

    def _set(self, epoch: float) -> None:
        if epoch >= self.start_epoch and (self.end_epoch is None or epoch < self.end_epoch):
            _sync(self.model)
            self.model.optimizer.learning_rate = self.initial_lr * self.multiplier(epoch)


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raises the learning rate from ``initial_lr / size()`` to ``initial_lr`` during the first epochs.

    Args:
        initial_lr: the rate at the end.
        warmup_epochs: how many epochs it takes.
        momentum_correction: for compatibility.
        steps_per_epoch: batches per epoch; by default what ``fit`` says.
        verbose: for compatibility.
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: float = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        def multiplier(epoch: float) -> float:
            n = basics.size()
            steps = self.steps_per_epoch or (self.params or {}).get("steps") or 1
            done = min((epoch + 1.0 / steps) / warmup_epochs, 1.0)
            return (1.0 + (n - 1) * done) / n

        super().__init__(initial_lr, multiplier, 0, warmup_epochs, False, momentum_correction, steps_per_epoch)  # type: ignore[arg-type]
        self.verbose = verbose


class BestModelCheckpoint(keras.callbacks.ModelCheckpoint):
    """Keeps the best model only; who runs the training says where, by ``filepath``.

    Args:
        monitor: name of the metric.
        verbose: 1 to tell about each.
        mode: "auto", "min" or "max".
        save_freq: "epoch", or a number of batches.
        save_weights_only: leaves out the rest of the model.
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        mode: str = "auto",
        save_freq: Any = "epoch",
        save_weights_only: bool = False,
    ) -> None:
        suffix = ".weights.h5" if save_weights_only else ".keras"
        super().__init__(
            f"best{suffix}",
            monitor,
            verbose,
            save_best_only=True,
            save_weights_only=save_weights_only,
            mode=mode,
            save_freq=save_freq,
        )
