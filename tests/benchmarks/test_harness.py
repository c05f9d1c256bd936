"""The harness of the benches: rounds alternate, medians and promises are right, the JSON says what was measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import __main__ as benches
from benchmarks.harness import MIN_ROUNDS, Report, alternate, machine, quantile, show


def test_rounds_alternate() -> None:
    calls: list[str] = []
    subjects = {name: lambda name=name: calls.append(name) or float(len(calls)) for name in "ab"}
    values = alternate(subjects, MIN_ROUNDS)
    assert "".join(calls) == "abbaabbaab"
    assert values == {"a": [1, 4, 5, 8, 9], "b": [2, 3, 6, 7, 10]}


def test_too_few_rounds_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 5"):
        alternate({"a": lambda: 0.0}, 4)


def test_medians_and_promises() -> None:
    report = Report("x")
    median = report.add("case", {"ours": [1.0, 9.0, 2.0], "peer": [4.0, 4.0, 40.0]})
    assert median == {"ours": 2.0, "peer": 4.0}
    report.require("fast", median["peer"] / median["ours"], at_least=2.0)
    report.require("short", 1.0, at_most=1.0, unit="s")
    assert report.held
    report.require("faster", 2.0, at_least=2.1)
    assert not report.held
    table = report.table()
    assert "faster" in table
    assert "MISSED" in table


def test_a_ratio_compares_what_was_measured_in_one_round() -> None:
    report = Report("x")
    report.add("case", {"ours": [1.0, 10.0, 1.0], "peer": [2.0, 30.0, 4.0]})
    assert report.ratio("case", "peer", "ours") == 3.0


def test_who_is_absent_has_a_row(tmp_path: Path) -> None:
    report = Report("x")
    report.add("case", {"ours": [1.0]})
    report.miss("a peer", "not installed")
    assert any("a peer" in line and "not installed" in line for line in report.table().splitlines())
    assert json.loads(report.write(tmp_path).read_text())["absent"] == [{"subject": "a peer", "why": "not installed"}]


def test_a_promise_has_one_bound() -> None:
    with pytest.raises(ValueError, match="exactly one"):
        Report("x").require("both", 1.0, at_least=0.0, at_most=2.0)
    with pytest.raises(ValueError, match="exactly one"):
        Report("x").require("none", 1.0)


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [(0.0123, "s", "12.3 ms"), (4.2e-6, "s", "4.2 µs"), (2.0, "s", "2 s"), (4, "B", "4 B"), (1 << 20, "B", "1 MiB")]
    + [(1234567.0, "rows/s", "1,234,567 rows/s"), (2.517, "", "2.52")],
)
def test_show(value: float, unit: str, text: str) -> None:
    assert show(value, unit) == text


def test_quantile() -> None:
    assert quantile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert quantile([1.0], 0.9) == 1.0


def test_json(tmp_path: Path) -> None:
    report = Report("x")
    report.add("case", {"ours": [1.0, 2.0, 3.0]})
    report.require("fast", 3.0, at_least=2.0)
    report.notes["batch"] = 256
    content = json.loads(report.write(tmp_path / "new").read_text())
    assert content["figures"][0]["median"] == 2.0
    assert content["promises"][0]["held"] is True
    assert content["notes"] == {"batch": 256}
    assert content["machine"]["cores"] >= 1
    assert set(machine()) >= {"cpu", "memory_bytes", "kernel", "python", "versions", "load"}


def test_main_ends_with_1_when_a_promise_is_missed_or_a_bench_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Module:
        def __init__(self, found: float) -> None:
            self.found = found

        def run(self, report: Report) -> None:
            report.require("one", 1 / self.found, at_least=1.0)

    modules = {"benchmarks.allreduce": Module(1.0), "benchmarks.reader": Module(2.0), "benchmarks.run": Module(0.0)}
    monkeypatch.setattr(benches.importlib, "import_module", modules.__getitem__)
    assert benches.main(["allreduce", "--out", str(tmp_path)]) == 0
    assert benches.main(["allreduce", "reader", "--out", str(tmp_path)]) == 1
    assert "MISSED reader: one" in capsys.readouterr().out
    assert benches.main(["run", "--out", str(tmp_path)]) == 1
    assert "MISSED run: did not end" in capsys.readouterr().out
    assert (tmp_path / "run.json").exists()


def test_an_unknown_bench_lists_the_known(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        benches.main(["alreduce"])
    assert f"they are {', '.join(benches.BENCHES)}" in capsys.readouterr().err
