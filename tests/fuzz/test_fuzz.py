"""What peers and strangers can send, mutated, against the parsers under ASan and UBSan: ten seconds, sixty with --full.

Where clang is, libFuzzer drives the target, with the good inputs as its corpus; else a driver of its own does. An
input that breaks it is left in the folder of the build: ``sparkvod_fuzz FILE`` feeds it again.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BUILD_SECONDS = 1200
OPTIONS = {
    "ASAN_OPTIONS": "detect_leaks=1:strict_string_checks=1:abort_on_error=0",
    "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
}


def tool(name: str) -> str:
    """Returns a build tool's path: the one of this Python's environment, else PATH's."""
    found = shutil.which(name, path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))
    if found is None:
        pytest.skip(f"no {name} was found; 'pip install {name}' brings it")
    return found


def run(command: list[str], seconds: float, folder: Path) -> str:
    """Runs a command and returns its output, or fails the test with the end of it."""
    try:
        process = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=folder,
            timeout=seconds,
            env={**os.environ, **OPTIONS},
        )
    except subprocess.TimeoutExpired as error:
        pytest.fail(f"{command[0]} did not end within {seconds} s: {(error.output or b'')[-4000:]!r}")
    output = process.stdout.decode(errors="replace")
    if process.returncode != 0:
        pytest.fail(f"{' '.join(command)} ended with {process.returncode}:\n{output[-12000:]}")
    return output


def has_libfuzzer(clang: str, folder: Path) -> bool:
    """Tells whether this clang can link libFuzzer, which some packages leave out."""
    probe = folder / "probe.cc"
    probe.write_text('extern "C" int LLVMFuzzerTestOneInput(const char*, unsigned long) { return 0; }\n')
    command = [clang, "-fsanitize=fuzzer,address", str(probe), "-o", str(folder / "probe")]
    return subprocess.run(command, capture_output=True, timeout=60).returncode == 0


def build(folder: Path, options: list[str]) -> Path:
    """Configures and builds the target, where anything changed, and returns the program."""
    cmake = tool("cmake")
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "CMakeCache.txt").exists():
        command = [cmake, "-S", str(ROOT), "-B", str(folder), "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}"]
        common = ["-DSPARKVOD_PYTHON=OFF", "-DSPARKVOD_TESTS=ON", "-DSPARKVOD_SANITIZE=address,undefined"]
        run([*command, *common, *options], BUILD_SECONDS, folder)
    run([cmake, "--build", str(folder), "--target", "sparkvod_fuzz", "-j", "2"], BUILD_SECONDS, folder)
    return folder / "sparkvod_fuzz"


@pytest.mark.timeout(BUILD_SECONDS + 120)
def test_parsers_survive_the_driver(full: bool) -> None:
    # The same build as the native tests under ASan.
    program = build(ROOT / "build-native" / "address", [])
    output = run([str(program), "60" if full else "10"], 110, program.parent)
    inputs = re.search(r"(\d+) inputs, nothing broke", output)
    assert inputs, output
    assert int(inputs[1]) > 1000


@pytest.mark.timeout(BUILD_SECONDS + 120)
def test_parsers_survive_libfuzzer(full: bool, tmp_path: Path) -> None:
    clang = shutil.which("clang++")
    if clang is None or not has_libfuzzer(clang, tmp_path):
        pytest.skip(
            "no clang++ with libFuzzer was found (Debian: apt-get install clang); the driver's run stands for it"
        )
    options = [f"-DCMAKE_CXX_COMPILER={clang}", "-DSPARKVOD_LIBFUZZER=ON"]
    program = build(ROOT / "build-native" / "fuzzer", options)
    driver = build(ROOT / "build-native" / "address", [])
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    run([str(driver), "--seeds", str(corpus)], 60, tmp_path)
    seconds = 60 if full else 10
    output = run(
        [str(program), str(corpus), f"-max_total_time={seconds}", "-max_len=4096", "-rss_limit_mb=4096", "-timeout=20"],
        110,
        program.parent,
    )
    assert re.search(r"Done \d+ runs", output), output
