"""Petastorm's own readers on today's pyarrow: every pool, Spark workers, and no row lost."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sparkvod.data import petastorm_compat
from sparkvod.data.petastorm_compat import for_workers
from sparkvod.data.petastorm_pieces import ParquetDataset
from tests.data import datasets

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(importlib.util.find_spec("petastorm") is None, reason="petastorm is not installed"),
]


@pytest.fixture(scope="module")
def folder(spark: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A data set that ``materialize_dataset`` wrote, 60 rows."""
    path = tmp_path_factory.mktemp("compat") / "data"
    datasets.materialize(spark, str(path), 60, 3, images=False)
    return str(path)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Plain Parquet: 10 row groups of 5 rows."""
    path = tmp_path_factory.mktemp("plain")
    pq.write_table(pa.table({"id": np.arange(50), "x": np.arange(50) / 2}), path / "a.parquet", row_group_size=5)
    return str(path)


@pytest.mark.parametrize("pool", ["thread", "process", "dummy"])
def test_make_reader_of_what_materialize_dataset_wrote(folder: str, pool: str, no_leaks: None) -> None:
    petastorm = petastorm_compat.require()
    with petastorm.make_reader(f"file://{folder}", reader_pool_type=pool, workers_count=1, num_epochs=1) as reader:
        rows = {int(row.id): row for row in reader}
    assert sorted(rows) == list(range(60))
    for number in (0, 7, 59):
        wanted = datasets.row(number, images=False)
        np.testing.assert_array_equal(rows[number].matrix, wanted["matrix"])
        np.testing.assert_array_equal(rows[number].packed, wanted["packed"])
        assert (rows[number].name, rows[number].maybe) == (wanted["name"], wanted["maybe"])


@pytest.mark.parametrize("pool", ["thread", "process", "dummy"])
def test_make_batch_reader_of_plain_parquet(plain: str, pool: str, no_leaks: None) -> None:
    petastorm = petastorm_compat.require()
    with petastorm.make_batch_reader(f"file://{plain}", reader_pool_type=pool, workers_count=1, num_epochs=2) as reader:
        ids = np.concatenate([batch.id for batch in reader])
    assert sorted(ids.tolist()) == sorted(list(range(50)) * 2)


@pytest.mark.parametrize("pool", ["thread", "dummy"])
def test_no_row_is_lost_in_a_hundred_reads(plain: str, pool: str, full: bool) -> None:
    petastorm = petastorm_compat.require()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(1000 if full else 100):
            with petastorm.make_batch_reader(
                f"file://{plain}", reader_pool_type=pool, workers_count=3, num_epochs=1
            ) as reader:
                assert sum(len(batch.id) for batch in reader) == 50
    finally:
        sys.setswitchinterval(interval)


class _LateVentilator:
    """Hands out its only piece, and is completed, just when it is asked whether it is."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self._asked = False
        self._stop_requested = False

    def start(self) -> None:
        pass

    def processed_item(self) -> None:
        pass

    def stop(self) -> None:
        self._stop_requested = True

    def completed(self) -> bool:
        if not self._asked:
            self._asked = True
            self._pool.ventilate(7)
        return True


@pytest.mark.parametrize("name", ["thread", "process", "dummy"])
def test_a_piece_handed_out_at_the_last_moment(name: str, no_leaks: None) -> None:
    petastorm_compat.require()
    from petastorm.workers_pool import EmptyResultError
    from petastorm.workers_pool.dummy_pool import DummyPool
    from petastorm.workers_pool.process_pool import ProcessPool
    from petastorm.workers_pool.thread_pool import ThreadPool
    from petastorm.workers_pool.worker_base import WorkerBase

    class Worker(WorkerBase):
        def process(self, value: int) -> None:
            self.publish_func(value * 2)

    pool = {"thread": ThreadPool, "process": ProcessPool, "dummy": DummyPool}[name](1)
    pool.start(Worker, None, ventilator=_LateVentilator(pool))
    try:
        assert pool.get_results() == 14
        with pytest.raises(EmptyResultError):
            pool.get_results()
    finally:
        pool.stop()
        pool.join()


