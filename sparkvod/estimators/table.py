"""The one table of the estimators' and models' Params: name, default, valid values, meaning, who has it.

:mod:`sparkvod.estimators.params` makes everything else from it: the ``pyspark.ml`` Params, getters, setters, the
keyword-only constructors with their signatures, and the scikit-learn protocol. The tables in ``docs/params.md`` are
made from it too (``python -m sparkvod.estimators.table > docs/params.md``), and a test keeps them equal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from sparkvod.estimators import checks

ALL = ("torch", "keras", "lightning", "mxnet")


@dataclass(frozen=True)
class Entry:
    """One Param.

    Attributes:
        name: its name, as the constructor's keyword and as the attribute that ``ParamGridBuilder`` takes.
        default: value when it is not set; a list is copied for each instance.
        check: returns the value in its canonical form, or raises ``TypeError`` or ``ValueError`` saying what it
        expected.
        doc: what it means, with its unit.
        frameworks: the estimators that have it.
        aliases: further names of its accessors, without ``get`` and ``set``.
        keyword: a further name of the constructor's keyword.
        inert: not empty for a Param of the peer that has no meaning here: why; setting it logs that once.
    """

    name: str
    default: Any
    check: Callable[[Any], Any]
    doc: str
    frameworks: tuple[str, ...] = ALL
    aliases: tuple[str, ...] = ()
    inert: str = ""
    keyword: str = ""

    @property
    def accessor(self) -> str:
        """The name in its getter and setter: ``BatchSize`` for ``batch_size``."""
        return "".join(part[:1].upper() + part[1:] for part in self.name.split("_"))


#: Those whose losses are functions of tensors and whose optimizers have parameters, and the one that has names for all.
_MODULES, _KERAS = ("torch", "lightning", "mxnet"), ("keras",)
_POSITIVE = checks.integer(1)
_READERS = "readers know themselves how many threads to use: one for local files, eight for remote ones"

ESTIMATOR: tuple[Entry, ...] = (
    # what is trained
    Entry(
        "model",
        None,
        checks.anything,
        "the model to train, which is copied, never changed; or a function without arguments that builds it",
    ),
    Entry(
        "optimizer",
        None,
        checks.anything,
        "the optimizer: an instance over the model's parameters, or a function of the parameters",
        _MODULES,
    ),
    Entry(
        "optimizer",
        None,
        checks.anything,
        "the optimizer: one of Keras, or a name such as 'adam'; the compiled model's when not given",
        _KERAS,
    ),
    Entry(
        "loss",
        None,
        checks.functions,
        "the loss, or a list with one per label: f(output, label), a mean over rows",
        _MODULES,
    ),
    Entry(
        "loss",
        None,
        checks.keras_functions,
        "the loss, or a list with one per label, or a dict by output: a name, a keras.losses.Loss, or "
        "f(y_true, y_pred); the compiled model's when not given",
        _KERAS,
    ),
    Entry(
        "loss_weights",
        None,
        checks.loss_weights,
        "weights of the labels' losses; 1/labels each when not given",
        _MODULES,
    ),
    Entry(
        "loss_weights",
        None,
        checks.loss_weights_or_dict,
        "weights of the labels' losses, a list or a dict by output; 1 each when not given",
        _KERAS,
    ),
    Entry(
        "metrics",
        [],
        checks.groups,
        "groups of metrics: each a function f(output, label), or a list with one per label",
        _MODULES,
    ),
    Entry(
        "metrics",
        [],
        checks.keras_metrics,
        "metrics as Keras takes them: a list for all outputs, a list of lists with one per label, or a dict by output; "
        "the compiled model's when not given",
        _KERAS,
    ),
    Entry(
        "custom_objects",
        {},
        checks.a_dict,
        "classes and functions by name that the model needs and that are not found by themselves",
        _KERAS,
    ),
    Entry(
        "checkpoint_callback",
        None,
        checks.anything,
        "a keras.callbacks.ModelCheckpoint with save_best_only, such as BestModelCheckpoint: fit returns the weights "
        "of the epoch that was best by its monitor",
        _KERAS,
    ),
    Entry(
        "lr_scheduler",
        None,
        checks.scheduler,
        "function of the optimizer that returns a scheduler; it steps once per epoch",
        ("torch",),
    ),
    Entry("scale_lr", False, checks.boolean, "multiply the learning rate by the number of ranks, as the peer does"),
    # the columns
    Entry(
        "feature_cols",
        None,
        checks.some_strings,
        "names of the feature columns; all but labels, weights and validation when not given",
    ),
    Entry("label_cols", None, checks.strings, "names of the label columns"),
    Entry("sample_weight_col", None, checks.string, "name of a column of weights: the loss is their weighted mean"),
    Entry(
        "input_shapes",
        None,
        checks.shapes,
        "shapes of the model's inputs, -1 for the rows; one per feature column, or one for all columns side by side",
    ),
    Entry(
        "input_dtypes",
        None,
        checks.names_or_none,
        "dtypes of the model's inputs, such as ['int64', None]; None is the model's own",
        ("torch", "keras"),
    ),
    Entry(
        "label_shapes",
        None,
        checks.shapes,
        "shapes that labels are given before the loss, -1 for the rows; None: the output's if it has as many numbers",
    ),
    Entry(
        "validation",
        None,
        checks.validation,
        "share of rows held out, in [0, 1), or name of a column that is true, or above 0, where a row is held out",
    ),
    # the run
    Entry("num_proc", None, _POSITIVE, "number of ranks; as many as can run at once when not given; excludes backend"),
    Entry(
        "backend",
        None,
        checks.backend,
        "object with run(fn, args, kwargs, env) and num_processes(), such as a SparkBackend; excludes num_proc",
    ),
    Entry(
        "store",
        None,
        checks.store,
        "Store, or path, of prepared data and runs; a temporary one when not given on a local master",
    ),
    Entry(
        "batch_size",
        32,
        _POSITIVE,
        "rows of a step on each rank; excludes global_batch_size",
    ),
    Entry(
        "global_batch_size",
        None,
        _POSITIVE,
        "rows of a step on all ranks together, so that any number of ranks gives the same model; excludes batch_size",
    ),
    Entry(
        "val_batch_size",
        None,
        _POSITIVE,
        "rows of a validation step on each rank; as in training when not given",
    ),
    Entry(
        "epochs",
        1,
        checks.integer(0),
        "passes over the data, those before a resumption included; 0: prepare, check, return the model as it is",
    ),
    Entry(
        "terminate_on_nan",
        False,
        checks.boolean,
        "end training on all ranks with an error that names epoch and step when the loss is not finite; "
        "otherwise one warning",
    ),
    Entry("train_steps_per_epoch", None, _POSITIVE, "steps of an epoch; as many as show each row once when not given"),
    Entry(
        "validation_steps_per_epoch",
        None,
        _POSITIVE,
        "steps of a validation; as many as show each row once when not given",
    ),
    Entry(
        "backward_passes_per_step", 1, _POSITIVE, "batches whose gradients are summed before the ranks exchange them"
    ),
    Entry(
        "gradient_compression",
        None,
        checks.compression,
        "compression of gradients between ranks: a member of Compression, such as Compression.fp16",
    ),
    Entry(
        "random_seed",
        None,
        checks.integer(0, bits=63),
        "seed of shuffling, of a split by fraction and of the framework (plus the rank); drawn when not given",
    ),
    Entry("shuffle", True, checks.boolean, "show rows in another order each epoch"),
    Entry("callbacks", [], checks.callbacks, "Callback objects that run on each rank", _MODULES),
    Entry(
        "callbacks",
        [],
        checks.a_list,
        "callbacks of Keras and Callback objects, which run on each rank; those that write files on rank 0 alone",
        _KERAS,
    ),
    Entry("backend_env", None, checks.a_dict, "environment variables of the ranks", _KERAS),
    Entry("verbose", 1, checks.integer(0), "0: silent; above: progress, timings and the ranks' output"),
    Entry(
        "use_gpu",
        True,
        checks.boolean,
        "kept for the peer's name: this version trains on the CPU, and says so where there is a GPU",
    ),
    Entry(
        "run_id",
        None,
        checks.file_name,
        "name of the run: an interrupted run of that name goes on from its last checkpoint",
    ),
    Entry("checkpoint_every", None, _POSITIVE, "steps between checkpoints, besides the one at the end of each epoch"),
    Entry(
        "checkpoint_seconds",
        None,
        checks.seconds,
        "seconds after which a step is followed by a checkpoint, by rank 0's clock; besides the others",
    ),
    Entry(
        "max_restarts",
        0,
        checks.integer(0),
        "times that a run which lost a rank is started again from its last checkpoint; never for an exception of yours",
    ),
    # the data
    Entry(
        "reader",
        "auto",
        checks.choice("auto", "arrow", "petastorm"),
        "how data is read: auto (petastorm for what Petastorm wrote, else arrow), arrow or petastorm",
    ),
    Entry(
        "partitions_per_process",
        10,
        _POSITIVE,
        "upper bound on the partitions that prepared data keep: num_proc times this, rounded up to a power of two and "
        "at least 128; a DataFrame with fewer keeps its own",
    ),
    Entry(
        "transformation_fn",
        None,
        checks.function,
        "function from and to a pandas DataFrame of a batch's columns, run in the reader; it keeps the number of rows",
    ),
    # the peer's own ways to train, PyTorch
    Entry(
        "loss_constructors",
        None,
        checks.functions,
        "functions that return the losses, called on each rank with what they take of model, rank, size and task",
        ("torch", "lightning"),
    ),
    Entry(
        "train_minibatch_fn",
        None,
        checks.function,
        "f(model, optimizer, transform_outputs, loss_fn, inputs, labels, sample_weights, "
        "backward_passes_per_step, batch_idx) -> (outputs, loss), in place of the built-in step",
        ("torch", "lightning"),
    ),
    # the peer's that have no meaning here
    Entry(
        "tensorflow_dataset_prefetch_buffer_size",
        0,
        checks.integer(0),
        "ignored",
        _KERAS,
        inert="batches are read ahead by bytes, not by number",
    ),
    Entry(
        "shuffle_buffer_size",
        None,
        checks.integer(0),
        "ignored",
        aliases=("ShufflingBufferSize",),
        inert="rows are shuffled by lanes of a fixed size",
    ),
    Entry("data_module", None, checks.anything, "ignored", inert="readers are chosen by `reader`"),
    Entry(
        "continuous_cols",
        None,
        checks.strings,
        "ignored",
        inert="it served NVTabular; name the columns in feature_cols",
    ),
    Entry(
        "categorical_cols",
        None,
        checks.strings,
        "ignored",
        inert="it served NVTabular; name the columns in feature_cols",
    ),
    Entry("compress_sparse_cols", False, checks.boolean, "ignored", inert="vectors are stored as dense lists"),
    Entry(
        "train_reader_num_workers", 2, checks.integer(0), "ignored", aliases=("TrainReaderNumWorker",), inert=_READERS
    ),
    Entry("val_reader_num_workers", 2, checks.integer(0), "ignored", aliases=("ValReaderNumWorker",), inert=_READERS),
    Entry("reader_pool_type", "thread", checks.choice("thread", "process", "dummy"), "ignored", inert=_READERS),
    Entry(
        "inmemory_cache_all",
        False,
        checks.boolean,
        "ignored",
        aliases=("InMemoryCacheAll",),
        inert="the operating system caches what was read",
    ),
    Entry(
        "mp_start_method",
        None,
        checks.choice("fork", "spawn", "forkserver"),
        "ignored",
        inert="readers start no processes",
    ),
    Entry(
        "transformation_edit_fields",
        None,
        checks.a_list,
        "ignored",
        inert="the columns that transformation_fn returns are taken as they are",
    ),
    Entry(
        "transformation_removed_fields",
        None,
        checks.a_list,
        "ignored",
        inert="the columns that transformation_fn returns are taken as they are",
    ),
)

MODEL: tuple[Entry, ...] = (
    Entry("model", None, checks.anything, "the trained model"),
    Entry("history", None, checks.a_list, "one record per epoch: losses, metrics, rows per second"),
    Entry("feature_columns", None, checks.strings, "names of the feature columns", keyword="feature_cols"),
    Entry(
        "label_columns",
        None,
        checks.strings,
        "names of the label columns",
        aliases=("LabelColoumns",),
        keyword="label_cols",
    ),
    Entry(
        "outputCols", None, checks.strings, "names of the columns that transform adds; <label>__output when not given"
    ),
    Entry("run_id", None, checks.string, "name of the run that trained it"),
    Entry("_metadata", None, checks.a_dict, "the columns' types and shapes, the outputs' shapes and dtypes"),
    Entry("optimizer", None, checks.anything, "the optimizer with its state after the last step", ("torch",)),
    Entry(
        "input_shapes",
        None,
        checks.shapes,
        "shapes of the model's inputs, -1 for the rows; one per feature column, or one for all columns side by side",
        ("torch", "keras", "lightning"),
    ),
    Entry(
        "input_dtypes",
        None,
        checks.names_or_none,
        "dtypes of the model's inputs, such as ['int64', None]; None is the model's own",
        ("torch", "keras"),
    ),
    Entry("loss", None, checks.functions, "the loss that it was trained with", ("torch",)),
    Entry("loss_constructors", None, checks.functions, "functions that return the losses", ("torch",)),
    Entry("custom_objects", {}, checks.a_dict, "classes and functions by name that the model is made of", _KERAS),
    Entry("_floatx", None, checks.string, "Keras's default dtype of numbers when it was trained", _KERAS),
)


def of(table: Iterable[Entry], framework: str) -> dict[str, Entry]:
    """Returns the entries of ``table`` that the estimator or model of ``framework`` has, by name."""
    return {entry.name: entry for entry in table if framework in entry.frameworks}


def _lines(entries: Iterable[Entry]) -> list[str]:
    lines = ["| Param | default | accessors | what it is |", "|---|---|---|---|"]
    for entry in entries:
        names = ", ".join(f"`get{name}`, `set{name}`" for name in (entry.accessor, *entry.aliases))
        text = f"no effect: {entry.inert}" if entry.inert else entry.doc
        cell = text.replace("|", "\\|").replace("<", "&lt;")
        lines.append(f"| `{entry.name}` | `{entry.default!r}` | {names} | {cell} |")
    return lines


def markdown() -> str:
    """Returns the tables of the Params of all estimators and models as Markdown."""
    lines = [
        "# Params",
        "",
        "Made from `sparkvod/estimators/table.py` by `python -m sparkvod.estimators.table > docs/params.md`.",
    ]
    for framework in ("torch", "keras"):
        name, estimator = framework.capitalize(), of(ESTIMATOR, framework).values()
        lines += [
            "",
            f"## {name}Estimator",
            "",
            *_lines(entry for entry in estimator if not entry.inert),
            "",
            f"## {name}Estimator, for compatibility",
            "",
            "Horovod's scripts set these. Setting one to anything else than its default logs a warning, once.",
            "",
            *_lines(entry for entry in estimator if entry.inert),
            "",
            f"## {name}Model",
            "",
            *_lines(of(MODEL, framework).values()),
        ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(markdown(), end="")  # noqa: T201
