"""Saving and loading of estimators and models, alone or inside a ``Pipeline``, in classic Spark and in Spark Connect.

A saved instance is a directory that Spark writes: ``metadata``, as every ML instance has it (class, uid, Params as
JSON), and ``objects``, Parquet files with what is not JSON, as bytes by name: the model, the optimizer, functions.
The bytes go through Spark in pieces, one small job each: a driver's JVM has 1 GB by default, and holds what one job
writes or reads several times over.
"""

from __future__ import annotations

import importlib
import io
import json
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar, cast

import cloudpickle
from pyspark.ml.util import MLReadable, MLReader, MLWritable, MLWriter

import sparkvod
from sparkvod import log
from sparkvod.estimators.parts import dump_part
from sparkvod.launch.spark import interruptible

if TYPE_CHECKING:
    from sparkvod.estimators.params import TableParams

_FORMAT = 2
_PIECE = 16 << 20
_SCHEMA = "name string, start long, content binary"
#: Weights are noise to a compressor.
_OPTIONS = {"compression": "uncompressed", "partitionOverwriteMode": "static"}
_LOG = log.get("estimators")


class Saved(MLReadable, MLWritable):
    """Mixin of estimators and models that can be saved.

    Attributes:
        NOT_SAVED: Params that belong to a session, not to the instance: they are None after loading.
    """

    NOT_SAVED: ClassVar[tuple[str, ...]] = ("backend", "store")

    def write(self) -> Writer:
        """Returns a writer; ``write().overwrite().save(path)`` replaces what is there."""
        return Writer(self)

    @classmethod
    def read(cls) -> Reader:
        """Returns a reader; ``load(path)`` is the short form."""
        return Reader(cls)

    def _dump(self, name: str, value: Any) -> bytes:
        """Returns the value of a Param, that is not JSON, as bytes; frameworks know better for some."""
        return dump_part(name, value)

    def _load(self, name: str, content: bytes) -> Any:
        """Returns what :meth:`_dump` wrote."""
        return cloudpickle.loads(content)


def _is_json(value: Any) -> bool:
    try:
        return bool(json.loads(json.dumps(value)) == value)
    except (TypeError, ValueError):
        return False


class Writer(MLWriter):
    """Writes an instance.

    Args:
        instance: an estimator or a model.
    """

    def __init__(self, instance: Saved) -> None:
        super().__init__()
        self._instance = instance

    def save(self, path: str) -> None:
        """Writes the instance to a directory: a path or URL that Spark can write.

        Raises:
            TypeError: a Param cannot be pickled.
        """
        params = cast("TableParams", self._instance)
        simple, objects = {}, {}
        for param, value in params._paramMap.items():
            if param.name in self._instance.NOT_SAVED:
                if value is not None:
                    _LOG.info("%s is not saved; set it again after loading", param.name)
            elif _is_json(value):
                simple[param.name] = value
            else:
                objects[param.name] = self._instance._dump(param.name, value)
        spark = self.sparkSession
        metadata = {
            "class": _name(type(self._instance)),
            "timestamp": int(time.time() * 1000),
            "sparkVersion": spark.version,
            "sparkvodVersion": sparkvod.__version__,
            "format": _FORMAT,
            "uid": params.uid,
            "paramMap": simple,
            "defaultParamMap": {},
            "objects": {name: len(content) for name, content in sorted(objects.items())},
            "pieces": sum(1 for _ in _pieces(objects)),
        }
        interruptible(spark, "save", lambda: self._write(path, metadata, objects))

    def _write(self, path: str, metadata: dict[str, Any], objects: dict[str, bytes]) -> None:
        spark = self.sparkSession
        mode = "overwrite" if self.shouldOverwrite else "error"
        text = spark.createDataFrame([(json.dumps(metadata),)], "value string")
        text.coalesce(1).write.mode(mode).text(f"{path}/metadata")
        for number, rows in enumerate(_pieces(objects)):
            frame = spark.createDataFrame(rows, _SCHEMA).coalesce(1)
            if number:
                frame.write.mode("overwrite").options(**_OPTIONS).parquet(_folder(path, number))
            else:  # replaces all pieces that were there
                first = frame.selectExpr("*", "0 as piece").write.mode(mode).options(**_OPTIONS)
                first.partitionBy("piece").parquet(f"{path}/objects")


