"""Prints the stub of the built extension, sparkvod/_native.pyi (``make stub``)."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

HEADER = "# Made from the built extension by `make stub`.\n"
# Classes with the buffer protocol, which Python shows as a method from 3.12 on only.
BUFFERS = ("Memory",)
BUFFER_METHOD = "    def __buffer__(self, flags: int, /) -> memoryview:\n        ...\n"


def stub() -> str:
    """Returns the stub of the extension that this interpreter imports.

    Raises:
        RuntimeError: the generator failed, for example because a signature names a type that Python does not know.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pybind11_stubgen", "--exit-code", "-o", folder, "sparkvod._native"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"pybind11-stubgen ended with {done.returncode}:\n{done.stdout}{done.stderr}")
        text = (Path(folder) / "sparkvod" / "_native.pyi").read_text()
    for name in BUFFERS:
        head = f"class {name}:\n"
        if head not in text:
            raise RuntimeError(f"the extension has no class {name}: correct BUFFERS in tools/stub.py")
        text = text.replace(head, head + BUFFER_METHOD)
    return HEADER + text


if __name__ == "__main__":
    sys.stdout.write(stub())
