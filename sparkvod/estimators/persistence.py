"""Saving and loading of estimators and models, alone or inside a ``Pipeline``, in classic Spark and in Spark Connect.

A saved instance is a directory that Spark writes: ``metadata``, as every ML instance has it (class, uid, Params as
JSON), and ``objects``, a Parquet file with what is not JSON, as bytes by name: the model, the optimizer, functions.
"""

from __future__ import annotations

import importlib
import json
import time
from typing import TYPE_CHECKING, Any, ClassVar, cast

import cloudpickle
from pyspark.ml.util import MLReadable, MLReader, MLWritable, MLWriter

import sparkvod
from sparkvod import log
from sparkvod.estimators.parts import dump_part

if TYPE_CHECKING:
    from sparkvod.estimators.params import TableParams

_CHUNK = 8 << 20
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
        cls = type(self._instance)
        metadata = {
            "class": f"{cls.__module__}.{cls.__name__}",
            "timestamp": int(time.time() * 1000),
            "sparkVersion": spark.version,
            "sparkvodVersion": sparkvod.__version__,
            "uid": params.uid,
            "paramMap": simple,
            "defaultParamMap": {},
            "objects": sorted(objects),
        }
        mode = "overwrite" if self.shouldOverwrite else "error"
        text = spark.createDataFrame([(json.dumps(metadata),)], "value string")
        text.coalesce(1).write.mode(mode).text(f"{path}/metadata")
        if objects:
            rows = [
                (name, number, bytearray(content[at : at + _CHUNK]))
                for name, content in objects.items()
                for number, at in enumerate(range(0, max(len(content), 1), _CHUNK))
            ]
            parts = spark.createDataFrame(rows, "name string, part int, content binary")
            parts.coalesce(1).write.mode(mode).parquet(f"{path}/objects")


class Reader(MLReader):
    """Reads an instance.

    Args:
        cls: the class that ``load`` was called on.
    """

    def __init__(self, cls: type[Saved]) -> None:
        super().__init__()
        self._cls = cls

    def load(self, path: str) -> Any:
        """Returns the instance that was saved at ``path``.

        Raises:
            ValueError: something else was saved there.
        """
        metadata = json.loads(self.sparkSession.read.text(f"{path}/metadata").first()[0])  # type: ignore[index]
        module, _, name = metadata["class"].rpartition(".")
        cls = getattr(importlib.import_module(module), name)
        if not issubclass(cls, self._cls):
            raise ValueError(
                f"{path} holds a {metadata['class']}, a {self._cls.__name__} was expected; call load of that class"
            )
        instance = cls()
        instance._resetUid(metadata["uid"])
        instance._set(**metadata["paramMap"])
        if metadata["objects"]:
            rows = self.sparkSession.read.parquet(f"{path}/objects").collect()
            for param in metadata["objects"]:
                chunks = sorted((row["part"], row["content"]) for row in rows if row["name"] == param)
                instance._set(**{param: instance._load(param, b"".join(bytes(chunk) for _, chunk in chunks))})
        return instance
