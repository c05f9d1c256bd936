"""``KerasEstimator``: trains a Keras 3 model on a DataFrame."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sparkvod.estimators import columns, table, values
from sparkvod.estimators.base import EstimatorBase
from sparkvod.estimators.keras.model import KerasModel
from sparkvod.estimators.parts import built, is_builder
from sparkvod.estimators.plan import Plan, Planned
from sparkvod.estimators.task import TrainResult

_COMPILED = ("loss", "loss_weights", "metrics", "weighted_metrics")


class KerasEstimator(EstimatorBase, table=table.of(table.ESTIMATOR, "keras")):
    """Trains a ``keras.Model`` on a Spark DataFrame, on several ranks; ``fit`` returns a :class:`KerasModel`.

    All keyword arguments are Params; see ``explainParams()``. Needed are ``model`` and ``label_cols``, and
    ``optimizer`` and ``loss`` unless the model is compiled: what is not given is taken from there. ``model`` is a
    ``keras.Model``, or a function without arguments that returns one: each ``fit`` calls it once, on the driver.

    Features are given to the model in the dtypes and shapes of its own inputs: all columns side by side in its only
    input, or one column in each. The learning rate is taken as given, at any number of ranks.

    Example:
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        >>> estimator = KerasEstimator(
        ...     model=model, optimizer="adam", loss="mse",
        ...     feature_cols=["x1", "x2"], label_cols=["y"], batch_size=64, epochs=3, num_proc=2)
        >>> fitted = estimator.fit(df)
        >>> fitted.transform(df).select("y", "y__output").show()
    """

    framework = "keras"
    run_prefix = "keras"
    adapter = "sparkvod.estimators.keras.adapter:KerasAdapter"

    #: What the function that was given as the model has built for this fit.
    _built: Any = None

    @property
    def _model(self) -> Any:
        return self.value("model") if self._built is None else self._built

    def get_model_class(self) -> type[KerasModel]:
        """Returns the class of what ``fit`` returns; override it to return another."""
        return KerasModel

    # ---- checks -----------------------------------------------------------------------------------------------------

    def _given(self) -> dict[str, Any]:
        """Returns optimizer, loss, metrics and so on: the Params, or else what the model was compiled with."""
        model = self._model
        compiled = dict(getattr(getattr(model, "_compile_config", None), "config", {}))
        compiled |= {"optimizer": getattr(model, "optimizer", None)}
        found = {}
        for name in ("optimizer", "loss", "loss_weights", "metrics"):
            given = self.value(name)
            found[name] = given if given not in (None, []) else compiled.get(name)
        own_metrics = self.value("metrics") not in (None, [])
        found["weighted_metrics"] = None if own_metrics else compiled.get("weighted_metrics")
        return found

    def _check_given(self) -> None:
        """Checks that what training needs was given, and fits together as far as that is known without data."""
        import keras

        from sparkvod.estimators.keras import given, monitoring

        self._built = built(self.value("model"), keras.Model, "keras.Model")
        given.check(self, self._model, self._given())
        monitoring.check_packages(self.value("callbacks"))

    def _check_early(self, dataset: Any, packed: Planned, asked: dict[str, Any]) -> Planned:
        self._check_validation(bool(asked["validation"]))
        return super()._check_early(dataset, packed, asked)

    def _check_prepared(self, data: Any, features: list[str]) -> None:
        self._check_validation(data.val is not None)
        super()._check_prepared(data, features)

    def _check_validation(self, there: bool) -> None:
        from sparkvod.estimators.keras import given, monitoring

        monitoring.check_validation(self.value("callbacks"), given.best(self.value("checkpoint_callback")), there)

    def _pack(self) -> bytes:
        import keras

        from sparkvod.estimators.keras import building, given

        parts = self._given()
        parts |= given.optimizer(parts["optimizer"], self._model)
        parts["gradient_compression"] = self.value("gradient_compression")
        parts["best"] = given.best(self.value("checkpoint_callback"))
        parts |= {"backend": keras.backend.backend(), "floatx": keras.backend.floatx()}
        return building.pack(parts, self._model, dict(self.value("custom_objects") or {}))

    def _completed(self, payload: bytes, features: Sequence[Any]) -> bytes:
        from sparkvod.estimators.keras import building, forgetting, given, model_io

        model = self._model
        if not forgetting.may_forget(model) or not forgetting.forgotten(model, building.Parts(payload).model()):
            return payload
        if not model.built:
            inputs = model_io.plan_inputs(model, features, self.value("input_shapes"), self.value("input_dtypes"))
            given.build(model_io.Feed(model, inputs, self.value("label_cols")))
        payload = self._pack()
        forgetting.refuse(model, forgetting.forgotten(model, building.Parts(payload).model()))
        return payload

    def _plan(self, payload: bytes, features: Sequence[Any], labels: Sequence[Any]) -> Plan:
        from sparkvod.estimators.keras import adding, building, given, model_io, monitoring

        parts = building.Parts(payload)
        model = parts.model()
        inputs = model_io.plan_inputs(model, features, self.value("input_shapes"), self.value("input_dtypes"))
        tails = columns.label_tails(labels, self.value("label_shapes"))
        weighted = self.value("sample_weight_col") is not None
        loop, planned, outputs = building.build(parts, model, inputs, labels, tails, weighted)
        adding.require_sums(loop, planned, labels, [output.tail for output in outputs], weighted)
        monitoring.check_names(self.value("callbacks"), given.best(self.value("checkpoint_callback")), loop)
        self._terms = loop.terms
        return Plan(inputs, planned, outputs)

    def _takes(self, plan: Plan) -> Sequence[values.Takes | None]:
        return [
            values.Takes(term.name, None if term.is_binary else output.tail[-1], term.ignored)
            if term.is_binary or term.takes_classes
            else None
            for term, output in zip(self._terms, plan.outputs, strict=True)
        ]

    def _fingerprint(self) -> dict[str, Any]:
        from sparkvod.estimators.keras import given

        found = given.fingerprint(self._model, self._given())
        names = ("input_shapes", "input_dtypes", "label_shapes", "gradient_compression", "transformation_fn")
        found |= {name: given.named(self.value(name)) for name in names}
        return found

    def _takes_text(self) -> bool:
        from sparkvod.estimators.keras import model_io

        named = self.value("input_dtypes") or []
        return "string" in [*named, *model_io.input_dtypes(self._model)]

    def _env(self) -> dict[str, str | None]:
        import keras

        return {"KERAS_BACKEND": keras.backend.backend(), **(self.value("backend_env") or {})}

    def _run_callbacks(self, store: Any, run_id: str) -> list[Any]:
        from sparkvod.estimators.keras import given

        return given.callbacks(self.value("callbacks"), store, run_id)

    # ---- saving -----------------------------------------------------------------------------------------------------

    def _dump(self, name: str, value: Any) -> bytes:
        from sparkvod.estimators.keras import forgetting, packing
        from sparkvod.estimators.keras.custom import found_in_parts

        if is_builder(value) and name == "model":
            return super()._dump(name, value)
        if name == "model":
            content = packing.dump_model(value, self.value("custom_objects"), bare=False)
            if forgetting.may_forget(value):
                forgetting.refuse(value, forgetting.forgotten(value, packing.load_model(content)))
            return content
        apart = packing.taken_apart(value, self.value("custom_objects"))
        if name in ("optimizer", "loss", "metrics"):
            apart = packing.WithObjects(apart, {**found_in_parts(value), **(self.value("custom_objects") or {})})
        return super()._dump(name, apart)

    def _load(self, name: str, content: bytes) -> Any:
        from sparkvod.estimators.keras import packing

        if name == "model" and packing.is_model(content):
            return packing.load_model(content, compiled=True)
        return packing.put_together(super()._load(name, content), {})

    # ---- the end ----------------------------------------------------------------------------------------------------

    def _trained(self, payload: bytes, result: TrainResult, params: dict[str, Any]) -> KerasModel:
        from sparkvod.estimators.keras import building, given, packing
        from sparkvod.estimators.keras.model_io import Feed

        parts = building.Parts(payload)
        model = parts.model()
        inputs = [
            columns.Input(tuple(i["columns"]), tuple(i["tail"]), i["dtype"]) for i in params["_metadata"]["inputs"]
        ]
        feed = Feed(model, inputs, params["label_columns"])
        given.build(feed)
        packing.load_variables(model.weights, result.state["model"])
        model.compile(
            optimizer=parts.optimizer(),
            **{name: building.in_model_order(feed, parts.made(name)) for name in _COMPILED},
        )
        return self.get_model_class()(
            model=model,
            custom_objects=parts.custom_objects,
            _floatx=parts.raw("floatx"),
            **params,
        )
