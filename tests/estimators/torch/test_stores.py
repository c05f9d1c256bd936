"""Whole fits on stores that are no local directory: S3, one whose listing is behind, one that two drivers share."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sparkvod.data import Store
from sparkvod.errors import StoreError
from sparkvod.estimators import TorchEstimator
from tests.contracts.estimator import FEATURES, frame
from tests.data.stores import KEY, SECRET, LaggingStore, s3_server

torch = pytest.importorskip("torch", reason="the PyTorch estimator needs torch")

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def s3() -> Iterator[dict[str, Any]]:
    pytest.importorskip("s3fs", reason="s3fs is not installed")
    pytest.importorskip("moto.server", reason="moto is not installed")
    with s3_server() as options:
        yield options


def fitted(df: Any, store: Any, **params: Any) -> Any:
    torch.manual_seed(1)
    net = torch.nn.Linear(4, 1)
    defaults = {
        "model": net,
        "optimizer": torch.optim.Adam(net.parameters(), lr=0.01),
        "loss": torch.nn.MSELoss(),
        "feature_cols": FEATURES,
        "label_cols": ["y"],
        "validation": "held_out",
        "batch_size": 50,
        "random_seed": 3,
        "num_proc": 2,
        "verbose": 0,
    }
    return TorchEstimator(**{**defaults, **params}, store=store).fit(df)


def weights(model: Any) -> np.ndarray:
    return np.concatenate([p.detach().numpy().ravel() for p in model.getModel().parameters()])


@pytest.fixture(scope="module")
def expected(spark: Any, tmp_path_factory: pytest.TempPathFactory) -> np.ndarray:
    """The weights after two epochs on a local store."""
    return weights(fitted(frame(spark), Store.create(str(tmp_path_factory.mktemp("store"))), epochs=2))


def test_a_fit_on_s3_goes_on_and_predicts(
    spark: Any, s3: dict[str, Any], expected: np.ndarray, caplog: pytest.LogCaptureFixture, capfd: Any
) -> None:
    store, df = Store.create("s3://bucket/fit", storage_options=s3), frame(spark)
    with caplog.at_level(logging.DEBUG, "sparkvod"):
        fitted(df, store, epochs=1, run_id="first", checkpoint_every=3, verbose=1)
        model = fitted(df, store, epochs=2, run_id="first", checkpoint_every=3, verbose=1)
    np.testing.assert_array_equal(weights(model), expected)
    assert [record["epoch"] for record in model.getHistory()] == [0, 1]
    assert store.listing(store.get_run_path("first")).keys() == {"checkpoint"}
    predicted = model.transform(df)
    assert predicted.count() == df.count()
    captured = capfd.readouterr()
    plan = predicted._jdf.queryExecution().toString()
    for text in (caplog.text, captured.out, captured.err, plan, repr(model)):
        assert SECRET not in text
        assert KEY not in text


def test_a_fit_where_listings_are_behind_goes_on(spark: Any, tmp_path: Path, expected: np.ndarray) -> None:
    store, df = LaggingStore(f"lagging://{tmp_path}/store"), frame(spark)
    fitted(df, store, epochs=1, run_id="first", checkpoint_every=3)
    model = fitted(df, store, epochs=2, run_id="first", checkpoint_every=3)
    np.testing.assert_array_equal(weights(model), expected)
    assert [record["epoch"] for record in model.getHistory()] == [0, 1]


def test_memory_is_refused(spark: Any) -> None:
    with pytest.raises(StoreError, match=r"'memory://.*own memory: Spark's workers .* fit needs a store that all"):
        fitted(frame(spark), "memory://x")


def other_driver(options: str, folder: str, name: str) -> None:
    """What the second driver runs, in a process of its own: waits for the word, trains, tells the weights."""
    from pyspark.sql import SparkSession

    session = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
    session = session.config("spark.driver.memory", "1g").getOrCreate()
    df = frame(session)
    df.count()
    Path(folder, "ready").touch()
    while not Path(folder, "go").exists():
        time.sleep(0.02)
    store = Store.create("s3://bucket/shared", storage_options=json.loads(options))
    found = weights(fitted(df, store, epochs=2, run_id=name)).tolist()
    Path(folder, "found").write_text(json.dumps(found))
    session.stop()


@pytest.mark.timeout(300)
def test_two_drivers_on_one_store(spark: Any, s3: dict[str, Any], tmp_path: Path, expected: np.ndarray) -> None:
    store, df = Store.create("s3://bucket/shared", storage_options=s3), frame(spark)
    call = f"other_driver({json.dumps(s3)!r}, {str(tmp_path)!r}, 'second')"
    script = f"from tests.estimators.torch.test_stores import *; {call}"
    with subprocess.Popen([sys.executable, "-c", script], cwd=os.getcwd()) as process, ThreadPoolExecutor(1) as pool:
        try:
            deadline = time.monotonic() + 90
            while not (tmp_path / "ready").exists():
                assert process.poll() is None, "the second driver ended before it began"
                assert time.monotonic() < deadline, "the second driver did not start within 90 s"
                time.sleep(0.02)
            (tmp_path / "go").touch()
            mine = pool.submit(lambda: weights(fitted(df, store, epochs=2, run_id="first"))).result(120)
            assert process.wait(90) == 0
        finally:
            process.kill()
    np.testing.assert_array_equal(mine, expected)
    np.testing.assert_array_equal(np.float32(json.loads((tmp_path / "found").read_text())), expected)
    assert store.listing(store.get_runs_path()).keys() == {"first/checkpoint", "second/checkpoint"}
