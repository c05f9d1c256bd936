"""Keras in the training loop: one model on one rank. Used on the workers only."""

from __future__ import annotations

import os
import pickle
import random
import zlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
from keras import ops
from keras.src.random.seed_generator import global_seed_generator

import sparkvod.keras as hvd
from sparkvod import log
from sparkvod.errors import SparkvodError
from sparkvod.estimators import columns
from sparkvod.estimators.adapter import Adapter
from sparkvod.estimators.keras import building, packing, steps
from sparkvod.estimators.keras.best import Best
from sparkvod.estimators.keras.model_io import labels

if TYPE_CHECKING:
    from sparkvod.data import Batch
    from sparkvod.estimators.task import TrainTask

_LOG = log.get("estimators")


class KerasAdapter(Adapter):
    """Trains a model of Keras 3.

    The payload is a pickled dict of pickled parts, as :func:`sparkvod.estimators.keras.building.pack` makes it.
    """

    def __init__(self, task: TrainTask) -> None:
        super().__init__(task)
        self._parts = building.Parts(task.payload)
        self._model: Any = None
        self._optimizer: Any = None

    @property
    def model(self) -> Any:
        """The model, compiled."""
        return self._model

    @property
    def optimizer(self) -> Any:
        """The distributed optimizer."""
        return self._optimizer

    # ---- the beginning ----------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Joins the world, builds model, losses and metrics, and takes rank 0's weights."""
        backend = self._parts.raw("backend")
        if keras.backend.backend() != backend:
            raise SparkvodError(
                f"the model is of Keras's backend {backend!r}, and this worker has {keras.backend.backend()!r}, which "
                "was loaded before: one backend in a Python worker was expected; start a new Spark session to change it"
            )
        hvd.init()
        steps.use_threads(max(1, len(os.sched_getaffinity(0)) // hvd.local_size()))
        keras.backend.set_floatx(self._parts.raw("floatx"))
        keras.config.set_dtype_policy(self._parts.raw("dtype_policy"))
        keras.utils.set_random_seed(self.task.seed % (1 << 32))  # for what is initialised only now
        task = self.task
        self._model = self._parts.model()
        label_columns = [task.data.column(label.column) for label in task.labels]
        self._loop, _, _ = building.build(
            self._parts,
            self._model,
            task.inputs,
            label_columns,
            [label.tail for label in task.labels],
            task.weight_column is not None,
        )
        hvd.broadcast_variables(self._model.weights, root_rank=0)
        wanted = self._parts.raw("best")
        self._best = None if wanted is None else Best(wanted, self._model.metrics)

    def seed(self, seed: int) -> None:
        """Seeds Python, NumPy, the backend and the generators of the model's layers."""
        keras.utils.set_random_seed(seed % (1 << 32))
        for number, state in enumerate(self._generators()):
            state.assign([zlib.crc32(f"{seed} {number}".encode()) & 0x7FFFFFFF, 0])

    def _generators(self) -> list[Any]:
        """Returns the states of the generators that random layers draw from, and of the one of all others."""
        weights = {id(variable) for variable in self._model.weights}
        own = [variable for variable in self._model.variables if id(variable) not in weights]
        return [*own, global_seed_generator().state]

    def prepare(self) -> None:
        """Makes the optimizer distributed, and scales its learning rate if asked to."""
        optimizer = self._parts.optimizer()
        state, was_built = self._parts.raw("optimizer_state"), self._parts.raw("optimizer_built")
        if state is not None and not was_built:
            packing.load_variables(optimizer.variables, state)
        if undecayed := [self._model.weights[place] for place in self._parts.raw("undecayed")]:
            inner = getattr(optimizer, "inner_optimizer", optimizer)
            inner._exclude_from_weight_decay = {inner._var_key(weight) for weight in undecayed}
        optimizer.build(self._model.trainable_variables)
        if state is not None and was_built:
            packing.load_variables(optimizer.variables, state)
        if self._parts.raw("scales_loss") and not hasattr(optimizer, "inner_optimizer"):
            optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
            optimizer.build(self._model.trainable_variables)
        self._model.optimizer = optimizer
        if self.task.scale_lr:
            optimizer.learning_rate = float(ops.convert_to_numpy(optimizer.learning_rate)) * hvd.size()
        compression = self._parts.raw("gradient_compression")
        options = {"compression": compression, "sparse_as_dense": True, "op": hvd.Sum}
        with packing.under_policy("float32"):  # not to be refused by everybody's policy: the model's own has decided
            self._optimizer = hvd.DistributedOptimizer(optimizer, **options)
        self._steps = steps.for_backend(self._loop, self._optimizer, self.task.backward_passes_per_step)

    # ---- steps ------------------------------------------------------------------------------------------------------

    @property
    def needs_normalisers(self) -> bool:
        """Whether there are sample weights, or a loss passes over a class."""
        return self.task.weight_column is not None or any(term.ignored is not None for term in self._loop.terms)

    def normalisers(self, batch: Batch) -> np.ndarray:
        """Returns the sums of this rank's weights, one per label."""
        if not batch.rows:
            return np.zeros(len(self._loop.terms))
        return self._normalisers(labels(self.task.labels, batch.columns, batch.rows), self._weights(batch))

    def _normalisers(self, found: Sequence[np.ndarray], weights: np.ndarray | None) -> np.ndarray:
        return np.array([term.normaliser(y, weights) for term, y in zip(self._loop.terms, found, strict=True)])

    def _weights(self, batch: Batch) -> np.ndarray | None:
        return columns.weights(batch.columns, self.task.weight_column)

    @property
    def needs_rows(self) -> bool:
        """Always: the gradient's shape, and which variables have one, come from going backward."""
        return True

    def train(self, batch: Batch, normalisers: np.ndarray, step: int, last: bool) -> np.ndarray:
        """Takes one step; a rank without rows takes it on a row that counts for nothing."""
        passes = self.task.backward_passes_per_step
        rows, weights = self._rows(batch)
        factors = self._loop.factors(normalisers) if batch.rows else np.zeros(len(normalisers), np.float32)
        share, apply = batch.rows / batch.global_rows, last or (step + 1) % passes == 0
        with hvd.own_errors():  # by which the driver tells a lost rank from one that raised
            sums = self._steps.train(rows, factors, share, apply)
        if not batch.rows:
            return np.zeros(self.sums_size)
        return self._loop.vector(sums, self._normalisers(rows.labels, weights), batch.rows)

    def evaluate(self, batch: Batch) -> np.ndarray:
        """Returns the batch's sums, by the model in inference."""
        rows, weights = self._rows(batch)
        sums = self._steps.evaluate(rows)
        return self._loop.vector(sums, self._normalisers(rows.labels, weights), batch.rows)

    def _rows(self, batch: Batch) -> tuple[steps.Rows, np.ndarray | None]:
        """Returns what goes into a step, and the weights before they are rounded to its dtype, for the normalisers."""
        number, weights = batch.rows or 1, self._weights(batch)  # or a row that stands in for none
        inputs = self._loop.feed.arrays(batch.columns, number)
        rounded = None if weights is None else weights.astype(keras.backend.floatx())
        return steps.Rows(inputs, labels(self.task.labels, batch.columns, number), rounded), weights

    # ---- figures ----------------------------------------------------------------------------------------------------

    @property
    def sums_size(self) -> int:
        """Length of the vectors of sums."""
        return self._loop.sums_size

    def record(self, sums: np.ndarray) -> dict[str, Any]:
        """Returns ``{"loss": ..., "<metric>": ...}`` by Keras's names."""
        return self._loop.record(sums)

    # ---- between epochs ---------------------------------------------------------------------------------------------

    def epoch_ended(self, record: dict[str, Any]) -> None:
        """Does nothing: a schedule of Keras's is in the optimizer."""

    def callbacks_done(self, record: dict[str, Any]) -> None:
        """Keeps the weights, if they are the best so far and the best are asked for.

        After the callbacks, one of which may have put averaged weights into the model, as the validation had them.
        """
        if self._best is not None and self._best.improved(record):
            self._best.keep(packing.dump_variables(self._model.weights) if hvd.rank() == 0 else b"")

    def replicas(self) -> Iterator[tuple[str, np.ndarray]]:
        """Yields the weights that are trained; the others become rank 0's at an epoch's end."""
        for weight in self._model.trainable_weights:
            yield weight.path, np.asarray(ops.convert_to_numpy(weight))

    @property
    def learning_rate(self) -> float | None:
        """The learning rate."""
        return float(ops.convert_to_numpy(self._optimizer.learning_rate))

    def state(self, result: bool = False) -> dict[str, bytes]:
        """Returns the states of model and optimizer; as a result, the weights alone: the best, if they were kept."""
        if result:
            if self._best is not None and self._best.weights:
                return {"model": self._best.weights}
            if getattr(self._optimizer, "use_ema", False):
                self._optimizer.finalize_variable_values(self._model.trainable_variables)
            return {"model": packing.dump_variables(self._model.weights)}
        state = {
            "model": packing.dump_variables(self._model.weights),
            "optimizer": packing.dump_variables(self._optimizer.variables),
        }
        if self._best is not None:
            state["best"] = self._best.to_bytes()
        return state

    def load_state(self, state: dict[str, bytes]) -> None:
        """Takes what :meth:`state` returned."""
        packing.load_variables(self._model.weights, state["model"])
        packing.load_variables(self._optimizer.variables, state["optimizer"])
        if self._best is not None and "best" in state:
            self._best.load(state["best"])

    def _buffers(self) -> list[Any]:
        return list(self._model.non_trainable_weights)

    def share_buffers(self) -> None:
        """Gives all ranks rank 0's weights that are not trained, such as the statistics of batch normalisation."""
        if hvd.size() > 1 and self._buffers():
            hvd.broadcast_variables(self._buffers(), root_rank=0)

    def own_state(self, within: bool) -> bytes:
        """Returns the states of all generators, and buffers that are not rank 0's."""
        buffers = packing.dump_variables(self._buffers()) if within and hvd.rank() > 0 else b""
        own = (steps.random_state(), packing.dump_variables(self._generators()))
        return pickle.dumps((random.getstate(), np.random.get_state(), *own, buffers))

    def load_own_state(self, state: bytes) -> None:
        """Takes what :meth:`own_state` returned."""
        python, numpy, backend, layers, buffers = pickle.loads(state)
        random.setstate(python)
        np.random.set_state(numpy)
        steps.set_random_state(backend)
        packing.load_variables(self._generators(), layers)
        if buffers:
            packing.load_variables(self._buffers(), buffers)
