"""What an estimator says before there are steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sparkvod._native", reason="the engine is not built")


@pytest.mark.timeout(120)
def test_fit_says_what_it_begins(spark: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    from sparkvod.estimators import TorchEstimator
    from sparkvod.launch.local import LocalLauncher

    net = torch.nn.Linear(1, 1)
    made = TorchEstimator(
        model=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
        loss=torch.nn.MSELoss(),
        feature_cols=["x"],
        label_cols=["y"],
        epochs=1,
        store=str(tmp_path / "store"),
        backend=LocalLauncher(1),
        run_id="of_a_test",
    )
    made.fit(spark.range(8).selectExpr("float(id) as x", "float(id) as y"))
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith(("preparing", "run ", "epoch "))]
    assert lines[:2] == ["preparing the data", "run of_a_test: starting 1 rank"]
    assert lines[2].startswith("epoch 1/1: step 1/1 (100 %), loss ")
    assert lines[3].startswith("run of_a_test: preparing ")
