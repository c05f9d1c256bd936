"""What every estimator promises, on a Spark session of four slots.

An estimator joins with a subclass of :class:`EstimatorContract` named ``Test...`` that says how to make one. The data
are a regression on five numbers per row, in partitions of unequal sizes, one of them empty.
"""

from __future__ import annotations

import glob
import os
import subprocess
import sys
import textwrap
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from sparkvod.data import Store
from sparkvod.errors import WorkerError
from sparkvod.estimators.callbacks import Callback

ROWS = 1003
FEATURES = ["x0", "x1", "x2", "row"]


def frame(spark: Any) -> Any:
    """Returns ROWS rows in partitions of 500, 0, 3, 300 and 200: FEATURES, ``y``, ``weight``, ``held_out``."""
    parts = [spark.range(a, b, 1, 1) for a, b in ((0, 500), (500, 500), (500, 503), (503, 803), (803, ROWS))]
    ids = parts[0]
    for part in parts[1:]:
        ids = ids.union(part)
    return ids.selectExpr(
        "id",
        "float(sin(id * 0.7)) as x0",
        "float(cos(id * 1.3)) as x1",
        "float(sin(id * 0.37 + 1)) as x2",
        "id / 1000.0D as row",
        "sin(id * 0.7) + 2 * cos(id * 1.3) - 0.5 as y",
        "double(1 + id % 3) as weight",
        "id % 5 = 0 as held_out",
    )


def recorder(folder: Path) -> Callable[[Any], Any]:
    """Returns a ``transformation_fn`` that notes the rows of each batch, in a file per process."""
    folder.mkdir(parents=True, exist_ok=True)

    def record(batch: Any) -> Any:
        with open(folder / str(os.getpid()), "a", encoding="utf-8") as file:
            file.write(" ".join(str(round(row * 1000)) for row in batch["row"]) + "\n")
        return batch

    return record


class Interrupt(Callback):
    """Raises in one rank, once: as long as the file is not there."""

    def __init__(self, file: Path, epoch: int, step: int, rank: int = 1) -> None:
        self._file, self._at, self._rank = file, (epoch, step), rank

    def on_batch_end(self, trainer: Any, epoch: int, step: int) -> None:
        if (epoch, step) == self._at and trainer.rank == self._rank and not self._file.exists():
            self._file.write_text(repr(time.time()))
            raise ArithmeticError("interrupted by the test")


