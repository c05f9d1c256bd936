"""Saving and loading estimators and models."""

from __future__ import annotations

import os
import subprocess
import sys
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
    with pytest.raises(ValueError, match="holds a .*TorchEstimator, not a TorchModel: call load of that class"):
        TorchModel.load(path)


def test_a_model_larger_than_a_chunk_comes_back(spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sparkvod.estimators import persistence

    monkeypatch.setattr(persistence, "_PIECE", 1000)
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


def test_a_class_is_not_imported_before_its_name_is_checked(spark: Any, tmp_path: Path) -> None:
    path = str(tmp_path / "saved")
    TorchModel(model=torch.nn.Linear(1, 1)).save(path)
    (part,) = (tmp_path / "saved" / "metadata").glob("part-*")
    text = part.read_text()
    for crc in part.parent.glob(".*.crc"):
        crc.unlink()
    part.write_text(text.replace("sparkvod.estimators.torch.model.TorchModel", "this.Zen"))
    with pytest.raises(ValueError, match=r"holds a this\.Zen, not a TorchModel"):
        TorchModel.load(path)
    assert "this" not in sys.modules
    part.write_text(text.replace('"format": 2, ', ""))
    with pytest.raises(ValueError, match="was saved in format 1 by sparkvod .* reads format 2"):
        TorchModel.load(path)
    part.write_text("nonsense")
    with pytest.raises(ValueError, match="saved/metadata is not the metadata of a saved"):
        TorchModel.load(path)


LARGE = """
import sys, torch
from pyspark.sql import SparkSession
from sparkvod.estimators import TorchModel

mib, path = int(sys.argv[1]), sys.argv[2]
builder = SparkSession.builder.master("local[1]").config("spark.driver.memory", "1g")
spark = builder.config("spark.ui.enabled", "false").getOrCreate()


def peak():
    lines = dict(line.split(":") for line in open("/proc/self/status"))
    open("/proc/self/clear_refs", "w").write("5")
    return int(lines["VmHWM"].split()[0]) / 1024


def current():
    lines = dict(line.split(":") for line in open("/proc/self/status"))
    return int(lines["VmRSS"].split()[0]) / 1024


TorchModel(model=torch.nn.Linear(1, 1)).write().overwrite().save(path)
TorchModel.load(path)
rest = current()
model = torch.nn.Linear(1024, mib * 256, bias=False)
expected = model.weight.detach()[::97].clone()
TorchModel(model=model).write().overwrite().save(path)
saving = (peak() - rest) / mib
del model
rest = current()
found = TorchModel.load(path).getModel().weight.detach()
loading = (peak() - rest) / mib
assert torch.equal(found[::97], expected)
assert spark.range(3).count() == 3
print(f"{mib} MiB: saving took {saving:.2f} times the model with it, loading {loading:.2f}", flush=True)
assert saving < 2.6 and loading < 2.6, (saving, loading)  # 2.2 to 2.3 measured
"""


@pytest.mark.timeout(600)
def test_a_large_model_is_saved_and_loaded_with_one_gigabyte_for_the_driver(
    tmp_path: Path, full: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SPARK_REMOTE")}
    command = [sys.executable, "-c", LARGE, str(1536 if full else 300), str(tmp_path / "saved")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=540, env=environment, cwd=os.getcwd())
    assert done.returncode == 0, done.stderr[-4000:]
    with capsys.disabled():
        print(f"\n{done.stdout.strip()}")  # noqa: T201 - a measured figure


def test_what_cannot_be_pickled_is_named(spark: Any, tmp_path: Path) -> None:
    import threading

    with pytest.raises(TypeError, match="train_minibatch_fn cannot be pickled"):
        estimator(tmp_path, train_minibatch_fn=threading.Lock().acquire).save(str(tmp_path / "saved"))
