"""Stores of all kinds: S3, those that fsspec knows with their options, mounted ones, memory, one that lags."""

from __future__ import annotations

import logging
import pickle
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sparkvod.data import (
    FilesystemStore,
    PreparedData,
    Store,
    files,
    open_prepared,
    open_reader,
    prepare,
    release,
    store,
)
from sparkvod.data.claims import claim
from sparkvod.errors import StoreError
from tests.data.stores import KEY, SECRET, LaggingStore, noting, s3_server

pytestmark = pytest.mark.timeout(120)

OPTIONS = {
    "hdfs": {"host": "namenode", "user": "me", "kerb_ticket": "/tmp/ticket"},
    "abfs": {"account_name": "us", "account_key": SECRET},
    "gs": {"token": SECRET, "project": "ours"},
}


@pytest.fixture(scope="module")
def s3() -> Iterator[dict[str, Any]]:
    pytest.importorskip("s3fs", reason="s3fs is not installed")
    pytest.importorskip("moto.server", reason="moto is not installed")
    with s3_server() as options:
        yield options


def ids(prepared: PreparedData, num_proc: int = 1) -> list[int]:
    """Returns the values of the column id that all ranks read in an epoch."""
    seen: list[int] = []
    for rank in range(num_proc):
        with open_reader("auto", prepared.train, ["id"], 16, rank, num_proc) as reader:
            for batch in reader.epoch(0):
                seen += batch.columns["id"].tolist()
    return seen


def write_parquet(to: FilesystemStore, rows: int = 100) -> None:
    """Writes what somebody else might have written, in this process."""
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"id": np.arange(rows), "y": np.arange(rows) / 2}), sink, row_group_size=10)
    to.write_bytes(f"{to.get_train_data_path()}/a.parquet", sink.getvalue().to_pybytes())


# -- by fsspec, with options --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("protocol", "where"), [("hdfs", "service/data"), ("abfs", "box/data"), ("gs", "box/data")])
def test_options_reach_the_file_system(tmp_path: Path, protocol: str, where: str) -> None:
    options = OPTIONS[protocol]
    with noting(protocol, tmp_path) as made:
        first = Store.create(f"{protocol}://{where}", storage_options=options)
        assert not first.is_local
        assert first.get_train_data_path(2) == f"{protocol}://{where}/intermediate_train_data.2"
        other = pickle.loads(pickle.dumps(first))
        write_parquet(other)
        assert sorted(ids(pickle.loads(pickle.dumps(open_prepared(other))))) == list(range(100))
        assert len(made) >= 3
        assert all(found == options for found in made)
        assert SECRET not in repr(first) + repr(open_prepared(first).train)
    assert (tmp_path / where / "intermediate_train_data" / "a.parquet").exists()


