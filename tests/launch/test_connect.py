from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import JAVA_OPTIONS

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.timeout(170)
def test_run_works_on_spark_connect() -> None:
    pytest.importorskip("grpc_status", reason="pyspark[connect] is not installed")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests/launch/connect_script.py"), JAVA_OPTIONS],
        capture_output=True,
        text=True,
        env=environment,
        timeout=160,
    )
    assert done.stdout.splitlines()[-1:] == ["all went well"], done.stdout[-3000:] + done.stderr[-6000:]
    assert "[1]<stdout>:a line of 1" in done.stdout
