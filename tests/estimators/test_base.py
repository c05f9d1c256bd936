"""What all estimators check and tidy up around training, seen through the PyTorch estimator."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sparkvod.errors import DataError
from sparkvod.estimators import TorchEstimator, base
from tests.estimators.backends import Here, Never, write

torch = pytest.importorskip("torch", reason="the estimator here is PyTorch's")

ROWS = 20
COLUMNS = {"x": np.ones((ROWS, 2), "float32"), "y": np.ones(ROWS), "w": np.ones(ROWS)}


def make(store: Any, **params: Any) -> TorchEstimator:
    model = torch.nn.Linear(2, 1)
    defaults = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "loss": torch.nn.MSELoss()}
    columns = {"feature_cols": ["x"], "label_cols": ["y"]}
    return TorchEstimator(**{**defaults, **columns, "store": store, "verbose": 0, "backend": Never(1), **params})


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"sample_weight_col": "missing"}, "no column 'missing' in .*the columns are x, y, w"),
        ({"sample_weight_col": "x"}, "sample_weight_col 'x' is a vector"),
        ({"label_cols": ["Y"]}, "no column 'Y' in "),
        ({"feature_cols": ["z"]}, "no column 'z' in "),
        ({"feature_cols": None, "label_cols": ["x", "y", "w"]}, r"no feature columns beside \['w', 'x', 'y'\]"),
        ({"feature_cols": None, "sample_weight_col": "w", "validation": "x"}, "no feature columns beside"),
    ],
)
def test_the_columns_of_parquet_files_are_checked_on_the_driver(tmp_path: Path, params: Any, words: str) -> None:
    store = write(tmp_path / "store", **COLUMNS)
    with pytest.raises(DataError, match=words):
        make(store, **params).fit_on_parquet()


def test_columns_of_files_that_cannot_become_tensors_are_no_features_in_silence(tmp_path: Path) -> None:
    store = write(tmp_path / "store", **COLUMNS)
    (file,) = Path(store.get_train_data_path()).glob("*.parquet")
    table = pq.read_table(file)
    pq.write_table(table.append_column("text", pa.array(["a"] * ROWS)), file)
    with pytest.raises(DataError, match="column 'text' has the type string, which cannot become a tensor"):
        make(store, feature_cols=None, sample_weight_col="w").fit_on_parquet()
    assert make(store, backend=Here()).fit_on_parquet().getFeatureColumns() == ["x"]


def test_validation_files_of_another_width_are_refused_on_the_driver(tmp_path: Path) -> None:
    store = write(tmp_path / "store", **COLUMNS)
    other = write(tmp_path / "other", **{**COLUMNS, "x": np.ones((ROWS, 3), "float32")})
    shutil.copytree(other.get_train_data_path(), store.get_val_data_path())
    with pytest.raises(DataError, match="column 'x' has 3 numbers per row in the validation data, 2 were expected"):
        make(store).fit_on_parquet()


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (np.arange(ROWS) % 3, "label 'y' has values 0..2, the model has 2 outputs"),
        (np.arange(ROWS) / 2, "label 'y' has fractional values 0..9.5"),
    ],
)
def test_labels_of_files_are_checked_by_their_footers(tmp_path: Path, values: np.ndarray, words: str) -> None:
    store = write(tmp_path / "store", **{**COLUMNS, "y": values})
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(DataError, match=words):
        make(store, model=model, optimizer=optimizer, loss=torch.nn.CrossEntropyLoss()).fit_on_parquet()


def test_fractions_that_footers_hide_are_not_cut_off(tmp_path: Path) -> None:
    store = write(tmp_path / "store", **{**COLUMNS, "y": np.array([0, 0.5, 1, 1] * 5)})
    model = torch.nn.Linear(2, 2)
    params = {"optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "loss": torch.nn.CrossEntropyLoss()}
    with pytest.raises(DataError, match="label 'y' has fractional values, such as 0.5"):
        make(store, model=model, backend=Here(), **params).fit_on_parquet()


def test_negative_weights_in_files_are_refused(tmp_path: Path) -> None:
    store = write(tmp_path / "store", **{**COLUMNS, "w": -np.ones(ROWS)})
    with pytest.raises(DataError, match="a sample weight of -1 was found in column 'w'"):
        make(store, backend=Here(), sample_weight_col="w").fit_on_parquet()


@pytest.fixture
def released(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    found: list[Any] = []
    monkeypatch.setattr(base, "release", found.append)
    return found


@pytest.mark.timeout(60)
def test_fit_lets_go_of_its_data_however_it_ends(spark: Any, tmp_path: Path, released: list[Any]) -> None:
    df = spark.range(20).selectExpr("double(id) as x", "double(id) as y", "array(double(id)) as v")
    with pytest.raises(AssertionError, match="training was started"):
        make(str(tmp_path), model=torch.nn.Linear(1, 1), optimizer=sgd).fit(df)
    assert len(released) == 1
    with pytest.raises(DataError, match="cannot take its 1 input"):  # whose width shows only in the prepared data
        make(str(tmp_path), feature_cols=["v"]).fit(df)
    assert len(released) == 2
    make(str(tmp_path), model=torch.nn.Linear(1, 1), optimizer=sgd, backend=Here()).fit(df)
    assert len(released) == 3


def sgd(parameters: Any) -> Any:
    return torch.optim.SGD(parameters, lr=0.1)


@pytest.mark.timeout(60)
def test_a_run_id_without_a_store_is_warned_of(spark: Any, caplog: pytest.LogCaptureFixture) -> None:
    df = spark.range(20).selectExpr("array(double(id), 1.0D) as x", "double(id) as y")
    for run_id in (None, "mine"):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "sparkvod"):
            make(None, backend=Here(), run_id=run_id).fit(df)
        warnings = [message for message in caplog.messages if "without a store" in message]
        assert len(warnings) == (run_id is not None)
    assert "run_id='mine'" in warnings[0]


def test_directories_are_shared_where_a_local_master_is_on_this_host(monkeypatch: pytest.MonkeyPatch) -> None:
    class Session:
        def __init__(self, master: str) -> None:
            self.conf = {"spark.master": master}

    answers = iter([True, False])
    monkeypatch.setattr(base, "on_this_host", lambda spark: next(answers))
    assert not base._shares_directories(None)
    assert not base._shares_directories(Session("spark://host:7077"))
    assert base._shares_directories(Session("local[2]"))
    assert not base._shares_directories(Session("local[2]"))


@pytest.mark.timeout(60)
@pytest.mark.parametrize("feature", ["x", "array(x, x)"])  # whose width the schema tells, and does not
def test_a_model_is_tried_once(spark: Any, monkeypatch: pytest.MonkeyPatch, feature: str) -> None:
    tried, plan = [], TorchEstimator._plan

    def planned(self: TorchEstimator, payload: bytes, features: Any, labels: Any) -> Any:
        tried.append(features[0].shape)
        return plan(self, payload, features, labels)

    monkeypatch.setattr(TorchEstimator, "_plan", planned)
    model = torch.nn.Linear(1 if feature == "x" else 2, 1)
    df = spark.range(ROWS).selectExpr("float(id) / 20 AS x").selectExpr(f"{feature} AS f", "x AS y")
    make(None, model=model, feature_cols=["f"], backend=Here(), optimizer=sgd).fit(df)
    assert tried == [() if feature == "x" else (2,)]
