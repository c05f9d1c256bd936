"""The rooms depend on each other downwards only: checked on imports, #includes, and who reads the environment.

The order is docs/architecture.md's. Every import counts, also inside functions and under TYPE_CHECKING, and names
passed to ``importlib.import_module`` as literals.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

PYTHON_LAYERS = (
    ("cli",),
    ("estimators",),
    ("keras",),
    ("torch", "tensorflow", "mxnet"),
    ("core", "launch", "data"),
    ("observe",),
    ("_native",),
    ("config", "errors", "log"),
)
NATIVE_LAYERS = tuple(
    (room,) for room in ("bindings", "engine", "backends", "collectives", "bootstrap", "transport", "kernels", "base")
)

# Imports between rooms of one layer, (importing room, imported module): each with its reason.
ALLOWED = {
    # The world that a launcher gives to its worker: what core.init() needs to know of a launcher.
    ("core", "sparkvod.launch.context"),
    # The environment as a launcher: the worlds of torchrun, of sparkvod's launchers, and of a script started alone.
    ("core", "sparkvod.launch.environment"),
    # sparkvod.tensorflow.keras is the peer's other name of sparkvod.keras; nothing else of the room knows it.
    ("tensorflow", "sparkvod.keras"),
}
# The bottom layer is one unit: the log's level is a knob.
UNITS = (frozenset({"config", "errors", "log"}),)
# The package itself is above all rooms; this much of it everybody may have.
ROOT_NAMES = {"__version__"}

FRAMEWORKS = {"torch", "tensorflow", "jax", "keras", "mxnet", "lightning", "pytorch_lightning"}
# Rooms that must work where no framework is installed, and where the engine is not built.
WITHOUT_FRAMEWORK = {"core", "launch", "data", "observe", "config", "errors", "log"}
# Imports of a framework in those rooms, (importing module, framework): each with its reason.
ALLOWED_FRAMEWORKS = {
    # Inside a function that only runs where torchrun started this process: its agent's store is torch's.
    ("sparkvod.launch.environment", "torch"),
}
WITHOUT_ENGINE = {"launch", "data", "observe", "config", "errors", "log"}


def depth(layers: tuple[tuple[str, ...], ...], room: str) -> int:
    """Returns the index of the room's layer, 0 for the uppermost."""
    return next(index for index, rooms in enumerate(layers) if room in rooms)


def room_of(module: str) -> str:
    """Returns the room of a module of the package: ``launch`` for ``sparkvod.launch.local``, '' for the package."""
    return module.split(".")[1] if "." in module else ""


