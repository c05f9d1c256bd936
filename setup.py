"""Builds the native engine with CMake; everything else about the package is in pyproject.toml."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
CMAKE_AT_LEAST = (3, 18)


def find_cmake() -> str | None:
    """Returns the path of a CMake that is new enough: the one of PyPI's package when it is installed, else PATH's."""
    try:
        import cmake
    except ImportError:
        found = shutil.which("cmake")
    else:
        found = str(Path(cmake.CMAKE_BIN_DIR) / "cmake")
    if found is None:
        return None
    said = subprocess.run([found, "--version"], capture_output=True, text=True, check=False).stdout
    version = re.search(r"version (\d+)\.(\d+)", said)
    return found if version and tuple(map(int, version.groups())) >= CMAKE_AT_LEAST else None


class BuildEngine(build_ext):
    """Configures and builds in ``build/native-<python>``, kept between builds so that the next one is incremental."""

    def build_extension(self, ext: Extension) -> None:
        """Builds the module and puts it where setuptools expects it."""
        import pybind11

        cmake = find_cmake()
        if cmake is None:
            wanted = ".".join(map(str, CMAKE_AT_LEAST))
            raise SystemExit(f"no CMake was found, {wanted} or newer is needed: run 'pip install cmake'")
        build = ROOT / "build" / f"native-{sys.implementation.cache_tag}-{sysconfig.get_platform()}"
        configure = [
            cmake,
            "-S",
            str(ROOT),
            "-B",
            str(build),
            "-DCMAKE_BUILD_TYPE=" + ("Debug" if self.debug else "Release"),
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
        ]
        if not (build / "CMakeCache.txt").exists() and shutil.which("ninja"):
            configure += ["-G", "Ninja"]
        name = ext.name.rpartition(".")[2]
        subprocess.run(configure, check=True)
        subprocess.run([cmake, "--build", str(build), "--target", name, *self._parallel()], check=True)

        suffix = sysconfig.get_config_var("EXT_SUFFIX")
        target = Path(self.get_ext_fullpath(ext.name)).resolve()
        target.parent.mkdir(parents=True, exist_ok=True)
        # A process that has the old file mapped keeps it: the new one takes its name, not its bytes.
        fresh = target.with_name(f".{target.name}.{os.getpid()}")
        shutil.copy2(build / f"{name}{suffix}", fresh)
        os.replace(fresh, target)

    def _parallel(self) -> list[str]:
        if "CMAKE_BUILD_PARALLEL_LEVEL" in os.environ:
            return []
        return ["--parallel", str(self.parallel or len(os.sched_getaffinity(0)))]


setup(
    # The second is no Python module but what TensorFlow loads; named like one, it is found and shipped like one.
    ext_modules=[Extension("sparkvod._native", sources=[]), Extension("sparkvod._tensorflow_ops", sources=[])],
    cmdclass={"build_ext": BuildEngine},
    # Asked for only where none is installed: the package is 30 MB.
    setup_requires=[] if find_cmake() else [f"cmake>={'.'.join(map(str, CMAKE_AT_LEAST))}"],
)
