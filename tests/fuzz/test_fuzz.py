"""What peers and strangers can send, mutated, against the parsers under ASan and UBSan: ten seconds, sixty with --full.

Where clang is, libFuzzer drives the target, with the good inputs as its corpus; else a driver of its own does. An
input that breaks it is left in the folder of the build: ``sparkvod_fuzz FILE`` feeds it again.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.native.building import BUILD_SECONDS, VARIANTS, build, run

HALT = {"UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1"}


def has_libfuzzer(clang: str, folder: Path) -> bool:
    """Tells whether this clang can link libFuzzer, which some packages leave out."""
    probe = folder / "probe.cc"
    probe.write_text('extern "C" int LLVMFuzzerTestOneInput(const char*, unsigned long) { return 0; }\n')
    command = [clang, "-fsanitize=fuzzer,address", str(probe), "-o", str(folder / "probe")]
    return subprocess.run(command, capture_output=True, timeout=60).returncode == 0


@pytest.mark.timeout(BUILD_SECONDS + 120)
def test_parsers_survive_the_driver(full: bool) -> None:
    # The same build as the native tests under ASan.
    program = build("address", "sparkvod_fuzz", VARIANTS["address"])
    output = run([str(program), "60" if full else "10"], 110, program.parent, **HALT)
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
    program = build("fuzzer", "sparkvod_fuzz", VARIANTS["address"] + options)
    driver = build("address", "sparkvod_fuzz", VARIANTS["address"])
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    run([str(driver), "--seeds", str(corpus)], 60, tmp_path, **HALT)
    seconds = 60 if full else 10
    output = run(
        [str(program), str(corpus), f"-max_total_time={seconds}", "-max_len=4096", "-rss_limit_mb=4096", "-timeout=20"],
        110,
        program.parent,
        **HALT,
    )
    assert re.search(r"Done \d+ runs", output), output
