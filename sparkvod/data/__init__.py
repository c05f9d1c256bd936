"""Stores, preparation of DataFrames as Parquet, and readers. Needs neither a framework nor the native engine."""

import sparkvod.data._needs  # noqa: F401 - before what it checks
from sparkvod.data.dataset import Dataset, PreparedData, RowGroup, open_prepared
from sparkvod.data.loader import prefetch
from sparkvod.data.preparation import clean, prepare, release
from sparkvod.data.readers.reader import Batch, Reader, open_reader
from sparkvod.data.schema import Column
from sparkvod.data.store import FilesystemStore, LocalStore, RemoteStore, Store

__all__ = [
    "Batch",
    "Column",
    "Dataset",
    "FilesystemStore",
    "LocalStore",
    "PreparedData",
    "Reader",
    "RemoteStore",
    "RowGroup",
    "Store",
    "clean",
    "open_prepared",
    "open_reader",
    "prefetch",
    "prepare",
    "release",
]
