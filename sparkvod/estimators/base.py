"""The flow of ``fit`` that all estimators share, from the checks to the model. No framework is imported here."""

from __future__ import annotations

import dataclasses
import secrets
import sys
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

from pyspark.ml import Estimator

from sparkvod import log
from sparkvod.data import PreparedData, Store, open_prepared, prepare, release
from sparkvod.estimators import checkpoint, launching
from sparkvod.estimators.columns import as_dict, require_spark
from sparkvod.estimators.frame import output_column, refuse_taken
from sparkvod.estimators.model import ModelBase
from sparkvod.estimators.persistence import Saved
from sparkvod.estimators.plan import Plan, Planned, Planning
from sparkvod.estimators.task import TrainResult, TrainTask
from sparkvod.launch.private_folder import STORE, PrivateFolder
from sparkvod.launch.spark import SparkLauncher, advising, check_session, interruptible, on_this_host
from sparkvod.observe.progress import ProgressBar, write_line

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_LOG = log.get("estimators")

#: Params that the task has under the same names.
_OPTIONS = (
    "epochs",
    "terminate_on_nan",
    "val_batch_size",
    "train_steps_per_epoch",
    "validation_steps_per_epoch",
    "checkpoint_every",
    "checkpoint_seconds",
    "shuffle",
    "scale_lr",
    "backward_passes_per_step",
    "reader",
    "transformation_fn",
    "callbacks",
    "use_gpu",
    "verbose",
)
#: Params that must be equal for a run to go on, besides what the data, the inputs and the framework say.
_SAME = (
    "sample_weight_col",
    "global_batch_size",
    "train_steps_per_epoch",
    "shuffle",
    "scale_lr",
    "backward_passes_per_step",
    "random_seed",
    "loss_weights",
)


