"""The one table of knobs, and the only module that reads or writes the process environment.

A knob is read from ``SPARKVOD_<NAME>``; knobs marked ``engine`` are handed to the native engine by
:func:`engine_config`. The table in ``docs/knobs.md`` is made from :data:`KNOBS`
(``python -m sparkvod.config > docs/knobs.md``), and a test keeps the two equal.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

PREFIX = "SPARKVOD_"
_NEARLY = 0.75  # of a misspelt name's letters are the knob's, in order
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")
_EXPECTED = {
    int: "a whole number",
    float: "a number",
    str: "text in UTF-8",
    bool: "1 or 0 (true, false, yes, no, on, off)",
}
# Whole numbers are 64 bits in the engine, and seconds become nanoseconds there.
_MAXIMA: dict[type, float] = {int: (1 << 63) - 1, float: 1e9}
MOST_RANKS = 1 << 20


@dataclass(frozen=True)
class Knob:
    """One knob.

    Attributes:
        name: lower-case name; the environment variable is ``SPARKVOD_`` and the name in capitals.
        default: value when the variable is unset; its type is the knob's type.
        doc: what it does, with its unit.
        engine: True when the native engine reads it.
        choices: the valid values, empty when any value of the type will do.
        minimum: smallest valid number, None when there is none.
        maximum: largest valid number, None for the largest that the type's knobs take.
    """

    name: str
    default: Any
    doc: str
    engine: bool = False
    choices: tuple[str, ...] = ()
    minimum: float | None = None
    maximum: float | None = None

    @property
    def variable(self) -> str:
        """Name of the environment variable."""
        return PREFIX + self.name.upper()


KNOBS: dict[str, Knob] = {
    knob.name: knob
    for knob in (
        Knob("log_level", "warning", "what is logged", True, ("debug", "info", "warning", "error")),
        Knob(
            "transport",
            "auto",
            "how ranks of one host exchange bytes: auto (threads of one process inproc, processes shm), shm or tcp",
            True,
            ("auto", "shm", "tcp"),
        ),
        Knob(
            "address",
            "",
            "address that this rank listens on and tells the others, or the interface (eth0) or network (10.0.0.0/8) "
            "that it is taken from; empty: found by itself",
            True,
        ),
        Knob("port_range", "", "ports that may be listened on, as 'first-last'; empty: any free one", True),
        Knob(
            "host_id", "", "name of the host for the grouping of ranks; empty: found from kernel and namespaces", True
        ),
        Knob("start_timeout", 120.0, "seconds within which all ranks must have connected", True, minimum=0.001),
        Knob(
            "collective_timeout",
            600.0,
            "seconds a collective may wait for ranks that have not submitted it or for a peer's bytes; 0: for ever",
            True,
            minimum=0,
        ),
        Knob(
            "stall_check_time_seconds",
            60.0,
            "seconds after which a rank that waits for others warns who has not submitted what; 0: never",
            True,
            minimum=0,
        ),
        Knob(
            "host_timeout",
            60.0,
            "seconds without any answer of another host's kernel after which its ranks are lost (it answers for ranks "
            "that are stopped or slow too); 0: as the system has it, hours",
            True,
            minimum=0,
            maximum=32767,
        ),
        Knob(
            "stall_stacks",
            False,
            "whether a rank that others warn of shows the Python stacks of all its threads on its standard error",
        ),
        Knob(
            "fusion_threshold",
            64 << 20,
            "bytes up to which small tensors are fused into one allreduce; 0: never",
            True,
            minimum=0,
        ),
        Knob(
            "linger_us",
            300,
            "microseconds that the background thread waits for more tensors to fuse, after a cycle that agreed on less "
            "than 1 MiB; a caller that waits ends it, and it is not done where completions are called (TensorFlow)",
            True,
            minimum=0,
            maximum=10**6,
        ),
        Knob(
            "one_shot_bytes",
            32 << 10,
            "bytes up to which each of the ranks that share memory sums everything itself, with one synchronisation",
            True,
            minimum=0,
            maximum=128 << 10,
        ),
        Knob("cache_capacity", 1024, "entries of the response cache; 0: none", True, minimum=0),
        Knob(
            "spin_us",
            50,
            "microseconds to spin before sleeping; ranks that outnumber the cores offer them to each other meanwhile, "
            "and do not spin where there are more than four to a core",
            True,
            minimum=0,
            maximum=10**6,
        ),
        Knob(
            "staging_bytes",
            4 << 20,
            "bytes of shared staging memory per rank for tensors in ordinary memory",
            True,
            minimum=65536,
        ),
        Knob(
            "arena_bytes",
            0,
            "address space in bytes for engine memory per rank; 0: the host's memory, less where ulimit -v holds",
            True,
            minimum=0,
        ),
        Knob(
            "allreduce_algorithm",
            "auto",
            "what carries allreduces: auto (the cheapest, docs/algorithms.md), or another word, where that applies",
            True,
            ("auto", "direct", "hierarchical", "ring", "halving-doubling", "doubling", "tree"),
        ),
        Knob(
            "broadcast_algorithm",
            "auto",
            "the same for broadcasts",
            True,
            ("auto", "direct", "chain", "tree"),
        ),
        Knob(
            "tcp_streams",
            1,
            "TCP connections over which the bytes between two ranks go, where one does not fill the link",
            True,
            minimum=1,
            maximum=64,
        ),
        Knob(
            "tls",
            False,
            "whether TCP connections between ranks are encrypted (TLS 1.3, needs OpenSSL 3's libssl.so.3 on every "
            "host); all ranks must have it alike",
            True,
        ),
        Knob(
            "link_gbits",
            10.0,
            "10^9 bits per second of a host's network link, by which algorithms are chosen",
            True,
            minimum=0.01,
            maximum=10**5,
        ),
        Knob("autotune", False, "whether rank 0 tunes the engine in the first steps, docs/tuning.md"),
        Knob("autotune_log", "", "file in which rank 0 writes what it tried, as CSV; empty: none"),
        Knob("autotune_warmup_samples", 3, "samples that it leaves out before the first", minimum=0),
        Knob("autotune_steps_per_sample", 10, "steps of the training that are one sample", minimum=1),
        Knob(
            "autotune_bayes_opt_max_samples",
            20,
            "sets of values that it tries at most; the score of each is the median of five samples",
            minimum=1,
        ),
        Knob(
            "autotune_gaussian_process_noise",
            0.8,
            "standard deviation that a score's noise is taken to have, where that of all scores is 1",
            minimum=0,
            maximum=1,
        ),
        Knob("bucket_bytes", 25 << 20, "bytes of gradients at which DistributedOptimizer closes a bucket", minimum=1),
        Knob(
            "first_bucket_bytes",
            1 << 20,
            "the same for the first bucket, which is small so that the communication starts early",
            minimum=1,
        ),
        Knob(
            "timeline",
            "",
            "file in which each rank writes its timeline, from init on: '{rank}' in it, or 'rank<n>' put before its "
            "suffix, tells the ranks apart; DYNAMIC, or empty: none until start_timeline()",
        ),
        Knob(
            "metrics_port",
            0,
            "port on which the first rank of a host answers Prometheus, the next ones on the ports above it; 0: none",
            minimum=0,
        ),
        Knob("metrics_address", "127.0.0.1", "address on which they answer; no password is asked for"),
        Knob("timeline_mark_cycles", False, "whether the timeline also shows negotiations that agreed on nothing"),
        Knob("rank", -1, "rank of this process, set by launchers", minimum=-1, maximum=MOST_RANKS),
        Knob("size", -1, "number of ranks, set by launchers", minimum=-1, maximum=MOST_RANKS),
        Knob("rendezvous", "", "host:port where rank 0 gathers the ranks' endpoints, set by launchers or by hand"),
        Knob(
            "secret_file",
            "",
            "file of the job's secret, readable by its owner only; empty, on one host: ~/.sparkvod/secret",
        ),
        Knob(
            "spark_start_timeout", 600.0, "seconds within which a Spark job must have got all its tasks", minimum=0.001
        ),
    )
}


def _parse(knob: Knob, text: str) -> Any:
    kind = type(knob.default)
    try:
        value: Any = _truth(text) if kind is bool else kind(text)
        if kind is str:
            text.encode()  # bytes of the environment that are no UTF-8 come as what cannot be encoded
    except ValueError:
        raise ValueError(f"{knob.variable}={text!r} was found, {_EXPECTED[kind]} was expected") from None
    if knob.choices and value not in knob.choices:
        raise ValueError(f"{knob.variable}={text!r} was found, one of {', '.join(knob.choices)} was expected")
    if knob.minimum is not None and not value >= knob.minimum:  # so that nan is refused
        raise ValueError(f"{knob.variable}={text!r} was found, a value of at least {knob.minimum:g} was expected")
    maximum = _MAXIMA.get(kind) if knob.maximum is None else knob.maximum
    if maximum is not None and value > maximum:
        raise ValueError(f"{knob.variable}={text!r} was found, a value of at most {maximum:.12g} was expected")
    return value


def _truth(text: str) -> bool:
    word = text.strip().lower()
    if word not in _TRUE + _FALSE:
        raise ValueError(word)
    return word in _TRUE


def get(name: str, env: Mapping[str, str] | None = None) -> Any:
    """Returns a knob's value: the environment's, else the default.

    Args:
        name: name of the knob; an unknown one raises ``KeyError`` with the valid names.
        env: environment to read, the process's by default.

    Raises:
        ValueError: the variable holds something that the knob cannot take.
    """
    if name not in KNOBS:
        raise KeyError(f"no knob {name!r}; the knobs are {', '.join(KNOBS)}")
    knob = KNOBS[name]
    text = (os.environ if env is None else env).get(knob.variable, "")
    return knob.default if text == "" else _parse(knob, text)


def is_set(name: str) -> bool:
    """Returns whether the environment says something about a knob."""
    return os.environ.get(KNOBS[name].variable, "") != ""


def misspelt(env: Mapping[str, str] | None = None) -> dict[str, str]:
    """Returns the variables of an environment, by default the process's, that are nearly called like a knob.

    Returns:
        By variable the one that is meant.
    """
    found = {}
    for variable in os.environ if env is None else env:
        name = variable.removeprefix(PREFIX).lower()
        if variable.startswith(PREFIX) and name not in KNOBS:
            for near in difflib.get_close_matches(name, KNOBS, 1, _NEARLY):
                found[variable] = KNOBS[near].variable
    return found


def engine_config(**overrides: Any) -> dict[str, Any]:
    """Returns the native engine's configuration, with ``overrides`` by knob name on top.

    Raises:
        KeyError: an override names no knob of the engine.
    """
    values = {knob.name: get(knob.name) for knob in KNOBS.values() if knob.engine}
    for name, value in overrides.items():
        if name not in values:
            raise KeyError(f"no engine knob {name!r}; they are {', '.join(values)}")
        values[name] = value
    return values


def environment() -> dict[str, str]:
    """Returns a copy of the process environment."""
    return dict(os.environ)


def set_environment(values: Mapping[str, str | None]) -> dict[str, str | None]:
    """Sets (or, for None, removes) environment variables and returns what to pass to undo it."""
    before = {name: os.environ.get(name) for name in values}
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    return before


def markdown(knobs: Iterable[Knob] = KNOBS.values()) -> str:
    """Returns the table of knobs as Markdown."""
    lines = [
        "# Knobs",
        "",
        "Made from `sparkvod/config.py` by `python -m sparkvod.config > docs/knobs.md`.",
        "",
        "| variable | default | what it does |",
        "|---|---|---|",
    ]
    lines += [f"| `{k.variable}` | `{k.default}` | {k.doc} |" for k in knobs]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(markdown(), end="")  # noqa: T201
