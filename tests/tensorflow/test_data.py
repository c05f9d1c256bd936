"""tf.data from the readers: the same batches, declared types, errors, and training on them."""

from __future__ import annotations

import importlib.util
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.contracts.worlds import Suite
from tests.tensorflow.test_contract import QUIET

pytest.importorskip("tensorflow", reason="the TensorFlow front end needs tensorflow")

COLUMNS = ["id", "flag", "tiny", "single", "vector"]
READERS = ["arrow", *(["petastorm"] if importlib.util.find_spec("petastorm") else [])]


def _dataset(folder: str, files: list[list[int]]) -> Any:
    from tests.contracts.reader import write

    return write(Path(folder), files)


def check_batches_are_the_readers() -> None:
    from sparkvod.data import open_reader
    from sparkvod.tensorflow.data import from_reader
    from tests.contracts.reader import UNEVEN, WIDTH

    with tempfile.TemporaryDirectory() as folder:
        dataset = _dataset(folder, UNEVEN)
        for name in READERS:
            for rank in range(2):
                with (
                    open_reader(name, dataset, COLUMNS, 50, rank, 2, seed=3) as reader,
                    open_reader(name, dataset, COLUMNS, 50, rank, 2, seed=3) as other,
                ):
                    found = from_reader(reader, epochs=[4, 1], start_step=2)
                    spec = {key: (value.dtype.name, tuple(value.shape)) for key, value in found.element_spec.items()}
                    assert spec == {
                        "id": ("int64", (None,)),
                        "flag": ("bool", (None,)),
                        "tiny": ("int8", (None,)),
                        "single": ("float32", (None,)),
                        "vector": ("float32", (None, WIDTH)),
                    }
                    assert int(found.cardinality()) == 2 * reader.steps - 2
                    # All are kept until the end: nothing that was given out may change.
                    batches = list(found)
                    plain = [batch.columns for epoch, start in ((4, 2), (1, 0)) for batch in other.epoch(epoch, start)]
                    for ours, theirs in zip(batches, plain, strict=True):
                        for column in COLUMNS:
                            np.testing.assert_array_equal(ours[column], theirs[column])


def check_structures() -> None:
    import tensorflow as tf

    from sparkvod.data import open_reader
    from sparkvod.tensorflow.data import from_reader
    from tests.contracts.reader import SETS, WIDTH

    with tempfile.TemporaryDirectory() as folder:
        with open_reader("auto", _dataset(f"{folder}/few", SETS["few groups"]), COLUMNS, 50) as reader:
            x, y, weight = next(iter(from_reader(reader, "vector", ["single", "flag"], "tiny")))
            assert (x.shape[1:], set(y), weight.dtype) == ((WIDTH,), {"single", "flag"}, tf.int8)
            x, y = from_reader(reader, labels="single").element_spec
            assert (set(x), y.dtype) == ({"id", "flag", "tiny", "vector"}, tf.float32)
            assert len(list(from_reader(reader, epochs=0))) == 0
            for wrong, match in (
                ({"features": "none"}, "column 'none' was found, one of id, flag"),
                ({"sample_weight": "tiny"}, "without labels"),
                ({"start_step": 99}, "start_step=99 was found, 0 to 3"),
                ({"prefetch": 0}, "prefetch=0"),
            ):
                with pytest.raises(ValueError, match=match):
                    from_reader(reader, **wrong)
        with open_reader("auto", _dataset(f"{folder}/two", SETS["fewer rows than ranks"]), ["id"], 1, 3, 4) as reader:
            assert [int(batch.shape[0]) for batch in from_reader(reader, "id")] == [0]
            assert not list(from_reader(reader, "id", skip_empty=True))


def check_errors_and_ends() -> None:
    import tensorflow as tf

    from sparkvod.data import open_reader
    from sparkvod.tensorflow.data import from_reader
    from tests.contracts.reader import SETS

    ended = []

    class Broken:
        steps = 3

        def epoch(self, epoch: int, start_step: int = 0) -> Iterator[Any]:
            try:
                yield from reader.epoch(epoch, start_step)
                raise RuntimeError("the file is gone")
            finally:
                ended.append(epoch)

    with (
        tempfile.TemporaryDirectory() as folder,
        open_reader("auto", _dataset(folder, SETS["few groups"]), ["id"], 40) as reader,
    ):
        Broken.columns = reader.columns  # type: ignore[attr-defined]
        with pytest.raises(tf.errors.OpError, match="the file is gone"):
            list(from_reader(Broken()))  # type: ignore[arg-type]
        assert ended == [0]
        for _ in from_reader(Broken(), epochs=[7, 8]):  # type: ignore[arg-type]
            break


def check_text() -> None:
    import pyarrow as pa
    import tensorflow as tf
    from pyarrow import parquet

    from sparkvod.data import FilesystemStore, open_prepared, open_reader
    from sparkvod.tensorflow.data import from_reader

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "intermediate_train_data"
        path.mkdir()
        table = pa.table({"word": ["red", "grün", "", "blue"] * 5, "id": list(range(20))})
        parquet.write_table(table, path / "part.parquet")
        prepared = open_prepared(FilesystemStore(folder), text=True)
        with open_reader("auto", prepared.train, ["word", "id"], 8) as reader:
            found = from_reader(reader, "word", "id")
            assert found.element_spec[0] == tf.TensorSpec([None], tf.string)
            for words, ids in found:
                expected = [("red", "grün", "", "blue")[number % 4] for number in ids.numpy()]
                assert [word.decode() for word in words.numpy()] == expected


def check_prefetch() -> None:
    """Batches are read while nobody asks for them, as many as were said and no more."""
    from sparkvod.data import open_reader
    from sparkvod.tensorflow.data import from_reader
    from tests.contracts.reader import EVEN

    read = []

    class Counting:
        def epoch(self, epoch: int, start_step: int = 0) -> Iterator[Any]:
            for batch in reader.epoch(epoch, start_step):
                read.append(batch.rows)
                yield batch

    with (
        tempfile.TemporaryDirectory() as folder,
        open_reader("auto", _dataset(folder, EVEN[:1]), ["id"], 40) as reader,
    ):
        Counting.columns, Counting.steps = reader.columns, reader.steps  # type: ignore[attr-defined]
        batches = iter(from_reader(Counting(), prefetch=5))  # type: ignore[arg-type]
        next(batches)
        deadline = time.monotonic() + 20
        while len(read) < 6 and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.1)
        assert 6 <= len(read) <= 8 < reader.steps
        del batches


def check_fit() -> None:
    import keras

    from sparkvod.data import open_reader
    from sparkvod.tensorflow.data import from_reader
    from tests.contracts.reader import EVEN, WIDTH

    if not hasattr(keras, "config"):
        return
    with (
        tempfile.TemporaryDirectory() as folder,
        open_reader("auto", _dataset(folder, EVEN[:1]), ["vector", "single"], 500) as reader,
    ):
        model = keras.Sequential([keras.Input((WIDTH,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(1e-9), "mse")
        data = from_reader(reader, "vector", "single", epochs=3)
        told = model.fit(data, steps_per_epoch=reader.steps, epochs=3, verbose=0).history
        assert len(told["loss"]) == 3
        assert np.isfinite(told["loss"]).all()


SUITE = Suite(
    [check_batches_are_the_readers, check_structures, check_errors_and_ends, check_text, check_prefetch, check_fit],
    env=QUIET,
)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("check", SUITE.names)
def test_data(check: str) -> None:
    pytest.importorskip("pyarrow", reason="the readers need pyarrow")
    SUITE.verify(check, 1)
