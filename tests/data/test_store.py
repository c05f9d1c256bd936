"""Stores: paths, atomic writes, errors."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import cloudpickle
import pytest

from sparkvod.data import FilesystemStore, LocalStore, Store, files
from sparkvod.errors import StoreError


def test_paths_are_the_peers(tmp_path: Path) -> None:
    store = Store.create(str(tmp_path))
    prefix = str(tmp_path)
    assert store.get_train_data_path() == f"{prefix}/intermediate_train_data"
    assert store.get_train_data_path(3) == f"{prefix}/intermediate_train_data.3"
    assert store.get_val_data_path(0) == f"{prefix}/intermediate_val_data.0"
    assert store.get_test_data_path(1) == f"{prefix}/intermediate_test_data.1"
    assert store.get_runs_path() == f"{prefix}/runs"
    assert store.get_run_path("r") == store.get_checkpoint_path("r") == f"{prefix}/runs/r"
    assert store.get_logs_path("r") == f"{prefix}/runs/r/logs"
    assert store.get_checkpoint_filename() == "checkpoint"
    assert store.saving_runs()


def test_paths_can_be_chosen(tmp_path: Path) -> None:
    store = Store.create(
        str(tmp_path),
        train_path=f"{tmp_path}/a",
        runs_path=f"{tmp_path}/b",
        save_runs=False,
        checkpoint_filename="c.pt",
    )
    assert store.get_train_data_path(1) == f"{tmp_path}/a.1"
    assert store.get_runs_path() == f"{tmp_path}/b"
    assert store.get_checkpoint_path("r") is store.get_logs_path("r") is None
    assert store.get_checkpoint_filename() == "c.pt"


@pytest.mark.parametrize("form", ["{}", "file://{}", "file:{}", "{}/"])
def test_forms_of_a_local_prefix(tmp_path: Path, form: str) -> None:
    store = Store.create(form.format(tmp_path))
    assert store.prefix_path == str(tmp_path)
    assert store.is_local


def test_relative_prefix_stays_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    store = Store.create("here")
    monkeypatch.chdir("/")
    assert pickle.loads(pickle.dumps(store)).prefix_path == str(tmp_path / "here")


@pytest.mark.parametrize("prefix", ["local", "memory://sparkvod-test"])
def test_files(tmp_path: Path, prefix: str) -> None:
    store = Store.create(str(tmp_path) if prefix == "local" else prefix)
    path = f"{store.get_run_path('r')}/deep/checkpoint"
    assert not store.exists(path)
    store.write_text(path, "one")
    store.write_bytes(path, b"two")
    assert store.exists(path)
    assert store.read(path) == b"two"
    assert store.read_text(path) == "two"
    assert store.listing(store.get_run_path("r")) == {"deep/checkpoint": 3}
    assert store.create_exclusive(path, b"x") is False
    assert store.create_exclusive(path + "2", b"x") is True
    store.check_writable()
    store.delete(store.get_run_path("r"))
    store.delete(store.get_run_path("r"))
    assert not store.exists(path)
    with pytest.raises(FileNotFoundError):
        store.read(path)


def test_a_failed_write_leaves_the_old_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store.create(str(tmp_path))
    path = str(tmp_path / "file")
    store.write_text(path, "old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StoreError, match="No space left.*its disk is full.*free some room"):
        store.write_text(path, "new")
    assert store.read_text(path) == "old"
    assert os.listdir(tmp_path) == ["file"]


def test_unwritable_path_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    store = Store.create(str(tmp_path / "file" / "below"))
    with pytest.raises(StoreError, match=r"file/below/.*cannot be written \(NotADirectoryError.*pass another"):
        store.check_writable()


def test_unknown_scheme() -> None:
    with pytest.raises(StoreError, match="no file system for the store path 'nosuch://x'"):
        Store.create("nosuch://x")


def test_storage_options_and_pickle(tmp_path: Path) -> None:
    store = LocalStore(str(tmp_path), storage_options={"auto_mkdir": True})
    other = pickle.loads(pickle.dumps(store))
    assert isinstance(other, FilesystemStore)
    assert other.storage_options == {"auto_mkdir": True}
    assert other.fs.auto_mkdir is True


def test_remote_store_publishes_a_directory(tmp_path: Path) -> None:
    store = Store.create(str(tmp_path))
    remote = cloudpickle.loads(cloudpickle.dumps(store.to_remote("run", 2)))
    assert remote.train_data_path == store.get_train_data_path(2)
    with remote.get_local_output_dir() as local:
        Path(local, "logs").mkdir()
        Path(local, "logs", "events").write_text("e")
        Path(local, "a.ckpt").write_text("c")
        remote.sync(local)
    assert not os.path.exists(local)
    assert store.read_text(f"{remote.run_path}/logs/events") == "e"
    assert store.get_checkpoints("run") == [f"{remote.run_path}/a.ckpt"]
    assert store.get_checkpoints("other") == []


def test_parquet_data_sets_are_recognised(tmp_path: Path) -> None:
    store = Store.create(str(tmp_path))
    path = store.get_train_data_path()
    assert not store.is_parquet_dataset(path)
    store.write_text(f"{path}/_hidden/x.parquet", "")
    assert not store.is_parquet_dataset(path)
    store.write_text(f"{path}/x.parquet", "")
    assert store.is_parquet_dataset(path)


@pytest.mark.parametrize("prefix", [None, "", 3, b""])
def test_no_path(prefix: object) -> None:
    with pytest.raises(TypeError, match=r"the store path .* was found, a directory's path .* Store.temporary\(\)"):
        Store.create(prefix)  # type: ignore[arg-type]


def test_no_other_user_may_write_the_files_whatever_the_umask(tmp_path: Path) -> None:
    store, before = Store.create(str(tmp_path)), os.umask(0)
    try:
        store.write_bytes(str(tmp_path / "whole"), b"x")
        store.create_exclusive(str(tmp_path / "new"), b"x")
        with files.open_to_write(store.fs, str(tmp_path / "parts")) as file:
            file.write(b"x")
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o644}