def imports(tree: ast.AST, module: str, is_package: bool) -> Iterator[tuple[int, str]]:
    """Yields (line, imported module) for every import in a module, relative ones resolved.

    ``from a import b`` yields ``a.b``, because b may be a module; whoever checks looks at the leading parts only.
    ``import sparkvod`` imports nothing yet: the package is lazy, so what is taken from it (``sparkvod.run``) counts.
    """
    package = module.split(".") if is_package else module.split(".")[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name != "sparkvod":
                    yield node.lineno, alias.name
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "sparkvod":
            yield node.lineno, f"sparkvod.{node.attr}"
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            origin = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                yield node.lineno, f"{origin}.{alias.name}"
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                yield node.lineno, node.args[0].value


def environment_uses(tree: ast.AST) -> Iterator[int]:
    """Yields the lines that read or write the process environment through ``os``."""
    names = {"environ", "environb", "getenv", "putenv", "unsetenv"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "os":
            used = {node.attr}
        elif isinstance(node, ast.ImportFrom) and node.module == "os":
            used = {alias.name for alias in node.names}
        else:
            continue
        if names & used:
            yield node.lineno


def python_import_fault(importer: str, imported: str) -> str | None:
    """Returns what is wrong with one import, None when it is allowed."""
    room, parts = room_of(importer), imported.split(".")
    if parts[0] in FRAMEWORKS and room in WITHOUT_FRAMEWORK and (importer, parts[0]) not in ALLOWED_FRAMEWORKS:
        return f"imports {parts[0]}: {room} must work where no framework is installed"
    if parts[0] != "sparkvod" or room == "":
        return None
    other = parts[1]
    if other in ROOT_NAMES:
        return None
    if not any(other in rooms for rooms in PYTHON_LAYERS):
        return f"takes {other} from the package itself, which is above all rooms"
    if other == "_native" and room in WITHOUT_ENGINE:
        return f"imports _native: {room} must work where the engine is not built"
    if room == other or any({room, other} <= unit for unit in UNITS):
        return None
    if any(room == allowed and f"{imported}.".startswith(f"{target}.") for allowed, target in ALLOWED):
        return None
    if depth(PYTHON_LAYERS, room) >= depth(PYTHON_LAYERS, other):
        return f"imports {imported}: {room} is not above {other}"
    return None


def python_faults(source: str, module: str, is_package: bool = False) -> list[str]:
    """Returns everything in one Python module that breaks the order, as ``line: what``."""
    tree = ast.parse(source)
    found = [
        f"{line}: {fault}"
        for line, imported in imports(tree, module, is_package)
        if (fault := python_import_fault(module, imported))
    ]
    if module != "sparkvod.config":
        found += [f"{line}: uses the environment, which is config.py's" for line in environment_uses(tree)]
    return found


def without_comments(source: str) -> str:
    """Returns C++ source with comments, and what stands in string literals, blanked; line breaks are kept."""
    token = re.compile(r'//[^\n]*|/\*.*?\*/|(?<!#include )"(?:\\.|[^"\\\n])*"', re.DOTALL)
    return token.sub(lambda match: re.sub(r"[^\n]", " ", match.group()), source)


def native_faults(source: str, path: str) -> list[str]:
    """Returns everything in one C++ file that breaks the order, as ``line: what``; path is relative to the root."""
    room = path.split("/")[1]
    found = []
    for number, line in enumerate(without_comments(source).splitlines(), 1):
        include = re.match(r'\s*#\s*include\s*(["<])([^">]+)[">]', line)
        if include:
            kind, header = include.groups()
            if kind == '"' and not re.match(r"native/\w+/", header):
                found.append(f'{number}: includes "{header}": quoted includes start at the root, "native/..."')
            elif kind == '"' and depth(NATIVE_LAYERS, header.split("/")[1]) < depth(NATIVE_LAYERS, room):
                found.append(f"{number}: includes {header}, which is above {room}")
            elif kind == "<" and room != "bindings" and re.match(r"Python\.h|pybind11/", header):
                found.append(f"{number}: includes {header}: only bindings knows Python")
            elif kind == "<" and re.match(r"(torch|ATen|c10|tensorflow|mxnet)/", header):
                found.append(f"{number}: includes {header}: no framework's header is needed to build")
        elif re.search(r"\bgetenv\b", line):
            found.append(f"{number}: reads the environment: the configuration is handed in")
        elif re.search(r"\bthrow\b", line) and room != "bindings":
            found.append(f"{number}: throws: errors below bindings are values")
    return found


def module_name(path: Path) -> str:
    """Returns the dotted name of a source file of the package."""
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


PYTHON_FILES = sorted((ROOT / "sparkvod").rglob("*.py"))
NATIVE_FILES = sorted(path for path in (ROOT / "native").rglob("*") if path.suffix in (".h", ".cc"))


def test_python_rooms_depend_downwards() -> None:
    assert PYTHON_FILES
    found = [
        f"{path.relative_to(ROOT)}:{fault}"
        for path in PYTHON_FILES
        for fault in python_faults(path.read_text(), module_name(path), path.name == "__init__.py")
    ]
    assert not found, "\n".join(found)


def test_native_rooms_depend_downwards() -> None:
    assert NATIVE_FILES
    found = [
        f"{path.relative_to(ROOT)}:{fault}"
        for path in NATIVE_FILES
        for fault in native_faults(path.read_text(), path.relative_to(ROOT).as_posix())
    ]
    assert not found, "\n".join(found)


def test_every_file_is_in_a_known_room() -> None:
    known = {room for rooms in PYTHON_LAYERS for room in rooms} | {""}
    assert {room_of(module_name(path)) for path in PYTHON_FILES} <= known
    assert {path.relative_to(ROOT).parts[1] for path in NATIVE_FILES} <= {room for (room,) in NATIVE_LAYERS}


# ---- the checker itself -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "source", "said"),
    [
        ("sparkvod.core.ops", "import sparkvod.torch", "core is not above torch"),
        ("sparkvod.core.ops", "from sparkvod import torch", "core is not above torch"),
        ("sparkvod.core.ops", "from sparkvod.torch.optimizer import X", "core is not above torch"),
        ("sparkvod.core.ops", "from ..torch import X", "core is not above torch"),
        ("sparkvod.core.ops", "from .. import torch", "core is not above torch"),
        ("sparkvod.core.ops", "def f():\n    import sparkvod.estimators", "2: imports sparkvod.estimators"),
        ("sparkvod.core.ops", "if TYPE_CHECKING:\n    from sparkvod.keras import X", "core is not above keras"),
        ("sparkvod.core.ops", "importlib.import_module('sparkvod.torch')", "core is not above torch"),
        ("sparkvod.core.ops", "from sparkvod.launch import local", "core is not above launch"),
        ("sparkvod.core.ops", "from sparkvod.launch import contextual", "core is not above launch"),
        ("sparkvod.core.ops", "import sparkvod\nsparkvod.run(print)", "2: takes run from the package itself"),
        ("sparkvod.core.ops", "import sparkvod\nsparkvod.torch.init()", "core is not above torch"),
        ("sparkvod.core.ops", "from sparkvod import run_local", "the package itself"),
        ("sparkvod.core.ops", "import torch", "no framework"),
        ("sparkvod.data.store", "from sparkvod.launch import spark", "data is not above launch"),
        ("sparkvod.data.store", "from sparkvod import _native", "the engine is not built"),
        ("sparkvod.data.readers.arrow", "from ...core import ops", "data is not above core"),
        ("sparkvod.launch.spark", "def f():\n    import tensorflow as tf", "no framework"),
        ("sparkvod.launch.local", "from sparkvod._native import Engine", "the engine is not built"),
        ("sparkvod.torch.ops", "from sparkvod.tensorflow import ops", "torch is not above tensorflow"),
        ("sparkvod.observe.progress", "from sparkvod.core import basics", "observe is not above core"),
        ("sparkvod.log", "import sparkvod.observe", "log is not above observe"),
        ("sparkvod.log", "import os\nlevel = os.environ['X']", "2: uses the environment"),
        ("sparkvod.log", "from os import getenv", "uses the environment"),
    ],
)
def test_a_bad_python_sample_is_found(module: str, source: str, said: str) -> None:
    assert any(said in fault for fault in python_faults(source, module)), python_faults(source, module)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("sparkvod.estimators.torch", "import torch\nfrom sparkvod import config, data, torch as front"),
        ("sparkvod.core.basics", "from sparkvod.launch import context\nfrom sparkvod._native import Engine"),
        ("sparkvod.core.basics", "from sparkvod.launch.context import current\nfrom sparkvod import __version__"),
        ("sparkvod.core.basics", "import sparkvod\nprint(sparkvod.__version__)"),
        ("sparkvod.log", "from sparkvod import config"),
        ("sparkvod.launch.environment", "def f():\n    from torch.distributed import TCPStore"),
        ("sparkvod.config", "import os\nos.environ['X'] = '1'"),
        ("sparkvod.launch.local", "import torchlike, os\nos.getpid()"),
        ("sparkvod.torch.ops", "from . import optimizer\nfrom ..core import ops"),
    ],
)
def test_a_good_python_sample_passes(module: str, source: str) -> None:
    assert python_faults(source, module) == []


