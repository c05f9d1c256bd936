"""Scala UDFs in a classic DataFrame's plan: which are Spark ML's own, and when two of them are the same function.

``VectorAssembler.transform`` and its like put a new function object into the plan at every call, so Spark never finds
two such plans equal. But the functions can be serialised, and two with equal bytes have the same code and the same
captured values. A plan is *normalised* by putting one object in the place of all functions with equal bytes; then
Spark's own comparison does the rest.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

_TRUSTED = ("org.apache.spark.ml.feature.", "org.apache.spark.ml.functions", "org.apache.spark.sql.ml.")
"""Where the code of a UDF must be: Spark ML's transformers of features and its conversions of vectors. All of them are
functions of the row alone."""
_CAPTURED = ("org.apache.spark.", "scala.", "java.lang.", "java.util.", "[")


class UnknownFunctionError(Exception):
    """A function in the plan is not known to be deterministic; the text says which."""


@dataclass(frozen=True)
class Normalised:
    """A normalised plan.

    Attributes:
        plan: the analysed plan of Spark's JVM.
        names: the names under which its UDFs are shown in its text.
        functions: digest of a function -> the object that stands for it.
    """

    plan: Any
    names: frozenset[str] = frozenset()
    functions: dict[bytes, Any] = field(default_factory=dict)

    def equals(self, other: Normalised) -> bool:
        """Tells whether both plans give the same rows, in columns of whatever names."""
        if self.functions.keys() != other.functions.keys():
            return False
        plan = _Normaliser(dict(self.functions)).plan(other.plan) if self.functions else other.plan
        return bool(self.plan.sameResult(plan))


def normalise(df: Any) -> Normalised | None:
    """Returns the normalised plan of a DataFrame, None in Spark Connect, where there is no JVM to ask.

    Raises:
        UnknownFunctionError: the plan has a UDF that is not Spark ML's own.
    """
    if not hasattr(df, "_jdf"):
        return None
    plan = df._jdf.queryExecution().analyzed()
    patterns = _jvm().org.apache.spark.sql.catalyst.trees.TreePattern
    if plan.containsPattern(patterns.PYTHON_UDF()):
        raise UnknownFunctionError("a Python UDF")
    if not plan.containsPattern(patterns.SCALA_UDF()):
        return Normalised(plan)
    normaliser = _Normaliser({})
    plan = normaliser.plan(plan)
    return Normalised(plan, frozenset(normaliser.names), normaliser.functions)


def local_bytes(plan: Any) -> int:
    """Returns about how many bytes of local data a plan holds in the JVM."""
    leaves = _list(plan.collectLeaves())
    local = [leaf for leaf in leaves if leaf.getClass().getSimpleName() == "LocalRelation"]
    return sum(int(leaf.stats().sizeInBytes()) for leaf in local)


class _Normaliser:
    """Rebuilds a plan with known functions; what holds no UDF stays the very same object."""

    def __init__(self, functions: dict[bytes, Any]) -> None:
        self.functions = functions
        self.names: set[str] = set()
        self._jvm = _jvm()
        self._pattern = self._jvm.org.apache.spark.sql.catalyst.trees.TreePattern.SCALA_UDF()

    def plan(self, node: Any) -> Any:
        """Returns the plan, normalised."""
        if not node.containsPattern(self._pattern):
            return node
        old = _list(node.children())
        node = node.withNewChildren(self._seq([self.plan(child) for child in old]))
        expressions = _list(node.expressions())
        if not any(expression.containsPattern(self._pattern) for expression in expressions):
            return node
        kind, child = node.getClass().getSimpleName(), node.children().apply(0)
        if kind == "Project":
            return node.copy(self._seq([self._expression(e) for e in _list(node.projectList())]), child)
        if kind == "Filter":
            return node.copy(self._expression(node.condition()), child)
        raise UnknownFunctionError(f"a UDF in the operator {kind}")

    def _expression(self, node: Any) -> Any:
        if not node.containsPattern(self._pattern):
            return node
        old = _list(node.children())
        is_udf = node.getClass().getSimpleName() == "ScalaUDF"
        if not is_udf and not any(child.containsPattern(self._pattern) for child in old):
            raise UnknownFunctionError("a UDF in a subquery")
        node = node.withNewChildren(self._seq([self._expression(child) for child in old]))
        if not is_udf:
            return node
        name = str(node.toString()).partition("(")[0]
        self.names.add(name.lower())
        function = self._known(node.function(), name)
        return node.copy(
            function,
            node.dataType(),
            node.children(),
            node.inputEncoders(),
            node.outputEncoder(),
            node.udfName(),
            node.nullable(),
            node.udfDeterministic(),
        )

    def _known(self, function: Any, name: str) -> Any:
        """Returns the object that stands for a function."""
        where = [function.getClass().getName()]
        methods = [m for m in function.getClass().getDeclaredMethods() if m.getName() == "writeReplace"]
        if methods:  # a lambda, whose serialised form tells its code and what it captured
            methods[0].setAccessible(True)
            form = methods[0].invoke(function, _gateway().new_array(self._jvm.java.lang.Object, 0))
            where = [str(form.getImplClass()).replace("/", "."), str(form.getCapturingClass()).replace("/", ".")]
            for number in range(form.getCapturedArgCount()):
                captured = form.getCapturedArg(number)
                kind = captured.getClass().getName() if hasattr(captured, "_target_id") else "java.lang."
                if not kind.startswith(_CAPTURED):
                    raise UnknownFunctionError(f"the UDF {name} with a {kind}")
        if not all(place.startswith(_TRUSTED) for place in where):
            raise UnknownFunctionError(f"the UDF {name} of {where[0]}")
        digest = hashlib.sha256(bytes(self._jvm.org.apache.spark.util.Utils.serialize(function))).digest()
        return self.functions.setdefault(digest, function)

    def _seq(self, items: list[Any]) -> Any:
        return self._jvm.PythonUtils.toSeq(items)


def _gateway() -> Any:
    from pyspark import SparkContext

    return SparkContext._gateway


def _jvm() -> Any:
    return _gateway().jvm


def _list(seq: Any) -> list[Any]:
    return [seq.apply(index) for index in range(seq.size())]
