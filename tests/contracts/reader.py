"""What every reader must do. A new reader joins by subclassing :class:`ReaderContract` and naming itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sparkvod.data import Batch, Dataset, FilesystemStore, Reader, open_prepared, open_reader
from sparkvod.errors import DataError

WIDTH = 3


def rows_table(ids: np.ndarray) -> pa.Table:
    """Returns a table whose columns, one of each type, all follow from ``id``."""
    vectors = pa.array((ids[:, None] + np.arange(WIDTH)).astype(np.float32).reshape(-1))
    return pa.table(
        {
            "id": pa.array(ids, pa.int64()),
            "flag": pa.array(ids % 2 == 1, pa.bool_()),
            "tiny": pa.array((ids % 100).astype(np.int8), pa.int8()),
            "short": pa.array((ids % 1000).astype(np.int16), pa.int16()),
            "whole": pa.array(ids.astype(np.int32), pa.int32()),
            "single": pa.array(ids.astype(np.float32) / 4, pa.float32()),
            "real": pa.array(ids / 8, pa.float64()),
            "vector": pa.FixedSizeListArray.from_arrays(vectors, WIDTH),
            "list": pa.ListArray.from_arrays(np.arange(len(ids) + 1, dtype=np.int32) * 2, pa.array(np.repeat(ids, 2))),
        }
    )


def write(path: Path, files: list[list[int]]) -> Dataset:
    """Writes files of row groups with these numbers of rows, and returns the data set; ids count from 0."""
    folder = path / "intermediate_train_data"
    folder.mkdir(parents=True)
    first = 0
    for number, groups in enumerate(files):
        with pq.ParquetWriter(folder / f"{number:05d}.parquet", rows_table(np.arange(0)).schema) as writer:
            for rows in groups:
                writer.write_table(rows_table(np.arange(first, first + rows)), row_group_size=max(rows, 1))
                first += rows
    return open_prepared(FilesystemStore(str(path))).train


EVEN = [[100] * 40, [100] * 40]
UNEVEN = [[1, 250, 3], [], [77] * 20, [0, 5, 410], [13] * 60]
SETS = {
    "even": EVEN,
    "uneven": UNEVEN,
    "few groups": [[50, 20], [31]],
    "one group": [[97]],
    "fewer rows than ranks": [[1, 1]],
    "one row": [[1]],
}


class ReaderContract:
    """The contract. ``reader`` is the name to ask :func:`open_reader` for."""

    reader: str

    @pytest.fixture
    def make(self, tmp_path: Path) -> Iterator[Any]:
        """Gives a function that opens a reader; all of them are closed at the end."""
        opened: list[Reader] = []

        def make(dataset: Dataset, batch_size: int = 20, rank: int = 0, num_proc: int = 1, **kwargs: Any) -> Reader:
            kwargs.setdefault("seed", 7)
            reader = open_reader(
                self.reader, dataset, kwargs.pop("columns", ["id"]), batch_size, rank, num_proc, **kwargs
            )
            opened.append(reader)
            return reader

        yield make
        for reader in opened:
            reader.close()

    @staticmethod
    def ids(batches: list[Batch]) -> list[list[int]]:
        """Returns the ids of each batch, sorted."""
        return [sorted(batch.columns["id"].tolist()) for batch in batches]

    def world(
        self, make: Any, dataset: Dataset, num_proc: int, epoch: int = 0, global_batch: int = 60, **kwargs: Any
    ) -> Any:
        """Returns for each step the ids of each rank."""
        readers = [make(dataset, global_batch // num_proc, rank, num_proc, **kwargs) for rank in range(num_proc)]
        start = kwargs.pop("start_step", 0)
        per_rank = [self.ids(list(reader.epoch(epoch, start))) for reader in readers]
        return list(zip(*per_rank, strict=True)), readers

    @pytest.mark.parametrize("name", SETS)
    @pytest.mark.parametrize("num_proc", [1, 2, 3, 5, 8, 40])
    @pytest.mark.parametrize("shuffle", [True, False])
    def test_each_row_once(self, make: Any, tmp_path: Path, name: str, num_proc: int, shuffle: bool) -> None:
        dataset = write(tmp_path, SETS[name])
        for epoch in (0, 1):
            steps, _ = self.world(make, dataset, num_proc, epoch, 7 * num_proc, shuffle=shuffle)
            seen = [row for ranks in steps for rows in ranks for row in rows]
            assert sorted(seen) == list(range(dataset.rows))

    @pytest.mark.parametrize("name", SETS)
    @pytest.mark.parametrize("shuffle", [True, False])
    def test_steps_have_the_same_rows_on_any_number_of_ranks(
        self, make: Any, tmp_path: Path, name: str, shuffle: bool
    ) -> None:
        dataset = write(tmp_path, SETS[name])
        expected = None
        for num_proc in (1, 2, 3, 5, 60):
            steps, _ = self.world(make, dataset, num_proc, shuffle=shuffle)
            merged = [sorted(row for rows in ranks for row in rows) for ranks in steps]
            expected = expected or merged
            assert merged == expected

    @pytest.mark.parametrize("num_proc", [1, 2, 3, 40])
    def test_all_ranks_agree_on_steps_and_their_rows(self, make: Any, tmp_path: Path, num_proc: int) -> None:
        dataset = write(tmp_path, UNEVEN)
        readers = [make(dataset, 11, rank, num_proc) for rank in range(num_proc)]
        batches = [list(reader.epoch(0)) for reader in readers]
        steps = -(-dataset.rows // (11 * num_proc))
        assert [reader.steps for reader in readers] == [steps] * num_proc
        assert [len(rank) for rank in batches] == [steps] * num_proc
        for step, parts in enumerate(zip(*batches, strict=True)):
            expected = min(11 * num_proc, dataset.rows - 11 * num_proc * step)
            assert {batch.global_rows for batch in parts} == {expected}
            assert sum(batch.rows for batch in parts) == expected
            assert all(batch.rows == len(batch.columns["id"]) for batch in parts)

    def test_order_follows_seed_and_epoch(self, make: Any, tmp_path: Path) -> None:
        dataset = write(tmp_path, EVEN)
        first = self.ids(list(make(dataset).epoch(0)))
        assert self.ids(list(make(dataset).epoch(0))) == first
        assert self.ids(list(make(dataset).epoch(1))) != first
        assert self.ids(list(make(dataset, seed=8).epoch(0))) != first
        plain = make(dataset, shuffle=False)
        assert self.ids(list(plain.epoch(0))) == self.ids(list(plain.epoch(1)))

    @pytest.mark.parametrize("name", ["even", "few groups", "one group"])
    def test_shuffling_moves_rows_by_a_tenth_of_the_data(self, make: Any, tmp_path: Path, name: str) -> None:
        dataset = write(tmp_path, SETS[name])
        order = np.concatenate([batch.columns["id"] for batch in make(dataset, 1).epoch(0)])
        assert np.abs(order - np.arange(dataset.rows)).mean() >= 0.1 * dataset.rows

    @pytest.mark.parametrize("num_proc", [1, 2, 3])
    @pytest.mark.parametrize("start", [0, 1, 50, 133, 134])
    def test_resumes_in_mid_epoch(self, make: Any, tmp_path: Path, num_proc: int, start: int) -> None:
        dataset = write(tmp_path, EVEN)
        for rank in range(num_proc):
            whole = list(make(dataset, 60 // num_proc, rank, num_proc).epoch(3))
            rest = list(make(dataset, 60 // num_proc, rank, num_proc).epoch(3, start))
            assert [b.columns["id"].tolist() for b in rest] == [b.columns["id"].tolist() for b in whole[start:]]

    def test_resuming_decodes_only_what_is_left(self, make: Any, tmp_path: Path) -> None:
        dataset = write(tmp_path, [[1000] * 192])
        reader = make(dataset, 200)
        list(reader.epoch(0, reader.steps * 9 // 10))
        assert reader.decoded <= 0.4 * len(dataset.groups)

    @pytest.mark.parametrize("name", ["even", "uneven", "few groups", "one group"])
    @pytest.mark.parametrize("num_proc", [1, 2, 4, 8, 16, 32])
    def test_no_group_is_decoded_twice(self, make: Any, tmp_path: Path, name: str, num_proc: int) -> None:
        dataset = write(tmp_path, SETS[name])
        _, readers = self.world(make, dataset, num_proc, global_batch=96)
        assert sum(reader.decoded for reader in readers) <= 1.1 * len(dataset.groups)

    @pytest.mark.parametrize("num_proc", [2, 4, 8])
    def test_ranks_have_equal_shares_of_each_step(self, make: Any, tmp_path: Path, num_proc: int) -> None:
        steps, _ = self.world(make, write(tmp_path, EVEN), num_proc, global_batch=64)
        for ranks in steps[:-1]:
            assert all(abs(len(rows) - 64 // num_proc) <= 3 for rows in ranks)

    def test_types_and_values(self, make: Any, tmp_path: Path) -> None:
        dataset = write(tmp_path, UNEVEN)
        reader = make(dataset, 33, columns=None)
        rows = 0
        for batch in reader.epoch(0):
            ids = batch.columns["id"]
            expected = {
                "id": ids,
                "flag": ids % 2 == 1,
                "tiny": (ids % 100).astype(np.int8),
                "short": (ids % 1000).astype(np.int16),
                "whole": ids.astype(np.int32),
                "single": ids.astype(np.float32) / 4,
                "real": ids / 8,
                "vector": (ids[:, None] + np.arange(WIDTH)).astype(np.float32),
                "list": np.repeat(ids, 2).reshape(-1, 2),
            }
            assert set(batch.columns) == set(expected)
            for name, values in expected.items():
                found = batch.columns[name]
                assert found.dtype == values.dtype, name
                assert found.flags.c_contiguous, name
                np.testing.assert_array_equal(found, values, name)
            rows += batch.rows
        assert rows == dataset.rows

    def test_a_batch_without_rows_has_the_types_of_the_others(self, make: Any, tmp_path: Path) -> None:
        dataset = write(tmp_path, [[1]])
        batches = [next(make(dataset, 4, rank, 3, columns=["id", "vector"]).epoch(0)) for rank in range(3)]
        assert sorted(batch.rows for batch in batches) == [0, 0, 1]
        for batch in batches:
            assert batch.global_rows == 1
            assert batch.columns["id"].dtype == np.int64
            assert batch.columns["vector"].shape == (batch.rows, WIDTH)

    def test_large_steps_span_many_windows(self, make: Any, tmp_path: Path) -> None:
        dataset = write(tmp_path, UNEVEN)
        steps, _ = self.world(make, dataset, 2, global_batch=2 * dataset.rows)
        assert sorted(row for rows in steps[0] for row in rows) == list(range(dataset.rows))

    def test_two_iterators_of_one_reader(self, make: Any, tmp_path: Path) -> None:
        dataset = write(tmp_path, EVEN)
        reader = make(dataset)
        expected = [self.ids(list(make(dataset).epoch(epoch))) for epoch in (0, 1)]
        both = zip(reader.epoch(0), reader.epoch(1), strict=True)
        pairs = [(self.ids([a])[0], self.ids([b])[0]) for a, b in both]
        assert [list(side) for side in zip(*pairs, strict=True)] == expected

    def test_unknown_column_lists_those_there_are(self, make: Any, tmp_path: Path) -> None:
        with pytest.raises(DataError, match="no column 'ID'.*id, flag"):
            make(write(tmp_path, [[3]]), columns=["ID"])

    def test_null_in_a_file_of_others(self, make: Any, tmp_path: Path) -> None:
        (tmp_path / "intermediate_train_data").mkdir()
        table = pa.table(
            {"x": [1.0, None, 3.0], "y": [1.0, float("nan"), 2.0], "z": [[1], [2, 3], []], "id": [1, 2, 3]}
        )
        pq.write_table(table, tmp_path / "intermediate_train_data" / "a.parquet")
        dataset = open_prepared(FilesystemStore(str(tmp_path))).train
        with pytest.raises(DataError, match="'x'.*1 nulls"):
            make(dataset, columns=["x"])
        with pytest.raises(DataError, match="'y'.*1 NaN"):
            list(make(dataset, columns=["y"]).epoch(0))
        with pytest.raises(DataError, match="'z'.*values"):
            list(make(dataset, columns=["z"]).epoch(0))

    def test_bad_arguments(self, make: Any, tmp_path: Path) -> None:
        dataset = write(tmp_path, [[3]])
        with pytest.raises(ValueError, match="batch_size=0"):
            make(dataset, 0)
        with pytest.raises(ValueError, match="rank=2 of num_proc=2"):
            make(dataset, 1, 2, 2)
        with pytest.raises(ValueError, match="start_step=9"):
            make(dataset, 1).epoch(0, 9)
        with pytest.raises(ValueError, match="reader 'arow'.*arrow"):
            open_reader("arow", dataset)

    def test_a_file_that_is_gone(self, make: Any, tmp_path: Path) -> None:
        dataset = write(tmp_path, [[3], [4]])
        (tmp_path / "intermediate_train_data" / "00001.parquet").unlink()
        with pytest.raises(DataError, match="00001.parquet cannot be read"):
            list(make(dataset).epoch(0))
