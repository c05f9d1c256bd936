"""Where runs and data live: one directory on any file system that fsspec knows, local ones first.

The layout is the peer's: ``intermediate_train_data[.idx]``, ``intermediate_val_data[.idx]``, ``runs/<run_id>`` with the
checkpoint file and ``logs``. A store is a plain picklable object: workers open their own connection from its prefix
and storage options.
"""

from __future__ import annotations

import atexit
import os
import posixpath
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import fsspec
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from sparkvod.data import files
from sparkvod.errors import StoreError

_MISSING = (
    "the package of that file system is not installed or the scheme is misspelt; install it (s3fs, gcsfs, adlfs, ...)"
)

_FORMS = "a directory's path (/shared/x) or URL (file:///x, s3://bucket/x, gs://, abfs://, hdfs://host:port/x)"
_OPEN = (
    "check its host, network and credentials (storage_options); hdfs:// needs, on the driver and all executors, Java "
    "with JAVA_HOME set (for libjvm), Hadoop's client with HADOOP_HOME set (for libhdfs), and CLASSPATH set to what "
    "'hadoop classpath --glob' prints"
)
_DBFS = "/dbfs"


@dataclass(frozen=True)
class RemoteStore:
    """The paths of one run and one data set, and how to publish a local directory: what a worker needs.

    ``get_local_output_dir()`` is a context manager giving a temporary directory, ``sync(local_dir)`` copies its files
    to the run's path.
    """

    train_data_path: str
    val_data_path: str
    test_data_path: str
    saving_runs: bool
    runs_path: str | None
    run_path: str | None
    checkpoint_path: str | None
    logs_path: str | None
    checkpoint_filename: str
    logs_subdir: str
    get_local_output_dir: Callable[[], AbstractContextManager[str]]
    sync: Callable[[str], None]


class Store:
    """Base of all stores; make one with :meth:`create`."""

    @staticmethod
    def create(prefix_path: str, *args: Any, **kwargs: Any) -> FilesystemStore:
        """Returns the store for ``prefix_path``.

        Args:
            prefix_path: a local path (absolute or not), ``file:///...`` or any URL that fsspec knows (``s3://``,
                ``gs://``, ``abfs://``, ``hdfs://``, ``memory://``). ``dbfs:/x`` is ``/dbfs/x``, where Databricks
                mounts it.
            *args: passed to :class:`FilesystemStore`.
            **kwargs: passed to :class:`FilesystemStore`.

        Raises:
            StoreError: the scheme is unknown, or what its file system needs is not installed.
            TypeError: ``prefix_path`` is no path.
        """
        return FilesystemStore(prefix_path, *args, **kwargs)

    @staticmethod
    def temporary(**kwargs: Any) -> FilesystemStore:
        """Returns a store in a new directory of this machine's temporary files, for a local Spark master.

        The directory, with all that was prepared and saved in it, is removed when this process ends in an orderly way;
        that of a process that was killed stays.

        Args:
            **kwargs: passed to :class:`FilesystemStore`.
        """
        folder = tempfile.mkdtemp(prefix="sparkvod-store-")
        atexit.register(_remove_folder, folder, os.getpid())
        return FilesystemStore(folder, **kwargs)


