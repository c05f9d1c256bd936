"""Lets Petastorm 0.12 run on today's pyarrow and numpy, and cures its readers of losing rows. Import it first.

Importing this module puts a hook in place that mends each module of Petastorm right after it is loaded, whoever loads
it: the program, an object that is being unpickled, a child of Petastorm's process pool. Nothing of Petastorm is
imported here. In a process that Spark starts, Petastorm is often imported while a function is unpickled: wrap that
function with :func:`for_workers`, and this module is there before.

What is mended:

* pyarrow: its old file systems, now fsspec's, and the data set of pieces (``petastorm_pieces``);
* numpy: names that numpy 2 has dropped;
* columns of lists of fixed size, large lists and large strings, which Petastorm leaves out with a warning;
* the end of an epoch: the pools ask "is all that was handed out processed?" first and "is everything handed out?"
  after, and when the last pieces are handed out in between they end without them (the dummy pool can also wait for
  ever). Here the second question is asked before the first is believed;
* children of the process pool, which must import this module before Petastorm;
* ``materialize_dataset``, whose count of row groups would run in Spark workers without this module.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.util
import json
import os
import posixpath
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.machinery import ModuleSpec
from typing import Any

import cloudpickle
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from fsspec.implementations.local import LocalFileSystem

from sparkvod.data.petastorm_pieces import ParquetDataset, ParquetDatasetPiece, as_lists
from sparkvod.errors import DataError

_ENTRY = "import sys; sys.path.append({root!r}); from sparkvod.data import petastorm_compat as c; c.run_child({path!r})"


def require() -> types.ModuleType:
    """Returns the package ``petastorm``.

    Raises:
        DataError: it is not installed, or one of another version is.
    """
    try:
        import petastorm
    except ImportError as error:
        raise DataError(
            f"Petastorm cannot be imported ({error}), petastorm 0.12 was expected on the driver and on every worker: "
            "pip install 'sparkvod[petastorm]'"
        ) from error
    if not petastorm.__version__.startswith("0.12."):
        raise DataError(
            f"petastorm {petastorm.__version__} was found, 0.12 was expected, which this version of sparkvod makes run "
            "on today's pyarrow: pip install 'sparkvod[petastorm]'"
        )
    return petastorm


def available() -> bool:
    """Tells whether Petastorm is installed, without importing it."""
    return importlib.util.find_spec("petastorm") is not None


def for_workers(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that other processes unpickle with this module in place.

    Pass the result to Spark where the function, or what it uses, comes from Petastorm:
    ``rdd.map(for_workers(lambda row: dict_to_spark_row(schema, row)))``.

    Args:
        function: what to call.
    """
    return _ForWorkers(function)


class _ForWorkers:
    """Calls a function. Its pickle names this module before it comes to the function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        functools.update_wrapper(self, function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickled, (cloudpickle.dumps(self._function),)


def _unpickled(data: bytes) -> Callable[..., Any]:
    return _ForWorkers(cloudpickle.loads(data))


# -- pyarrow.parquet as Petastorm knows it --------------------------------------------------------------------------


class _Parquet:
    """``pyarrow.parquet`` with the data set of pieces. Petastorm's closures capture it, so it is pickled by name."""

    ParquetDataset = ParquetDataset
    ParquetDatasetPiece = ParquetDatasetPiece

    def __getattr__(self, name: str) -> Any:
        return getattr(pq, name)

    def __reduce__(self) -> str:
        return "parquet"


parquet = _Parquet()


def _connect(host: str = "default", port: int = 0, user: str | None = None, **options: Any) -> Any:
    """Stands for ``pyarrow.hdfs.connect``: the same cluster through fsspec."""
    import fsspec

    kept = {name: options[name] for name in ("kerb_ticket", "extra_conf") if options.get(name)}
    return fsspec.filesystem("hdfs", host=host, port=port, user=user, **kept)


def _mend_libraries() -> None:
    """Adds what Petastorm imports from pyarrow and numpy, where they lack it."""
    for old, new in (("unicode_", np.str_), ("string_", np.bytes_), ("in1d", np.isin)):
        if old not in vars(np):
            setattr(np, old, new)
    if hasattr(pa, "localfs"):
        return
    filesystem, hdfs = types.ModuleType("pyarrow.filesystem"), types.ModuleType("pyarrow.hdfs")
    vars(filesystem).update(LocalFileSystem=LocalFileSystem)
    vars(hdfs).update(HadoopFileSystem=type("HadoopFileSystem", (), {}), connect=_connect)
    sys.modules.update({filesystem.__name__: filesystem, hdfs.__name__: hdfs})
    vars(pa).update(filesystem=filesystem, hdfs=hdfs, localfs=LocalFileSystem(), LocalFileSystem=LocalFileSystem)
    if not hasattr(pa.lib, "ArrowIOError"):
        pa.lib.ArrowIOError = OSError


# -- what is done to Petastorm's modules ----------------------------------------------------------------------------


def _pieces(module: Any) -> None:
    if not hasattr(pq, "ParquetDatasetPiece"):
        module.pq = parquet


