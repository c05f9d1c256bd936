"""Keras's callbacks in the training loop that all frameworks share."""

from __future__ import annotations

import pickle
import posixpath
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparkvod import log
from sparkvod.estimators.callbacks import Callback
from sparkvod.estimators.keras.best import logs_of

if TYPE_CHECKING:
    from sparkvod.estimators.trainer import Trainer

_LOG = log.get("estimators")

#: Of Keras's own callbacks those that write: one rank does.
_WRITE = ("CSVLogger", "ModelCheckpoint", "ProgbarLogger", "RemoteMonitor", "TensorBoard")
#: What a callback has of its model, and where TensorBoard's writes in this process.
_NOT_STATE = ("_model", "model", "params", "validation_data", "log_dir", "_log_write_dir", "_train_dir", "_val_dir")


class KerasCallbacks(Callback):
    """Calls Keras's callbacks on each rank, those that write files on rank 0 alone.

    Their state, such as the patience of ``EarlyStopping``, is in the checkpoint as far as it can be pickled.

    Args:
        content: the callbacks, pickled; they are made where Keras's backend is known.
        store: where TensorBoard's files go: to the run's ``logs``.
        run_id: the run's name.
    """

    def __init__(self, content: bytes, store: Any = None, run_id: str = "") -> None:
        self._content, self._store, self._run_id = content, store, run_id
        self._callbacks: list[Any] = []
        self._wants_logs = self._wants_test_logs = False
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def on_train_begin(self, trainer: Trainer) -> None:
        """Makes the callbacks and gives them the model."""
        found = pickle.loads(self._content)
        self._callbacks = [c for c in found if trainer.rank == 0 or not _is_one_of(c, _WRITE)]
        self._wants_logs = any(_overrides(c, "on_train_batch_end", "on_batch_end") for c in self._callbacks)
        self._wants_test_logs = any(_overrides(callback, "on_test_batch_end") for callback in self._callbacks)
        trainer.model.stop_training = False
        params = {"epochs": trainer.task.epochs, "steps": trainer.steps, "verbose": 0}
        for callback in self._callbacks:
            if _is_one_of(callback, ("TensorBoard",)):
                callback.log_dir = self._logs_folder() or callback.log_dir
            callback.set_params(params)
            callback.set_model(trainer.model)
            callback.on_train_begin({})
        self._heed(trainer)

    def on_epoch_begin(self, trainer: Trainer, epoch: int) -> None:
        """Calls theirs."""
        for callback in self._callbacks:
            callback.on_epoch_begin(epoch, {})

    def on_batch_begin(self, trainer: Trainer, epoch: int, step: int) -> None:
        """Calls theirs."""
        for callback in self._callbacks:
            callback.on_train_batch_begin(step, {})

    def on_batch_end(self, trainer: Trainer, epoch: int, step: int) -> None:
        """Calls theirs, with this rank's figures of the epoch so far if one of them reads them."""
        logs = trainer.running() if self._wants_logs else {}
        for callback in self._callbacks:
            callback.on_train_batch_end(step, dict(logs))
        self._heed(trainer)

    def on_validation_begin(self, trainer: Trainer) -> None:
        """Calls theirs: one of them may swap weights for its averages until the validation's end."""
        for callback in self._callbacks:
            callback.on_test_begin({})

    def on_validation_batch_begin(self, trainer: Trainer, step: int) -> None:
        """Calls theirs."""
        for callback in self._callbacks:
            callback.on_test_batch_begin(step, {})

    def on_validation_batch_end(self, trainer: Trainer, step: int) -> None:
        """Calls theirs, with this rank's figures so far if one of them reads them."""
        logs = trainer.running() if self._wants_test_logs else {}
        for callback in self._callbacks:
            callback.on_test_batch_end(step, dict(logs))

    def on_validation_end(self, trainer: Trainer, record: dict[str, Any]) -> None:
        """Calls theirs, with the figures of all ranks."""
        for callback in self._callbacks:
            callback.on_test_end(dict(record))

    def on_epoch_end(self, trainer: Trainer, epoch: int, record: dict[str, Any]) -> None:
        """Calls theirs, with the figures of all ranks."""
        logs = logs_of(record)
        for callback in self._callbacks:
            callback.on_epoch_end(epoch, logs)
        self._heed(trainer)
        self._send_logs()

    def on_train_end(self, trainer: Trainer) -> None:
        """Calls theirs."""
        for callback in self._callbacks:
            callback.on_train_end({})
        self._send_logs()
        if self._folder is not None:
            self._folder.cleanup()

    def _heed(self, trainer: Trainer) -> None:
        if trainer.model.stop_training:
            trainer.stop()

    # ---- state ------------------------------------------------------------------------------------------------------

    def state(self) -> Any:
        """Returns what the callbacks remember, by their classes' names."""
        return [(type(callback).__name__, _remembered(callback)) for callback in self._callbacks]

    def load_state(self, state: Any) -> None:
        """Takes what :meth:`state` of rank 0 returned, for as many callbacks as are the same."""
        left = list(state)
        for callback in self._callbacks:
            found = next((entry for entry in left if entry[0] == type(callback).__name__), None)
            if found is not None:
                left.remove(found)
                for name, content in found[1].items():
                    setattr(callback, name, pickle.loads(content))

    # ---- TensorBoard ------------------------------------------------------------------------------------------------

    def _logs_folder(self) -> str | None:
        """Returns where TensorBoard writes: in the store where that is a directory, else where it is sent from."""
        path = None if self._store is None else self._store.get_logs_path(self._run_id)
        if path is None:
            return None
        if self._store.is_local:
            return str(self._store.get_localized_path(path))
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="sparkvod-logs-")
        return self._folder.name

    def _send_logs(self) -> None:
        if self._folder is None:
            return
        target = self._store.get_logs_path(self._run_id)
        for source in Path(self._folder.name).rglob("*"):
            if source.is_file():
                relative = source.relative_to(self._folder.name).as_posix()
                self._store.write_bytes(posixpath.join(target, relative), source.read_bytes())


def _is_one_of(callback: Any, names: tuple[str, ...]) -> bool:
    return any(cls.__name__ in names and cls.__module__.startswith("keras.") for cls in type(callback).__mro__)


def _overrides(callback: Any, *hooks: str) -> bool:
    """Returns whether a callback does something in one of these hooks, and may look at the figures."""
    methods = [getattr(callback, name) for name in hooks]  # LambdaCallback has its own on the object
    return any(not str(getattr(method, "__module__", "")).endswith("callbacks.callback") for method in methods)


def _remembered(callback: Any) -> dict[str, bytes]:
    found = {}
    for name, value in vars(callback).items():
        if name in _NOT_STATE or callable(value):
            continue
        try:
            found[name] = pickle.dumps(value)
        except Exception:  # a writer or a file, which cannot be kept: it begins anew
            _LOG.debug("%s of %s cannot be kept in the checkpoint", name, type(callback).__name__, exc_info=True)
    return found
