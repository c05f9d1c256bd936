"""The Arrow reader: the contract, and what is its own."""

from __future__ import annotations

import gc
import pickle
import threading
from dataclasses import replace
from pathlib import Path

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sparkvod.data import FilesystemStore, open_prepared, open_reader
from sparkvod.data.readers import arrow
from tests.contracts.reader import EVEN, ReaderContract, write


class TestArrowReader(ReaderContract):
    """The contract."""

    reader = "arrow"


@pytest.mark.parametrize("num_proc", [1, 2, 3])
@pytest.mark.parametrize("start", [0, 5])
def test_large_groups_are_decoded_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_proc: int, start: int
) -> None:
    dataset = write(tmp_path, [[500] * 10, [700, 333] * 5])
    columns = ["id", "vector", "list"]
    monkeypatch.setattr(arrow, "PART_BYTES", 100 * 60)
    monkeypatch.setattr(arrow, "SMALL_WINDOW", 0)
    seen = []
    decoded = 0
    for rank in range(num_proc):
        reader = open_reader("arrow", dataset, columns, 60 // num_proc, rank, num_proc)
        assert reader._parts.max() >= 4
        for batch in reader.epoch(0, start):
            np.testing.assert_array_equal(batch.columns["vector"][:, 0], batch.columns["id"])
            np.testing.assert_array_equal(batch.columns["list"][:, 1], batch.columns["id"])
            seen += batch.columns["id"].tolist()
        decoded += reader.decoded
        reader.close()
    assert len(seen) == len(set(seen)) == dataset.rows - 60 * start
    assert decoded <= len(dataset.groups) * (1.1 if num_proc != 3 else 1.3)


def test_held_memory_is_bounded(tmp_path: Path) -> None:
    folder = tmp_path / "intermediate_train_data"
    folder.mkdir()
    wide = pa.FixedSizeListArray.from_arrays(pa.array(np.zeros(4096 * 64, np.float32)), 64)
    with pq.ParquetWriter(folder / "a.parquet", pa.table({"x": wide}).schema) as writer:
        for _ in range(200):
            writer.write_table(pa.table({"x": wide}))
    dataset = open_prepared(FilesystemStore(str(tmp_path))).train
    reader = open_reader("arrow", dataset, batch_size=256)
    highest = 0
    for step, _ in enumerate(reader.epoch(0)):
        if step == 0:
            first = reader.decoded
        highest = max(highest, reader.decoded * 4096 - step * 256)
    reader.close()
    assert first <= 2 * 32
    assert highest <= 4 * 32 * 4096


def test_few_groups_for_many_ranks_are_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    dataset = write(tmp_path, [[10]])
    open_reader("arrow", dataset, num_proc=2).close()
    assert "1 row groups for 2 ranks" in caplog.text


def test_data_sets_can_be_pickled(tmp_path: Path) -> None:
    dataset = write(tmp_path, EVEN)
    other = pickle.loads(pickle.dumps(dataset))
    first, second = (open_reader("auto", data, ["id"], 20) for data in (dataset, other))
    for a, b in zip(first.epoch(0), second.epoch(0), strict=True):
        np.testing.assert_array_equal(a.columns["id"], b.columns["id"])
    first.close()
    second.close()


def test_an_abandoned_epoch_leaves_nothing_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrow, "PART_BYTES", 1000)
    dataset = write(tmp_path, [[500] * 20])
    threads = threading.active_count()
    files = set(Path("/proc/self/fd").iterdir())
    reader = open_reader("arrow", dataset, ["id"], 20)
    batches = reader.epoch(0)
    next(batches)
    batches.close()
    reader.close()
    del batches
    gc.collect()
    assert len(set(Path("/proc/self/fd").iterdir())) <= len(files)
    assert threading.active_count() == threads


def test_columns_come_in_any_order(tmp_path: Path) -> None:
    """Prepared data of plain columns, and others' data, have paths of their own through the decoder."""
    dataset = write(tmp_path, EVEN)
    for data in (dataset, replace(dataset, checked=True)):
        with open_reader("arrow", data, ["real", "id", "whole"], 20, seed=3) as reader:
            for batch in reader.epoch(1):
                assert list(batch.columns) == ["real", "id", "whole"]
                np.testing.assert_array_equal(batch.columns["real"] * 8, batch.columns["id"])
                np.testing.assert_array_equal(batch.columns["whole"], batch.columns["id"])


def test_names_with_dots_and_names_that_begin_like_others(tmp_path: Path) -> None:
    (tmp_path / "intermediate_train_data").mkdir()
    table = pa.table({"a.b": [1, 2], "a": [[3, 4], [5, 6]], "ab": [7, 8], "a.bc": [9, 10]})
    pq.write_table(table, tmp_path / "intermediate_train_data" / "a.parquet")
    dataset = open_prepared(FilesystemStore(str(tmp_path))).train
    for names in (["a"], ["a.b"], ["ab", "a.bc"], ["a.bc", "a", "ab", "a.b"]):
        with open_reader("arrow", dataset, names, 2, shuffle=False) as reader:
            batches = list(reader.epoch(0))
        for name in names:
            assert batches[0].columns[name].tolist() == table.column(name).to_pylist()


def test_two_iterators_on_a_file_system_in_memory(tmp_path: Path) -> None:
    dataset = write(tmp_path, EVEN)
    memory = fsspec.filesystem("memory")
    memory.put(str(tmp_path / "intermediate_train_data"), "/two-iterators", recursive=True)
    try:
        with open_reader("arrow", replace(dataset, path="memory:///two-iterators"), ["id"], 20) as reader:
            pairs = list(zip(reader.epoch(0), reader.epoch(1), strict=True))
        for side in zip(*pairs, strict=True):
            ids = np.concatenate([batch.columns["id"] for batch in side])
            np.testing.assert_array_equal(np.sort(ids), np.arange(dataset.rows))
    finally:
        memory.rm("/two-iterators", recursive=True)
