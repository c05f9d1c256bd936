"""The reader ``arrow`` beside the reader ``petastorm`` and Petastorm itself, on the same files.

All end with shuffled batches of 256 rows. Petastorm itself is ``make_batch_reader`` with ``BatchedDataLoader``, or
``make_reader`` with ``DataLoader`` where there is a Unischema: ten threads, and a shuffling queue of 4,096 rows, much
less shuffling than ours.
"""

from __future__ import annotations

import json
import pickle
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.harness import MIN_ROUNDS, Report, alternate
from benchmarks.reader import BATCH, WIDTH, make, ours, total
from sparkvod.data import Dataset, FilesystemStore, open_prepared, open_reader, petastorm_compat, unischema

ROWS, DECODED_ROWS, GROUP, QUEUE = 200_000, 10_000, 1000, 4096


def make_decoded(folder: str) -> Dataset:
    """Writes what ``materialize_dataset`` writes of fields with ``ScalarCodec``; a codec takes its time per value."""
    petastorm_compat.require()
    from petastorm.codecs import ScalarCodec
    from petastorm.etl.dataset_metadata import ROW_GROUPS_PER_FILE_KEY
    from petastorm.unischema import Unischema, UnischemaField
    from pyspark.sql.types import FloatType

    path = Path(folder, "intermediate_train_data")
    path.mkdir(parents=True)
    values = np.random.default_rng(0).normal(size=(DECODED_ROWS, WIDTH)).astype(np.float32)
    table = pa.table({f"x{i}": values[:, i] for i in range(WIDTH)})
    pq.write_table(table, path / "part.parquet", row_group_size=GROUP)
    fields = [UnischemaField(name, np.float32, (), ScalarCodec(FloatType()), False) for name in table.column_names]
    metadata = {
        unischema.KEY: pickle.dumps(Unischema("Bench", fields)),
        ROW_GROUPS_PER_FILE_KEY: json.dumps({"part.parquet": DECODED_ROWS // GROUP}),
    }
    pq.write_metadata(table.schema.with_metadata(metadata), path / "_common_metadata")
    return open_prepared(FilesystemStore(folder)).train


def theirs(dataset: Dataset, seen: Callable[[np.ndarray], None] | None = None) -> float:
    """Reads an epoch with Petastorm's reader and loader, and returns the rows per second."""
    petastorm = petastorm_compat.require()
    from petastorm.pytorch import BatchedDataLoader, DataLoader

    by_row = dataset.codecs is not None
    read, load = (petastorm.make_reader, DataLoader) if by_row else (petastorm.make_batch_reader, BatchedDataLoader)
    began = time.perf_counter()
    rows = 0
    reader = read(f"file://{dataset.path}", num_epochs=1)
    with load(reader, batch_size=BATCH, shuffling_queue_capacity=QUEUE) as batches:
        for batch in batches:
            rows += len(next(iter(batch.values())))
            if seen:
                for values in batch.values():
                    seen(values.numpy())
    return rows / (time.perf_counter() - began)


def run(report: Report) -> None:
    """Measures 20 columns of scalars, one column of vectors of 20, and 20 fields of a Unischema."""
    with tempfile.TemporaryDirectory(prefix="sparkvod-bench-") as folder:
        cases: dict[str, Dataset] = {
            f"{WIDTH} columns of float32": make(f"{folder}/columns", ROWS, False),
            f"one column of {WIDTH} float32": make(f"{folder}/vectors", ROWS, True),
            f"{WIDTH} fields of a Unischema": make_decoded(f"{folder}/fields"),
        }
        for what, dataset in cases.items():
            with (
                open_reader("arrow", dataset, None, BATCH, seed=1) as arrow,
                open_reader("petastorm", dataset, None, BATCH, seed=1) as petastorm,
            ):
                subjects: dict[str, Callable[..., Any]] = {
                    "arrow": partial(ours, arrow),
                    "petastorm": partial(ours, petastorm),
                    "Petastorm itself": partial(theirs, dataset),
                }
                sums = [total(read, source) for read, source in ((ours, arrow), (ours, petastorm), (theirs, dataset))]
                if len({count for count, _ in sums}) > 1 or not np.allclose([s for _, s in sums], sums[0][1], atol=0.1):
                    raise RuntimeError(f"the readers read different data: {sums}")
                # Rows with codecs take a second a round.
                values = alternate(subjects, MIN_ROUNDS if report.quick or dataset.codecs is not None else 25)
            report.add(f"read {dataset.rows:,} rows, {what}", values, "rows/s")
            for peer in ("petastorm", "Petastorm itself"):
                ratio = float(np.median(np.divide(values["arrow"], values[peer])))
                report.require(f"{what}, arrow times as fast as {peer}", ratio, at_least=3.0)
