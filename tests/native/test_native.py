"""Builds the native tests plain, under ASan+UBSan and under TSan (incrementally), and runs each build.

``build-native/<variant>/sparkvod_tests NAME`` runs the cases whose names contain NAME.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# What each variant is configured with, and what its program needs around it.
VARIANTS = {
    "plain": [],
    "address": ["-DSPARKVOD_SANITIZE=address,undefined"],
    "thread": ["-DSPARKVOD_SANITIZE=thread"],
}
SANITIZER_OPTIONS = {
    "ASAN_OPTIONS": "detect_leaks=1:strict_string_checks=1",
    "UBSAN_OPTIONS": "print_stacktrace=1",
    "TSAN_OPTIONS": "halt_on_error=0:second_deadlock_stack=1",
}
BUILD_SECONDS, RUN_SECONDS, FULL_RUN_SECONDS = 1200, 600, 1800


def tool(name: str) -> str:
    """Returns a build tool's path: the one of this Python's environment, else PATH's."""
    found = shutil.which(name, path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))
    if found is None:
        pytest.skip(f"no {name} was found; 'pip install {name}' brings it")
    return found


def run(command: list[str], seconds: float, env: dict[str, str] | None = None) -> str:
    """Runs a command and returns its output, or fails the test with the end of it."""
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env, start_new_session=True
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


def build(variant: str) -> Path:
    """Configures and builds one variant, where anything changed, and returns its test program."""
    folder = ROOT / "build-native" / variant
    cmake = tool("cmake")
    if not (folder / "CMakeCache.txt").exists():
        run(
            [cmake, "-S", str(ROOT), "-B", str(folder), "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}"]
            + ["-DSPARKVOD_PYTHON=OFF", "-DSPARKVOD_TESTS=ON", *VARIANTS[variant]],
            BUILD_SECONDS,
        )
    run([cmake, "--build", str(folder), "--target", "sparkvod_tests", "-j", "2"], BUILD_SECONDS)
    return folder / "sparkvod_tests"


@pytest.mark.timeout(BUILD_SECONDS + FULL_RUN_SECONDS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_native(variant: str, request: pytest.FixtureRequest) -> None:
    full = bool(request.config.getoption("--full", default=False))
    program = build(variant)
    command = [str(program)] + (["--full"] if full else [])
    output = run(command, FULL_RUN_SECONDS if full else RUN_SECONDS, {**os.environ, **SANITIZER_OPTIONS})
    assert ", 0 failed" in output.splitlines()[-1]