class EstimatorContract(ABC):
    """The checks."""

    @abstractmethod
    def estimator(self, optimizer: str = "sgd", random_layer: bool = False, **params: Any) -> Any:
        """Returns an estimator of a small network, 4 inputs, one output, with the same weights at each call.

        Args:
            optimizer: ``sgd`` (rate 0.05, momentum) or ``adam`` (rate 0.01, and a schedule that changes it each epoch).
            random_layer: with dropout.
            params: further Params.
        """

    @abstractmethod
    def weights(self, fitted: Any) -> np.ndarray:
        """Returns all weights of a fitted model, flat."""

    @abstractmethod
    def predict(self, fitted: Any, x: np.ndarray) -> np.ndarray:
        """Returns the framework's own predictions [rows] for inputs [rows, 4]."""

    def fitted(self, df: Any, **params: Any) -> Any:
        return self.estimator(**{"verbose": 0, "random_seed": 3, **params}).fit(df)

    # ---- the same training on any number of ranks -----------------------------------------------------------------

    @pytest.mark.timeout(180)
    @pytest.mark.parametrize("optimizer", ["sgd", "adam"])
    def test_any_number_of_ranks_trains_to_the_same_weights(self, spark: Any, tmp_path: Path, optimizer: str) -> None:
        store, found = Store.create(str(tmp_path / "store")), {}
        df = frame(spark)
        for size in (1, 2, 3):
            notes = tmp_path / f"ranks-{size}"
            options = {"optimizer": optimizer, "num_proc": size, "batch_size": 24 // size, "epochs": 2, "store": store}
            model = self.fitted(df, transformation_fn=recorder(notes), **options)
            found[size] = self.weights(model)
            self._check_rows(notes, steps=-(-ROWS // 24), epochs=2)
            if size < 3:  # lanes divide evenly: no row group is decoded by two ranks
                groups = self._row_groups(store)
                assert sum(worker["decoded"] for worker in model.workers) <= 1.1 * 2 * groups
        for size in (2, 3):
            np.testing.assert_allclose(found[size], found[1], rtol=0, atol=1e-5)

    def _check_rows(self, notes: Path, steps: int, epochs: int) -> None:
        """Each row once per epoch: each rank notes one line per step."""
        files = [path.read_text(encoding="utf-8").split("\n")[:-1] for path in notes.iterdir()]
        assert all(len(lines) == steps * epochs for lines in files)
        for epoch in range(epochs):
            lines = [line for file in files for line in file[epoch * steps : (epoch + 1) * steps]]
            seen = Counter(int(word) for line in lines for word in line.split())
            assert seen == Counter(range(ROWS))

    def _row_groups(self, store: Any) -> int:
        import pyarrow.parquet

        files = glob.glob(f"{store.prefix_path}/intermediate_train_data*/**/*.parquet", recursive=True)
        return sum(pyarrow.parquet.read_metadata(file).num_row_groups for file in files)

    # ---- interrupted ----------------------------------------------------------------------------------------------

    @pytest.mark.timeout(120)
    @pytest.mark.parametrize("checkpoint_every", [None, 3])
    def test_an_interrupted_run_goes_on_to_the_same_bits(
        self, spark: Any, tmp_path: Path, checkpoint_every: int | None
    ) -> None:
        df = frame(spark)
        options = {"optimizer": "adam", "random_layer": True, "num_proc": 2, "batch_size": 64, "epochs": 4}
        options["checkpoint_every"] = checkpoint_every
        whole = self.fitted(df, store=str(tmp_path / "whole"), run_id="run", **options)
        options |= {"store": str(tmp_path / "broken"), "run_id": "run"}
        interrupt = Interrupt(tmp_path / "interrupted", epoch=1, step=4)
        with pytest.raises(WorkerError, match="interrupted by the test"):
            self.fitted(df, callbacks=[interrupt], **options)
        assert interrupt._file.exists()
        resumed = self.fitted(df, **options)
        assert self.weights(resumed).tobytes() == self.weights(whole).tobytes()
        assert [_figures(record) for record in resumed.getHistory()] == [_figures(r) for r in whole.getHistory()]

    @pytest.mark.timeout(60)
    def test_another_training_does_not_go_on_from_a_checkpoint(self, spark: Any, tmp_path: Path) -> None:
        df = frame(spark)
        options = {"num_proc": 1, "batch_size": 128, "store": str(tmp_path), "run_id": "run"}
        self.fitted(df, **options)
        with pytest.raises(ValueError, match="batch_size is 64 and was 128"):
            self.fitted(df, **{**options, "batch_size": 64})
        with pytest.raises(ValueError, match="rows is 503 and was 1003"):
            self.fitted(df.filter("id < 503"), **options)
        more = self.fitted(df, epochs=2, **options)
        assert [record["epoch"] for record in more.getHistory()] == [0, 1]

    # ---- a rank that raises ---------------------------------------------------------------------------------------

    @pytest.mark.timeout(120)
    def test_a_rank_that_raises_ends_fit_and_leaves_nothing(self, spark: Any, tmp_path: Path, no_leaks: None) -> None:
        df = frame(spark)
        options = {"num_proc": 2, "batch_size": 8, "epochs": 2, "store": str(tmp_path / "store")}
        self.fitted(df, **options)
        before = _left_in_workers()
        interrupt = Interrupt(tmp_path / "raised", epoch=1, step=20)
        with pytest.raises(WorkerError, match="rank 1 on .* raised ArithmeticError: interrupted by the test") as caught:
            self.fitted(df, callbacks=[interrupt], **options)
        seconds = time.time() - float(interrupt._file.read_text())
        assert seconds < 3, f"fit raised {seconds:.1f} s after the rank"
        assert isinstance(caught.value.__cause__, ArithmeticError)
        assert "on_batch_end" in str(caught.value)
        deadline = time.monotonic() + 5
        while _left_in_workers() - before and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not _left_in_workers() - before
        assert len(self.fitted(df, **options).getHistory()) == 2

    # ---- pipelines ------------------------------------------------------------------------------------------------

    @pytest.mark.timeout(180)
    def test_a_saved_pipeline_predicts_the_same_in_a_new_process(self, spark: Any, tmp_path: Path) -> None:
        from pyspark.ml import Pipeline
        from pyspark.ml.feature import VectorAssembler

        df = frame(spark)
        assembler = VectorAssembler(inputCols=FEATURES, outputCol="features")
        estimator = self.estimator(
            feature_cols=["features"], num_proc=2, batch_size=64, verbose=0, validation="held_out", random_seed=3
        )
        model = Pipeline(stages=[assembler, estimator]).fit(df)
        model.write().overwrite().save(str(tmp_path / "model"))
        model.write().overwrite().save(str(tmp_path / "model"))
        df.write.parquet(str(tmp_path / "data"))
        expected = model.transform(df).select("id", "y__output").toPandas().sort_values("id")
        script = f"""
            import os, sys
            os.environ["PYSPARK_PYTHON"] = sys.executable
            from pyspark.ml import PipelineModel
            from pyspark.sql import SparkSession
            spark = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").getOrCreate()
            model = PipelineModel.load({str(tmp_path / "model")!r})
            found = model.transform(spark.read.parquet({str(tmp_path / "data")!r})).select("id", "y__output")
            found.toPandas().sort_values("id").to_csv({str(tmp_path / "found.csv")!r}, index=False)
            spark.stop()
        """
        root = Path(__file__).resolve().parents[2]
        subprocess.run(
            [sys.executable, "-c", textwrap.dedent(script)], check=True, timeout=120, cwd=root, capture_output=True
        )
        found = np.loadtxt(tmp_path / "found.csv", delimiter=",", skiprows=1)
        np.testing.assert_array_equal(found[:, 0], expected["id"])
        np.testing.assert_allclose(found[:, 1], expected["y__output"], rtol=0, atol=1e-6)

    @pytest.mark.timeout(60)
    def test_transform_predicts_what_the_model_does_and_keeps_all_columns(self, spark: Any, tmp_path: Path) -> None:
        df = frame(spark)
        model = self.fitted(df, num_proc=1, batch_size=128)
        found = model.transform(df)
        assert found.columns == [*df.columns, "y__output"]
        table = found.toPandas().sort_values("id")
        x = table[FEATURES].to_numpy("float32")
        np.testing.assert_allclose(table["y__output"], self.predict(model, x), rtol=1e-6, atol=1e-6)
        assert len(model.transform(df.filter("id < 0")).collect()) == 0

    @pytest.mark.timeout(60)
    def test_fit_takes_params_and_lists_of_them(self, spark: Any, tmp_path: Path) -> None:
        estimator = self.estimator(num_proc=2, batch_size=256, verbose=0, random_seed=3, store=str(tmp_path))
        grid = [{estimator.epochs: epochs} for epochs in (1, 3)]
        assert [len(model.getHistory()) for model in estimator.fit(frame(spark), grid)] == [1, 3]
        assert estimator.getEpochs() == 1

    # ---- figures --------------------------------------------------------------------------------------------------

    @pytest.mark.timeout(60)
    def test_the_history_has_the_losses_of_all_rows(self, spark: Any, tmp_path: Path) -> None:
        df = frame(spark)
        model = self.fitted(df, num_proc=2, batch_size=100, validation="held_out", sample_weight_col="weight")
        record = model.getHistory()[-1]
        held = df.filter("held_out").toPandas()
        errors = (self.predict(model, held[FEATURES].to_numpy("float32")) - held["y"]) ** 2
        expected = np.average(errors, weights=held["weight"])
        assert record["validation"]["loss"] == pytest.approx(expected, rel=1e-5)
        assert record["rows"] == df.filter("not held_out").count()
        phases = ["preparing", "starting", "training", "collecting"]
        assert sum(model.timings[phase] for phase in phases) == pytest.approx(model.timings["total"], rel=0.1, abs=0.2)


def _figures(record: dict[str, Any]) -> dict[str, Any]:
    """Returns a record without what depends on the clock."""
    return {name: value for name, value in record.items() if name not in ("seconds", "rows_per_second", "rows")}


def _left_in_workers() -> set[str]:
    """Returns what the engine could have left in Spark's Python workers: shared memory and listening sockets."""
    left = set()
    for process in psutil.Process().children(recursive=True):
        try:
            if "python" not in process.name():
                continue
            folder = f"/proc/{process.pid}/fd"
            links = [os.readlink(f"{folder}/{number}") for number in os.listdir(folder)]
            left |= {f"{process.pid} {link}" for link in links if "memfd:" in link}
            left |= {
                f"{process.pid} {c.laddr}"
                for c in process.net_connections(kind="tcp")
                if c.status == psutil.CONN_LISTEN
            }
        except (psutil.Error, OSError):
            continue
    return left
