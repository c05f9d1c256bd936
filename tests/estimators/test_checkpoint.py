"""Checkpoint files."""

import contextlib
import io
import json
import zipfile

import numpy as np
import pytest

from sparkvod.data import Store
from sparkvod.errors import StoreError
from sparkvod.estimators import checkpoint
from sparkvod.estimators.checkpoint import Checkpoint


def example():
    history = [{"epoch": 0, "train": {"loss": float("nan")}}]
    state = {"model": b"\x00m" * 1000, "optimizer": b""}
    return Checkpoint(1, 7, 42, history, {"batch_size": 8}, state, [b"zero", b"one"])


def test_it_comes_back_as_it_was():
    before = example()
    after = Checkpoint.from_bytes(before.to_bytes(), "here")
    np.testing.assert_equal(vars(after), vars(before))


def test_ranks_stay_in_order():
    before = Checkpoint(0, 0, 0, [], {}, {}, [str(rank).encode() for rank in range(120)])
    assert Checkpoint.from_bytes(before.to_bytes(), "here").ranks == before.ranks


@pytest.mark.parametrize("damage", [lambda c: c[: len(c) // 2], lambda c: c[:300] + b"x" + c[301:], lambda c: b""])
def test_a_damaged_file_is_refused(damage):
    with pytest.raises(StoreError, match="here is no whole checkpoint"):
        Checkpoint.from_bytes(damage(example().to_bytes()), "here")


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("version", 1, "is a checkpoint of format 1, and this version of sparkvod reads format 2"),
        ("version", None, "no version"),
        ("epoch", -1, "epoch must be a whole number from 0, got -1"),
        ("step", "3", "step must be a whole number"),
        ("seed", True, "seed must be a whole number"),
        ("ranks", 3, "rank/000002"),
        ("history", [1], "history must be a list of records"),
        ("fingerprint", [], "fingerprint must be a dict"),
    ],
)
def test_a_header_is_validated(tmp_path, field, value, said):
    buffer = io.BytesIO(example().to_bytes())
    with zipfile.ZipFile(buffer) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    header = json.loads(members.pop("header.json"))
    with zipfile.ZipFile(buffer := io.BytesIO(), "w") as archive:
        archive.writestr("header.json", json.dumps({**header, field: value}))
        for name, content in members.items():
            archive.writestr(name, content)
    with pytest.raises(StoreError, match=f"here .*{said}"):
        Checkpoint.from_bytes(buffer.getvalue(), "here")
    store = Store.create(str(tmp_path))
    store.write_bytes(checkpoint.path_of(store, "run"), buffer.getvalue())
    if field != "ranks":  # what no header shows
        with pytest.raises(StoreError, match=f"run/checkpoint .*{said}"):
            checkpoint.read_header(store, "run")


def test_every_truncation_and_mutation_is_refused_or_read():
    content, random = example().to_bytes(), np.random.default_rng(3)
    for at in range(0, len(content), 41):
        with pytest.raises(StoreError, match="no whole checkpoint"):
            Checkpoint.from_bytes(content[:at], "here")
    for _ in range(200):
        damaged = bytearray(content)
        for at in random.integers(0, len(content), 3):
            damaged[at] = random.integers(256)
        with contextlib.suppress(StoreError):
            Checkpoint.from_bytes(bytes(damaged), "here")


def test_the_header_is_read_alone(tmp_path):
    store = Store.create(str(tmp_path))
    assert checkpoint.read_header(store, "run") is None
    path = checkpoint.path_of(store, "run")
    store.write_bytes(path, example().to_bytes())
    assert checkpoint.read_header(store, "run")["step"] == 7
    store.write_bytes(path, b"nonsense")
    with pytest.raises(StoreError, match="no whole checkpoint"):
        checkpoint.read_header(store, "run")
    assert checkpoint.path_of(Store.create(str(tmp_path), save_runs=False), "run") is None


def test_differences_are_named():
    checkpoint.require_same({"a": 1}, {"a": 1}, "run", step=3)
    with pytest.raises(ValueError, match=r"run 'run' .*a is 1 and was 2; b is None and was 'x'\. .* expected; pass"):
        checkpoint.require_same({"a": 1}, {"a": 2, "b": "x"}, "run", step=3)


def test_metrics_may_change_between_epochs_only():
    now, before = {"a": 1, "metrics": ["f"]}, {"a": 1, "metrics": []}
    checkpoint.require_same(now, before, "run", step=0)
    with pytest.raises(
        ValueError, match=r"metrics is \['f'\] and was \[\]\. .*may change between epochs, not in step 3"
    ):
        checkpoint.require_same(now, before, "run", step=3)


def test_a_run_is_trained_by_one_fit_at_a_time(tmp_path):
    store = Store.create(str(tmp_path))
    refused = pytest.raises(ValueError, match=r"run 'run' is being trained by another fit .* leave run_id out")
    with checkpoint.alone(store, "run"), checkpoint.alone(store, "other"), refused, checkpoint.alone(store, "run"):
        raise AssertionError
    with checkpoint.alone(store, "run"):
        pass
