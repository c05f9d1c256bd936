"""The wheel: built as a stranger builds it, installed into an empty environment, and used there by two ranks."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCES = (
    *("sparkvod", "native", "tests", "setup.py", "pyproject.toml", "CMakeLists.txt", "MANIFEST.in"),
    *("README.md", "CHANGELOG.md", "LICENSE"),
)
EXTRAS = {"autotune", "torch", "tensorflow", "keras", "mxnet", "lightning", "spark", "petastorm", "dev"}

# Sums in engine memory, so that neither numpy nor a framework is needed.
JOB = """
import json
import sparkvod

def work():
    from sparkvod.core import basics
    basics.init()
    engine = basics.engine()
    memory = engine.allocate(4 * 1000)
    values = memoryview(memory).cast("B").cast("f")
    for index in range(1000):
        values[index] = index + 1000 * basics.rank()
    handle = engine.allreduce("values", memory.address, memory.address, 1000, 8, 1)
    engine.wait(handle, 60.0)
    engine.release(handle)
    found = [basics.rank(), basics.size(), values[0], values[999]]
    values.release()
    basics.shutdown()
    return found

if __name__ == "__main__":
    print(json.dumps(sparkvod.run_local(work, np=2, timeout=120)))
"""


def run(command: list[str | Path], folder: Path, deadline: float) -> str:
    """Runs a command as a stranger would, nothing of this process's Python in its environment; returns its output."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "SPARKVOD_", "VIRTUAL"))}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=deadline,
        check=False,
    )
    assert done.returncode == 0, f"{command} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources in which nothing was built."""
    folder = tmp_path_factory.mktemp("source")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
        else:
            shutil.copy2(ROOT / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def wheel(source: Path) -> Path:
    """The wheel that ``pip wheel .`` makes."""
    run([sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", "dist", "."], source, deadline=800)
    made = list((source / "dist").glob("*.whl"))
    assert len(made) == 1
    return made[0]


@pytest.mark.timeout(900)
def test_it_holds_the_package_and_the_engine_and_nothing_else(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    info = {name for name in names if name.split("/")[0].endswith(".dist-info")}
    assert {name.split("/")[0] for name in names - info} == {"sparkvod"}
    assert {name for name in names if name.endswith(".so")} == {
        f"sparkvod/{name}{sysconfig.get_config_var('EXT_SUFFIX')}" for name in ("_native", "_tensorflow_ops")
    }
    assert {"sparkvod/py.typed", "sparkvod/_native.pyi", "sparkvod/__init__.py"} <= names
    assert any(name.endswith("/LICENSE") for name in info)
    assert {Path(name).suffix for name in names - info} <= {".py", ".pyi", ".typed", ".so"}
    sources = {path.relative_to(ROOT).as_posix() for path in (ROOT / "sparkvod").rglob("*.py")}
    assert sources <= names, f"not in the wheel: {sorted(sources - names)}"


@pytest.mark.timeout(900)
def test_it_is_for_one_python_and_platform(wheel: Path) -> None:
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    assert wheel.name.endswith(f"-{tag}-{tag}-{platform}.whl")


@pytest.mark.timeout(900)
def test_two_ranks_sum_in_an_empty_environment(wheel: Path, tmp_path: Path) -> None:
    run([sys.executable, "-m", "venv", tmp_path / "env"], tmp_path, deadline=120)
    python = tmp_path / "env" / "bin" / "python"
    run([python, "-m", "pip", "install", "-q", wheel], tmp_path, deadline=300)
    run([python, "-m", "pip", "check"], tmp_path, deadline=60)
    (tmp_path / "job.py").write_text(JOB)
    said = run([python, "job.py"], tmp_path, deadline=200)
    assert json.loads(said.splitlines()[-1]) == [[0, 2, 1000.0, 2998.0], [1, 2, 1000.0, 2998.0]]


@pytest.mark.timeout(900)
def test_its_metadata_name_the_extras_and_one_dependency(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    metadata = Parser().parsestr(archive.read(name).decode())
    required = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert set(metadata.get_all("Provides-Extra", [])) == EXTRAS
    assert [line.split(">=")[0] for line in required] == ["cloudpickle"]
    assert metadata["License-Expression"] == "Apache-2.0"


@pytest.mark.timeout(120)
def test_the_source_archive_holds_what_the_engine_is_built_from(source: Path) -> None:
    build = "import setuptools.build_meta as backend; backend.build_sdist('dist')"
    run([sys.executable, "-c", build], source, deadline=100)
    with tarfile.open(next((source / "dist").glob("*.tar.gz"))) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    native = {path.relative_to(source).as_posix() for path in (source / "native").rglob("*") if path.is_file()}
    assert native | {"CMakeLists.txt", "setup.py", "LICENSE", "sparkvod/py.typed"} <= held
