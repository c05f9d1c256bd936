"""Params made from the table: ``pyspark.ml`` Params, accessors, constructor, ``setParams``, scikit-learn's protocol."""

from __future__ import annotations

import copy
import difflib
import functools
import inspect
from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

from pyspark.ml.param import Param, Params

from sparkvod import log
from sparkvod.estimators.table import Entry

_LOG = log.get("estimators")
_warned: set[str] = set()

T = TypeVar("T", bound="TableParams")


def _shown(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else text[:77] + "..."


def convert(entry: Entry, value: Any) -> Any:
    """Returns ``value`` in its canonical form; an error names the Param, the value and what is valid."""
    if value is None:
        return None
    try:
        return entry.check(value)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{entry.name}={_shown(value)} was found, {error}") from None


class TableParams(Params):
    """Base of estimators and models: everything about their Params comes from ``TABLE``.

    A subclass names its table in the class statement: ``class X(TableParams, table=entries_by_name)``. None, for a
    Param whose default is something else, means that default.
    """

    TABLE: ClassVar[Mapping[str, Entry]] = {}

    def __init_subclass__(cls, table: Mapping[str, Entry] | None = None, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if table is None:
            return
        cls.TABLE = table
        for entry in table.values():
            setattr(cls, entry.name, Param(Params._dummy(), entry.name, entry.doc, functools.partial(convert, entry)))
            for name in (entry.accessor, *entry.aliases):
                for accessor in (_getter(entry, name), _setter(entry, name)):
                    if accessor.__name__ not in vars(cls):
                        accessor.__qualname__ = f"{cls.__qualname__}.{accessor.__name__}"
                        setattr(cls, accessor.__name__, accessor)
        keywords = [
            inspect.Parameter(e.name, inspect.Parameter.KEYWORD_ONLY, default=e.default) for e in table.values()
        ]
        cls.__signature__ = inspect.Signature(keywords)  # type: ignore[attr-defined]

    def __init__(self, **kwargs: Any) -> None:
        super().__init__()
        self._setDefault(**{name: copy.copy(entry.default) for name, entry in self.TABLE.items()})
        self.setParams(**kwargs)

    def setParams(self: T, **kwargs: Any) -> T:  # noqa: N802, the name is pyspark's
        """Sets Params by keyword.

        Raises:
            TypeError: a keyword is no Param, or a value has the wrong type.
            ValueError: a value is not valid.
        """
        for entry in self.TABLE.values():
            if entry.keyword in kwargs:
                if entry.name in kwargs:
                    raise TypeError(f"{entry.name} and {entry.keyword} are the same Param: pass one of them")
                kwargs[entry.name] = kwargs.pop(entry.keyword)
        for name in kwargs:
            if name not in self.TABLE:
                close = difflib.get_close_matches(name, self.TABLE, 1)
                hint = f"did you mean {close[0]!r}?" if close else f"it has {', '.join(sorted(self.TABLE))}"
                raise TypeError(f"{type(self).__name__} has no Param {name!r}; {hint}")
        return self._set(**kwargs)

    def _set(self: T, **kwargs: Any) -> T:
        for name, value in kwargs.items():
            entry = self.TABLE.get(name)
            param = getattr(self, name)
            if entry is not None and value is None and entry.default is not None:
                self._paramMap.pop(param, None)
                continue
            value = param.typeConverter(value) if value is not None else None
            if entry is not None and entry.inert and value != entry.default and name not in _warned:
                _warned.add(name)
                _LOG.warning("%s=%s has no effect: %s", name, _shown(value), entry.inert)
            self._paramMap[param] = value
        self._check_together()
        return self

    def _check_together(self) -> None:
        """Checks Params that depend on each other; called after each change."""

    def set(self, param: Param, value: Any) -> None:
        """Sets one Param, as :meth:`setParams` does by keyword."""
        self._shouldOwn(param)
        self._set(**{param.name: value})

    def value(self, name: str) -> Any:
        """Returns the value of the Param ``name``: what was set, else its default."""
        return self.getOrDefault(getattr(self, name))

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """Returns all Params by name, as scikit-learn asks for them.

        Args:
            deep: taken for scikit-learn's sake; there are no Params of Params.
        """
        return {name: self.value(name) for name in self.TABLE}

    def set_params(self: T, **params: Any) -> T:
        """Sets Params by keyword, as scikit-learn does it; the same as :meth:`setParams`."""
        return self.setParams(**params)

    def __repr__(self) -> str:
        changed = ((p.name, v) for p, v in self._paramMap.items() if p.name in self.TABLE)
        return f"{type(self).__name__}({', '.join(f'{name}={_shown(value)}' for name, value in changed)})"


def _getter(entry: Entry, accessor: str) -> Any:
    def get(self: TableParams) -> Any:
        return self.value(entry.name)

    get.__name__ = f"get{accessor}"
    get.__doc__ = f"Returns {entry.name}: {entry.doc}."
    return get


def _setter(entry: Entry, accessor: str) -> Any:
    def set_(self: TableParams, value: Any) -> Any:
        return self._set(**{entry.name: value})

    set_.__name__ = f"set{accessor}"
    set_.__doc__ = f"Sets {entry.name} and returns self: {entry.doc}."
    return set_