class FilesystemStore(Store):
    """A store on an fsspec file system.

    Args:
        prefix_path: directory of everything; relative local paths are made absolute at once, so that workers with
            another working directory find the same place.
        train_path: directory of training data instead of ``<prefix>/intermediate_train_data``.
        val_path: the same for validation data.
        test_path: the same for test data.
        runs_path: directory of runs instead of ``<prefix>/runs``.
        save_runs: False: no checkpoints and logs are kept; their paths are None.
        storage_options: options of the fsspec file system (credentials, endpoint, ...).
        checkpoint_filename: name of the checkpoint file in a run's directory, ``checkpoint`` by default.

    Raises:
        StoreError: the scheme is unknown or its package is not installed.
    """

    def __init__(
        self,
        prefix_path: str,
        train_path: str | None = None,
        val_path: str | None = None,
        test_path: str | None = None,
        runs_path: str | None = None,
        save_runs: bool = True,
        storage_options: dict[str, Any] | None = None,
        checkpoint_filename: str | None = None,
    ) -> None:
        if not isinstance(prefix_path, (str, os.PathLike)) or not os.fspath(prefix_path):
            raise TypeError(
                f"the store path {prefix_path!r} was found, {_FORMS} was expected; Store.temporary() makes a store for "
                "a local master"
            )
        prefix_path, *others = (_mounted(path) for path in (prefix_path, train_path, val_path, test_path, runs_path))
        train_path, val_path, test_path, runs_path = others
        self.storage_options = dict(storage_options or {})
        self._fs, _ = self._connect(prefix_path)
        self.prefix_path = self.get_full_path(prefix_path)
        self._train_path = self.get_full_path(train_path or self._join("intermediate_train_data"))
        self._val_path = self.get_full_path(val_path or self._join("intermediate_val_data"))
        self._test_path = self.get_full_path(test_path or self._join("intermediate_test_data"))
        self._runs_path = self.get_full_path(runs_path or self._join("runs"))
        self._save_runs = save_runs
        self._checkpoint_filename = checkpoint_filename or "checkpoint"

    def _connect(self, path: str) -> tuple[fsspec.AbstractFileSystem, str]:
        try:
            return url_to_fs(os.fspath(path), **self.storage_options)
        except OSError as error:  # Arrow's, which loads libhdfs and through it Java
            raise StoreError(
                f"the file system of the store path {path!r} cannot be opened ({error}): {_OPEN}"
            ) from error
        except (ImportError, TypeError, ValueError) as error:
            raise StoreError(f"no file system for the store path {path!r} ({error}): {_MISSING}") from error

    def _join(self, *parts: str) -> str:
        return posixpath.join(self.prefix_path, *parts)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_fs"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._fs, _ = self._connect(self.prefix_path)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.prefix_path!r})"

    # -- paths ---------------------------------------------------------------------------------------------------

    @property
    def fs(self) -> fsspec.AbstractFileSystem:
        """The fsspec file system of this process."""
        return self._fs

    @property
    def is_local(self) -> bool:
        """True when the store is a directory of the machine's own file system."""
        return isinstance(self._fs, LocalFileSystem)

    @property
    def failures(self) -> tuple[type[Exception], ...]:
        """What :attr:`fs` raises when it fails: ``OSError``, and what clients of remote ones have of their own."""
        return files.failures(self._fs)

    def get_filesystem(self) -> fsspec.AbstractFileSystem:
        """Returns :attr:`fs`."""
        return self._fs

    def get_localized_path(self, path: str) -> str:
        """Returns ``path`` as :attr:`fs` wants it: without the scheme."""
        return str(self._fs._strip_protocol(os.fspath(path)))

    def get_full_path(self, path: str) -> str:
        """Returns ``path`` as anybody wants it: an absolute path on a local store, a URL with its scheme elsewhere."""
        local = self.get_localized_path(path)
        return local if self.is_local else str(self._fs.unstrip_protocol(local))

    def get_full_path_fn(self) -> Callable[[str], str]:
        """Returns a picklable function doing what :meth:`get_full_path` does."""
        return self.get_full_path

    def get_train_data_path(self, idx: int | None = None) -> str:
        """Returns the directory of training data set ``idx``; None: the one without a number."""
        return self._train_path if idx is None else f"{self._train_path}.{idx}"

    def get_val_data_path(self, idx: int | None = None) -> str:
        """Returns the directory of validation data set ``idx``."""
        return self._val_path if idx is None else f"{self._val_path}.{idx}"

    def get_test_data_path(self, idx: int | None = None) -> str:
        """Returns the directory of test data set ``idx``."""
        return self._test_path if idx is None else f"{self._test_path}.{idx}"

    def get_data_metadata_path(self, path: str) -> str:
        """Returns the file with the metadata of the data set in ``path``; readers of Parquet skip its name."""
        return posixpath.join(self.get_full_path(path), "_sparkvod.json")

    def saving_runs(self) -> bool:
        """Tells whether checkpoints and logs are kept."""
        return self._save_runs

    def get_runs_path(self) -> str:
        """Returns the directory of all runs."""
        return self._runs_path

    def get_run_path(self, run_id: str) -> str:
        """Returns the directory of one run."""
        return posixpath.join(self._runs_path, run_id)

    def get_checkpoint_path(self, run_id: str) -> str | None:
        """Returns the directory that holds the run's checkpoint file (the run's own), None when runs are not saved."""
        return self.get_run_path(run_id) if self._save_runs else None

    def get_checkpoints(self, run_id: str, suffix: str = ".ckpt") -> list[str]:
        """Returns the paths of the run's files that end with ``suffix``, sorted by name."""
        path = self.get_checkpoint_path(run_id)
        if path is None or not self.exists(path):
            return []
        return sorted(self.get_full_path(name) for name in self._fs.ls(path, detail=False) if name.endswith(suffix))

    def get_checkpoint_filename(self) -> str:
        """Returns the name of the checkpoint file in the run's directory."""
        return self._checkpoint_filename

    def get_logs_path(self, run_id: str) -> str | None:
        """Returns the directory of the run's logs, None when runs are not saved."""
        return posixpath.join(self.get_run_path(run_id), self.get_logs_subdir()) if self._save_runs else None

    def get_logs_subdir(self) -> str:
        """Returns the name of the directory of logs in a run's directory."""
        return "logs"

    # -- files ---------------------------------------------------------------------------------------------------

    def exists(self, path: str) -> bool:
        """Tells whether a file or directory is there, by asking the file system and not a listing cached before."""
        self._fs.invalidate_cache()
        return bool(self._fs.exists(path))

    def read(self, path: str) -> bytes:
        """Returns a file's bytes; whether it is there shows by opening it, and not by a listing.

        Raises:
            FileNotFoundError: there is no such file.
        """
        return files.read(self._fs, path)

    def open_to_read(self, path: str) -> Any:
        """Returns an open file for those who read a part of it; raises as :meth:`read` does."""
        return files.open_to_read(self._fs, path)

    def read_text(self, path: str) -> str:
        """Returns a file's text, UTF-8."""
        return self.read(path).decode()

    def write_text(self, path: str, text: str) -> None:
        """Writes a file's text as UTF-8, as :meth:`write_bytes` does."""
        self.write_bytes(path, text.encode())

    def write_bytes(self, path: str, data: bytes) -> None:
        """Writes a file so that a reader sees the old content or the new one, never a part.

        See :func:`sparkvod.data.files.write`. Missing directories are made.

        Raises:
            StoreError: the file cannot be written.
        """
        try:
            files.write(self._fs, path, data)
        except self.failures as error:
            raise self._unwritable(path, error) from error

    def make_directory(self, path: str) -> None:
        """Makes a directory and those above it, where the file system has any.

        Raises:
            StoreError: it cannot be made.
        """
        try:
            files.make_directory(self._fs, path)
        except self.failures as error:
            raise self._unwritable(path, error) from error

    def create_exclusive(self, path: str, data: bytes) -> bool | None:
        """Writes a file only if it is not there yet, atomically.

        Returns:
            True when this call made the file, False when it was there, None when the file system cannot tell.

        Raises:
            StoreError: the file cannot be written.
        """
        try:
            return files.create(self._fs, path, data)
        except self.failures as error:
            raise self._unwritable(path, error) from error

    def delete(self, path: str) -> None:
        """Deletes a file, or a directory with all in it; nothing happens when it is not there."""
        if self.exists(path):
            self._fs.rm(path, recursive=True)

    def delete_file(self, path: str) -> None:
        """Deletes a file by its name, also one that no listing shows yet; nothing happens when it is not there."""
        files.delete(self._fs, path)

    def size(self, path: str) -> int | None:
        """Returns the bytes of a file, also of one that no listing shows yet; None when it is not there."""
        return files.size(self._fs, path)

    def listing(self, path: str) -> dict[str, int]:
        """Returns the files below a directory: name relative to it -> size in bytes; {} when it is not there."""
        self._fs.invalidate_cache()
        root = self.get_localized_path(path).rstrip("/") + "/"
        found = self._fs.find(path, detail=True)
        return {str(name)[len(root) :]: int(info["size"]) for name, info in found.items() if str(name).startswith(root)}

    def require_shared(self, what: str) -> None:
        """Refuses a store in this process's memory, where other processes are to read or write.

        Args:
            what: what they are needed for, for the message.

        Raises:
            StoreError: the store is ``memory://``.
        """
        if isinstance(self._fs, MemoryFileSystem):
            raise StoreError(
                f"the store {self.prefix_path!r} was found, which is this process's own memory: Spark's workers and "
                f"the ranks are other processes, so {what} needs a store that all of them reach; pass a directory's "
                "path or a URL to Store.create(), or Store.temporary() on a local master. memory:// serves to read "
                "Parquet files in one process (open_prepared, open_reader)"
            )

    def check_writable(self) -> None:
        """Writes and deletes a small file under the prefix.

        Raises:
            StoreError: it cannot be done; the message names the path and what to do.
        """
        probe = self._join(f".sparkvod-{uuid.uuid4().hex[:8]}")
        self.write_bytes(probe, b"probe")
        try:
            self.delete_file(probe)
        except self.failures as error:
            raise self._unwritable(probe, error) from error

    def _unwritable(self, path: str, error: Exception) -> StoreError:
        if files.is_full(error):
            return StoreError(
                f"the store path {self.get_full_path(path)!r} cannot be written ({type(error).__name__}: {error}): its "
                "disk is full, or its owner's quota used up; free some room, such as old runs and "
                "intermediate_train_data under the store, or pass another to Store.create()"
            )
        return StoreError(
            f"the store path {self.get_full_path(path)!r} cannot be written ({type(error).__name__}: {error}), a "
            "directory that "
            "this process and all executors may write to was expected; pass another to Store.create() or correct its "
            "permissions or storage_options"
        )

    def is_parquet_dataset(self, path: str) -> bool:
        """Tells whether there are Parquet files below ``path``."""
        return any(is_data_file(name) for name in self.listing(path))

    def get_parquet_dataset(self, path: str) -> Any:
        """Returns the ``pyarrow.dataset.Dataset`` of the Parquet files below ``path``."""
        import pyarrow.dataset

        return pyarrow.dataset.dataset(self.get_localized_path(path), filesystem=self._fs, format="parquet")

    # -- workers -------------------------------------------------------------------------------------------------

    def get_local_output_dir_fn(self, run_id: str) -> Callable[[], AbstractContextManager[str]]:
        """Returns a function that makes a temporary directory on the worker, a context manager."""

        @contextmanager
        def local_output_dir() -> Iterator[str]:
            with tempfile.TemporaryDirectory(prefix=f"{run_id}-") as path:
                yield path

        return local_output_dir

    def sync_fn(self, run_id: str) -> Callable[[str], None]:
        """Returns a function that copies the files of a local directory to the run's path, each of them atomically."""

        def sync(local_dir: str) -> None:
            for folder, _, names in os.walk(local_dir):
                for name in names:
                    source = os.path.join(folder, name)
                    with open(source, "rb") as file:
                        target = posixpath.join(self.get_run_path(run_id), os.path.relpath(source, local_dir))
                        self.write_bytes(target, file.read())

        return sync

    def to_remote(self, run_id: str, dataset_idx: int | None) -> RemoteStore:
        """Returns the paths and functions for one run on one data set; cloudpickle can pickle them."""
        return RemoteStore(
            train_data_path=self.get_train_data_path(dataset_idx),
            val_data_path=self.get_val_data_path(dataset_idx),
            test_data_path=self.get_test_data_path(dataset_idx),
            saving_runs=self.saving_runs(),
            runs_path=self.get_runs_path(),
            run_path=self.get_run_path(run_id),
            checkpoint_path=self.get_checkpoint_path(run_id),
            logs_path=self.get_logs_path(run_id),
            checkpoint_filename=self.get_checkpoint_filename(),
            logs_subdir=self.get_logs_subdir(),
            get_local_output_dir=self.get_local_output_dir_fn(run_id),
            sync=self.sync_fn(run_id),
        )


class LocalStore(FilesystemStore):
    """A store on the local file system; kept for the peer's name, ``Store.create`` does the same."""


def _mounted(path: Any) -> Any:
    """Returns where ``dbfs:/x`` is mounted, other paths as they are: fsspec takes the scheme for a folder's name."""
    text = "" if path is None else os.fspath(path)
    if not text.startswith("dbfs:"):
        return path
    if not os.path.isdir(_DBFS):
        raise StoreError(
            f"the store path {text!r} was found, and {_DBFS}, where Databricks mounts DBFS, does not exist here; pass "
            "a path that Python can open on the driver and all executors, such as /Volumes/... or s3://..., abfss://..."
        )
    return posixpath.join(_DBFS, text.removeprefix("dbfs:").lstrip("/"))


def _remove_folder(folder: str, pid: int) -> None:
    """At the end of the process that made it, and not at that of a child which was forked from it."""
    if os.getpid() == pid:
        shutil.rmtree(folder, ignore_errors=True)


def is_data_file(name: str) -> bool:
    """Tells whether a path relative to a data set names a Parquet file that is part of the data."""
    return name.endswith((".parquet", ".pq")) and not any(part.startswith(("_", ".")) for part in name.split("/"))
