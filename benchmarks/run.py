"""``sparkvod.run`` of an empty function on a warm session, beside a plain job of the same shape, and a failing rank."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from benchmarks.harness import MIN_ROUNDS, Report, alternate, quantile

ENTERED, RETURNED, RAISED = 1.5, 2.5, 3.0  # promised seconds
RANKS = 2


def session() -> Any:
    """Returns a local session with as many slots as ranks; quiet, because its log would stand among the figures."""
    from pyspark.sql import SparkSession

    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    spark = (
        SparkSession.builder.master(f"local[{RANKS}]")
        .appName("sparkvod benchmark")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("OFF")
    return spark


def run(report: Report) -> None:
    """Measures when the function is entered on the last rank, when ``run`` returns, and when a failure arrives."""
    import sparkvod
    from sparkvod.errors import WorkerError
    from sparkvod.launch import context

    spark = session()
    rounds = MIN_ROUNDS if report.quick else 15

    def empty() -> float:
        return time.time()

    def meets() -> list[bytes]:
        world = context.current()
        assert world is not None
        return world.allgather(b"%d" % world.rank)

    def fails() -> None:
        world = context.current()
        assert world is not None
        if world.rank == 1:
            raise ValueError("as asked", time.time())
        time.sleep(600)

    def plain() -> float:
        began = time.time()
        spark.range(0, RANKS, 1, RANKS).mapInArrow(lambda batches: batches, "id long").toArrow()
        return time.time() - began

    try:
        plain()  # the session is warm: it has run a job with Python workers
        began = time.time()
        first = max(sparkvod.run(empty, num_proc=RANKS, verbose=0)) - began
        if sparkvod.run(meets, num_proc=RANKS, verbose=0) != [[b"0", b"1"]] * RANKS:
            raise AssertionError("the ranks did not meet")

        entered: list[float] = []

        def ours() -> float:
            began = time.time()
            entered.append(max(sparkvod.run(empty, num_proc=RANKS, verbose=0)) - began)
            return time.time() - began

        returned = report.add("returned", alternate({"sparkvod.run": ours, "plain Spark job": plain}, rounds))
        report.add("function entered on the last rank", {"sparkvod.run": entered})
        report.add("function entered, first run of the session", {"sparkvod.run": [first]})

        raised = []
        for _ in range(MIN_ROUNDS):
            try:
                sparkvod.run(fails, num_proc=RANKS, verbose=0)
            except WorkerError as e:
                if e.rank != 1 or not isinstance(e.__cause__, ValueError):
                    raise
                raised.append(time.time() - e.__cause__.args[1])
            time.sleep(3)  # Spark gives the slots back when it has killed the sleeping rank
        report.add("failure of one rank raised, its peer asleep", {"sparkvod.run": raised})
    finally:
        spark.stop()
    report.require("function entered (90 % of rounds)", quantile(entered, 0.9), at_most=ENTERED, unit="s")
    report.require("function entered, first run of the session", first, at_most=2 * ENTERED, unit="s")
    report.require("run returned", returned["sparkvod.run"], at_most=RETURNED, unit="s")
    report.require("failure raised, worst round", max(raised), at_most=RAISED, unit="s")
