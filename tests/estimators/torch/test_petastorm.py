"""Training with the Petastorm reader: the same parameters as with Arrow's, and data sets of Petastorm's own."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from sparkvod.data import Store
from sparkvod.estimators import TorchEstimator
from tests.data import datasets

torch = pytest.importorskip("torch", reason="the PyTorch estimator needs torch")

pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.skipif(importlib.util.find_spec("petastorm") is None, reason="petastorm is not installed"),
]
IMAGES = importlib.util.find_spec("cv2") is not None


def make(store: Any, numbers: int, **params: Any) -> TorchEstimator:
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(numbers, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1))
    defaults: dict[str, Any] = {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.05),
        "loss": torch.nn.MSELoss(),
        "batch_size": 16,
        "epochs": 2,
        "num_proc": 2,
        "store": store,
        "verbose": 0,
        "random_seed": 0,
    }
    return TorchEstimator(**{**defaults, **params})


def flat(fitted: Any) -> Any:
    return torch.cat([p.detach().ravel() for p in fitted.getModel().parameters()])


def test_both_readers_train_to_the_same_parameters(spark: Any, tmp_path: Path) -> None:
    df = spark.range(0, 400, 1, 3).selectExpr(
        "float(id % 7) / 7 as a", "array(float(id % 5), float(id % 3)) as v", "double(id % 11) / 11 as y"
    )
    found = {}
    for reader in ("arrow", "petastorm"):
        store = Store.create(str(tmp_path / reader))
        estimator = make(store, 3, reader=reader, feature_cols=["a", "v"], label_cols=["y"], validation=0.2)
        found[reader] = estimator.fit(df)
    assert torch.equal(flat(found["arrow"]), flat(found["petastorm"]))
    histories = [[record["validation"]["loss"] for record in fitted.getHistory()] for fitted in found.values()]
    assert histories[0] == histories[1]


@pytest.mark.skipif(not IMAGES, reason="Petastorm's image codec needs opencv-python-headless, which is not installed")
def test_what_materialize_dataset_wrote(spark: Any, tmp_path: Path) -> None:
    store = Store.create(str(tmp_path / "store"))
    datasets.materialize(spark, store.get_train_data_path(), 90)
    fitted = [
        make(
            store,
            60 + 6 + 4,
            feature_cols=["image", "matrix", "packed"],
            label_cols=["x"],
            num_proc=num_proc,
            batch_size=20 // num_proc,
        ).fit_on_parquet()
        for num_proc in (1, 2)
    ]
    torch.testing.assert_close(flat(fitted[0]), flat(fitted[1]), rtol=1e-5, atol=1e-6)
    assert len(fitted[0].getHistory()) == 2
