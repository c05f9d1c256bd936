"""The native part of the benches: ``sparkvod_bench``, of ``benchmarks/native``, built when it is first asked for."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUILD_SECONDS, RUN_SECONDS = 900, 120


def tool(name: str) -> str | None:
    """Returns a tool's path: of this Python's environment, else PATH's."""
    return shutil.which(name, path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))


def build() -> Path:
    """Builds the program in ``build/bench``, where anything changed, and returns its path.

    Raises:
        RuntimeError: there is no CMake, or the build failed; with the compiler's words.
    """
    folder = ROOT / "build" / "bench"
    cmake = tool("cmake")
    if cmake is None:
        raise RuntimeError("no cmake was found, which builds the native part of the benches; run 'pip install cmake'")
    if not (folder / "CMakeCache.txt").exists():
        ninja = tool("ninja")
        generator = ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}"] if ninja else []
        options = ["-DSPARKVOD_PYTHON=OFF", "-DSPARKVOD_BENCH=ON"]
        _say([cmake, "-S", str(ROOT), "-B", str(folder), *generator, *options], BUILD_SECONDS)
    _say([cmake, "--build", str(folder), "--target", "sparkvod_bench", "-j", "2"], BUILD_SECONDS)
    return folder / "sparkvod_bench"


def run(program: Path, *arguments: object) -> dict[str, float]:
    """Runs a mode of the program and returns what it measured; ``benchmarks/native/main.cc`` lists the modes."""
    return json.loads(_say([str(program), *map(str, arguments)], RUN_SECONDS))


def _say(command: list[str], seconds: float) -> str:
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=seconds, check=False
    )
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-4000:]}")
    return done.stdout
