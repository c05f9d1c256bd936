"""The text that Prometheus reads: every line in its grammar, histograms cumulative, and answers over http."""

from __future__ import annotations

import re
import urllib.error
import urllib.request
from typing import Any

import pytest

from sparkvod.observe import metrics

SAMPLE = re.compile(r'^([a-z_]+)\{((?:[a-z]+="(?:[^"\\\n]|\\["\\n])*",?)*)\} (\S+)$')


def stats() -> dict[str, Any]:
    microseconds, sizes = [0] * 40, [0] * 40
    microseconds[3], microseconds[39] = 2, 1  # two of up to 8 us, one of days
    sizes[10] = 3
    return {
        "collectives": {"allreduce/shm/in-place": {"calls": 3, "tensors": 5, "bytes": 3072}},
        "histograms": {"allreduce/shm/in-place": {"seconds": 1.5, "by_microseconds": microseconds, "by_bytes": sizes}},
        "latencies": {"allreduce": {"count": 3, "seconds": 2.5, "by_microseconds": microseconds}},
        "in_flight": 4,
        "cycles": 10,
        "cache_hits": 7,
        "cache_misses": 3,
        "sleeps": 1,
        "idle_wakes": 2,
        "kernels": "avx2",
    }


def samples(text: str) -> dict[str, float]:
    found = {}
    for line in text.splitlines():
        if not line.startswith("# "):
            match = SAMPLE.match(line)
            assert match, line
            found[f"{match[1]}{{{match[2]}}}"] = float(match[3])
    return found


def test_every_line_is_in_the_grammar_and_counts_add_up() -> None:
    text = metrics.render(stats(), {"rank": "0"})
    assert text.endswith("\n")
    found = samples(text)
    way = 'rank="0",collective="allreduce",transport="shm",algorithm="in-place"'
    assert found[f"sparkvod_collective_bytes_total{{{way}}}"] == 3072
    name = "sparkvod_collective_duration_seconds"
    assert found[f'{name}_bucket{{{way},le="4e-06"}}'] == 0
    assert found[f'{name}_bucket{{{way},le="8e-06"}}'] == 2
    assert found[f'{name}_bucket{{{way},le="1.6e-05"}}'] == 2
    assert found[f'{name}_bucket{{{way},le="+Inf"}}'] == 3
    assert found[f"{name}_sum{{{way}}}"] == 1.5
    assert found[f"{name}_count{{{way}}}"] == 3
    assert found[f'sparkvod_collective_size_bytes_bucket{{{way},le="1024"}}'] == 3
    assert found['sparkvod_latency_seconds_count{rank="0",collective="allreduce"}'] == 3
    assert found['sparkvod_in_flight{rank="0"}'] == 4
    # A type before the samples of each metric, once.
    typed = re.findall(r"^# TYPE (\S+) (counter|gauge|histogram)$", text, re.MULTILINE)
    assert len(typed) == len({name for name, _ in typed}) == 12


def test_labels_are_escaped() -> None:
    assert 'host="a\\"b\\\\c\\n"' in metrics.render(stats(), {"host": 'a"b\\c\n'})


def get(endpoint: metrics.Endpoint, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{endpoint.port}{path}", timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as e:
        return e.code, e.read().decode()


@pytest.mark.timeout(30)
def test_the_endpoint_answers_until_it_is_closed(no_leaks: None) -> None:
    answers = iter(["first", "second"])

    def text() -> str:
        return next(answers)

    endpoint = metrics.Endpoint("127.0.0.1", 0, text)
    assert get(endpoint, "/metrics") == (200, "first")
    assert get(endpoint, "/?x=1") == (200, "second")
    assert get(endpoint, "/other")[0] == 404
    assert get(endpoint, "/metrics")[0] == 503  # what fails while it is asked
    with pytest.raises(OSError, match="in use"):
        metrics.Endpoint("127.0.0.1", endpoint.port, text)
    with pytest.raises(OSError, match="65535"):
        metrics.Endpoint("127.0.0.1", 70000, text)
    endpoint.close()
    with pytest.raises(urllib.error.URLError):
        get(endpoint, "/metrics")
