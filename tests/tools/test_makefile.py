"""What the Makefile says where something that it cannot install is missing."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Set by a make that runs these tests; the inner one must not take them for its own.
OUTER = ("MAKEFLAGS", "MAKELEVEL", "MAKEOVERRIDES", "MFLAGS")


def make(*arguments: str) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if name not in OUTER}
    command = ["make", "--no-print-directory", "-C", str(ROOT), *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)


def test_without_a_python_it_says_which_one_to_install(tmp_path: Path) -> None:
    venv = tmp_path / "env"
    done = make("PYTHON=", f"VENV={venv}", f"{venv}/python.stamp")
    assert done.returncode != 0
    assert "no Python 3.11 or 3.12 with pip and venv was found" in done.stderr
    assert not venv.exists()


def test_without_a_compiler_it_says_which_one_to_install(tmp_path: Path) -> None:
    venv = tmp_path / "env"
    venv.mkdir()
    for stamp in ("python", "demo"):
        (venv / f"{stamp}.stamp").touch()
    empty = tmp_path / "bin"
    empty.mkdir()
    # Only the shell is left, so that the search finds no compiler.
    done = make(f"VENV={venv}", f"{venv}/engine.stamp", "SHELL=/bin/bash", f"PATH={empty}")
    assert done.returncode != 0
    assert "no C++ compiler was found: install g++" in done.stderr


def test_make_alone_explains_the_targets() -> None:
    done = make()
    assert done.returncode == 0
    for target in ("demo", "test", "test-full", "bench", "lint"):
        assert f"make {target} " in done.stdout
