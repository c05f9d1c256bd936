"""Builds of the engine with its native tests, incrementally, and runs of what they make."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BUILD_SECONDS = 1200

# What each variant is configured with, and what its program needs around it.
VARIANTS = {
    "plain": [],
    "address": ["-DSPARKVOD_SANITIZE=address,undefined"],
    "thread": ["-DSPARKVOD_SANITIZE=thread"],
}
SANITIZER_OPTIONS = {
    "ASAN_OPTIONS": "detect_leaks=1:strict_string_checks=1:abort_on_error=0",
    "UBSAN_OPTIONS": "print_stacktrace=1",
    "TSAN_OPTIONS": "halt_on_error=0:second_deadlock_stack=1",
}


def tool(name: str) -> str:
    """Returns a build tool's path: the one of this Python's environment, else PATH's; fails the test without it."""
    found = shutil.which(name, path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))
    if found is None:
        pytest.fail(f"no {name} was found, which builds the engine; 'pip install {name}' brings it")
    return found


def run(command: list[str], seconds: float, folder: Path = ROOT, **options: str) -> str:
    """Runs a command, the sanitizers with ``options`` in place of ours; returns its output, or fails with its end."""
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        cwd=folder,
        env={**os.environ, **SANITIZER_OPTIONS, **options},
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        output, _ = process.communicate()
        pytest.fail(f"{command[0]} did not end within {seconds} s:\n{output[-8000:]}")
    if process.returncode != 0:
        pytest.fail(f"{' '.join(command)} ended with {process.returncode}:\n{output[-12000:]}")
    return output


def build(name: str, target: str, options: list[str]) -> Path:
    """Configures and builds a target in ``build-native/NAME``, where anything changed, and returns the program."""
    folder = ROOT / "build-native" / name
    cmake = tool("cmake")
    if not (folder / "CMakeCache.txt").exists():
        command = [cmake, "-S", str(ROOT), "-B", str(folder), "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}"]
        run([*command, "-DSPARKVOD_PYTHON=OFF", "-DSPARKVOD_TESTS=ON", *options], BUILD_SECONDS)
    run([cmake, "--build", str(folder), "--target", target, "-j", "2"], BUILD_SECONDS)
    return folder / target
