"""The extension's stub is the one that the built extension gives."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.timeout(120)
def test_the_stub_is_current() -> None:
    command = [sys.executable, str(ROOT / "tools" / "stub.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert (ROOT / "sparkvod" / "_native.pyi").read_text() == done.stdout, "run: make stub"