class EstimatorBase(Planning, Saved, Estimator):
    """Base of estimators. A framework's estimator adds the methods that are abstract here and in :class:`Planning`.

    Attributes:
        framework: its name in the table of Params.
        run_prefix: beginning of the names of runs that were given none.
        adapter: ``module:Class`` of its :class:`~sparkvod.estimators.adapter.Adapter`.
    """

    framework: ClassVar[str]
    run_prefix: ClassVar[str]
    adapter: ClassVar[str]

    def __init__(self, **kwargs: Any) -> None:
        self._folder: PrivateFolder | None = None
        super().__init__(**kwargs)

    # ---- for the frameworks ---------------------------------------------------------------------------------------

    @abstractmethod
    def _check_given(self) -> None:
        """Raises ``ValueError`` for what is missing, or does not fit together, as far as that shows without data."""

    @abstractmethod
    def _pack(self) -> bytes:
        """Returns the payload of the task: model, optimizer, loss, …; ``TypeError`` for what cannot be pickled."""

    @abstractmethod
    def _fingerprint(self) -> dict[str, Any]:
        """Returns, as JSON values, what of the framework's Params a run depends on."""

    def _run_callbacks(self, store: Any, run_id: str) -> list[Any]:
        """Returns the callbacks as the training loop calls them.

        Args:
            store: where the run's files go.
            run_id: its name.
        """
        return list(self.value("callbacks"))

    @abstractmethod
    def _trained(self, payload: bytes, result: TrainResult, params: dict[str, Any]) -> ModelBase:
        """Returns the model, given the values of its Params that all frameworks' models have."""

    def _env(self) -> dict[str, str | None]:
        """Returns environment variables that the ranks need."""
        return {}

    # ---- fit ------------------------------------------------------------------------------------------------------

    def _check_together(self) -> None:
        sizes = [self._paramMap.get(getattr(self, name)) for name in ("batch_size", "global_batch_size")]
        if None not in sizes:
            raise ValueError(
                f"batch_size={sizes[0]} and global_batch_size={sizes[1]} exclude each other: pass batch_size (rows of "
                "a step on each rank) or global_batch_size (rows of a step on all ranks together)"
            )
        num_proc, backend = (self._paramMap.get(getattr(self, name)) for name in ("num_proc", "backend"))
        if num_proc is not None and backend is not None:
            raise ValueError(
                f"num_proc={num_proc} and a backend were found, one of them was expected; "
                "the backend knows its number of ranks"
            )

    def _fit(self, dataset: DataFrame) -> ModelBase:
        require_spark(dataset, "fit")
        outputs = [output_column(label) for label in self.value("label_cols") or []]
        refuse_taken(dataset, outputs, "transform adds columns of these names; drop or rename yours before fit")
        timings, began = launching.Timings(), time.perf_counter()
        with timings.phase("preparing"), self._listening() as listener:
            launching.announce(listener, "preparing", "preparing the data")
            check_session(dataset.sparkSession)
            launcher, packed = self._begin(dataset.sparkSession)
            asked: dict[str, Any] = {
                "label_cols": self.value("label_cols"),
                "feature_cols": self._feature_cols(dataset.columns),
                "sample_weight_col": self.value("sample_weight_col"),
                "validation": self.value("validation"),
                "seed": self.value("random_seed") or 0,
                "text": self._takes_text(),
            }
            packed = self._check_early(dataset, packed, asked)
            store = self._store(dataset.sparkSession)
            store.require_shared("fit")
            store.check_writable()
            if isinstance(launcher, SparkLauncher):
                launcher.ask_for_slots()
            with advising():
                data = interruptible(
                    dataset.sparkSession,
                    "prepare",
                    lambda: prepare(
                        dataset,
                        store,
                        num_proc=launcher.num_processes(),
                        partitions_per_process=self.value("partitions_per_process"),
                        verbose=self.value("verbose"),
                        **asked,
                    ),
                )
        try:
            return self._train(launcher, packed, store, data, asked["feature_cols"], timings, began)
        finally:
            release(data)

    def fit_on_parquet(self, params: dict[Any, Any] | None = None, dataset_idx: int | None = None) -> Any:
        """Fits to data that already lie in the store's training and validation directories, as Parquet files.

        Without ``feature_cols`` all columns are features but those that are labels, weights or ``validation``. What
        lies in the validation directory is for validation; ``validation`` itself splits nothing here.

        Args:
            params: Params to be taken instead of those that are set.
            dataset_idx: number of the data set; None for the directories without a number.

        Returns:
            The fitted model.

        Raises:
            DataError: there are no such data, a column is missing or cannot become a tensor, or the data do not fit
                the model.
            ValueError: there is no store, or a Param does not fit.
            WorkerError: training failed; also on nulls, NaN and negative weights, which show when data are read.
        """
        if params:
            return self.copy(params).fit_on_parquet(None, dataset_idx)
        from pyspark.sql import SparkSession

        timings, began = launching.Timings(), time.perf_counter()
        with timings.phase("preparing"):
            if self.value("store") is None:
                raise ValueError(
                    "no store was found, the one with the data was expected; pass store=Store.create(path)"
                )
            backend = self.value("backend")
            launcher, packed = self._begin(SparkSession.active() if backend is None else None)
            store = self._store(None)
            store.require_shared("fit_on_parquet")
            store.check_writable()
            data = open_prepared(store, dataset_idx, text=self._takes_text())
            features = self._feature_cols([*(column.name for column in data.schema), *data.train.refused])
            self._check_prepared(data, features)
        return self._train(launcher, packed, store, data, features, timings, began)

    def _begin(self, spark: Any) -> tuple[Any, Planned]:
        """Checks what can be checked without data, and returns the launcher and what the framework packed."""
        if self.value("model") is None:
            raise ValueError("no model was found, one to train was expected; pass model=...")
        if not self.value("label_cols"):
            raise ValueError(
                "no label_cols were found, the names of the label columns were expected; pass label_cols=[...]"
            )
        self._check_given()
        packed = Planned(self._pack())
        launcher = self.value("backend") or SparkLauncher(self.value("num_proc"), verbose=self.value("verbose"))
        if isinstance(launcher, SparkLauncher) and spark is not None:
            launcher = launcher.with_defaults(spark=spark, **self._mailbox(spark))
        launcher.num_processes()
        return launcher, packed

    def _train(
        self,
        launcher: Any,
        packed: Planned,
        store: Any,
        data: PreparedData,
        feature_cols: list[str],
        timings: launching.Timings,
        began: float,
    ) -> ModelBase:
        with timings.phase("preparing"):
            features = [data.column(name) for name in feature_cols]
            labels = [data.column(name) for name in self.value("label_cols")]
            planned = self._planned(packed, features, labels, data)
            payload, plan = planned.payload, planned.plan
            assert plan is not None
            self._check_values(plan, data)
            task = self._task(launcher.num_processes(), payload, store, data, plan)
            self._check_run(task)
        with checkpoint.alone(store, task.run_id), self._listening() as listener:
            started = time.time()
            results = launching.run_until_done(launcher, task, self.value("max_restarts"), listener, self._env())
            ended = time.time()
        first = results[0]
        if first.warning and not task.verbose:  # otherwise rank 0 has logged it when it happened
            _LOG.warning("run %s: %s", task.run_id, first.warning)
        timings |= launching.split(started, first.moments, ended)
        metadata = {
            "columns": as_dict([*features, *labels]),
            "inputs": [{"columns": list(i.columns), "tail": list(i.tail), "dtype": i.dtype} for i in plan.inputs],
            "outputs": [dataclasses.asdict(output) for output in plan.outputs],
        }
        params = {
            "history": first.history,
            "feature_columns": feature_cols,
            "label_columns": list(self.value("label_cols")),
            "run_id": task.run_id,
            "_metadata": metadata,
        }
        with timings.phase("collecting"):
            model = self._trained(payload, first, params)
        timings["total"] = time.perf_counter() - began
        model.timings = dict(timings)
        model.workers = [{"rows": result.rows, "decoded": result.decoded} for result in results]
        _LOG.info("run %s: %s", task.run_id, timings)
        if self.value("verbose"):
            write_line(f"run {task.run_id}: {timings}", sys.stderr)
        return model

    def _task(self, size: int, payload: bytes, store: Any, data: PreparedData, plan: Plan) -> TrainTask:
        options = {name: self.value(name) for name in _OPTIONS}
        seed = self.value("random_seed")
        given = self.value("global_batch_size")
        batch_size = self.value("batch_size")
        fingerprint = {
            **self._fingerprint(),
            "num_proc": size,
            "batch_size": None if given else batch_size,
            "features": [item.columns for item in plan.inputs],
            "input_shapes": [item.tail for item in plan.inputs],
            "labels": [label.column for label in plan.labels],
            "data": data.fingerprint,
            "rows": data.train.rows,
        }
        fingerprint |= {name: self.value(name) for name in _SAME}
        run_id = self.value("run_id") or f"{self.run_prefix}_{int(time.time())}_{secrets.token_hex(3)}"
        options["callbacks"] = self._run_callbacks(store, run_id)
        return TrainTask(
            adapter=self.adapter,
            payload=payload,
            data=data,
            inputs=plan.inputs,
            labels=plan.labels,
            weight_column=self.value("sample_weight_col"),
            store=store,
            run_id=run_id,
            seed=secrets.randbits(31) if seed is None else seed,
            fingerprint=checkpoint.plain(fingerprint),
            global_batch_size=given or batch_size * size,
            **options,
        )

    def _check_run(self, task: TrainTask) -> None:
        """Refuses, before anything starts, to go on with a run of something else."""
        header = checkpoint.read_header(task.store, task.run_id) if self.value("run_id") else None
        if header is not None:
            checkpoint.require_same(task.fingerprint, header["fingerprint"], task.run_id, header["step"])
            if header["epoch"] > task.epochs:
                _LOG.warning(
                    "run %r has done %d epochs and epochs=%d was found: nothing is trained, and the model after %d "
                    "epochs is returned; pass another run_id for a shorter run",
                    task.run_id,
                    header["epoch"],
                    task.epochs,
                    header["epoch"],
                )

    @contextmanager
    def _listening(self) -> Iterator[Callable[[dict[str, Any]], None] | None]:
        if not self.value("verbose"):
            yield None
            return
        with ProgressBar() as bar:
            yield bar

    # ---- store ----------------------------------------------------------------------------------------------------

    def _store(self, spark: Any) -> Any:
        """Returns the store that was given, or a temporary one that lives as long as this estimator and its copies."""
        given = self.value("store")
        if given is not None:
            return Store.create(given) if isinstance(given, str) else given
        if not _shares_directories(spark):
            raise ValueError(
                f"no store was found, and the master is {spark.conf.get('spark.master', 'unknown')}: one that "
                "the driver and all "
                "executors can reach was expected; pass store=Store.create('hdfs://...', 's3://...' or a "
                "shared directory)"
            )
        if self.value("run_id") is not None:
            _LOG.warning(
                "run_id=%r was found without a store: the run's checkpoint lies in a temporary one and goes with this "
                "estimator, so no other process can go on with the run; pass store=Store.create(path)",
                self.value("run_id"),
            )
        if self._folder is None:
            self._folder = PrivateFolder(STORE)
        return Store.create(self._folder.path)

    def _mailbox(self, spark: Any) -> dict[str, Any]:
        """Returns where workers leave log lines and progress: in the store, where they share no directory with us.

        Also where nobody listens: by it the launcher knows whether the ranks have started, and which one failed first.
        """
        store = self.value("store")
        if store is None or spark is None or _shares_directories(spark):
            return {}
        store = Store.create(store) if isinstance(store, str) else store
        return {"mailbox": f"{store.get_runs_path()}/.mailbox", "mailbox_options": store.storage_options}


def _shares_directories(spark: Any) -> bool:
    """Returns whether the executors share the driver's temporary directory: a local master on this host."""
    return spark is not None and str(spark.conf.get("spark.master", "")).startswith("local") and on_this_host(spark)