def _dataset_metadata(module: Any) -> None:
    _pieces(module)

    def count_row_groups(dataset: ParquetDataset, spark_context: Any, filesystem_factory: Any) -> None:
        """Notes the row groups of each file, from footers read by threads of the driver instead of a Spark job."""
        with ThreadPoolExecutor(16) as pool:
            footers = pool.map(lambda piece: piece.get_metadata().num_row_groups, dataset.pieces)
            names = [posixpath.relpath(piece.path, str(dataset.paths)) for piece in dataset.pieces]
            counts = dict(zip(names, footers, strict=True))
        module.utils.add_to_dataset_metadata(dataset, module.ROW_GROUPS_PER_FILE_KEY, json.dumps(counts))

    module._generate_num_row_groups_per_file = count_row_groups


def _unischema(module: Any) -> None:
    original = module.Unischema.from_arrow_schema.__func__

    def from_arrow_schema(cls: Any, parquet_dataset: Any, omit_unsupported_fields: bool = True) -> Any:
        """Infers the fields of the types that pieces are read as; lists of fixed size would be left out."""
        written = parquet_dataset.pieces[0].get_metadata().schema.to_arrow_schema()
        schema = as_lists(written.empty_table()).schema
        footer = types.SimpleNamespace(schema=types.SimpleNamespace(to_arrow_schema=lambda: schema))
        piece = types.SimpleNamespace(get_metadata=lambda: footer)
        view = types.SimpleNamespace(partitions=parquet_dataset.partitions, pieces=[piece])
        return original(cls, view, omit_unsupported_fields)

    module.Unischema.from_arrow_schema = classmethod(from_arrow_schema)


def _weighted_sampling(module: Any) -> None:
    """Numpy's old name for Python's float, which this one module uses."""
    module.np = types.SimpleNamespace(**{**vars(np), "float": float})


def _thread_or_process_pool(kind: Any) -> None:
    from petastorm.workers_pool import EmptyResultError

    original = kind.get_results

    @functools.wraps(original)
    def get_results(self: Any) -> Any:
        while True:
            try:
                return original(self)
            except EmptyResultError:
                # The ventilator has completed, so the counters are final now; when they were compared it had perhaps
                # not. One that was stopped counts no further.
                stopped = getattr(self._ventilator, "_stop_requested", False)
                if stopped or self._ventilated_items == self._ventilated_items_processed:
                    raise

    kind.get_results = get_results


def _thread_pool(module: Any) -> None:
    _thread_or_process_pool(module.ThreadPool)


def _process_pool(module: Any) -> None:
    _thread_or_process_pool(module.ProcessPool)
    module.exec_in_new_process = start_child


def _dummy_pool(module: Any) -> None:
    def get_results(self: Any) -> Any:
        while not self._results_queue:
            # Asked before the queue is looked at: what is handed out in between is found there.
            completed = self._ventilator is None or self._ventilator.completed()
            if self._ventilator_queue:
                args, kwargs = self._ventilator_queue.pop(0)
                self._worker.process(*args, **kwargs)
                if self._ventilator is not None:
                    self._ventilator.processed_item()
            elif completed:
                raise module.EmptyResultError
            else:
                time.sleep(0.001)
        return self._results_queue.pop(0)

    module.DummyPool.get_results = get_results


def _exec(module: Any) -> None:
    module.exec_in_new_process = start_child


def start_child(function: Callable[..., Any], *args: Any, **kwargs: Any) -> subprocess.Popen[bytes]:
    """Calls a function in a new Python process, where this module is imported before the function is unpickled."""
    import dill

    handle, path = tempfile.mkstemp(suffix=".petastorm")
    with os.fdopen(handle, "wb") as file:
        dill.dump((function, args, kwargs), file)
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    return subprocess.Popen([sys.executable, "-c", _ENTRY.format(root=root, path=path)])


def run_child(path: str) -> None:
    """Does the work of a process that :func:`start_child` started."""
    import dill

    with open(path, "rb") as file:
        function, args, kwargs = dill.load(file)
    os.unlink(path)
    function(*args, **kwargs)


_MENDS: dict[str, Callable[[Any], None]] = {
    "petastorm.reader": _pieces,
    "petastorm.arrow_reader_worker": _pieces,
    "petastorm.py_dict_reader_worker": _pieces,
    "petastorm.etl.rowgroup_indexing": _pieces,
    "petastorm.etl.petastorm_generate_metadata": _pieces,
    "petastorm.etl.dataset_metadata": _dataset_metadata,
    "petastorm.unischema": _unischema,
    "petastorm.weighted_sampling_reader": _weighted_sampling,
    "petastorm.workers_pool.thread_pool": _thread_pool,
    "petastorm.workers_pool.process_pool": _process_pool,
    "petastorm.workers_pool.dummy_pool": _dummy_pool,
    "petastorm.workers_pool.exec_in_new_process": _exec,
}


class _Finder(importlib.abc.MetaPathFinder):
    """Finds Petastorm's modules as Python does, and mends those of :data:`_MENDS` when they have been executed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        """See ``importlib.abc.MetaPathFinder``."""
        if fullname == "petastorm":
            _mend_libraries()
        if fullname not in _MENDS:
            return None
        others = (finder.find_spec(fullname, path, target) for finder in sys.meta_path if finder is not self)
        spec = next((found for found in others if found is not None), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: types.ModuleType) -> None:
                execute(module)
                _MENDS[fullname](module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _install() -> None:
    for name, mend in _MENDS.items():
        if name in sys.modules:
            mend(sys.modules[name])
    sys.meta_path.insert(0, _Finder())


_install()
