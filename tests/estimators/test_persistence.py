"""Saving and loading estimators and models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sparkvod.estimators import TorchEstimator, TorchModel

torch = pytest.importorskip("torch", reason="the estimator here is PyTorch's")


def estimator(tmp_path: Path, **params: Any) -> TorchEstimator:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.25)
    loss = lambda output, label: (output - label).abs()  # noqa: E731, something that is no module
    return TorchEstimator(
        model=model, optimizer=optimizer, loss=loss, store=str(tmp_path / "store"), label_cols=["y"], **params
    )


def test_an_estimator_comes_back(spark: Any, tmp_path: Path) -> None:
    before = estimator(tmp_path, batch_size=7, input_shapes=[[-1, 2]], metrics=[torch.nn.functional.l1_loss])
    path = str(tmp_path / "saved")
    before.save(path)
    after = TorchEstimator.load(path)
    assert type(after) is TorchEstimator
    assert after.uid == before.uid
    assert (after.getBatchSize(), after.getInputShapes(), after.getEpochs()) == (7, [[-1, 2]], 1)
    assert after.getStore() is None
    assert torch.equal(after.getModel().weight, before.getModel().weight)
    assert after.getOptimizer().param_groups[0]["params"][0] is after.getModel().weight
    assert after.getOptimizer().param_groups[0]["lr"] == 0.25
    assert float(after.getLoss()(torch.tensor(1.0), torch.tensor(3.0))) == 2.0


def test_what_is_there_is_replaced_only_if_asked(spark: Any, tmp_path: Path) -> None:
    path = str(tmp_path / "saved")
    estimator(tmp_path, batch_size=7).save(path)
    with pytest.raises(Exception, match="(?i)already exists"):
        estimator(tmp_path, batch_size=8).save(path)
    estimator(tmp_path, batch_size=8).write().overwrite().save(path)
    assert TorchEstimator.load(path).getBatchSize() == 8


def test_another_kind_is_not_loaded(spark: Any, tmp_path: Path) -> None:
    path = str(tmp_path / "saved")
    estimator(tmp_path).save(path)
    with pytest.raises(ValueError, match="holds a .*TorchEstimator, a TorchModel was expected"):
        TorchModel.load(path)


def test_a_model_larger_than_a_chunk_comes_back(spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sparkvod.estimators import persistence

    monkeypatch.setattr(persistence, "_CHUNK", 1000)
    model = torch.nn.Linear(40, 30)
    before = TorchModel(model=model, history=[{"loss": 0.5}], optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    path = str(tmp_path / "saved")
    before.save(path)
    after = TorchModel.load(path)
    assert torch.equal(after.getModel().weight, model.weight)
    assert after.getHistory() == [{"loss": 0.5}]
    assert after.getOptimizer().param_groups[0]["params"][0] is after.getModel().weight
    metadata = next((tmp_path / "saved" / "metadata").glob("part-*")).read_text()
    assert len(metadata) < 1000


def test_what_cannot_be_pickled_is_named(spark: Any, tmp_path: Path) -> None:
    import threading

    with pytest.raises(TypeError, match="train_minibatch_fn cannot be pickled"):
        estimator(tmp_path, train_minibatch_fn=threading.Lock().acquire).save(str(tmp_path / "saved"))
