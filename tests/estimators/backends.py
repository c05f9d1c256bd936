"""Backends that need no Spark, and data for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from sparkvod.data import FilesystemStore, Store
from sparkvod.launch.context import WorldContext, use


class Here:
    """Runs the one rank in this process."""

    def run(self, fn: Any, args: Any = (), kwargs: Any = None, env: Any = None) -> list[Any]:
        with use(WorldContext(0, 1, lambda data: [data])):
            return [fn(*args, **(kwargs or {}))]

    def num_processes(self) -> int:
        return 1


class Never(Here):
    """Must not be reached; says that it has so many ranks."""

    def __init__(self, ranks: int = 2) -> None:
        self.ranks = ranks

    def run(self, *args: Any, **kwargs: Any) -> list[Any]:
        raise AssertionError("training was started")

    def num_processes(self) -> int:
        return self.ranks


def write(folder: Path, validation: bool = False, row_group_size: int = 50, **columns: np.ndarray) -> FilesystemStore:
    """Returns a store whose training data (and validation data, if asked for) are these columns."""
    store = Store.create(str(folder))
    arrays = {
        name: pa.FixedSizeListArray.from_arrays(pa.array(values.ravel()), values.shape[1])
        if values.ndim > 1
        else pa.array(values)
        for name, values in columns.items()
    }
    for path in [store.get_train_data_path()] + [store.get_val_data_path()] * validation:
        Path(path).mkdir(parents=True)
        pq.write_table(pa.table(arrays), f"{path}/part-0.parquet", row_group_size=row_group_size)
    return store
