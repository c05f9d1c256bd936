"""``docs/benchmarks.md`` and its plots, made from what the benches wrote last."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks import plots
from benchmarks.harness import show

HEAD = """# Benchmarks: the latest run

Written by `python -m benchmarks --docs` (`make bench ARGS=--docs`) from its own measurements;
[benchmarks/README.md](../benchmarks/README.md) says how they are taken and what is promised. Medians of alternating
rounds; your figures will differ, quote ratios. A promise that did not hold says **missed**.
"""


def write(names: Iterable[str], results: Path, docs: Path) -> Path:
    """Writes the document from the benches' JSON files that are there.

    Args:
        names: of the benches, in the document's order.
        results: folder of the JSON files.
        docs: folder of the document; plots go into ``images`` in it.

    Returns:
        Path of the document.
    """
    images = docs / "images"
    images.mkdir(parents=True, exist_ok=True)
    parts, described = [HEAD], False
    for name in names:
        path = results / f"{name}.json"
        if not path.exists():
            continue
        content = json.loads(path.read_text(encoding="utf-8"))
        if not described:
            parts.append(machine(content["machine"]))
            described = True
        parts.append(section(name, content, plots.write(name, content, images)))
    path = docs / "benchmarks.md"
    path.write_text("\n".join(parts), encoding="utf-8")
    return path


def machine(told: dict[str, Any]) -> str:
    """Returns a paragraph about the machine and the versions."""
    versions = ", ".join(f"{name} {version}" for name, version in told["versions"].items() if version)
    gib, load = told["memory_bytes"] / 2**30, told["load"][0]
    return (
        f"{told['cpu']}, {told['cores']} cores, {gib:.0f} GiB, Linux {told['kernel']}, Python {told['python']};\n"
        f"{versions}.\n{told['time'][:10]}, load average {load:.1f} at the end of the first bench.\n"
    )


def section(name: str, content: dict[str, Any], plot: Path | None) -> str:
    """Returns a bench's tables: cases by subjects, and its promises."""
    lines = [f"## {name}", ""]
    if plot is not None:
        lines += [f"![{name}](images/{plot.name})", ""]
    for cases in groups(content["figures"]):
        subjects = list(dict.fromkeys(subject for row in cases.values() for subject in row))
        rows = [[case, *(row.get(subject, "") for subject in subjects)] for case, row in cases.items()]
        lines += _table(["", *subjects], rows)
    lines += [f"{absent['subject']}: {absent['why']}.\n" for absent in content.get("absent", [])]
    held = [
        [
            promise["what"],
            ("≥ " if promise["at_least"] else "≤ ") + show(promise["bound"], promise["unit"]),
            show(promise["found"], promise["unit"]),
            "held" if promise["held"] else "**missed**",
        ]
        for promise in content["promises"]
    ]
    lines += _table(["promised", "bound", "found", ""], held)
    return "\n".join(lines)


def groups(figures: list[dict[str, Any]]) -> list[dict[str, dict[str, str]]]:
    """Returns medians by case and subject; cases that have no subject in common with those before begin a new group."""
    cases: dict[str, dict[str, str]] = {}
    for figure in figures:
        cases.setdefault(figure["case"], {})[figure["subject"]] = show(figure["median"], figure["unit"])
    found: list[dict[str, dict[str, str]]] = []
    for case, row in cases.items():
        if not found or not any(set(row) & set(other) for other in found[-1].values()):
            found.append({})
        found[-1][case] = row
    return found


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    if not rows:
        return []
    return [f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *rows]] + [""]
