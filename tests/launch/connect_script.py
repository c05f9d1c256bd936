"""Run by test_connect.py in a process of its own: a Connect session cannot live beside a classic one."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from typing import Any

import pytest
from pyspark.sql import SparkSession

import sparkvod
from sparkvod.errors import LaunchError, WorkerError
from sparkvod.launch import context
from sparkvod.observe import mailbox


def main() -> None:
    spark = (
        SparkSession.builder.remote("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.driver.extraJavaOptions", sys.argv[1])
        .getOrCreate()
    )
    assert "connect" in type(spark).__module__

    def gather() -> list[bytes]:
        world = context.current()
        assert world is not None
        print("a line of", world.rank)
        return world.allgather(b"%d" % world.rank)

    assert sparkvod.run(gather) == [[b"0", b"1"]] * 2

    def fails() -> None:
        world = context.current()
        assert world is not None
        if world.rank == 1:
            raise ValueError("boom")
        time.sleep(60)

    began = time.monotonic()
    with pytest.raises(WorkerError, match="rank 1 on .* raised ValueError: boom") as caught:
        sparkvod.run(fails)
    assert time.monotonic() - began < 3, time.monotonic() - began
    assert isinstance(caught.value.__cause__, ValueError)

    def slow(batches: Any) -> Any:
        time.sleep(8)
        yield from batches

    time.sleep(3)
    other = threading.Thread(target=lambda: spark.range(0, 2, 1, 2).mapInArrow(slow, "id long").collect())
    other.start()
    time.sleep(2)
    with pytest.raises(LaunchError, match="0 of 2 tasks had started after 1 s"):
        sparkvod.run(gather, start_timeout=1)
    other.join()
    with pytest.raises(LaunchError, match="slots for 2 tasks"):
        sparkvod.run(gather, num_proc=3)

    spark.conf.set("spark.sql.execution.pyspark.udf.idleTimeoutSeconds", "1")
    spark.conf.set("spark.sql.execution.pyspark.udf.killOnIdleTimeout", "true")
    signal.signal(signal.SIGINT, signal.default_int_handler)  # as a notebook's kernel does
    interrupted: list[float] = []

    def interrupt(event: dict[str, Any]) -> None:
        if not interrupted:
            interrupted.append(time.monotonic())
            os.kill(os.getpid(), signal.SIGINT)

    def long() -> None:
        time.sleep(2.5)
        mailbox.current().post("ready")
        time.sleep(60)

    with pytest.raises(KeyboardInterrupt):
        sparkvod.run(long, on_event=interrupt)
    assert time.monotonic() - interrupted[0] < 2
    assert spark.conf.get("spark.sql.execution.pyspark.udf.idleTimeoutSeconds") == "1"
    assert sparkvod.run(gather) == [[b"0", b"1"]] * 2
    spark.stop()
    sys.stdout.write("all went well\n")


if __name__ == "__main__":
    main()
