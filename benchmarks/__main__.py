"""Runs the benches: ``python -m benchmarks [--quick] [--docs] [--out DIR] [name ...]``; 1 if a promise is missed."""

from __future__ import annotations

import argparse
import importlib
import sys
import traceback
from pathlib import Path

from benchmarks import document
from benchmarks.harness import Report

# Each is a module of this package with run(report). A new bench is one file and one name here.
BENCHES = ("allreduce", "collectives", "hosts", "step", "tune", "control", "reader", "petastorm", "run", "fit", "keras")

DOCS = Path(__file__).resolve().parents[1] / "docs"


def main(arguments: list[str] | None = None) -> int:
    """Runs the chosen benches one after the other, prints their tables and writes their JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "names", nargs="*", metavar="name", help=f"benches to run, of {', '.join(BENCHES)}; all by default"
    )
    parser.add_argument("--quick", action="store_true", help="shorter rounds: shows that the benches run")
    parser.add_argument("--out", type=Path, default=Path("artifacts/bench"), help="folder of the JSON files")
    parser.add_argument(
        "--docs", action="store_true", help="write docs/benchmarks.md and its plots from all JSON files"
    )
    options = parser.parse_args(arguments)
    unknown = sorted(set(options.names) - set(BENCHES))
    if unknown:
        parser.error(f"no bench named {', '.join(unknown)}; they are {', '.join(BENCHES)}")

    missed = []
    for name in options.names or BENCHES:
        report = Report(name, options.quick)
        try:
            importlib.import_module(f"benchmarks.{name}").run(report)
        except Exception:  # the other benches still count
            traceback.print_exc()
            missed.append(f"{name}: did not end")
        print(report.table(), flush=True)
        print(f"written to {report.write(options.out)}\n", flush=True)
        missed += [f"{name}: {promise.what}" for promise in report.promises if not promise.held]
    if options.docs:
        print(f"written to {document.write(BENCHES, options.out, DOCS)}")
    for line in missed:
        print(f"MISSED {line}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
