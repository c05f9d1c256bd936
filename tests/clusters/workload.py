"""A driver in a process of its own: makes a session, does the named steps, leaves what came of them as JSON.

``python workload.py ARGUMENTS.json`` or ``spark-submit ... workload.py ARGUMENTS.json``; the arguments are

* ``out``: the file for the results; ``store``: a directory that all processes reach;
* ``steps``: names of functions below; ``conf``: the session's configuration, ``spark.remote`` makes it a Connect one;
* ``artifacts``: files that ``addArtifacts`` takes, by kind (``pyfile``, ``archive``); ``python``: one in an archive;
* ``forbid``: whether touching SparkContext raises once the session is there.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROWS, EPOCHS = 603, 2


def main() -> None:
    arguments = json.loads(Path(sys.argv[1]).read_text())
    from pyspark.sql import SparkSession

    builder = SparkSession.builder
    for name, value in arguments["conf"].items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    for kind, files in arguments.get("artifacts", {}).items():
        spark.addArtifacts(*files, **{kind: True})
    if "python" in arguments:
        spark.conf.set("spark.sql.execution.pyspark.python", arguments["python"])
    undo = forbid_spark_context() if arguments.get("forbid") else lambda: None
    found: dict[str, Any] = {"session": type(spark).__module__}
    try:
        for name in arguments["steps"]:
            began = time.monotonic()
            found[name] = globals()[name](spark, arguments)
            sys.stderr.write(f"{name}: {time.monotonic() - began:.1f} s\n")
    finally:
        Path(arguments["out"]).write_text(json.dumps(found))
        undo()
        spark.stop()


class _Forbidden:
    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, instance: Any, owner: Any) -> Any:
        raise AssertionError(f"SparkContext.{self.name} was touched")


def forbid_spark_context() -> Callable[[], None]:
    """Makes whatever reads an attribute of SparkContext, or makes one, raise; returns what takes that back."""
    from pyspark import SparkContext

    kept = {name: value for name, value in vars(SparkContext).items() if name == "__init__" or name[:2] != "__"}
    for name in kept:
        setattr(SparkContext, name, _Forbidden(name))

    def undo() -> None:
        for name, value in kept.items():
            setattr(SparkContext, name, value)

    try:
        _ = SparkContext._active_spark_context
    except AssertionError:
        return undo
    raise AssertionError("SparkContext could be touched")


# ---- steps -----------------------------------------------------------------------------------------------------------


def frame(spark: Any) -> Any:
    """Returns ROWS rows in three partitions of unequal sizes, made by arithmetic that is the same on every machine."""
    ids = spark.range(0, 300, 1, 1).union(spark.range(300, 303, 1, 1)).union(spark.range(303, ROWS, 1, 1))
    return ids.selectExpr(
        "double((id * 37) % 101) / 101 as a",
        "double((id * 53) % 97) / 97 as b",
        "array(double(id % 7) / 7, double(id % 11) / 11) as more",
        "double((id * 37) % 101) / 101 - double(id % 7) / 7 as y",
    )


def estimator(arguments: dict[str, Any], **options: Any) -> Any:
    """Returns the estimator of all clusters."""
    import torch
    from their_model import Net

    from sparkvod.estimators import TorchEstimator

    net = Net()
    given: dict[str, Any] = {
        "model": net,
        "optimizer": torch.optim.Adam(net.parameters(), lr=0.02),
        "loss": torch.nn.MSELoss(),
        "feature_cols": ["features"],
        "label_cols": ["y"],
        "batch_size": 32,
        "epochs": EPOCHS,
        "num_proc": 2,
        "random_seed": 5,
        "store": arguments["store"],
    }
    return TorchEstimator(**{**given, **options})


def pipeline(arguments: dict[str, Any], **options: Any) -> Any:
    """Returns a pipeline of a stage of Spark's own that makes vectors, and the estimator."""
    from pyspark.ml import Pipeline
    from pyspark.ml.feature import VectorAssembler

    columns = ["a", "b", "first", "second"]
    return Pipeline(stages=[VectorAssembler(inputCols=columns, outputCol="features"), estimator(arguments, **options)])


