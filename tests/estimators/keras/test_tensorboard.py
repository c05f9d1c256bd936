"""What Keras's TensorBoard callback writes is in the store, readable by TensorBoard, also of a run that went on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.estimators.backends import Here, write

keras = pytest.importorskip("keras", reason="the Keras estimator needs keras")
pytest.importorskip(keras.backend.backend(), reason="Keras needs its backend")
pytest.importorskip("tensorboard", reason="TensorBoard's files are read by the package tensorboard")
pytest.importorskip("tensorflow", reason="Keras's callback writes by TensorFlow")

from sparkvod.data import FilesystemStore  # noqa: E402
from sparkvod.estimators import KerasEstimator  # noqa: E402


class Remote(FilesystemStore):
    """A store that is to be written to by its file system alone."""

    is_local = False


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Returns steps and values by tag; TensorFlow writes a scalar as a tensor."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray

    found = EventAccumulator(str(folder))
    found.Reload()
    return {
        tag: [(event.step, float(make_ndarray(event.tensor_proto))) for event in found.Tensors(tag)]
        for tag in found.Tags()["tensors"]
        if tag.startswith("epoch_")
    }


@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", ["local", "remote"])
def test_the_logs_are_in_the_store(tmp_path: Path, kind: str) -> None:
    x = np.random.default_rng(1).standard_normal((60, 3)).astype("float32")
    store = write(tmp_path / "store", validation=True, x=x, y=x.sum(1))
    if kind == "remote":
        store = Remote(str(tmp_path / "store"))
    keras.utils.set_random_seed(1)
    estimator = KerasEstimator(
        model=keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)]),
        optimizer="sgd",
        loss="mse",
        metrics=["mae"],
        feature_cols=["x"],
        label_cols=["y"],
        batch_size=20,
        epochs=2,
        run_id="run",
        callbacks=[keras.callbacks.TensorBoard("elsewhere", histogram_freq=1)],
        store=store,
        backend=Here(),
        verbose=0,
    )
    estimator.fit_on_parquet()
    history = estimator.setEpochs(3).fit_on_parquet().getHistory()  # goes on from the checkpoint
    logs = tmp_path / "store" / "runs" / "run" / "logs"
    assert Path(store.get_logs_path("run")).name == "logs"
    for folder, part in (("train", "train"), ("validation", "validation")):
        found = scalars(logs / folder)
        for name in ("loss", "mae"):
            expected = [(record["epoch"], record[part][name]) for record in history]
            assert [step for step, _ in found[f"epoch_{name}"]] == [0, 1, 2], (folder, name)
            np.testing.assert_allclose(found[f"epoch_{name}"], expected, rtol=1e-6)
    assert not Path("elsewhere").exists()