def test_relative_imports_of_a_package_start_at_itself() -> None:
    tree = ast.parse("from . import a\nfrom .b import c\nfrom ..d import e")
    expected = ["sparkvod.core.a", "sparkvod.core.b.c", "sparkvod.d.e"]
    assert [name for _, name in imports(tree, "sparkvod.core", is_package=True)] == expected
    assert [name for _, name in imports(tree, "sparkvod.core.basics", is_package=False)] == expected


@pytest.mark.parametrize(
    ("path", "source", "said"),
    [
        ("native/base/log.h", '#include "native/kernels/reduce.h"', "above base"),
        ("native/transport/shm/x.cc", '#pragma once\n#include "native/engine/queue.h"', "2: includes"),
        ("native/transport/shm/x.cc", '#include "channel.h"', "start at the root"),
        ("native/engine/queue.cc", '#include "native/bindings/module.h"', "above engine"),
        ("native/engine/queue.cc", "#include <pybind11/pybind11.h>", "only bindings"),
        ("native/bindings/ops.cc", "#include <tensorflow/c/c_api.h>", "no framework"),
        ("native/base/log.cc", 'auto* x = std::getenv("X");', "environment"),
        ("native/engine/queue.cc", "throw std::runtime_error(x);", "errors below bindings are values"),
    ],
)
def test_a_bad_native_sample_is_found(path: str, source: str, said: str) -> None:
    assert any(said in fault for fault in native_faults(source, path)), native_faults(source, path)


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("native/engine/queue.cc", '#include "native/engine/queue.h"\n#include "native/base/log.h"\n#include <vector>'),
        ("native/bindings/module.cc", "#include <pybind11/pybind11.h>\nvoid f() { throw 1; }"),
        ("native/base/log.cc", '// getenv is not called; nothing may throw\nauto x = "throw"; /* throw\nthrow */'),
    ],
)
def test_a_good_native_sample_passes(path: str, source: str) -> None:
    assert native_faults(source, path) == []
