"""The Arrow reader beside plain ``pyarrow.dataset``, on the same files: 200,000 rows of 20 float32, and ten times that.

Both end with numpy arrays; ours have in addition been shuffled and cut into batches of 256 rows.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.dataset as pads

from benchmarks.harness import MIN_ROUNDS, Report, alternate
from sparkvod.data import Dataset, FilesystemStore, Reader, open_prepared, open_reader
from sparkvod.data.dataset import write_manifest
from sparkvod.data.order import LANES
from sparkvod.data.schema import Column, from_arrow
from sparkvod.data.writer import WritePlan, write_partition

ROWS, WIDTH, BATCH, PARTITION = 200_000, 20, 256, 100_000
MIB = 1 << 20


def make(folder: str, rows: int, vector: bool) -> Dataset:
    """Writes random rows as ``prepare`` writes them, as one vector column or as columns of scalars."""
    store = FilesystemStore(folder)
    path = store.get_train_data_path(0)
    store.fs.makedirs(path)
    files: list[dict[str, Any]] = []
    columns: list[Column] = []
    for partition in range(rows // PARTITION):
        values = np.random.default_rng(partition).normal(size=(PARTITION, WIDTH)).astype(np.float32)
        if vector:
            table = pa.table({"x": pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), WIDTH)})
        else:
            table = pa.table({f"x{i}": values[:, i] for i in range(WIDTH)})
        columns = [column for column in (from_arrow(f.name, f.type) for f in table.schema) if column is not None]
        plan = WritePlan(store, path, store.get_val_data_path(0), tuple(columns), None, None, 0.0, 0)
        files += write_partition(plan, table.to_batches(10_000), partition, f"part-{partition}")["train"]
    manifest = {"idx": 0, "columns": [c.to_json() for c in columns], "train": files, "val": None}
    write_manifest(store, path, manifest)
    return open_prepared(store, 0).train


def ours(reader: Reader, seen: Callable[[np.ndarray], None] | None = None) -> float:
    """Reads an epoch and returns the rows per second."""
    began = time.perf_counter()
    rows = 0
    for batch in reader.epoch(0):
        rows += batch.rows
        if seen:
            for values in batch.columns.values():
                seen(values)
    return rows / (time.perf_counter() - began)


def plain(source: pads.Dataset, seen: Callable[[np.ndarray], None] | None = None) -> float:
    """Reads all with pyarrow.dataset and returns the rows per second."""
    began = time.perf_counter()
    rows = 0
    for batch in source.to_batches():
        rows += batch.num_rows
        for column in batch.columns:
            flat = column.flatten() if pa.types.is_fixed_size_list(column.type) else column
            values = flat.to_numpy(zero_copy_only=False)
            if seen:
                seen(values)
    return rows / (time.perf_counter() - began)


def total(read: Callable[..., float], source: Any) -> tuple[int, float]:
    """Returns the number of values that a subject gave and their sum."""
    found = [0, 0.0]

    def add(values: np.ndarray) -> None:
        found[0] += values.size
        found[1] += float(values.sum(dtype=np.float64))

    read(source, add)
    return int(found[0]), round(found[1], 3)


def _memory(dataset: Dataset, sender: Any) -> None:
    """In a process of its own: sends by how many bytes an epoch raises the peak of resident memory."""
    before = _status("VmRSS")
    with open_reader("arrow", dataset, None, BATCH) as reader:
        ours(reader)
    sender.send(_status("VmHWM") - before)


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"no {name} in /proc/self/status: this bench needs Linux")


def memory_growth(dataset: Dataset) -> int:
    """Returns by how many bytes reading an epoch raises the peak memory of a fresh process."""
    spawn = multiprocessing.get_context("spawn")
    receiver, sender = spawn.Pipe(duplex=False)
    process = spawn.Process(target=_memory, args=(dataset, sender), daemon=True)
    process.start()
    sender.close()
    try:
        if not receiver.poll(300):
            raise RuntimeError("the reading process did not end within 300 s")
        return int(receiver.recv())
    finally:
        process.join(10)
        if process.is_alive():
            process.terminate()


def run(report: Report) -> None:
    """Measures 20 columns of scalars and one column of vectors of 20, and the memory on ten times the rows."""
    rounds = MIN_ROUNDS if report.quick else 25
    with tempfile.TemporaryDirectory(prefix="sparkvod-bench-") as folder:
        for vector in (False, True):
            what = f"one column of {WIDTH} float32" if vector else f"{WIDTH} columns of float32"
            dataset = make(f"{folder}/{int(vector)}", ROWS, vector)
            reader = open_reader("arrow", dataset, None, BATCH, seed=1)
            source = pads.dataset(dataset.path, format="parquet")
            sums = total(ours, reader), total(plain, source)
            if sums[0] != sums[1] or sums[0][0] != ROWS * WIDTH:
                raise RuntimeError(f"sparkvod and pyarrow read different data: {sums}")
            subjects = {"sparkvod": partial(ours, reader), "pyarrow.dataset": partial(plain, source)}
            values = alternate(subjects, rounds)
            reader.close()
            report.add(f"read {ROWS:,} rows, {what}", values, "rows/s")
            # A round is one state of the machine, and its ratio means something; the ratio of two medians may not.
            ratio = float(np.median(np.divide(values["sparkvod"], values["pyarrow.dataset"])))
            report.require(f"{what}, times as fast as pyarrow.dataset", ratio, at_least=0.6)
        dataset = make(f"{folder}/large", 10 * ROWS, False)
        group = max(g.nbytes for g in dataset.row_groups)
        growth = memory_growth(dataset)
        report.add(f"peak memory growth, {10 * ROWS:,} rows", {"sparkvod": [float(growth)]}, "B")
        bound = 4 * LANES * group + 64 * MIB
        report.require("peak memory growth on ten times the rows", growth, at_most=bound, unit="B")
