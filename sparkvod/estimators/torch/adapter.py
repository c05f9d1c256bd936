"""PyTorch in the training loop: one model on one rank. Used on the workers only."""

from __future__ import annotations

import dataclasses
import inspect
import os
import pickle
import random
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import cloudpickle
import numpy as np
import torch
from torch import nn

import sparkvod.torch as hvd
from sparkvod import log
from sparkvod.estimators import columns, rows, trying
from sparkvod.estimators.adapter import Adapter
from sparkvod.estimators.torch import checking, model_io, packing
from sparkvod.estimators.torch.given import check_scheduler
from sparkvod.estimators.torch.gradient_hooks import GradientHooks
from sparkvod.estimators.torch.losses import Loss, LossTerm, terms_for
from sparkvod.torch import sync_batch_norm

if TYPE_CHECKING:
    from sparkvod.data import Batch
    from sparkvod.estimators.task import TrainTask

_LOG = log.get("estimators")

_OF_NUMPY = (torch.float32, torch.float64, torch.float16, torch.complex64, torch.complex128)


class TorchAdapter(Adapter):
    """Trains a PyTorch module.

    The payload is a pickled dict of pickled parts, as :class:`~sparkvod.estimators.torch.estimator.TorchEstimator`
    makes it.
    """

    def __init__(self, task: TrainTask) -> None:
        super().__init__(task)
        self._parts: dict[str, bytes] = pickle.loads(task.payload)
        self._model: nn.Module = nn.Identity()
        self._optimizer: Any = None
        self._scheduler: Any = None
        self._scale = 1.0
        self._frozen = True
        # A model may change its input in place, and a label or weight of the same column must not change with it.
        inputs = {name for item in task.inputs for name in item.columns}
        self._copied = sorted(inputs & {*(label.column for label in task.labels), task.weight_column})

    def _part(self, name: str) -> Any:
        return cloudpickle.loads(self._parts[name])

    @property
    def model(self) -> nn.Module:
        """The module."""
        return self._model

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The distributed optimizer."""
        return self._optimizer

    # ---- the beginning --------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Joins the world, builds model, losses and metrics, and takes rank 0's parameters."""
        hvd.init()
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // hvd.local_size()))
        if self.task.use_gpu and torch.cuda.is_available() and hvd.rank() == 0:
            _LOG.warning("a GPU was found, and training is on the CPU: this version's estimators use no GPUs")
        self._model = packing.load_model(self._parts["model"])
        self._synced = sync_batch_norm.synchronise(self._model)
        self._batch_norms = [m for m in self._model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
        state = self._model.state_dict()
        self._buffer_names = [name for name, _ in self._model.named_buffers() if name in state]
        hvd.broadcast_parameters(state, root_rank=0)
        labels = len(self.task.labels)
        constructors = self._part("loss_constructors")
        loss = self._part("loss") if constructors is None else self._construct(constructors)
        terms = terms_for(loss, labels)
        if constructors is not None:
            self._plan_labels(terms)
        for term, label in zip(terms, self.task.labels, strict=True):
            if label.is_mean:
                term.take_as_mean()
        self._loss = Loss(terms, self._part("loss_weights") or [1.0 / labels] * labels)
        self._metrics = [
            list(group) if isinstance(group, (list, tuple)) else [group] * labels for group in self._part("metrics")
        ]
        self._minibatch = self._part("train_minibatch_fn")

    def _construct(self, constructors: Any) -> list[Any]:
        known = {"model": self._model, "rank": hvd.rank(), "size": hvd.size(), "task": self.task}
        losses = []
        for constructor in constructors if isinstance(constructors, list) else [constructors]:
            parameters = inspect.signature(constructor).parameters
            takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
            losses.append(constructor(**{k: v for k, v in known.items() if takes_all or k in parameters}))
        return losses if len(losses) > 1 else losses * len(self.task.labels)

    def _plan_labels(self, terms: list[LossTerm]) -> None:
        """Tries model and losses as the driver does, which could not: the losses were made only now."""
        task = self.task
        _, labels = trying.tried(
            lambda: checking.output_specs(
                packing.load_model(self._parts["model"]),
                task.inputs,
                [task.data.column(label.column) for label in task.labels],
                terms,
                [label.tail for label in task.labels],
                task.weight_column is not None,
            ),
            lambda: rows.first(task.reader, task.data.train, task.columns, trying.ROWS, task.transformation_fn),
        )
        self.task = dataclasses.replace(task, labels=labels)

    def seed(self, seed: int) -> None:
        """Seeds Python, NumPy and PyTorch."""
        random.seed(seed)
        np.random.seed(seed % (1 << 32))
        torch.manual_seed(seed)

    def prepare(self) -> None:
        """Makes the optimizer distributed, scales its learning rate if asked to, makes the schedule."""
        given = self._part("optimizer")
        if isinstance(given, packing.DetachedOptimizer):
            optimizer = given.attach(self._model)
        else:
            optimizer = given(self._model.parameters())
        if self.task.scale_lr:
            self._scale = float(hvd.size())
            self._rescale(optimizer.param_groups, self._scale)
        GradientHooks(optimizer, self.task.seed)
        self._optimizer = hvd.DistributedOptimizer(
            optimizer,
            named_parameters=self._model.named_parameters(),
            compression=self._part("gradient_compression") or hvd.Compression.none,
            backward_passes_per_step=self.task.backward_passes_per_step,
            op=hvd.Sum,
        )
        schedule = self._part("lr_scheduler")
        self._scheduler = None if schedule is None else schedule(self._optimizer)
        if schedule is not None:
            check_scheduler(self._scheduler)

    @staticmethod
    def _rescale(groups: list[dict[str, Any]], factor: float) -> None:
        for group in groups:
            for name in ("lr", "initial_lr"):
                if name in group:
                    group[name] = group[name] * factor

    # ---- steps ----------------------------------------------------------------------------------------------------

    @property
    def needs_normalisers(self) -> bool:
        """Whether there are sample weights, or a loss weighs classes."""
        return self.task.weight_column is not None or not all(term.normalises_by_rows for term in self._loss.terms)

    def normalisers(self, batch: Batch) -> np.ndarray:
        """Returns the sums of this rank's weights, one per label."""
        if not batch.rows:
            return np.zeros(len(self._loss.terms))
        weights = self._weights(batch)
        labels = model_io.labels(self.task.labels, batch.columns, batch.rows)
        return np.array([t.normaliser(label, weights) for t, label in zip(self._loss.terms, labels, strict=True)])

    def _weights(self, batch: Batch) -> torch.Tensor | None:
        weights = columns.weights(batch.columns, self.task.weight_column)
        return None if weights is None else model_io.tensor(weights)

    @property
    def needs_rows(self) -> bool:
        """Whether there is a ``train_minibatch_fn``, or batch normalisation over the ranks, which all take part in."""
        return self._minibatch is not None or bool(self._synced)

    def train(self, batch: Batch, normalisers: np.ndarray, step: int, last: bool) -> np.ndarray:
        """Takes one step.

        In the built-in step a rank without rows sends no gradient of its own and takes the others'. A step of the
        user's runs on all ranks alike, since what it does to gradients and parameters must be done on each.
        """
        if self._minibatch is not None:
            return self._backward(batch, normalisers, step)
        passes = self.task.backward_passes_per_step
        if step % passes == 0:
            self._optimizer.zero_grad()
        sums = self._backward(batch, normalisers) if batch.rows or self._synced else np.zeros(self.sums_size)
        if last or (step + 1) % passes == 0:
            self._optimizer.step()
        return sums

    def _backward(self, batch: Batch, normalisers: np.ndarray, step: int | None = None) -> np.ndarray:
        """Goes forward and backward; with ``step``, the user's own function does, and the optimizer's step as well."""
        self._loss.normalisers, self._loss.share = normalisers.tolist(), batch.rows / batch.global_rows
        self._loss.counts = batch.rows > 0
        inputs, labels, weights = self._tensors(batch)
        if not self._model.training or self._frozen:
            self._model.train()
        # A batch of one has no statistics to normalise by, and which rank gets one is nobody's choice.
        self._frozen = batch.rows <= 1 and bool(self._batch_norms)
        for module in self._batch_norms if self._frozen else ():
            if module not in self._synced or batch.global_rows <= 1:
                module.eval()
        for module in self._synced:
            module.counts = batch.rows > 0
        if step is None:
            found = model_io.outputs(self._forward(inputs))
            labels = model_io.fit_labels(self._loss.terms, self.task.labels, found, labels)
            self._loss(found, labels, weights).backward()
            if not batch.rows:
                return np.zeros(self.sums_size)
        else:
            result, _ = self._minibatch(
                self._model,
                self._optimizer,
                self._transform_outputs,
                self._loss,
                inputs,
                labels,
                weights,
                self.task.backward_passes_per_step,
                step,
            )
            if not batch.rows:
                return np.zeros(self.sums_size)
            found, labels = self._transform_outputs(result, labels)
        return self._sums(found, labels, weights)

    def _forward(self, inputs: list[torch.Tensor]) -> Any:
        try:
            return self._model(*inputs)
        except IndexError as error:
            hint = checking.index_hint(self._model, self.task.inputs, inputs)
            raise IndexError(f"the model failed ({error}); {hint}") from error

    def _tensors(self, batch: Batch) -> tuple[list[torch.Tensor], list[torch.Tensor], torch.Tensor | None]:
        count = batch.rows or 1  # or a row that stands in for none
        own = {name: batch.columns[name].copy() for name in self._copied}
        inputs = model_io.inputs(self.task.inputs, {**batch.columns, **own}, count)
        return inputs, model_io.labels(self.task.labels, batch.columns, count), self._weights(batch)

    def _transform_outputs(self, result: Any, labels: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        found = model_io.outputs(result)
        return found, model_io.fit_labels(self._loss.terms, self.task.labels, found, labels)

    def evaluate(self, batch: Batch) -> np.ndarray:
        """Returns the batch's sums, by the model in evaluation mode."""
        self._model.eval()
        self._loss.counts = True
        with torch.no_grad():
            inputs, labels, weights = self._tensors(batch)
            found, labels = self._transform_outputs(self._forward(inputs), labels)
            self._loss(found, labels, weights)
            return self._sums(found, labels, weights)

    # ---- sums: the terms' sums, their normalisers, the metrics times rows, rows -----------------------------------

    @property
    def sums_size(self) -> int:
        """Length of the vectors of sums."""
        labels = len(self._loss.terms)
        return 2 * labels + len(self._metrics) * labels + 1

    def _sums(self, found: list[torch.Tensor], labels: list[torch.Tensor], weights: torch.Tensor | None) -> np.ndarray:
        count = labels[0].shape[0]
        normalisers = [t.normaliser(label, weights) for t, label in zip(self._loss.terms, labels, strict=True)]
        values = []
        with torch.no_grad():
            for group in self._metrics:
                values += [float(f(o.detach(), y)) * count for f, o, y in zip(group, found, labels, strict=True)]
        return np.array([*self._loss.sums, *normalisers, *values, count])

    def record(self, sums: np.ndarray) -> dict[str, Any]:
        """Returns ``{"loss": ..., "all_metrics": [{"group_<i>_<label>": ...}, ...]}``."""
        labels = len(self._loss.terms)
        means = sums[:labels] / np.maximum(sums[labels : 2 * labels], 1e-300)
        loss = float(sum(weight * mean for weight, mean in zip(self._loss.weights, means, strict=True)))
        metrics = (sums[2 * labels : -1] / max(sums[-1], 1.0)).reshape(len(self._metrics), labels)
        names = [label.column for label in self.task.labels]
        groups = [
            {f"group_{i}_{name}": float(value) for name, value in zip(names, row, strict=True)}
            for i, row in enumerate(metrics)
        ]
        return {"loss": loss, "all_metrics": groups}

    # ---- between epochs -------------------------------------------------------------------------------------------

    def epoch_ended(self, record: dict[str, Any]) -> None:
        """Steps the schedule; one that watches a figure gets the validation's loss, or else the training's."""
        if isinstance(self._scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            self._scheduler.step(record.get("validation", record["train"])["loss"])
        elif self._scheduler is not None:
            self._scheduler.step()

    def replicas(self) -> Iterator[tuple[str, np.ndarray]]:
        """Yields the parameters."""
        for name, parameter in self._model.named_parameters():
            found = parameter.detach().cpu()
            yield name, (found if found.dtype in _OF_NUMPY else found.float()).numpy()

    @property
    def learning_rate(self) -> float | None:
        """The learning rate of the first group."""
        rate = self._optimizer.param_groups[0].get("lr")
        return None if rate is None else float(rate)

    def state(self, result: bool = False) -> dict[str, bytes]:
        """Returns the states of model, optimizer and schedule; as a result, with the learning rate as it was given."""
        optimizer = self._optimizer.state_dict()
        if result:
            optimizer.pop("compression", None)
        if result and self._scale != 1.0:
            optimizer["param_groups"] = [dict(group) for group in optimizer["param_groups"]]
            self._rescale(optimizer["param_groups"], 1.0 / self._scale)
        state = {**packing.weights_of(self._model), "optimizer": optimizer}
        if self._scheduler is not None and not result:
            state["scheduler"] = self._scheduler.state_dict()
        own = packing.dump_own(self._optimizer, self._model)
        return {**{name: packing.dump_state(value) for name, value in state.items()}, "optimizer_own": own}

    def load_state(self, state: dict[str, bytes]) -> None:
        """Takes what :meth:`state` returned."""
        packing.load_weights(self._model, state)
        self._optimizer.load_state_dict(packing.load_state(state["optimizer"]))
        packing.load_own(self._optimizer, self._model, state["optimizer_own"])
        if self._scheduler is not None and "scheduler" in state:
            self._scheduler.load_state_dict(packing.load_state(state["scheduler"]))

    def _buffers(self) -> dict[str, torch.Tensor]:
        buffers = dict(self._model.named_buffers())
        return {name: buffers[name] for name in self._buffer_names}

    def share_buffers(self) -> None:
        """Gives all ranks rank 0's buffers, such as the running statistics of batch normalisation."""
        if hvd.size() > 1 and self._buffer_names:
            hvd.broadcast_parameters(self._buffers(), root_rank=0)

    def own_state(self, within: bool) -> bytes:
        """Returns the states of Python's, NumPy's and PyTorch's generators, and what else is not rank 0's.

        Within an epoch buffers, and what compression left out of the gradients.
        """
        buffers = self._buffers() if within and hvd.rank() > 0 else {}
        generators = (random.getstate(), np.random.get_state(), torch.get_rng_state().numpy())
        compression = self._optimizer.compression_state() if hvd.rank() > 0 else None
        return pickle.dumps((generators, packing.dump_state(buffers), packing.dump_state({"compression": compression})))

    def load_own_state(self, state: bytes) -> None:
        """Takes what :meth:`own_state` returned."""
        (python, numpy, own), buffers, others = pickle.loads(state)
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(torch.from_numpy(own))
        mine = self._buffers()
        with torch.no_grad():
            for name, value in packing.load_state(buffers).items():
                mine[name].copy_(value)
        compression = packing.load_state(others)["compression"]
        if compression is not None:
            self._optimizer.load_compression_state(compression)
