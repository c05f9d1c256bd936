"""What peers and strangers can send, mutated, against the parsers under ASan and UBSan, for a minute.

Where clang is, libFuzzer drives the target, with the good inputs as its corpus, and a driver of its own for ten
seconds (a minute with --full); else the driver does. An input that breaks it is left in the folder of the build:
``sparkvod_fuzz FILE`` feeds it again.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.native.building import BUILD_SECONDS, SANITIZER_OPTIONS, VARIANTS, build, run

SECONDS = 60
HALT = {
    "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
    # A rank that has joined needs as much memory as the others say; where there is not so much, it says so.
    "ASAN_OPTIONS": "detect_leaks=1:allocator_may_return_null=1:max_allocation_size_mb=600",
}


def has_libfuzzer(clang: str, folder: Path) -> bool:
    """Tells whether this clang can link libFuzzer, which some packages leave out."""
    probe = folder / "probe.cc"
    probe.write_text('extern "C" int LLVMFuzzerTestOneInput(const char*, unsigned long) { return 0; }\n')
    command = [clang, "-fsanitize=fuzzer,address", str(probe), "-o", str(folder / "probe")]
    return subprocess.run(command, capture_output=True, timeout=60).returncode == 0


def found_clang(folder: Path) -> str | None:
    """Returns a clang++ that has libFuzzer."""
    clang = shutil.which("clang++")
    return clang if clang is not None and has_libfuzzer(clang, folder) else None


@pytest.mark.timeout(BUILD_SECONDS + 120)
def test_parsers_survive_the_driver(full: bool, tmp_path: Path) -> None:
    # The same build as the native tests under ASan.
    program = build("address", "sparkvod_fuzz", VARIANTS["address"])
    seconds = SECONDS if full or found_clang(tmp_path) is None else 10
    output = run([str(program), str(seconds)], 110, program.parent, **HALT)
    inputs = re.search(r"(\d+) inputs, nothing broke", output)
    assert inputs, output
    assert int(inputs[1]) > 1000


@pytest.mark.timeout(BUILD_SECONDS + 120)
def test_a_planted_mistake_is_found(tmp_path: Path) -> None:
    program = build("address", "sparkvod_fuzz", VARIANTS["address"])
    env = {**os.environ, **SANITIZER_OPTIONS, **HALT}
    for command in ([str(SECONDS), "7"], ["crash-input"]):  # it is found, and found again in what was left of it
        ended = subprocess.run(
            [str(program), "--planted", *command], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=110
        )
        assert ended.returncode != 0
        assert "heap-buffer-overflow" in ended.stderr
        assert (tmp_path / "crash-input").stat().st_size > 0


@pytest.mark.timeout(BUILD_SECONDS + 120)
def test_parsers_survive_libfuzzer(tmp_path: Path) -> None:
    clang = found_clang(tmp_path)
    if clang is None:
        pytest.skip(
            "no clang++ with libFuzzer was found (Debian: apt-get install clang); the driver's run stands for it"
        )
    options = [f"-DCMAKE_CXX_COMPILER={clang}", "-DSPARKVOD_LIBFUZZER=ON"]
    program = build("fuzzer", "sparkvod_fuzz", VARIANTS["address"] + options)
    driver = build("address", "sparkvod_fuzz", VARIANTS["address"])
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    run([str(driver), "--seeds", str(corpus)], 60, tmp_path, **HALT)
    output = run(
        [str(program), str(corpus), f"-max_total_time={SECONDS}", "-max_len=4096", "-rss_limit_mb=4096", "-timeout=20"],
        110,
        program.parent,
        **HALT,
    )
    assert re.search(r"Done \d+ runs", output), output
