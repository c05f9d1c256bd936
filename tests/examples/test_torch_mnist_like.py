"""The digits example trains alone, under torchrun, and in processes of ours, to the same model."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the example needs torch")
pytest.importorskip("sklearn", reason="the example needs scikit-learn's digits")

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = str(ROOT / "examples" / "torch_mnist_like.py")
COMMANDS = {
    "alone": [SCRIPT],
    "run_local": [SCRIPT, "--np", "2"],
    "torchrun": ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3", SCRIPT],
}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("command", COMMANDS)
def test_it_trains(command: str) -> None:
    done = subprocess.run(
        [sys.executable, *COMMANDS[command]], cwd=ROOT, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = re.findall(r"epoch \d: loss ([\d.]+), accuracy on digits not trained on ([\d.]+)%", done.stdout)
    assert len(lines) == 5
    assert float(lines[-1][0]) < 0.2
    assert float(lines[-1][1]) > 85
