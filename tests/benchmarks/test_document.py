"""The document of the benches says what they measured, promised and missed."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import document, plots
from benchmarks.harness import Report


@pytest.fixture
def results(tmp_path: Path) -> Path:
    report = Report("hosts")
    report.add("sum, 1 ms", {"ours": [1.0], "ring": [2.0]})
    report.add("sum, 10 ms", {"ours": [3.0]})
    report.add("by dtype", {"float16": [0.5]})
    report.miss("a peer", "not installed")
    report.require("near", 0.5, at_least=0.9)
    report.require("far", 0.95, at_least=0.9)
    report.write(tmp_path / "results")
    return tmp_path / "results"


def test_cases_share_a_table_while_they_share_a_subject(results: Path, tmp_path: Path) -> None:
    text = document.write(["allreduce", "hosts"], results, tmp_path / "docs").read_text()
    assert "## allreduce" not in text  # which has not been run
    assert "## hosts" in text
    for line in (
        "|  | ours | ring |",
        "| sum, 1 ms | 1 s | 2 s |",
        "| sum, 10 ms | 3 s |  |",
        "|  | float16 |",
        "| by dtype | 500 ms |",
        "a peer: not installed.",
        "| near | ≥ 0.9 | 0.5 | **missed** |",
        "| far | ≥ 0.9 | 0.95 | held |",
    ):
        assert line in text.splitlines(), line


def test_a_bench_without_a_plot_needs_no_matplotlib(tmp_path: Path) -> None:
    assert plots.write("hosts", {"figures": [{}]}, tmp_path) is None
    assert plots.write("allreduce", {"figures": []}, tmp_path) is None


def test_the_same_figures_make_the_same_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the plots need matplotlib, which make bench installs")
    cases = {
        "allreduce": ["allreduce 4 B, 2 ranks", "allreduce 1 MiB, 2 ranks", "allreduce 1 MiB, 4 ranks", "by dtype"],
        "collectives": ["alltoall 1 MiB, 2 ranks", "alltoall 16 MiB, 4 ranks"],
        "control": ["negotiation of 100 cached tensors, 8 ranks", "negotiation of 100 cached tensors, 64 ranks"],
    }
    for name, known in cases.items():
        figures = [
            {"case": case, "subject": subject, "median": 1e-3 * (i + 1)}
            for i, case in enumerate(known)
            for subject in ("torch-gloo", "sparkvod")
        ]
        path = plots.write(name, {"figures": figures}, tmp_path)
        assert path is not None
        first = path.read_bytes()
        plots.write(name, {"figures": figures}, tmp_path)
        assert path.read_bytes() == first
        assert b"<svg" in first
