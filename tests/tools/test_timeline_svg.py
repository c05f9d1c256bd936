"""The picture of a timeline: valid SVG with what lies in the step, and nothing of the others."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[2]


def event(name: str, category: str, rank: int, tid: int, ts: float, duration: float) -> dict[str, Any]:
    return {"name": name, "cat": category, "ph": "X", "pid": rank, "tid": tid, "ts": ts, "dur": duration}


def test_a_step_is_drawn(tmp_path: Path) -> None:
    events: list[dict[str, Any]] = []
    for rank in range(2):
        name = {"name": "process_name", "ph": "M", "pid": rank, "tid": 0, "args": {"name": f"rank {rank} on <h>"}}
        lane = {"name": "thread_name", "ph": "M", "pid": rank, "tid": 1, "args": {"name": "engine"}}
        events += [name, lane]
    for rank in range(2):
        for step in range(3):
            at = step * 1000.0
            events.append(event(f"allreduce {step}", "engine", rank, 1, at + 100, 300))
            events.append(event("reduce", "engine", rank, 1, at + 200, 100))
            events.append(event("step", "thread", rank, 2, at + 900, 100))
    trace, picture = tmp_path / "trace.json", tmp_path / "picture.svg"
    trace.write_text(json.dumps({"traceEvents": events}))
    command = [sys.executable, str(ROOT / "tools" / "timeline_svg.py"), str(trace), "-o", str(picture), "--step", "1"]
    subprocess.run(command, check=True, timeout=60)
    titles = [element.text or "" for element in ElementTree.parse(picture).iter() if element.tag.endswith("title")]
    assert sum(title.startswith("allreduce 1") for title in titles) == 2
    assert sum(title.startswith("reduce") for title in titles) == 2
    assert not any(title.startswith(("allreduce 0", "allreduce 2")) for title in titles)


def test_what_cannot_be_drawn_is_told(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    for text, step, words in (
        (json.dumps({"traceEvents": [event("step", "thread", 0, 2, 0, 1)]}), "1", "1 steps of a DistributedOptimizer"),
        (json.dumps({"traceEvents": [event("step", "thread", 0, 2, 0, 1)]}), "-1", "for --step -1"),
        (json.dumps({"traceEvents": []}), "0", "no slices were found"),
        ("[]", "0", "no merged trace, one that python -m sparkvod.observe.timeline merge wrote"),
        ("{", "0", "no merged trace"),
    ):
        trace.write_text(text)
        command = [sys.executable, str(ROOT / "tools" / "timeline_svg.py"), str(trace), "-o", str(tmp_path / "x.svg")]
        done = subprocess.run([*command, "--step", step], capture_output=True, text=True, timeout=60)
        assert done.returncode == 1
        assert words in done.stderr
        assert "Traceback" not in done.stderr
