"""What the engine refuses at the caller, before any other rank hears of it."""

from __future__ import annotations

import threading

import pytest

from sparkvod import config
from sparkvod._native import Engine

SMALL = {"arena_bytes": 1 << 24, "start_timeout": 20.0, "address": "127.0.0.1"}


@pytest.fixture
def alone() -> Engine:
    engine = Engine(config.engine_config(**SMALL))
    engine.connect(0, [engine.listen()], b"secret")
    yield engine
    engine.shutdown()


def test_a_name_that_is_too_long(alone: Engine) -> None:
    with pytest.raises(ValueError, match="a name of 70000 bytes was found, at most 65536"):
        alone.barrier("n" * 70_000)
    alone.wait(alone.barrier("n" * 65_536))


@pytest.mark.parametrize("scale", ["prescale", "postscale"])
def test_a_scale_that_is_no_number(alone: Engine, scale: str) -> None:
    memory = alone.allocate(8)
    with pytest.raises(ValueError, match="'x' is scaled by NaN"):
        alone.allreduce("x", memory.address, memory.address, 2, 8, 1, **{scale: float("nan")})


MUST_AGREE: dict[str, tuple[int | float | str, int | float | str]] = {
    "staging_bytes": (100_000, 100_001),
    "fusion_threshold": (100_000, 100_001),
    "one_shot_bytes": (100_000, 100_001),
    "cache_capacity": (100_000, 100_001),
    "allreduce_algorithm": ("auto", "halving-doubling"),
    "broadcast_algorithm": ("tree", "chain"),
    "link_gbits": (10, 2.5),
    "tcp_streams": (1, 4),
}


@pytest.mark.parametrize("knob", MUST_AGREE)
@pytest.mark.timeout(60)
def test_knobs_that_must_agree(knob: str) -> None:
    values = MUST_AGREE[knob]
    engines = [Engine(config.engine_config(**{**SMALL, knob: values[rank]})) for rank in range(2)]
    endpoints = [engine.listen() for engine in engines]
    said: dict[int, str] = {}

    def join(rank: int) -> None:
        with pytest.raises(ValueError, match="set one value on all ranks") as caught:
            engines[rank].connect(rank, endpoints, b"secret")
        said[rank] = str(caught.value)

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    differing = f"{values[0]} on rank 0 and {values[1]} on rank 1"
    assert said[0] == f"SPARKVOD_{knob.upper()} is {differing}; set one value on all ranks"
    assert set(said) == {0, 1}


def test_an_algorithm_that_there_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="SPARKVOD_BROADCAST_ALGORITHM='ring' was found, one of auto, direct, chain,"):
        Engine(config.engine_config(broadcast_algorithm="ring"))
    monkeypatch.setenv("SPARKVOD_ALLREDUCE_ALGORITHM", "chain")
    with pytest.raises(ValueError, match="SPARKVOD_ALLREDUCE_ALGORITHM='chain' was found, one of auto, direct, hier"):
        config.engine_config()