def fit(spark: Any, arguments: dict[str, Any], **options: Any) -> dict[str, Any]:
    """Fits the pipeline and predicts with it."""
    data = frame(spark).selectExpr("a", "b", "more[0] as first", "more[1] as second", "y")
    model = pipeline(arguments, **options).fit(data)
    predicted = [row.y__output for row in model.transform(data).orderBy("a", "b", "first", "second").collect()]
    return {
        "parameters": digest(model.stages[-1]),
        "rows": len(predicted),
        "predicted": hashlib.sha256(repr(predicted).encode()).hexdigest(),
        "loss": [record["train"]["loss"] for record in model.stages[-1].getHistory()],
        "trained": [worker["rows"] for worker in model.stages[-1].workers],
    }


def digest(model: Any) -> str:
    """Returns a hash of the bits of a fitted model's parameters."""
    state = model.getModel().state_dict()
    text = b"".join(name.encode() + tensor.numpy().tobytes() for name, tensor in sorted(state.items()))
    return hashlib.sha256(text).hexdigest()


def where(spark: Any, arguments: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns what the ranks say of where they run."""
    import sparkvod

    def look() -> dict[str, Any]:
        import their_model

        import sparkvod
        import sparkvod.torch as hvd

        hvd.init()
        return {
            "rank": hvd.rank(),
            "local_size": hvd.local_size(),
            "folder": os.getcwd(),
            "python": sys.executable,
            "prefix": sys.prefix,
            "sparkvod": os.path.realpath(sparkvod.__file__),
            "module": os.path.realpath(their_model.__file__),
        }

    return sparkvod.run(look, num_proc=2, verbose=0)


def slots(spark: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """Asks for one rank more than there are slots, with ``start_timeout`` for where only Spark can tell.

    ``fit`` asks before it prepares the data.
    """
    from sparkvod.errors import LaunchError
    from sparkvod.estimators import SparkBackend

    data = frame(spark).selectExpr("array(a, b, more[0], more[1]) as features", "y")
    before, began = _files(arguments), time.monotonic()
    try:
        estimator(arguments, num_proc=None, backend=SparkBackend(3, start_timeout=4.0, verbose=0)).fit(data)
        raise AssertionError("it was not refused")
    except LaunchError as e:
        refused = {"error": str(e), "seconds": time.monotonic() - began, "prepared": len(_files(arguments) - before)}
    return {"fit": refused, "mailbox": _refused(3, 4.0, "mailbox", arguments)}


def _files(arguments: dict[str, Any]) -> set[Path]:
    return set(Path(arguments["store"]).rglob("*.parquet"))


def _refused(num_proc: int, timeout: float, way: str, arguments: dict[str, Any]) -> dict[str, Any]:
    import sparkvod
    from sparkvod.errors import LaunchError

    box = {"mailbox": f"{arguments['store']}/box"} if way == "mailbox" else {}
    began = time.monotonic()
    try:
        sparkvod.run(os.getpid, num_proc=num_proc, start_timeout=timeout, verbose=0, **box)
    except LaunchError as e:
        return {"error": str(e), "seconds": time.monotonic() - began}
    raise AssertionError("it was not refused")


def held(spark: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """Asks for two ranks while another job holds a slot for a while; then, patiently, once more."""
    import sparkvod

    def slow(batches: Any) -> Any:
        time.sleep(12)
        yield from batches

    other: list[Any] = []
    thread = threading.Thread(
        target=lambda: other.extend(spark.range(0, 1, 1, 1).mapInArrow(slow, "id long").collect())
    )
    thread.start()
    time.sleep(3)
    refused = {way: _refused(2, 2.0, way, arguments) for way in ("silent", "mailbox")}
    was_alive = thread.is_alive()
    results = sparkvod.run(os.getpid, num_proc=2, verbose=0)
    thread.join()
    return {"refused": refused, "held": was_alive, "ranks": len(set(results)), "other": len(other)}


def together(spark: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """Fits twice at once, where there are slots for one."""
    outcomes: dict[str, Any] = {}

    def go(name: str) -> None:
        try:
            outcomes[name] = fit(spark, arguments, verbose=0)
        except Exception as e:
            outcomes[name] = repr(e)

    threads = [threading.Thread(target=go, args=(name,)) for name in ("one", "other")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes


if __name__ == "__main__":
    main()