def _pieces(objects: dict[str, bytes]) -> Iterator[list[tuple[str, int, bytearray]]]:
    """Yields the rows of each piece: parts of the objects, at most ``_PIECE`` bytes together."""
    rows: list[tuple[str, int, bytearray]] = []
    room = _PIECE
    for name, content in sorted(objects.items()):
        view, at = memoryview(content), 0
        while at < len(view) or at == 0:
            part = view[at : at + room]
            rows.append((name, at, bytearray(part)))
            at += max(len(part), 1)
            room -= len(part)
            if room == 0:
                yield rows
                rows, room = [], _PIECE
    if rows:
        yield rows


def _folder(path: str, number: int) -> str:
    return f"{path}/objects/piece={number}"


class Reader(MLReader):
    """Reads an instance.

    Args:
        cls: the class that ``load`` was called on.
    """

    def __init__(self, cls: type[Saved]) -> None:
        super().__init__()
        self._cls = cls

    def load(self, path: str) -> Any:
        """Returns the instance that was saved at ``path``. It unpickles: load only what you trust.

        Raises:
            ValueError: something else was saved there, or not all of it is there.
        """
        metadata = self._metadata(path)
        instance: Any = _class(metadata["class"], self._cls, path)()
        instance._resetUid(metadata["uid"])
        instance._set(**metadata["paramMap"])
        for name, content in self._objects(path, metadata["objects"], metadata["pieces"]):
            instance._set(**{name: instance._load(name, content)})
        return instance

    def _metadata(self, path: str) -> dict[str, Any]:
        """Returns the metadata, of which the class has been checked, but not imported."""
        row = interruptible(self.sparkSession, "load", self.sparkSession.read.text(f"{path}/metadata").first)
        try:
            metadata: Any = json.loads(row[0])  # type: ignore[index]
            _check_name(str(metadata["class"]), self._cls, path)
            if metadata.get("format") != _FORMAT:
                raise ValueError(
                    f"{path} was saved in format {metadata.get('format', 1)} by sparkvod "
                    f"{metadata.get('sparkvodVersion')}, and this version reads format {_FORMAT}: load it with the "
                    "version that saved it, or save it again"
                )
            objects, pieces = metadata["objects"], metadata["pieces"]
            valid = isinstance(metadata["paramMap"], dict) and isinstance(metadata["uid"], str)
            if not valid or not isinstance(pieces, int) or not all(isinstance(n, int) for n in objects.values()):
                raise TypeError("wrong types")
        except (TypeError, KeyError, AttributeError, json.JSONDecodeError) as error:
            raise ValueError(
                f"{path}/metadata is not the metadata of a saved estimator or model ({type(error).__name__}: {error})"
            ) from error
        return cast("dict[str, Any]", metadata)

    def _objects(self, path: str, sizes: dict[str, int], pieces: int) -> Iterator[tuple[str, bytes]]:
        """Yields the objects by name, each as soon as it is whole, so that no two large ones are held at a time."""
        name, buffer = "", io.BytesIO()
        found = set()
        for number in range(pieces):
            reader = self.sparkSession.read.schema(_SCHEMA)
            rows = interruptible(self.sparkSession, "load", reader.parquet(_folder(path, number)).collect)
            for row in sorted(rows, key=lambda row: (row["name"], row["start"])):
                if row["name"] != name:
                    name, buffer = row["name"], io.BytesIO()
                if buffer.tell() != row["start"]:
                    break
                buffer.write(row["content"])
                if buffer.tell() == sizes.get(name):
                    found.add(name)
                    content, buffer = buffer.getvalue(), io.BytesIO()
                    yield name, content
                    del content
        missing = sorted(set(sizes) - found)
        if missing:
            raise ValueError(
                f"{path}/objects does not hold all of {', '.join(missing)}: the save was interrupted, or files are "
                "missing; save it again"
            )


def _name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__name__}"


def _known(cls: type) -> dict[str, type]:
    """Returns a class and the subclasses of it that have been imported, by name."""
    known = {_name(cls): cls}
    children: list[type] = cls.__subclasses__()
    for child in children:
        known |= _known(child)
    return known


def _check_name(name: str, cls: type[Saved], path: str) -> None:
    """Refuses the class that a file names before its module is imported, which would run it."""
    own = "sparkvod.estimators."
    if name not in _known(cls) and not name.startswith(own):
        raise ValueError(
            f"{path} holds a {name}, not a {cls.__name__}: call load of that class; of a subclass of {cls.__name__}, "
            "import its module first"
        )


def _class(name: str, cls: type[Saved], path: str) -> type[Saved]:
    known = _known(cls)
    if name in known:
        return known[name]
    module, _, short = name.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), short)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{path} holds a {name}, which this version of sparkvod does not have") from error
    if not (isinstance(found, type) and issubclass(found, cls)):
        raise ValueError(f"{path} holds a {name}, not a {cls.__name__}: call load of that class")
    return found
