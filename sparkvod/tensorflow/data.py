"""``tf.data`` from sparkvod's readers: ``sparkvod.tensorflow.data.from_reader(reader)``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

if TYPE_CHECKING:
    from sparkvod.data import Batch, Column, Reader

__all__ = ["from_reader"]


def from_reader(
    reader: Reader,
    features: str | Sequence[str] | None = None,
    labels: str | Sequence[str] | None = None,
    sample_weight: str | None = None,
    *,
    epochs: int | Iterable[int] = 1,
    start_step: int = 0,
    skip_empty: bool = False,
    prefetch: int = 2,
) -> tf.data.Dataset:
    """Returns a reader's batches as a ``tf.data.Dataset``; Python runs once for a batch, never for a row.

    An element is what ``features`` says; with ``labels`` the pair of features and labels, and with ``sample_weight``
    the three of them, as ``model.fit`` takes it. One name stands for a tensor, several for a dictionary of tensors.
    Columns of text are of ``tf.string``. Dtypes and shapes, ``[rows]`` of scalars and ``[rows, *shape]`` of others, are
    declared, with rows left open: a rank's part of a step is not always as long as the batch, and may be empty.

    Args:
        reader: of ``sparkvod.data.open_reader``, which stays the caller's to close, after the dataset's last use.
        features: names of columns; None for all that the reader reads and that are not named otherwise.
        labels: names of columns.
        sample_weight: name of a column.
        epochs: how many are read, from 0 on, or their numbers; a number decides the order of the rows.
        start_step: first step of the first epoch.
        skip_empty: leaves out steps that have no rows on this rank. Not where a step has a collective, which all
            ranks must reach.
        prefetch: batches that are read ahead.

    Raises:
        ValueError: a column is not read by the reader, ``sample_weight`` has no labels, or a number makes no sense.
    """
    numbers = list(range(epochs)) if isinstance(epochs, int) else [int(epoch) for epoch in epochs]
    if prefetch < 1:
        raise ValueError(f"prefetch={prefetch} was found, at least 1 was expected")
    if numbers and not 0 <= start_step <= reader.steps:
        raise ValueError(f"start_step={start_step} was found, 0 to {reader.steps} was expected, the steps of an epoch")
    if sample_weight is not None and labels is None:
        raise ValueError(f"sample_weight={sample_weight!r} was found without labels, which it weighs; name them too")
    columns = {column.name: column for column in reader.columns}
    if features is None:
        named = {*([labels] if isinstance(labels, str) else labels or ()), sample_weight}
        features = [name for name in columns if name not in named]
    parts = [part for part in (features, labels, sample_weight) if part is not None]
    for name in (name for part in parts for name in ([part] if isinstance(part, str) else part)):
        if name not in columns:
            raise ValueError(f"column {name!r} was found, one of {', '.join(columns)}, which are read, was expected")

    def of(part: str | Sequence[str], values: dict[str, Any]) -> Any:
        return values[part] if isinstance(part, str) else {name: values[name] for name in part}

    def arranged(values: dict[str, Any]) -> Any:
        return of(parts[0], values) if len(parts) == 1 else tuple(of(part, values) for part in parts)

    def batches() -> Iterator[Any]:
        for place, number in enumerate(numbers):
            batch: Batch
            for batch in reader.epoch(number, 0 if place else start_step):
                if batch.rows or not skip_empty:
                    yield arranged(batch.columns)

    def spec(column: Column) -> tf.TensorSpec:
        shape = [None, *(None if size < 0 else size for size in column.shape)]
        return tf.TensorSpec(shape, tf.string if column.dtype == "object" else column.dtype)

    signature = arranged({column.name: spec(column) for column in reader.columns})
    dataset = tf.data.Dataset.from_generator(batches, output_signature=signature)
    if not skip_empty:
        steps = len(numbers) * reader.steps - (start_step if numbers else 0)
        dataset = dataset.apply(tf.data.experimental.assert_cardinality(steps))
    return dataset.prefetch(prefetch)
