"""The training loop of one rank: epochs, steps, validation, checkpoints. One for every framework."""

from __future__ import annotations

import pickle
import time
from collections.abc import Iterator
from contextlib import closing
from itertools import islice
from typing import TYPE_CHECKING, Any

import cloudpickle
import numpy as np

from sparkvod import log
from sparkvod.core import basics, objects
from sparkvod.data import Batch, open_reader, prefetch
from sparkvod.data.loader import Prefetcher
from sparkvod.estimators import agreement, rows, sums
from sparkvod.estimators.adapter import Adapter
from sparkvod.estimators.checkpoint import Checkpoint, damaged, path_of, require_same
from sparkvod.estimators.finiteness import LossWatch
from sparkvod.estimators.task import TrainResult, TrainTask
from sparkvod.observe import mailbox

if TYPE_CHECKING:
    from sparkvod.data import Dataset, Reader

_LOG = log.get("estimators")
_PROGRESS_SECONDS = 0.2
_PREFETCH_BYTES = 16 << 20


class _Speed:
    """Rows, seconds and rows per second of an epoch.

    The rate counts from the end of the first step: until then the reader fills, and what is compiled or allocated when
    it is first used is. An epoch of one step has but that.
    """

    def __init__(self) -> None:
        self.rows = self._first = 0
        self._began = self._from = self._until = time.perf_counter()

    def add(self, rows: int) -> None:
        """Counts a step's rows."""
        self._until = time.perf_counter()
        if not self.rows:
            self._first, self._from = rows, self._until
        self.rows += rows

    def end(self) -> None:
        """Takes the time that passed since the last step in as well."""
        self._until = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Seconds since the beginning."""
        return self._until - self._began

    @property
    def rate(self) -> float:
        """Rows per second."""
        if self.rows == self._first:
            return self.rows / max(self.seconds, 1e-9)
        return (self.rows - self._first) / max(self._until - self._from, 1e-9)


def _nothing() -> None:
    """Is the state of a callback that knows of none."""


class Trainer:
    """Trains one rank's share.

    Args:
        task: what to train.
        adapter: the framework's part.

    Attributes:
        rank: this rank.
        size: number of ranks.
        history: one record per epoch done.
        steps: steps of an epoch.
    """

    def __init__(self, task: TrainTask, adapter: Adapter) -> None:
        self.task, self.adapter = task, adapter
        self.rank, self.size = 0, 1
        self.history: list[dict[str, Any]] = []
        self._moments = {"entered": time.time()}
        self._seed = task.seed
        self._rows = 0
        self._asked_to_stop = self._ends = self._owed = False
        self._posted = 0.0
        self._saved = time.monotonic()
        self._late: sums.PendingSum | None = None
        self._stand_in: dict[str, np.ndarray] | None = None
        self._running = np.zeros(0)
        self._remembered: list[Any] = []
        self.steps = 0

    @property
    def model(self) -> Any:
        """The framework's model."""
        return self.adapter.model

    @property
    def optimizer(self) -> Any:
        """The framework's optimizer."""
        return self.adapter.optimizer

    def stop(self) -> None:
        """Ends training on all ranks, whichever call it: after the current epoch, before the first in its beginning."""
        self._asked_to_stop = True

    def running(self) -> dict[str, Any]:
        """Returns this rank's figures of the epoch so far, or of its validation while that is under way."""
        return self.adapter.record(self._running)

    def run(self) -> TrainResult:
        """Trains from the beginning, or from the run's checkpoint, to the end."""
        task, adapter = self.task, self.adapter
        adapter.start()
        self.rank, self.size = basics.rank(), basics.size()
        epoch, step, running = self._begin()
        self._watch = LossWatch(adapter, task.terminate_on_nan, task.verbose > 0)
        train_reader = self._open(task.data.train, task.global_batch_size, task.shuffle)
        val_rows = task.val_batch_size * self.size if task.val_batch_size else task.global_batch_size
        val_reader = self._open(task.data.val, val_rows, False) if task.data.val is not None else None
        with closing(train_reader):
            self.steps = task.train_steps_per_epoch or train_reader.steps
            self._call("on_train_begin")
            for callback, state in zip(task.callbacks, self._remembered, strict=False):
                if state is not None:
                    callback.load_state(state)
            self._agree_to_end("when training begins")
            while epoch < task.epochs and not self._ends:
                self._epoch(epoch, step, running, train_reader, val_reader)
                epoch, step, running = epoch + 1, 0, np.zeros(adapter.sums_size)
                self._save(epoch, 0, running)
            self._call("on_train_end")
            decoded = train_reader.decoded
        if val_reader is not None:
            val_reader.close()
        self._moments["trained"] = time.time()
        self._moments.setdefault("first_step", self._moments["trained"])
        state = adapter.state(result=True) if self.rank == 0 else {}
        return TrainResult(state, self.history, self._moments, self._rows, decoded, self._watch.warning)

    # ---- where to begin -------------------------------------------------------------------------------------------

    def _begin(self) -> tuple[int, int, np.ndarray]:
        """Returns epoch, step and the epoch's sums so far to begin with: a checkpoint's, or the very beginning."""
        checkpoint: Checkpoint | None = objects.broadcast_object(self._load(), 0, "sparkvod.checkpoint")
        if checkpoint is None:
            self.adapter.seed(self._seed + self.rank)
            self.adapter.prepare()
            return 0, 0, np.zeros(self.adapter.sums_size)
        require_same(self.task.fingerprint, checkpoint.fingerprint, self.task.run_id, checkpoint.step)
        self._seed = checkpoint.seed
        self.history = checkpoint.history
        self.adapter.prepare()
        try:
            self.adapter.load_state(checkpoint.state)
        except (pickle.UnpicklingError, KeyError) as error:
            raise damaged(str(path_of(self.task.store, self.task.run_id)), error) from error
        checkpoint.state.clear()
        own_state, running, *_ = cloudpickle.loads(checkpoint.ranks[self.rank])
        self._remember(checkpoint.ranks[0])
        self.adapter.load_own_state(own_state)
        if not checkpoint.step:  # of a new epoch, perhaps with other metrics
            running = np.zeros(self.adapter.sums_size)
        if self.rank == 0:
            _LOG.warning(
                "run %s goes on from its checkpoint: epoch %d, step %d",
                self.task.run_id,
                checkpoint.epoch,
                checkpoint.step,
            )
        return checkpoint.epoch, checkpoint.step, running

    def _remember(self, first: bytes) -> None:
        """Takes the callbacks' states from rank 0's part of a checkpoint, if they are the same callbacks."""
        _, _, *rest = cloudpickle.loads(first)
        names, states = rest[0] if rest else ([], [])
        if names == [type(callback).__name__ for callback in self.task.callbacks]:
            self._remembered = states

    def _load(self) -> Checkpoint | None:
        path = path_of(self.task.store, self.task.run_id)
        if basics.rank() != 0 or path is None:
            return None
        try:
            return Checkpoint.from_bytes(self.task.store.read(path), path)
        except FileNotFoundError:
            return None

    def _save(self, epoch: int, step: int, running: np.ndarray) -> None:
        """Writes a checkpoint; all ranks call it at the same point."""
        path = path_of(self.task.store, self.task.run_id)
        if path is None:
            return
        callbacks = self.task.callbacks if self.rank == 0 else []
        states = [getattr(callback, "state", _nothing)() for callback in callbacks]
        remembered = [type(callback).__name__ for callback in callbacks], states
        mine = cloudpickle.dumps((self.adapter.own_state(within=step > 0), running, remembered))
        ranks = objects.allgather_object(mine, "sparkvod.rank_states")
        if self.rank == 0:
            state = self.adapter.state()
            content = Checkpoint(epoch, step, self._seed, self.history, self.task.fingerprint, state, ranks).to_bytes()
            self.task.store.write_bytes(path, content)
        self._saved = time.monotonic()

    def _due(self, steps: int) -> bool:
        """Tells, alike on all ranks, whether a checkpoint follows after so many steps of an epoch.

        Not while gradients are being summed up (``backward_passes_per_step``), which no checkpoint holds: then it
        follows when they have been applied.
        """
        every, seconds = self.task.checkpoint_every, self.task.checkpoint_seconds
        self._owed |= bool(every) and steps % (every or 1) == 0
        if seconds is not None:
            # What rank 0 said after the step before has travelled with this step's gradients: nobody waits for it.
            late = self._late is not None and self._late.result()[0] > 0
            mine = float(self.rank == 0 and not late and time.monotonic() - self._saved >= seconds)
            self._late = sums.PendingSum(f"sparkvod.late.{steps % 2}", np.array([mine]))
            self._owed |= late
        if steps % self.task.backward_passes_per_step:
            return False
        due, self._owed = self._owed, False
        return due

    # ---- an epoch -------------------------------------------------------------------------------------------------

    def _epoch(self, epoch: int, start: int, running: np.ndarray, reader: Reader, val_reader: Reader | None) -> None:
        task, adapter = self.task, self.adapter
        self._call("on_epoch_begin", epoch)
        speed = _Speed()
        rate = adapter.learning_rate
        steps = task.train_steps_per_epoch or reader.steps
        with closing(self._ahead(reader, epoch, start, steps)) as batches:
            for step, (batch, normalisers) in enumerate(self._weighed(batches), start):
                if not batch.rows and adapter.needs_rows:
                    batch = Batch(self._one_row(), 0, batch.global_rows)
                self._call("on_batch_begin", epoch, step)
                found = adapter.train(batch, normalisers, step, step + 1 == steps)
                self._watch.after_step(epoch, step, found)
                running = self._running = running + found
                self._moments.setdefault("first_step", time.time())
                self._rows += batch.rows
                speed.add(batch.global_rows)
                self._progress(epoch, step + 1, steps, speed, running)
                self._call("on_batch_end", epoch, step)
                if self._due(step + 1) and step + 1 < steps:
                    self._watch.settle()
                    self._save(epoch, step + 1, running)
        speed.end()
        self._watch.settle()
        self._owed = False
        if self._late is not None:
            self._late.result()
            self._late = None
        record: dict[str, Any] = {"epoch": epoch, "train": adapter.record(sums.across("sparkvod.train", running))}
        adapter.share_buffers()
        if val_reader is not None:
            record["validation"] = self._validate(val_reader)
        record |= {"rows": speed.rows, "seconds": speed.seconds, "rows_per_second": speed.rate, "lr": rate}
        self._watch.after_epoch(epoch, record)
        adapter.epoch_ended(record)
        self.history.append(record)
        self._post(epoch, steps, steps, speed, record["train"], record.get("validation"))
        self._call("on_epoch_end", epoch, record)
        adapter.callbacks_done(record)
        self._agree_to_end(f"after epoch {epoch}")

    def _agree_to_end(self, when: str) -> None:
        """Ends training if a callback asked for it on any rank: a rank that left alone would be waited for."""
        if self.task.callbacks:
            self._ends = agreement.reached(self.adapter, self._asked_to_stop, when)

    def _validate(self, reader: Reader) -> dict[str, Any]:
        trained, running = self._running, np.zeros(self.adapter.sums_size)
        steps = self.task.validation_steps_per_epoch or reader.steps
        self._call("on_validation_begin")
        with closing(self._ahead(reader, 0, 0, steps)) as batches:
            for step, batch in enumerate(batches):
                self._call("on_validation_batch_begin", step)
                if batch.rows:
                    running = running + self.adapter.evaluate(batch)
                self._running = running
                self._call("on_validation_batch_end", step)
        record = self.adapter.record(sums.across("sparkvod.validation", running))
        self._running = trained
        self._call("on_validation_end", record)
        return record

    # ---- batches --------------------------------------------------------------------------------------------------

    def _open(self, dataset: Dataset, global_batch: int, shuffle: bool) -> Reader:
        return open_reader(
            self.task.reader,
            dataset,
            self.task.columns,
            rank=self.rank,
            num_proc=self.size,
            shuffle=shuffle,
            seed=self._seed,
            global_batch=global_batch,
        )

    def _ahead(self, reader: Reader, epoch: int, start: int, steps: int) -> Prefetcher[Batch]:
        """Returns the batches of :meth:`_batches`, read ahead in a thread, up to a few MiB of them."""
        row_bytes = sum(i.nbytes for i in self.task.inputs) + sum(label.nbytes for label in self.task.labels)
        depth = _PREFETCH_BYTES // max(1, row_bytes * -(-reader.global_batch // self.size))
        return prefetch(self._batches(reader, epoch, start, steps), min(max(depth, 2), 64))

    def _batches(self, reader: Reader, epoch: int, start: int, steps: int) -> Iterator[Batch]:
        """Yields an epoch's batches from step ``start`` on: one pass over the data, or as many as ``steps`` take."""
        passes = -(-steps // reader.steps)
        for number in range(start // reader.steps, passes):
            begin = max(0, start - number * reader.steps)
            end = min(reader.steps, steps - number * reader.steps)
            source: Any = reader.epoch(epoch * passes + number, begin)
            with closing(source):
                for batch in islice(source, end - begin):
                    yield rows.transformed(self.task.transformation_fn, batch)

    def _one_row(self) -> dict[str, np.ndarray]:
        """Returns the first row of the training data; the same on all ranks, and in a run that goes on."""
        if self._stand_in is None:
            task = self.task
            self._stand_in = rows.first(task.reader, task.data.train, task.columns, 1, task.transformation_fn)
        return {name: array.copy() for name, array in self._stand_in.items()}  # a model may change it in place

    def _weighed(self, batches: Iterator[Batch]) -> Iterator[tuple[Batch, np.ndarray]]:
        """Yields batches with the sums of the ranks' normalisers; those of the next batch are under way meanwhile."""
        labels = len(self.task.labels)
        if not self.adapter.needs_normalisers:
            for batch in batches:
                yield batch, np.full(labels, float(batch.global_rows))
            return
        waiting: tuple[Batch, sums.PendingSum] | None = None
        for number, batch in enumerate(batches):
            pending = sums.PendingSum(f"sparkvod.normalisers.{number % 2}", self.adapter.normalisers(batch))
            if waiting is not None:
                yield waiting[0], waiting[1].result()
            waiting = batch, pending
        if waiting is not None:
            yield waiting[0], waiting[1].result()

    # ---- telling --------------------------------------------------------------------------------------------------

    def _call(self, hook: str, *args: Any) -> None:
        for callback in self.task.callbacks:
            getattr(callback, hook)(self, *args)

    def _progress(self, epoch: int, step: int, steps: int, speed: _Speed, running: np.ndarray) -> None:
        """Tells the driver now and then; the end of an epoch is told with its validation."""
        now = time.perf_counter()
        if self.rank == 0 and step < steps and now - self._posted >= _PROGRESS_SECONDS:
            self._posted = now
            self._post(epoch, step, steps, speed, self.adapter.record(running), None)

    def _post(
        self,
        epoch: int,
        step: int,
        steps: int,
        speed: _Speed,
        train: dict[str, Any],
        validation: dict[str, Any] | None,
    ) -> None:
        if self.rank == 0:
            mailbox.current().post(
                "progress",
                epoch=epoch,
                epochs=self.task.epochs,
                step=step,
                steps=steps,
                rows=speed.rows,
                rows_per_second=speed.rate,
                loss=train["loss"],
                val_loss=validation["loss"] if validation else None,
            )
