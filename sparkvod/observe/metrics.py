"""An engine's counters as Prometheus reads them: text on http, one endpoint per rank.

What is shown are the numbers of ``sparkvod.stats()``; nothing is measured for it. There is no password and no
encryption, so the endpoint answers on the loopback address unless another one is asked for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from sparkvod import log

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_HIGHEST_PORT = 65535
_JOIN_SECONDS = 10.0
_SECONDS_PER_REQUEST = 5.0

# Metric, what it tells, key in stats()["collectives"].
_CARRIED = (
    ("sparkvod_collective_calls_total", "Calls of the backend, each with one or more tensors.", "calls"),
    ("sparkvod_collective_tensors_total", "Tensors that they carried.", "tensors"),
    ("sparkvod_collective_bytes_total", "Bytes that they carried.", "bytes"),
)
# Metric, kind, what it tells, key in stats().
_SINGLE = (
    ("sparkvod_in_flight", "gauge", "Collectives that were submitted and are not done.", "in_flight"),
    ("sparkvod_cycles_total", "counter", "Negotiations.", "cycles"),
    ("sparkvod_cache_hits_total", "counter", "Requests that were one bit.", "cache_hits"),
    ("sparkvod_cache_misses_total", "counter", "Requests that travelled in full.", "cache_misses"),
    ("sparkvod_sleeps_total", "counter", "Sleeps of threads that drive the engine.", "sleeps"),
    ("sparkvod_idle_wakes_total", "counter", "Wake-ups of the background thread.", "idle_wakes"),
)


def render(stats: dict[str, Any], labels: dict[str, str]) -> str:
    """Returns the text of an engine's counters.

    Args:
        stats: what ``sparkvod.stats()`` returns.
        labels: put on every sample.
    """
    return "".join(f"{line}\n" for line in _lines(stats, labels))


def _lines(stats: dict[str, Any], labels: dict[str, str]) -> Iterator[str]:
    ways = {key: {**labels, **_way(key)} for key in stats["collectives"]}
    for metric, tells, field in _CARRIED:
        yield from _head(metric, "counter", tells)
        for key, carried in stats["collectives"].items():
            yield f"{metric}{_braces(ways[key])} {carried[field]}"
    histograms = stats["histograms"]
    yield from _head("sparkvod_collective_duration_seconds", "histogram", "Time of a call, without negotiation.")
    for key, found in histograms.items():
        yield from _histogram(
            "sparkvod_collective_duration_seconds", ways[key], found["by_microseconds"], 1e-6, found["seconds"]
        )
    yield from _head("sparkvod_collective_size_bytes", "histogram", "Bytes of a call.")
    for key, found in histograms.items():
        total = stats["collectives"][key]["bytes"]
        yield from _histogram("sparkvod_collective_size_bytes", ways[key], found["by_bytes"], 1, total)
    yield from _head("sparkvod_latency_seconds", "histogram", "From the submission of a collective to its end.")
    for collective, found in stats["latencies"].items():
        yield from _histogram(
            "sparkvod_latency_seconds",
            {**labels, "collective": collective},
            found["by_microseconds"],
            1e-6,
            found["seconds"],
        )
    for metric, kind, tells, field in _SINGLE:
        yield from _head(metric, kind, tells)
        yield f"{metric}{_braces(labels)} {stats[field]}"


def _way(key: str) -> dict[str, str]:
    return dict(zip(("collective", "transport", "algorithm"), key.split("/", 2), strict=True))


def _head(metric: str, kind: str, tells: str) -> Iterator[str]:
    yield f"# HELP {metric} {tells}"
    yield f"# TYPE {metric} {kind}"


def _histogram(metric: str, labels: dict[str, str], counts: Sequence[int], unit: float, total: float) -> Iterator[str]:
    # Bucket k holds what is up to 2**k; the last one, what is above as well.
    seen = 0
    for k, count in enumerate(counts[:-1]):
        seen += count
        yield f"{metric}_bucket{_braces({**labels, 'le': f'{2**k * unit:.12g}'})} {seen}"
    seen += counts[-1]
    yield f"{metric}_bucket{_braces({**labels, 'le': '+Inf'})} {seen}"
    yield f"{metric}_sum{_braces(labels)} {total:.12g}"
    yield f"{metric}_count{_braces(labels)} {seen}"


def _braces(labels: dict[str, str]) -> str:
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items()) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


class Endpoint:
    """Answers ``GET /metrics`` until it is closed, on threads of its own.

    Args:
        address: address to listen on.
        port: port to listen on; 0 for any.
        text: returns what to answer; called for each request.

    Raises:
        OSError: the port is taken, or the address is none of this host's.
    """

    def __init__(self, address: str, port: int, text: Callable[[], str]) -> None:
        if port > _HIGHEST_PORT:
            raise OSError(f"port {port} was found, at most {_HIGHEST_PORT} was expected")
        self._server = _Server((address, port), _handler(text))
        self._thread = threading.Thread(target=self._server.serve_forever, name="sparkvod-metrics", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """The port on which it listens."""
        return int(self._server.server_address[1])

    def close(self) -> None:
        """Stops answering."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(_JOIN_SECONDS)

    def forget(self) -> None:
        """Closes the listening socket in a process forked from the one that answers."""
        self._server.socket.close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.get("observe").debug("a request for metrics from %s failed", client_address, exc_info=True)


def _handler(text: Callable[[], str]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = _SECONDS_PER_REQUEST

        def do_GET(self) -> None:  # noqa: N802 - the base class's name
            """Answers ``/metrics`` and ``/``; others are not found."""
            if self.path.split("?")[0] not in ("/", "/metrics"):
                self.send_error(404, "ask for /metrics")
                return
            try:
                body, status = text().encode(), 200
            except Exception as e:
                # The world may have ended meanwhile.
                body, status = f"# {type(e).__name__}: {e}\n".encode(), 503
            self.send_response(status)
            self.send_header("Content-Type", CONTENT_TYPE)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Says nothing: a scrape each few seconds is no news."""

    return Handler
