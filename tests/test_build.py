"""What the compiler made: AVX code stays in its own files, and the module exports nothing but its entry point."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LIBRARY = ROOT / "build" / f"native-{sys.implementation.cache_tag}-{sysconfig.get_platform()}" / "libsparkvod_core.a"
MODULE = ROOT / "sparkvod" / f"_native{sysconfig.get_config_var('EXT_SUFFIX')}"
TENSORFLOW_OPS = ROOT / "sparkvod" / f"_tensorflow_ops{sysconfig.get_config_var('EXT_SUFFIX')}"


def symbols(*arguments: str | Path) -> list[tuple[str, str, str]]:
    """Returns (object, kind, name) of what nm lists; the object is '' for a module."""
    command = ["nm", "-A", "--defined-only", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    found = []
    for line in done.stdout.splitlines():
        place, _, rest = line.rpartition(":")
        _, kind, name = rest.split(maxsplit=2)
        found.append((place.rpartition(":")[2], kind, name))
    return found


@pytest.mark.skipif(not LIBRARY.exists(), reason="the engine was not built in this checkout: run make test")
def test_code_for_newer_cpus_cannot_be_shared() -> None:
    """The linker keeps one copy of a weak function: if that is an AVX file's, older CPUs run it and die."""
    avx = [(place, kind, name) for place, kind, name in symbols(LIBRARY) if "_avx" in place]
    shared = [(place, name) for place, kind, name in avx if kind in "WVu" and not name.startswith("DW.ref.")]
    assert not shared, f"functions with external linkage, declare them static or in an anonymous namespace: {shared}"


@pytest.mark.skipif(not MODULE.exists(), reason="the engine was not built in this checkout: run make test")
def test_the_module_exports_nothing_else() -> None:
    """Another version of the library, or of pybind11, in the same process can then not be mixed up with ours."""
    exported = [name for _, _, name in symbols("-D", MODULE)]
    assert "PyInit__native" in exported
    assert not [name for name in exported if "sparkvod" in name or "pybind11" in name]


@pytest.mark.skipif(not TENSORFLOW_OPS.exists(), reason="the engine was not built in this checkout: run make test")
def test_the_library_of_tensorflow_ops_needs_no_tensorflow_to_be_built() -> None:
    """It is linked to no TensorFlow, names none of its functions to the loader, and exports one function of its own."""
    exported = [name for _, kind, name in symbols("-D", TENSORFLOW_OPS) if kind == "T"]
    assert exported == ["sparkvod_tensorflow_connect"]
    command = ["nm", "-D", "--undefined-only", str(TENSORFLOW_OPS)]
    wanted = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    assert "TF_" not in wanted
    assert "tensorflow" not in wanted
