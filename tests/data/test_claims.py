"""Who has which number in a store, and what is deleted of those that nobody needs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest

from sparkvod.data import FilesystemStore, Store, clean
from sparkvod.data.claims import claim, remove, renew
from sparkvod.errors import StoreError

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def store(tmp_path: Path) -> FilesystemStore:
    return Store.create(str(tmp_path / "store"))


def change(store: FilesystemStore, idx: int, **values: object) -> None:
    """Rewrites a claim as if another driver, or an earlier hour, had made it."""
    path = f"{store.get_train_data_path(idx)}/_claim"
    store.write_text(path, json.dumps({**json.loads(store.read(path)), **values}))


def test_claims_are_exclusive(store: FilesystemStore) -> None:
    with ThreadPoolExecutor(8) as pool:
        numbers = list(pool.map(lambda _: claim(store), range(24)))
    assert sorted(numbers) == list(range(24))
    remove(store, 5)
    assert claim(store) == 5


def test_claims_where_nothing_is_exclusive(store: FilesystemStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FilesystemStore, "create_exclusive", lambda self, path, data: None)
    first, second = claim(store), claim(store)
    assert first != second
    assert store.exists(store.get_train_data_path(first))


def test_data_below_a_file_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    store = Store.create(str(tmp_path), train_path=str(tmp_path / "file" / "train"))
    with pytest.raises(StoreError, match="cannot be written"):
        claim(store)


def test_what_ended_drivers_left_is_deleted(store: FilesystemStore) -> None:
    imports = "import sys; from sparkvod.data import Store; from sparkvod.data.claims import claim"
    script = f"{imports}; claim(Store.create(sys.argv[1]))"
    subprocess.run([sys.executable, "-c", script, store.prefix_path], check=True, timeout=30)
    store.write_text(f"{store.get_train_data_path(0)}/part.parquet", "unfinished")
    store.write_text(f"{store.get_val_data_path(0)}/part.parquet", "unfinished")
    store.write_text(f"{store.get_train_data_path(1)}/data.parquet", "written by somebody else")
    store.write_text(f"{store.get_train_data_path()}/data.parquet", "written by somebody else")
    store.write_text(f"{store.get_run_path('run')}/checkpoint", "a checkpoint")
    assert clean(store) == []
    assert clean(store, older_than=timedelta(hours=1)) == []
    time.sleep(0.01)
    assert clean(store, older_than=0) == [0]
    left = {path.name for path in Path(store.prefix_path).iterdir()}
    assert left == {"intermediate_train_data.1", "intermediate_train_data", "runs"}
    assert clean(Store.create(store.prefix_path + "/nothing"), 0) == []


def test_what_a_living_driver_claimed_stays(store: FilesystemStore) -> None:
    for _ in range(5):
        claim(store)
    old = time.time() - 1e6
    for idx in range(5):
        change(store, idx, time=old)
    change(store, 1, pid=os.getppid(), started=None)  # another living driver
    change(store, 2, started=1)  # a process of this number, but not the one that claimed
    change(store, 3, host="elsewhere")  # only its age is known
    change(store, 4, host="elsewhere")
    renew(store, 4)
    assert clean(store, 1e5) == [2, 3]
    assert clean(store, 1e5) == []


@pytest.mark.parametrize("older_than", [-1, float("nan"), timedelta(seconds=-1)])
def test_bad_ages(store: FilesystemStore, older_than: float) -> None:
    with pytest.raises(ValueError, match="older_than="):
        clean(store, older_than)


def test_a_temporary_store_ends_with_its_process() -> None:
    script = """
import os, sys
from sparkvod.data import Store
store = Store.temporary(save_runs=False)
store.write_text(store.get_train_data_path(0) + "/data.parquet", "x")
child = os.fork()
if child == 0:
    sys.exit()
os.waitpid(child, 0)
assert store.exists(store.get_train_data_path(0))
print(store.prefix_path)
"""
    done = subprocess.run([sys.executable, "-c", script], check=True, timeout=30, capture_output=True, text=True)
    assert "sparkvod-store-" in done.stdout
    assert not os.path.exists(done.stdout.strip())
