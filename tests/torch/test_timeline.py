"""A timeline of two ranks in training, merged: complete, well nested, with communication during the backward pass."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the PyTorch front end needs torch")

import sparkvod
from sparkvod.observe import timeline

STEPS = 6


def train(path: str, by_knob: bool) -> dict[str, Any]:
    import torch

    import sparkvod.torch as hvd

    torch.set_num_threads(1)
    hvd.init()
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(layer for _ in range(8) for layer in (torch.nn.Linear(512, 512), torch.nn.ReLU())))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters())
    x = torch.randn(256, 512)
    if not by_knob:
        with pytest.raises(ValueError, match="/nowhere"):
            hvd.start_timeline("/nowhere/at/all.json")
        hvd.start_timeline(path, mark_cycles=True)
        with pytest.raises(ValueError, match="one runs"):
            hvd.start_timeline(path)
    for _ in range(STEPS):
        optimizer.zero_grad()
        with hvd.timeline_span("forward"):
            loss = model(x).square().mean()
        with hvd.timeline_span("backward pass"):
            loss.backward()
        optimizer.step()
    hvd.stop_timeline()
    hvd.stop_timeline()
    with hvd.timeline_span("after"):
        hvd.barrier()
    hvd.shutdown()
    return {}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("by_knob", [False, True])
def test_two_ranks_in_training(tmp_path: Path, by_knob: bool, no_leaks: None) -> None:
    path = str(tmp_path / "trace.json")
    env = {"OMP_NUM_THREADS": "1", "SPARKVOD_BUCKET_BYTES": "1100000", "SPARKVOD_FIRST_BUCKET_BYTES": "1100000"}
    if by_knob:
        env["SPARKVOD_TIMELINE"] = path
    sparkvod.run_local(train, (path, by_knob), np=2, env=env, verbose=0, timeout=90)

    trace = timeline.merge([timeline.path_of(path, rank) for rank in range(2)])
    assert trace["otherData"]["dropped"] == {"0": 0, "1": 0}
    slices = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    lanes = {(e["pid"], e["tid"]): e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    for rank in range(2):
        own = [event for event in slices if event["pid"] == rank]
        names = [event["name"] for event in own]
        for name in ("backward", "synchronize", "step", "forward", "backward pass"):
            assert names.count(name) == STEPS, name
        assert "after" not in names
        # The buckets go in place: each is a life in its tensor's lane, and in the engine's what it consists of.
        buckets = [e for e in own if e["cat"] == "tensor" and ".bucket" in lanes[rank, e["tid"]]]
        for phase in ("allreduce", "queue", "negotiate", "execute"):
            assert sum(e["name"] == phase for e in buckets) == STEPS * 8
        engine = {e["name"] for e in own if e["cat"] == "engine"}
        assert {"negotiate", "allreduce in-place", "wait for ranks", "reduce"} <= engine
    check_nesting(slices)

    hidden = timeline.hidden(trace)
    assert set(hidden) == {0, 1}
    for rank in range(2):
        assert hidden[rank].communication > 0
        # Communication goes on while the backward pass computes.
        assert hidden[rank].both > 0, hidden
        backward = [(e["ts"], e["ts"] + e["dur"]) for e in slices if e["pid"] == rank and e["name"] == "backward"]
        executed = [e for e in slices if e["pid"] == rank and e["name"] == "allreduce in-place"]
        assert any(begin <= e["ts"] and e["ts"] + e["dur"] <= end for e in executed for begin, end in backward)
    check_clocks(slices)


def check_nesting(slices: list[dict[str, Any]]) -> None:
    """Within a lane slices nest or follow each other: else Perfetto cannot draw them."""
    stacks: dict[tuple[int, int], list[float]] = {}
    for event in slices:  # in order of their beginnings, those that hold others first
        stack = stacks.setdefault((event["pid"], event["tid"]), [])
        while stack and stack[-1] <= event["ts"] + 0.002:
            stack.pop()
        end = event["ts"] + event["dur"]
        assert not stack or end <= stack[-1] + 0.002, event
        stack.append(end)


def check_clocks(slices: list[dict[str, Any]]) -> None:
    """No rank ends an allreduce before the other has begun it: the ranks' clocks are one."""
    executed = [[e for e in slices if e["pid"] == rank and e["name"] == "allreduce in-place"] for rank in range(2)]
    assert len(executed[0]) == len(executed[1])
    for left, right in zip(*executed, strict=True):
        assert left["ts"] <= right["ts"] + right["dur"]
        assert right["ts"] <= left["ts"] + left["dur"]


def test_a_world_of_one_and_none(tmp_path: Path) -> None:
    import sparkvod.torch as hvd
    from sparkvod.errors import NotInitializedError

    with pytest.raises(NotInitializedError):
        hvd.start_timeline(str(tmp_path / "x.json"))
    with hvd.timeline_span("nobody listens"):
        pass
    hvd.init()
    hvd.start_timeline(str(tmp_path / "x.json"))
    with hvd.timeline_span("alone"):
        pass
    hvd.shutdown()
    trace = timeline.merge([tmp_path / "x.rank0.json"])
    assert [e["name"] for e in trace["traceEvents"] if e["ph"] == "X"] == ["alone"]