def test_in_a_spark_worker(spark: Any, folder: str) -> None:
    petastorm = petastorm_compat.require()

    def read(numbers: Any) -> Any:
        # The name comes from the closure: unpickling this function imports Petastorm.
        with petastorm.make_reader(f"file://{folder}", reader_pool_type="dummy", num_epochs=1) as reader:
            yield sorted(int(row.id) for row in reader), sys.modules["petastorm.reader"].pq.__class__.__name__

    found = spark.sparkContext.parallelize([0], 1).mapPartitions(for_workers(read)).collect()
    assert found == [(list(range(60)), "_Parquet")]


def test_whoever_imports_petastorm_first(plain: str) -> None:
    script = f"""
        import sparkvod.data.petastorm_compat
        import sys
        assert "petastorm" not in sys.modules
        from petastorm import make_batch_reader
        with make_batch_reader("file://{plain}", num_epochs=1) as reader:
            print(sum(len(batch.id) for batch in reader))
        import petastorm.weighted_sampling_reader, petastorm.spark, petastorm.etl.rowgroup_indexing
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "50"


def test_sharding_columns_and_predicates(folder: str) -> None:
    petastorm = petastorm_compat.require()
    from petastorm.predicates import in_lambda

    seen = []
    for shard in range(2):
        with petastorm.make_reader(
            f"file://{folder}", ["id", "x"], reader_pool_type="dummy", cur_shard=shard, shard_count=2
        ) as reader:
            for row in reader:
                assert set(row._fields) == {"id", "x"}
                seen.append(int(row.id))
    assert sorted(seen) == list(range(60))
    even = in_lambda(["id"], lambda id: id % 2 == 0)
    with petastorm.make_reader(f"file://{folder}", ["id"], predicate=even, workers_count=1) as reader:
        assert sorted(int(row.id) for row in reader) == list(range(0, 60, 2))


def test_partitions_and_filters(spark: Any, tmp_path: Path) -> None:
    petastorm = petastorm_compat.require()
    folder = f"{tmp_path}/data"
    spark.range(0, 40, 1, 2).selectExpr("id", "id % 2 as bit", "concat('a ', id % 4) as word").write.partitionBy(
        "bit", "word"
    ).parquet(folder)
    dataset = ParquetDataset(folder)
    assert dataset.partitions is not None
    assert dataset.partitions.partition_names == {"bit", "word"}
    for filters, wanted in (
        ([("bit", "=", 1)], lambda n: n % 2 == 1),
        ([[("word", "in", ["a 0", "a 3"])], [("bit", ">", 0), ("word", "!=", "a 3")]], lambda n: n % 4 != 2),
    ):
        with petastorm.make_batch_reader(
            f"file://{folder}", reader_pool_type="dummy", filters=filters, num_epochs=1
        ) as reader:
            found = [(int(i), w) for batch in reader for i, w in zip(batch.id, batch.word, strict=True)]
        assert sorted(found) == [(n, f"a {n % 4}") for n in range(40) if wanted(n)]
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(OSError, match="no Parquet files"):
        ParquetDataset(str(empty))


def test_lists_of_fixed_size_are_not_left_out(tmp_path: Path) -> None:
    petastorm = petastorm_compat.require()
    lists = pa.FixedSizeListArray.from_arrays(pa.array(np.arange(12, dtype=np.float32)), 3)
    table = pa.table(
        {
            "fixed": lists,
            "large": lists.cast(pa.large_list(pa.float32())),
            "text": pa.array(list("abcd"), pa.large_string()),
        }
    )
    pq.write_table(table, tmp_path / "a.parquet")
    with petastorm.make_batch_reader(f"file://{tmp_path}", reader_pool_type="dummy", num_epochs=1) as reader:
        (batch,) = list(reader)
    np.testing.assert_array_equal(batch.fixed, np.arange(12, dtype=np.float32).reshape(4, 3))
    np.testing.assert_array_equal(batch.large, batch.fixed)
    assert batch.text.tolist() == list("abcd")


def test_torch_loader(plain: str) -> None:
    petastorm = petastorm_compat.require()
    pytest.importorskip("torch", reason="PyTorch is not installed")
    from petastorm.pytorch import BatchedDataLoader

    threads = threading.active_count()
    with BatchedDataLoader(petastorm.make_batch_reader(f"file://{plain}", num_epochs=1), batch_size=8) as loader:
        assert sorted(number for batch in loader for number in batch["id"].tolist()) == list(range(50))
    assert threading.active_count() <= threads + 1
