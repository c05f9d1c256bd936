"""What a data set that Petastorm's ``materialize_dataset`` wrote says of its fields: its pickled Unischema."""

from __future__ import annotations

import io
import json
import pickle
import posixpath
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from sparkvod import log
from sparkvod.data import petastorm_compat
from sparkvod.data.schema import Column, from_arrow, unconvertible
from sparkvod.data.store import FilesystemStore
from sparkvod.errors import DataError

KEY = b"dataset-toolkit.unischema.v1"
"""Petastorm's own name of the entry in ``_common_metadata``."""

# numpy dtype of a field -> (dtype of the column, Spark type of its elements); PyTorch has no larger unsigned types.
_DTYPES = {
    "bool": ("bool", "boolean"),
    "int8": ("int8", "byte"),
    "uint8": ("uint8", "short"),
    "int16": ("int16", "short"),
    "uint16": ("int32", "integer"),
    "int32": ("int32", "integer"),
    "uint32": ("int64", "long"),
    "int64": ("int64", "long"),
    "float16": ("float32", "float"),
    "float32": ("float32", "float"),
    "float64": ("float64", "double"),
}
_RENAMED = ("av.experimental.deepdrive.dataset_toolkit", "av.ml.dataset_toolkit")
_ALLOWED = {
    ("builtins", "object"),
    ("builtins", "int"),
    ("builtins", "float"),
    ("builtins", "bool"),
    ("builtins", "str"),
    ("builtins", "bytes"),
    ("collections", "OrderedDict"),
    ("copyreg", "_reconstructor"),
    ("decimal", "Decimal"),
    ("numpy", "dtype"),
    ("pyspark.serializers", "_restore"),
}
_log = log.get("data")


class _Unpickler(pickle.Unpickler):
    """Unpickles fields, codecs and types, and nothing that could run anything else."""

    def find_class(self, module: str, name: str) -> Any:
        """See ``pickle.Unpickler``."""
        for old in _RENAMED:
            if module.startswith(old + "."):
                module = "petastorm" + module[len(old) :]
        allowed = (
            (module, name) in _ALLOWED
            or (module == "petastorm.unischema" and name in ("Unischema", "UnischemaField"))
            or (module == "petastorm.codecs" and name.endswith("Codec") and name.isidentifier())
            or (module == "pyspark.sql.types" and name.endswith("Type") and name.isidentifier())
            or (module == "numpy" and isinstance(vars(np).get(name), type) and issubclass(vars(np)[name], np.generic))
        )
        if not allowed:
            raise pickle.UnpicklingError(f"{module}.{name} is not a field, a codec or a type")
        return super().find_class(module, name)


def stored(store_fs: Any, root: str) -> bytes | None:
    """Returns the pickled Unischema of a data set, None if there is none.

    Args:
        store_fs: fsspec file system.
        root: the data set's directory in it.
    """
    for name in ("_common_metadata", "_metadata"):
        path = posixpath.join(root, name)
        if store_fs.exists(path):
            with store_fs.open(path, "rb") as file:
                found = (pq.read_metadata(file).metadata or {}).get(KEY)
            if found is not None:
                return bytes(found)
    return None


def load(pickled: bytes, where: str) -> Any:
    """Returns the ``petastorm.unischema.Unischema``.

    Args:
        pickled: what :func:`stored` returned.
        where: the data set, for messages.

    Raises:
        DataError: Petastorm is not installed; it cannot be unpickled, or holds something else than fields.
    """
    petastorm_compat.require()
    try:
        return _Unpickler(io.BytesIO(pickled)).load()
    except Exception as error:  # a broken pickle raises anything
        raise DataError(
            f"the Unischema of {where} cannot be loaded ({type(error).__name__}: {error}), fields with Petastorm's own "
            "codecs were expected; write it again with materialize_dataset"
        ) from error


def find(store: FilesystemStore, path: str) -> Any:
    """Returns the Unischema of the data set in ``path``; None if it has none, or if Petastorm is not installed.

    Raises:
        DataError: it cannot be loaded.
    """
    pickled = stored(store.fs, store.get_localized_path(path))
    if pickled is None:
        return None
    if not petastorm_compat.available():
        _log.warning(
            "%s was written by Petastorm, which is not installed: only its plain columns can be used; for the others "
            "pip install 'sparkvod[petastorm]'",
            path,
        )
        return None
    return load(pickled, path)


def columns(unischema: Any, schema: pa.Schema) -> tuple[list[Column], dict[str, str], dict[str, str]]:
    """Returns what its fields become.

    Args:
        unischema: the Unischema.
        schema: the schema of the files.

    Returns:
        The columns that can become tensors; the others, each with the message that says why not; and the columns that
        only Petastorm can decode, each with its codec.
    """
    usable: list[Column] = []
    refused: dict[str, str] = {}
    codecs: dict[str, str] = {}
    for name, field in unischema.fields.items():
        plain = from_arrow(name, schema.field(name).type) if name in schema.names else None
        width = (-1,) if plain is not None and plain.kind == "vector" else ()
        if plain is not None and field.codec is None and field.shape in (width, (None,) * len(width)):
            usable.append(plain)
            continue
        try:
            kind = np.dtype(field.numpy_dtype).name
        except TypeError:
            kind = getattr(field.numpy_dtype, "__name__", str(field.numpy_dtype)).lower()
        if kind not in _DTYPES:
            refused[name] = str(unconvertible(name, {"str": "string"}.get(kind, kind)))
        elif None in field.shape:
            refused[name] = (
                f"the field {name!r} has the shape {field.shape}, one shape for all rows was expected; pad or cut its "
                "values to one and write the data set with that shape, or leave the field out"
            )
        else:
            dtype, spark = _DTYPES[kind]
            array = {"type": "array", "elementType": spark, "containsNull": False}
            shape = tuple(int(size) for size in field.shape)
            column = Column(name, "vector" if shape else "scalar", dtype, shape, json.dumps(array if shape else spark))
            usable.append(column)
            if plain is None or (plain.dtype, plain.kind) != (column.dtype, column.kind):
                kept = "no codec" if name in schema.names else "its values in the names of directories"
                codecs[name] = kept if field.codec is None or name not in schema.names else str(field.codec)
    return usable, refused, codecs
