"""Counters of ranks: histograms that add up, and an endpoint for each rank of a host."""

from __future__ import annotations

import socket
import urllib.request
from typing import Any

import pytest

import sparkvod
from sparkvod.core import basics

SIZES = (1, 1000, 300000)


def count(port: int) -> dict[str, Any]:
    basics.init()
    engine = basics.engine()
    for _ in range(4):
        for size in SIZES:
            memory = engine.allocate(size * 4)
            handle = engine.allreduce(f"x{size}", memory.address, memory.address, size, 8, 1)
            engine.wait(handle)
            engine.release(handle)
    stats = sparkvod.stats()
    text = ""
    if port:
        address = f"http://127.0.0.1:{port + basics.local_rank()}/metrics"
        with urllib.request.urlopen(address, timeout=20) as answer:
            text = answer.read().decode()
    handle = engine.barrier("all have asked")
    engine.wait(handle)
    basics.shutdown()
    return {"stats": stats, "text": text}


def free_ports() -> int:
    for _ in range(50):
        with socket.socket() as one, socket.socket() as two:
            one.bind(("127.0.0.1", 0))
            port = int(one.getsockname()[1])
            try:
                two.bind(("127.0.0.1", port + 1))
            except (OSError, OverflowError):
                continue
            return port
    raise AssertionError("no two ports beside each other were free")


@pytest.mark.timeout(90)
def test_each_rank_answers_on_its_port(no_leaks: None) -> None:
    port = free_ports()
    env = {"SPARKVOD_METRICS_PORT": str(port)}
    for rank, found in enumerate(sparkvod.run_local(count, (port,), np=2, env=env, verbose=0, timeout=60)):
        stats = found["stats"]
        calls = sum(carried["calls"] for carried in stats["collectives"].values())
        assert calls == 4 * len(SIZES)
        assert stats["collectives"].keys() == stats["histograms"].keys()
        for key, histogram in stats["histograms"].items():
            carried = stats["collectives"][key]
            assert sum(histogram["by_microseconds"]) == sum(histogram["by_bytes"]) == carried["calls"]
            assert histogram["seconds"] > 0
        in_place = stats["histograms"]["allreduce/shm/in-place"]["by_bytes"]
        assert in_place[21] == 4  # 1,200,000 bytes: above 2**20, up to 2**21
        latency = stats["latencies"]["allreduce"]
        assert latency["count"] == sum(latency["by_microseconds"]) == 4 * len(SIZES)
        assert latency["seconds"] >= sum(histogram["seconds"] for histogram in stats["histograms"].values())
        assert stats["in_flight"] == 0
        way = f'rank="{rank}",size="2",collective="allreduce",transport="shm",algorithm="in-place"'
        assert f"sparkvod_collective_calls_total{{{way}}} 4\n" in found["text"]
        assert f'sparkvod_latency_seconds_count{{rank="{rank}",size="2",collective="allreduce"}} 12\n' in found["text"]


@pytest.mark.timeout(60)
def test_a_port_that_is_taken_costs_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, no_leaks: None
) -> None:
    for name in ("RANK", "WORLD_SIZE", "SPARKVOD_RANK", "SPARKVOD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        monkeypatch.setenv("SPARKVOD_METRICS_PORT", str(taken.getsockname()[1]))
        basics.init()
        assert basics.is_initialized()
        basics.shutdown()
    assert "SPARKVOD_METRICS_PORT" in caplog.text
