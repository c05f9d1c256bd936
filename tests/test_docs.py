"""What the documents say exists: files, make targets, the tables of knobs and of Params; and samples that compile."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from sparkvod import config
from sparkvod.estimators import table

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("constraints/*.md")])
FOLDERS = ("native", "sparkvod", "tests", "docs", "tools", "examples", "benchmarks", "notebooks", "constraints", ".ci")


def mentioned_paths(text: str) -> set[str]:
    """Returns the paths that a document mentions: in backticks below one of the project's folders, or as links.

    Patterns and placeholders (``native/transport/<name>/``, ``tests/**``) and web addresses are left out.
    """
    quoted = re.findall(r"`([\w./-]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    paths = {name for name in quoted if name.split("/")[0] in FOLDERS and "/" in name}
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", text)
    return paths | {link for link in links if "://" not in link and not link.startswith("mailto:")}


def exists(path: Path) -> bool:
    """Tells whether a mentioned path is there; ``sparkvod/_native`` stands for the file with any ending."""
    return path.exists() or any(path.parent.glob(f"{path.name}.*"))


def mentioned_targets(text: str) -> set[str]:
    """Returns the make targets that a document mentions in backticks or in a block of commands."""
    quoted = re.findall(r"`make ([a-z-]+)", text)
    blocks = re.findall(r"```.*?```", text, flags=re.DOTALL)
    return {*quoted, *(target for block in blocks for target in re.findall(r"^make ([a-z-]+)", block, re.MULTILINE))}


def headings(document: Path) -> set[str]:
    """Returns what links to a document's headings call them: lower case, blanks as hyphens, no punctuation."""
    text = re.sub(r"^```.*?^```", "", document.read_text(), flags=re.DOTALL | re.MULTILINE)
    return {
        re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    }


def test_the_table_of_knobs_is_current() -> None:
    text = (ROOT / "docs" / "knobs.md").read_text()
    assert text == config.markdown(), "run: python -m sparkvod.config > docs/knobs.md"


def test_the_tables_of_params_are_current() -> None:
    text = (ROOT / "docs" / "params.md").read_text()
    assert text == table.markdown(), "run: python -m sparkvod.estimators.table > docs/params.md"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_sample_compiles(document: Path) -> None:
    for sample in re.findall(r"^```python\n(.*?)^```", document.read_text(), flags=re.DOTALL | re.MULTILINE):
        compile(sample, document.name, "exec")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_mentioned_file_exists(document: Path) -> None:
    paths = mentioned_paths(document.read_text())
    missing = {path for path in paths if not exists(ROOT / path) and not exists(document.parent / path)}
    assert not missing, f"{document.name} mentions files that do not exist: {sorted(missing)}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_linked_heading_exists(document: Path) -> None:
    links = re.findall(r"\]\(([\w./-]*)#([^)\s]+)\)", document.read_text())
    missing = {
        (name, place) for name, place in links if place not in headings((document.parent / name) if name else document)
    }
    assert not missing, f"{document.name} links to headings that do not exist: {sorted(missing)}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_mentioned_target_exists(document: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    missing = mentioned_targets(document.read_text()) - targets
    assert not missing, f"{document.name} mentions make targets that do not exist: {sorted(missing)}"


@pytest.mark.timeout(120)
def test_the_first_sample_of_the_readme_runs(spark: Any, capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch", reason="the sample trains with torch")
    sample = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), flags=re.DOTALL | re.MULTILINE)[0]
    names: dict[str, Any] = {}
    exec(compile(sample, "README.md", "exec"), names)
    assert "arr_delay__output" in capfd.readouterr().out
    losses = [record["validation"]["loss"] for record in names["model"].getHistory()]
    assert losses[-1] < losses[0] / 4


def test_what_counts_as_mentioned() -> None:
    text = (
        "See `docs/knobs.md`, [the law](../LICENSE#top), [a site](https://x.org), `native/transport/<name>/`, `a/b`.\n"
        "`make demo` or:\n```\nmake test ARGS=x\nmaker no\ncat `docs/none.md`\n```\n"
    )
    assert mentioned_paths(text) == {"docs/knobs.md", "../LICENSE"}
    assert mentioned_targets(text) == {"demo", "test"}
