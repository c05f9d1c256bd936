"""The examples of TensorFlow's and Keras's front ends train in processes of ours."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("sklearn", reason="the examples need scikit-learn's digits")

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.timeout(150)
@pytest.mark.parametrize(
    # By the backend whose import is the quickest.
    ("script", "framework", "epochs"),
    [("tensorflow_digits.py", "tensorflow", 5), ("keras_fit.py", "torch", 6)],
)
def test_it_trains(script: str, framework: str, epochs: int) -> None:
    pytest.importorskip(framework, reason=f"the example needs {framework}")
    pytest.importorskip("keras", reason="the example needs keras")
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / script), "--np", "2"],
        cwd=ROOT,
        env={**os.environ, "KERAS_BACKEND": framework, "TF_CPP_MIN_LOG_LEVEL": "3", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=140,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = re.findall(r"epoch \d: loss ([\d.]+), accuracy on digits not trained on ([\d.]+)%", done.stdout)
    assert len(lines) == epochs
    assert float(lines[-1][0]) < 0.3
    assert float(lines[-1][1]) > 85
