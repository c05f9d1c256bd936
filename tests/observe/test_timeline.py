"""Ranks' timelines become one: on one clock, also between hosts, and from files that a killed rank has left."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sparkvod.observe import timeline


def write(folder: Path, rank: int, slices: list[tuple[str, str, float, float]], cut: int = 0, **clock: Any) -> Path:
    """Writes a rank's file as the engine does; slices are (category, name, ts, dur)."""
    clock = {"boot_id": "b", "monotonic_ns": 0, "unix_ns": 0, "host": "h", **clock}
    events: list[dict[str, Any]] = [
        {"name": "sparkvod_clock", "ph": "M", "pid": rank, "tid": 0, "args": {"rank": rank, "size": 2, **clock}},
        {"name": "process_name", "ph": "M", "pid": rank, "tid": 0, "args": {"name": f"rank {rank} on h"}},
    ]
    for category, name, ts, duration in slices:
        event = {"name": name, "cat": category, "ph": "X", "pid": rank, "tid": 1, "ts": ts, "dur": duration}
        if name.startswith("cycle"):
            event.update(name="negotiate", args={"detail": f"{name}, agreed on 1"})
        events.append(event)
    events.append({"name": "sparkvod_end", "ph": "M", "pid": rank, "tid": 0, "args": {"dropped": rank}})
    path = folder / f"trace.rank{rank}.json"
    text = "[\n" + ",\n".join(json.dumps(event) for event in events) + "\n]\n"
    path.write_text(text[: len(text) - cut])
    return path


def times(trace: dict[str, Any]) -> dict[str, float]:
    return {event["name"]: event["ts"] for event in trace["traceEvents"] if event["ph"] == "X"}


def test_each_rank_has_its_file() -> None:
    assert timeline.path_of("/x/trace.json", 3) == "/x/trace.rank3.json"
    assert timeline.path_of("/x/trace", 0) == "/x/trace.rank0.json"
    assert timeline.path_of("/x/{rank}/t.json", 12) == "/x/12/t.json"
    assert timeline.path_of(Path("/x/trace.json"), 1) == "/x/trace.rank1.json"
    for wrong, error in ((None, TypeError), (5, TypeError), ("", ValueError), ("/", ValueError)):
        with pytest.raises(error, match=f"file_path={wrong!r} was found, the path of a file"):
            timeline.path_of(wrong, 0)


def test_ranks_of_one_host_share_the_monotonic_clock(tmp_path: Path) -> None:
    one = write(tmp_path, 0, [("engine", "a", 10, 5)], monotonic_ns=1_000_000, unix_ns=5)
    two = write(tmp_path, 1, [("engine", "b", 10, 5)], monotonic_ns=1_250_000, unix_ns=99)
    trace = timeline.merge([two, one])
    assert times(trace) == {"a": 0.0, "b": 250.0}
    assert [event["pid"] for event in trace["traceEvents"] if event["name"] == "process_name"] == [0, 1]
    assert trace["otherData"]["dropped"] == {"0": 0, "1": 1}


def test_hosts_share_the_time_of_day(tmp_path: Path) -> None:
    one = write(tmp_path, 0, [("engine", "a", 0, 5)], boot_id="x", monotonic_ns=77, unix_ns=1_000_000)
    two = write(tmp_path, 1, [("engine", "b", 0, 5)], boot_id="y", monotonic_ns=1, unix_ns=1_040_000)
    assert times(timeline.merge([one, two])) == {"a": 0.0, "b": 40.0}


def test_negotiations_correct_a_host_whose_clock_is_wrong(tmp_path: Path) -> None:
    ours = [("engine", "cycle 1", 0.0, 10.0), ("engine", "cycle 2", 100.0, 10.0), ("engine", "a", 110.0, 5.0)]
    theirs = [("engine", "cycle 1", 2.0, 8.0), ("engine", "cycle 2", 104.0, 6.0), ("engine", "b", 110.0, 5.0)]
    one = write(tmp_path, 0, ours, boot_id="x", unix_ns=0)
    two = write(tmp_path, 1, theirs, boot_id="y", unix_ns=3_000_000_000)
    found = times(timeline.merge([one, two]))
    assert abs(found["a"] - found["b"]) < 10
    right = write(tmp_path, 1, theirs, boot_id="y", unix_ns=1000)
    assert times(timeline.merge([one, right]))["b"] - times(timeline.merge([one, right]))["a"] == pytest.approx(1.0)


def test_what_holds_comes_before_what_is_held(tmp_path: Path) -> None:
    path = write(tmp_path, 0, [("engine", "inner", 1, 2), ("engine", "outer", 1, 5)])
    names = [event["name"] for event in timeline.merge([path])["traceEvents"] if event["ph"] == "X"]
    assert names == ["outer", "inner"]


def test_an_unfinished_file_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    path = write(tmp_path, 0, [("engine", "a", 0, 5), ("engine", "b", 5, 5)], cut=60)
    trace = timeline.merge([path])
    assert list(times(trace)) == ["a", "b"]
    assert trace["otherData"]["dropped"] == {"0": None}


def test_what_is_no_timeline_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text('[\n{"name": "x", "ph": "X"}\n]')
    with pytest.raises(ValueError, match="no timeline of a rank"):
        timeline.merge([tmp_path / "other.json"])
    path = write(tmp_path, 0, [])
    with pytest.raises(ValueError, match="found twice"):
        timeline.merge([path, path])
    with pytest.raises(ValueError, match="no timeline was found"):
        timeline.merge([])


def test_what_is_hidden(tmp_path: Path) -> None:
    slices = [
        ("engine", "allreduce", 0.0, 10.0),
        ("engine", "reduce", 2.0, 3.0),  # within the allreduce: counted once
        ("engine", "allreduce", 20.0, 10.0),
        ("thread", "backward", 5.0, 20.0),
        ("thread", "synchronize", 25.0, 5.0),  # waiting is not computing
        ("tensor", "allreduce", 0.0, 10.0),
    ]
    found = timeline.hidden(timeline.merge([write(tmp_path, 0, slices)]))[0]
    assert found.communication == pytest.approx(20e-6)
    assert found.computation == pytest.approx(20e-6)
    assert found.both == pytest.approx(10e-6)
    assert found.share == pytest.approx(0.5)


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [str(write(tmp_path, rank, [("engine", "a", 0, 5)])) for rank in range(2)]
    out = tmp_path / "merged.json"
    assert timeline.main(["merge", *files, "-o", str(out)]) == 0
    assert "dropped" in capsys.readouterr().err
    assert len(json.loads(out.read_text())["traceEvents"]) == 4
    assert timeline.main(["summary", str(out)]) == 0
    assert "rank 1: communication 0.000 s, computation 0.000 s, hidden 0 %" in capsys.readouterr().out
    assert timeline.main(["merge", str(tmp_path / "none.json"), "-o", str(out)]) == 1
    assert "none.json" in capsys.readouterr().err


def test_one_ranks_file_is_summed_up_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for cut in (0, 60):
        path = write(tmp_path, 1, [("engine", "a", 0, 3e6), ("thread", "b", 0, 1e6)], cut=cut)
        assert timeline.main(["summary", str(path)]) == 0
        assert capsys.readouterr().out == "rank 1: communication 3.000 s, computation 1.000 s, hidden 33 %\n"
    for text in ("no JSON", "[]", "{}", "7"):
        (tmp_path / "other").write_text(text)
        assert timeline.main(["summary", str(tmp_path / "other")]) == 1
        assert "no timeline of a rank, one that sparkvod wrote was expected" in capsys.readouterr().err