def test_a_file_that_is_seen_while_written_is_replaced_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with noting("hdfs", tmp_path):
        remote = Store.create("hdfs://n/x")
        path = f"{remote.get_run_path('r')}/checkpoint"
        remote.write_text(path, "one")
        remote.write_text(path, "two")
        assert remote.read_text(path) == "two"
        assert remote.listing(remote.get_run_path("r")) == {"checkpoint": 3}

        kind = type(remote.fs)
        whole = kind.pipe_file

        def broken(self: Any, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
            whole(self, path, value[:1])
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(kind, "pipe_file", broken)
        with pytest.raises(StoreError, match="No space left"):
            remote.write_text(path, "three")
        assert remote.read_text(path) == "two"
        assert remote.listing(remote.get_run_path("r")) == {"checkpoint": 3}

        # Killed between its two renames.
        remote.fs.mv(path, f"{path}.replaced")
        assert remote.read_text(path) == "two"
        with remote.open_to_read(path) as file:
            assert file.read() == b"two"
        monkeypatch.setattr(kind, "pipe_file", whole)
        remote.write_text(path, "four")
        remote.write_text(path, "five")
        assert remote.read_text(path) == "five"
        assert remote.listing(remote.get_run_path("r")) == {"checkpoint": 4}


def test_numbers_are_drawn_where_exclusive_creation_is_not_to_be_trusted(tmp_path: Path) -> None:
    with noting("hdfs", tmp_path):
        assert claim(Store.create("hdfs://n/x")) > 1000

    class PassesOver(fsspec.get_filesystem_class("memory")):  # type: ignore[misc]
        def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
            """As some servers that speak S3."""

    PassesOver.__bases__ = (fsspec.AbstractFileSystem,)
    assert files.create(PassesOver(), "/x/y", b"") is None


# -- mounted ------------------------------------------------------------------------------------------------------


def test_databricks_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    volume = Store.create("/Volumes/catalog/schema/volume/run")
    assert volume.is_local
    assert volume.get_train_data_path(1) == "/Volumes/catalog/schema/volume/run/intermediate_train_data.1"
    with pytest.raises(StoreError, match=r"'dbfs:/ml/x' was found, and .* pass a path that .* /Volumes/"):
        Store.create("dbfs:/ml/x")
    monkeypatch.setattr(store, "_DBFS", str(tmp_path))
    for form in ("dbfs:/ml/x", "dbfs:///ml/x"):
        mounted = Store.create(form, runs_path="dbfs:/runs")
        assert mounted.is_local
        assert mounted.prefix_path == f"{tmp_path}/ml/x"
        assert mounted.get_run_path("r") == f"{tmp_path}/runs/r"


def test_what_hdfs_needs_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(path: str, **options: Any) -> Any:
        raise OSError("Unable to load libhdfs: ./libhdfs.so: cannot open shared object file")

    monkeypatch.setattr(store, "url_to_fs", refused)
    with pytest.raises(StoreError, match="'hdfs://n:8020/x' cannot be opened.*JAVA_HOME.*HADOOP_HOME.*CLASSPATH"):
        Store.create("hdfs://n:8020/x")


# -- memory -------------------------------------------------------------------------------------------------------


def test_memory_serves_one_process(spark: Any) -> None:
    memory = Store.create("memory://sparkvod-one-process")
    write_parquet(memory)
    assert sorted(ids(open_prepared(memory), num_proc=2)) == list(range(100))
    df = spark.range(10).selectExpr("id", "double(id) as y")
    with pytest.raises(StoreError, match=r"own memory: Spark's workers .* other processes, so prepare needs a store"):
        prepare(df, memory, label_cols=["y"])
    memory.delete(memory.prefix_path)


# -- a listing that is behind -------------------------------------------------------------------------------------


def test_a_listing_that_is_behind(spark: Any, tmp_path: Path) -> None:
    lagging = LaggingStore(f"lagging://{tmp_path}/store")
    df = spark.range(0, 1000, 1, 3).selectExpr("id", "double(id) as y")
    began = time.monotonic()
    data = prepare(df, lagging, label_cols=["y"], validation=0.2, num_proc=2)
    again = open_prepared(lagging, data.idx)
    assert again.fingerprint == data.fingerprint
    assert len(ids(again, num_proc=2)) == data.train.rows == 800
    if time.monotonic() - began < 2:
        assert lagging.listing(lagging.prefix_path) == {}
    path = f"{lagging.get_run_path('r')}/checkpoint"
    lagging.write_text(path, "new")
    assert lagging.read_text(path) == "new"
    lagging.check_writable()
    assert not list((tmp_path / "store").glob(".sparkvod-*"))
    # What a repeated task left shows itself later, and is no reason to doubt the data.
    name = f"part-00000-{'0' * 12}-0000.parquet"
    Path(tmp_path / "store" / f"intermediate_train_data.{data.idx}" / name).write_bytes(b"late")
    time.sleep(2.1)
    assert open_prepared(lagging, data.idx).fingerprint == data.fingerprint
    release(data)


# -- S3 -----------------------------------------------------------------------------------------------------------


def test_files_on_s3(s3: dict[str, Any]) -> None:
    remote = Store.create("s3://bucket/files", storage_options=s3)
    path = f"{remote.get_run_path('r')}/deep/checkpoint"
    with pytest.raises(FileNotFoundError):
        remote.read(path)
    assert remote.size(path) is None
    remote.write_text(path, "one")
    remote.write_bytes(path, b"two")
    other = pickle.loads(pickle.dumps(remote))
    assert other.read_text(path) == "two"
    assert other.size(path) == 3
    assert remote.listing(remote.get_run_path("r")) == {"deep/checkpoint": 3}
    assert remote.create_exclusive(path, b"x") is False
    assert remote.create_exclusive(path + "2", b"x") is True
    assert [claim(remote), claim(other)] == [0, 1]
    remote.check_writable()
    remote.delete(remote.prefix_path)
    assert not remote.exists(path)
    write_parquet(remote)
    assert sorted(ids(open_prepared(remote))) == list(range(100))


def test_no_more_is_fetched_from_s3_than_is_read(s3: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    import s3fs

    remote = Store.create("s3://bucket/many-groups", storage_options=s3)
    sink = pa.BufferOutputStream()
    table = pa.table({"id": np.arange(64 * 4096), "y": np.random.default_rng(0).random(64 * 4096)})
    pq.write_table(table, sink, row_group_size=4096, use_dictionary=False, compression="none")
    size = sink.tell()
    remote.write_bytes(f"{remote.get_train_data_path()}/a.parquet", sink.getvalue().to_pybytes())
    prepared = open_prepared(remote)
    fetched: list[int] = []
    fetch = s3fs.core.S3File._fetch_range

    def counted(file: Any, start: int, end: int) -> Any:
        fetched.append(end - start)
        return fetch(file, start, end)

    monkeypatch.setattr(s3fs.core.S3File, "_fetch_range", counted)
    with open_reader("arrow", prepared.train, ["y"], 256) as reader:
        assert sum(batch.rows for batch in reader.epoch(0)) == 64 * 4096
        assert reader.decoded == 64
    # Half of the file, and its footer for as many threads as found it closed at once.
    assert sum(fetched) <= size / 2 + 10 * (128 << 10)
    assert len(fetched) <= 64 + 20


def test_prepared_on_s3(spark: Any, s3: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    remote = Store.create("s3://bucket/prepared", storage_options=s3)
    df = spark.range(0, 1000, 1, 3).selectExpr("id", "double(id) as y")
    with caplog.at_level(logging.DEBUG, "sparkvod"):
        data = prepare(df, remote, label_cols=["y"], num_proc=2)
        assert sorted(ids(open_prepared(remote, data.idx), num_proc=2)) == list(range(1000))
        release(data)
    assert SECRET not in caplog.text
    assert KEY not in caplog.text
    assert SECRET not in repr(remote) + repr(data)


def test_a_misspelt_bucket_is_not_made(s3: dict[str, Any]) -> None:
    misspelt = Store.create("s3://buckt/x", storage_options=s3)
    with pytest.raises(StoreError, match=r"'s3://buckt/x/.*cannot be written.*bucket does not exist"):
        misspelt.check_writable()
    assert not misspelt.exists("s3://buckt")


def test_s3_that_cannot_be_reached_is_named_without_credentials(
    spark: Any, s3: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    import s3fs

    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)
    options = {**s3, "endpoint_url": "http://127.0.0.1:9", "config_kwargs": {"retries": {"max_attempts": 0}}}
    nobody = Store.create("s3://bucket/x", storage_options=options)
    df = spark.range(10).selectExpr("id", "double(id) as y")
    with pytest.raises(StoreError, match=r"'s3://bucket/x/.*cannot be written.*storage_options") as caught:
        prepare(df, nobody, label_cols=["y"])
    assert SECRET not in str(caught.value)
    assert KEY not in str(caught.value)
