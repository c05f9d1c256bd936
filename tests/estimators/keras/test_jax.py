"""KerasEstimator on JAX: tests of this folder again, in a process whose Keras is on it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

keras = pytest.importorskip("keras", reason="the Keras estimator needs keras")
pytest.importorskip("jax", reason="this backend needs jax")

HERE = Path(__file__).parent
BESIDES = [f"test_{name}.py" for name in ("adding", "callbacks", "forgetting", "made_again", "monitoring")]
if keras.backend.backend() == "jax":
    pytest.skip("this process is on JAX, and runs those tests itself", allow_module_level=True)


def on_jax(*arguments: str, seconds: float) -> str:
    """Runs pytest, and returns what it printed."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments],
        env={**os.environ, "KERAS_BACKEND": "jax"},
        cwd=HERE.parents[2],
        timeout=seconds,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    return done.stdout


@pytest.mark.timeout(320)
def test_fit_resume_and_predict(full: bool) -> None:
    bad_input = ["test_scaled_losses_on_jax", "test_whole_numbers_that_jax_would_cut"]
    chosen = ["test_bad_input.py", *BESIDES] if full else [f"test_bad_input.py::{name}" for name in bad_input]
    files = ["test_training.py", "test_ranks.py", "test_saving.py", "test_own.py", *chosen]
    printed = on_jax(*(str(HERE / name) for name in files), *["--full"] * full, seconds=300)
    assert "passed" in printed
    assert "failed" not in printed


@pytest.mark.timeout(620)
def test_the_contract(leave_to_full: Callable[[str], None]) -> None:
    leave_to_full("what of it needs no Spark session of this backend's own runs in the test before")
    pytest.importorskip("pyspark", reason="the contract runs on Spark")
    assert "passed" in on_jax(str(HERE / "test_contract.py"), "--full", seconds=600)
