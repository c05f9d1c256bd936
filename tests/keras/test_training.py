"""Keras 3 on several ranks, on each backend: equal weights, averaged metrics, warm-up, saving and loading."""

from __future__ import annotations

from pathlib import Path

import pytest

import sparkvod

pytest.importorskip("keras", reason="sparkvod.keras needs keras")


def work(folder: str) -> None:
    import keras
    import numpy as np

    import sparkvod.keras as hvd

    hvd.init()
    rank, n = hvd.rank(), hvd.size()
    keras.utils.set_random_seed(rank)
    values = np.random.default_rng(rank).normal(size=(32, 4)).astype("float32")
    for passes in (1, 2):
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
        optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.1), backward_passes_per_step=passes)
        model.compile(optimizer, "mse")
        told = model.fit(
            values,
            values[:, :3],
            batch_size=8,
            epochs=2,
            verbose=0,
            callbacks=[
                hvd.callbacks.BroadcastGlobalVariablesCallback(0),
                hvd.callbacks.MetricAverageCallback(),
                hvd.callbacks.LearningRateWarmupCallback(0.1, warmup_epochs=2),
            ],
        ).history
        by_rank = hvd.allgather_object([weight.tolist() for weight in model.get_weights()])
        assert all(weights == by_rank[0] for weights in by_rank)
        assert len(set(map(str, hvd.allgather_object(told["loss"])))) == 1
        np.testing.assert_allclose(told["lr"], [0.1 * (1 + (n - 1) / 2) / n, 0.1], rtol=1e-5)
        assert int(optimizer.iterations) == 8 // passes
        path = str(Path(folder) / f"{rank}.{passes}.keras")
        model.save(path)
        plain, again = keras.models.load_model(path), hvd.load_model(path)
        assert type(plain.optimizer).__name__ == "Adam"
        assert not hasattr(plain.optimizer, "_sparkvod")
        assert int(again.optimizer.iterations) == 8 // passes
        again.fit(values, values[:, :3], batch_size=32, epochs=1, verbose=0)
    for options, match in (
        ({"op": hvd.Adasum}, "Average or Sum"),
        ({"op": hvd.Sum, "gradient_predivide_factor": 2.0}, "gradient_predivide_factor"),
        ({"backward_passes_per_step": 0}, "backward_passes_per_step"),
        ({"groups": "all"}, "groups"),
    ):
        with pytest.raises(ValueError, match=match):
            hvd.DistributedOptimizer(keras.optimizers.SGD(), **options)
    with pytest.raises(ValueError, match="already distributed"):
        hvd.DistributedOptimizer(optimizer)
    with pytest.raises(ValueError, match="optimizer of Keras"):
        hvd.DistributedOptimizer("sgd")


@pytest.mark.timeout(150)
@pytest.mark.parametrize("backend", ["tensorflow", "torch"])
def test_training(backend: str, tmp_path: Path) -> None:
    pytest.importorskip(backend, reason=f"this backend needs {backend}")
    env = {"KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3"}
    sparkvod.run_local(work, (str(tmp_path),), np=2, env=env, verbose=0, timeout=120)
