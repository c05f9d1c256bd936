"""The Petastorm reader: the contract, and data sets that Petastorm itself wrote."""

from __future__ import annotations

import importlib.util
import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sparkvod.data import Dataset, FilesystemStore, open_prepared, open_reader, prepare, unischema
from sparkvod.errors import DataError
from tests.contracts.reader import EVEN, UNEVEN, ReaderContract, write
from tests.data import datasets

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(importlib.util.find_spec("petastorm") is None, reason="petastorm is not installed"),
]
IMAGES = importlib.util.find_spec("cv2") is not None


class TestPetastormReader(ReaderContract):
    """The contract."""

    reader = "petastorm"


@pytest.fixture(scope="module")
def everything(spark: Any, tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """A data set of all codecs, 100 rows."""
    folder = tmp_path_factory.mktemp("petastorm")
    datasets.materialize(spark, str(folder / "intermediate_train_data"), images=IMAGES)
    return open_prepared(FilesystemStore(str(folder))).train


def test_the_order_is_the_arrow_readers_to_the_row(tmp_path: Path) -> None:
    dataset = write(tmp_path, UNEVEN)
    for shuffle in (True, False):
        for rank in range(3):
            ids = [
                [batch.columns["id"].tolist() for batch in reader.epoch(2, 1)]
                for name in ("arrow", "petastorm")
                for reader in [open_reader(name, dataset, ["id"], 9, rank, 3, shuffle, 5)]
            ]
            assert ids[0] == ids[1]


def test_codecs(everything: Dataset) -> None:
    columns = {column.name: (column.dtype, column.shape) for column in everything.columns}
    expected = {
        "id": ("int64", ()),
        "x": ("float32", ()),
        "small": ("uint8", ()),
        "half": ("float32", ()),
        "matrix": ("float32", (2, 3)),
        "packed": ("int32", (4,)),
        "image": ("uint8", (5, 4, 3)),
    }
    if not IMAGES:
        del expected["image"]
    assert columns == expected
    seen = []
    for rank in range(2):
        with open_reader("auto", pickle.loads(pickle.dumps(everything)), None, 7, rank, 2, seed=3) as reader:
            assert type(reader).__name__ == "PetastormReader"
            for batch in reader.epoch(1):
                for at, number in enumerate(batch.columns["id"].tolist()):
                    wanted = datasets.row(number, IMAGES)
                    for name, values in batch.columns.items():
                        assert values.dtype == np.dtype(columns[name][0])
                        np.testing.assert_array_equal(values[at], wanted[name])
                    seen.append(number)
    assert sorted(seen) == list(range(100))


def test_fields_that_cannot_become_tensors(everything: Dataset) -> None:
    for name, message in {
        "ragged": r"'ragged' has the shape \(None, 2\), one shape",
        "name": "'name' has the type string.*StringIndexer",
        "maybe": "'maybe' in .* has 10 nulls",
    }.items():
        with pytest.raises(DataError, match=message):
            open_reader("petastorm", everything, [name])


def test_the_arrow_reader_reads_only_what_is_plain(everything: Dataset) -> None:
    columns = ["id", "x", "half"]
    with (
        open_reader("arrow", everything, columns, 8, seed=1) as ours,
        open_reader("petastorm", everything, columns, 8, seed=1) as theirs,
    ):
        for a, b in zip(ours.epoch(0), theirs.epoch(0), strict=True):
            for name, values in a.columns.items():
                np.testing.assert_array_equal(values, b.columns[name])
    with pytest.raises(DataError, match=r"'matrix'.*NdarrayCodec\(\).*use 'petastorm' or 'auto'"):
        open_reader("arrow", everything, ["id", "matrix"])
    with pytest.raises(DataError, match="written by Petastorm"):
        open_reader("arrow", everything)


def test_auto_takes_arrow_for_plain_parquet(tmp_path: Path) -> None:
    with open_reader("auto", write(tmp_path, EVEN), ["id"]) as reader:
        assert type(reader).__name__ == "ArrowReader"


def test_data_that_prepare_wrote(spark: Any, tmp_path: Path) -> None:
    df = spark.range(0, 500, 1, 3).selectExpr("id", "array(float(id), float(id) / 2, float(1)) as v", "id % 2 = 0 as b")
    data = prepare(df, FilesystemStore(str(tmp_path)), label_cols=["id"]).train
    with open_reader("arrow", data, None, 16) as ours, open_reader("petastorm", data, None, 16) as theirs:
        for a, b in zip(ours.epoch(0), theirs.epoch(0), strict=True):
            for name, values in a.columns.items():
                assert values.dtype == b.columns[name].dtype
                np.testing.assert_array_equal(values, b.columns[name])


def test_fields_in_the_names_of_directories(spark: Any, tmp_path: Path) -> None:
    from petastorm.etl.dataset_metadata import materialize_dataset
    from petastorm.unischema import Unischema, UnischemaField

    fields = [
        UnischemaField("id", np.int64, (), None, False),
        UnischemaField("x", np.float64, (), None, False),
        UnischemaField("part", np.int64, (), None, False),
    ]
    url = f"file://{tmp_path}/intermediate_train_data"
    with materialize_dataset(spark, url, Unischema("Parts", fields)):
        df = spark.range(0, 60, 1, 2).selectExpr("id", "double(id) / 2 as x", "id % 3 as part")
        df.write.partitionBy("part").parquet(url)
    dataset = open_prepared(FilesystemStore(str(tmp_path))).train
    with open_reader("auto", dataset, None, 10) as reader:
        batches = list(reader.epoch(0))
    ids = np.concatenate([batch.columns["id"] for batch in batches])
    assert sorted(ids.tolist()) == list(range(60))
    np.testing.assert_array_equal(np.concatenate([batch.columns["part"] for batch in batches]), ids % 3)


def test_values_that_are_not_as_the_unischema_says(spark: Any, everything: Dataset, tmp_path: Path) -> None:
    shutil.copytree(everything.path, tmp_path / "intermediate_train_data")
    for path in (tmp_path / "intermediate_train_data").glob("*.parquet"):
        table = pq.read_table(path)
        where = table.schema.get_field_index("matrix")
        pq.write_table(table.set_column(where, "matrix", table.column("packed")), path)
        path.with_name(f".{path.name}.crc").unlink(missing_ok=True)
    dataset = open_prepared(FilesystemStore(str(tmp_path))).train
    with open_reader("petastorm", dataset, ["matrix"]) as reader, pytest.raises(DataError, match="matrix"):
        next(reader.epoch(0))


def test_large_groups_are_decoded_in_parts_and_from_any_file_system(
    everything: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fsspec

    from sparkvod.data.readers import arrow

    folder = "memory://sparkvod-petastorm/intermediate_train_data"
    memory = fsspec.filesystem("memory")
    try:
        for path in Path(everything.path).glob("*.parquet"):
            with memory.open(f"{folder}/{path.name}", "wb") as file:
                pq.write_table(pq.read_table(path), file, row_group_size=5)
        memory.pipe_file(f"{folder}/_common_metadata", Path(everything.path, "_common_metadata").read_bytes())
        monkeypatch.setattr(arrow, "PART_BYTES", 60)
        monkeypatch.setattr(arrow, "SMALL_WINDOW", 0)
        dataset = open_prepared(FilesystemStore("memory://sparkvod-petastorm")).train
        seen = []
        for rank in range(2):
            with open_reader("auto", dataset, ["id", "matrix"], 7, rank, 2) as reader:
                assert reader._parts.max() > 1  # type: ignore[attr-defined]
                for batch in reader.epoch(0):
                    np.testing.assert_array_equal(batch.columns["matrix"][:, 1, 2], batch.columns["id"] + 2)
                    seen += batch.columns["id"].tolist()
        assert sorted(seen) == list(range(100))
    finally:
        memory.rm("/sparkvod-petastorm", recursive=True)


class _Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return (print, ("unpickled",))


def test_a_unischema_that_would_run_something(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, [[3]])
    metadata = {unischema.KEY: pickle.dumps(_Evil())}
    pq.write_metadata(
        pa.schema([pa.field("id", pa.int64())], metadata), tmp_path / "intermediate_train_data" / "_common_metadata"
    )
    with pytest.raises(DataError, match="cannot be loaded.*print"):
        open_prepared(FilesystemStore(str(tmp_path)))
    assert "unpickled" not in capsys.readouterr().out


def test_without_petastorm(everything: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    dataset = write(tmp_path, EVEN)
    monkeypatch.setitem(__import__("sys").modules, "petastorm", None)
    with pytest.raises(DataError, match=r"petastorm 0.12 was expected.*sparkvod\[petastorm\]"):
        open_reader("petastorm", dataset)
    monkeypatch.setattr("sparkvod.data.petastorm_compat.available", lambda: False)
    plain = open_prepared(FilesystemStore(str(Path(everything.path).parent))).train
    assert "was written by Petastorm, which is not installed" in caplog.text
    with open_reader("auto", plain, ["id", "x"]) as reader:
        assert sum(batch.rows for batch in reader.epoch(0)) == 100
    with pytest.raises(DataError, match="'matrix' has the type binary"):
        open_reader("auto", plain, ["matrix"])
