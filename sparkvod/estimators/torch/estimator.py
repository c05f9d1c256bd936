"""``TorchEstimator``: trains a PyTorch module on a DataFrame."""

from __future__ import annotations

import functools
import pickle
from collections.abc import Sequence
from typing import Any

from sparkvod.estimators import columns, table, values
from sparkvod.estimators.base import EstimatorBase
from sparkvod.estimators.checks import refuse_classes
from sparkvod.estimators.parts import dump_part, is_builder
from sparkvod.estimators.plan import Plan
from sparkvod.estimators.task import TrainResult
from sparkvod.estimators.torch.model import TorchModel

_PARTS = (
    "loss",
    "loss_weights",
    "loss_constructors",
    "metrics",
    "lr_scheduler",
    "gradient_compression",
    "train_minibatch_fn",
)


class TorchEstimator(EstimatorBase, table=table.of(table.ESTIMATOR, "torch")):
    """Trains a PyTorch module on a Spark DataFrame, on several ranks; ``fit`` returns a :class:`TorchModel`.

    All keyword arguments are Params; see ``explainParams()``. Needed are ``model``, ``optimizer``, ``loss`` (or
    ``loss_constructors``) and ``label_cols``. ``model`` is a module, or a function without arguments that builds one:
    each ``fit`` calls it on the driver, whose weights training begins with, and each rank calls it for the module.

    Features are given to the model in its own floating-point dtype (``input_dtypes`` says otherwise): all columns
    side by side as
    one input, unless ``input_shapes`` has one shape per column. Labels are given to the loss in that dtype too, but
    as class
    indices (int64) where the loss takes these. The learning rate is taken as given, at any number of ranks.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> estimator = TorchEstimator(
        ...     model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), loss=torch.nn.MSELoss(),
        ...     feature_cols=["x1", "x2"], label_cols=["y"], batch_size=64, epochs=3, num_proc=2)
        >>> fitted = estimator.fit(df)
        >>> fitted.transform(df).select("y", "y__output").show()
    """

    framework = "torch"
    run_prefix = "pytorch"
    adapter = "sparkvod.estimators.torch.adapter:TorchAdapter"

    #: What the function that was given as the model has built for this fit.
    _built: Any = None

    @property
    def _model(self) -> Any:
        return self.value("model") if self._built is None else self._built

    def get_model_class(self) -> type[TorchModel]:
        """Returns the class of what ``fit`` returns; override it to return another."""
        return TorchModel

    # ---- checks ---------------------------------------------------------------------------------------------------

    def _check_given(self) -> None:
        """Checks that what training needs was given, and fits together as far as that is known without data."""
        import torch
        from torch import nn

        from sparkvod.estimators.torch import building, given

        self._built = building.build(self.value("model"))
        model, optimizer = self._model, self.value("optimizer")
        if not isinstance(model, nn.Module):
            if isinstance(model, type):
                raise ValueError(
                    f"the class model={model.__name__} was found, a module was expected; write {model.__name__}(...)"
                )
            raise ValueError(
                f"model must be a torch.nn.Module, or a function without arguments that builds one, got a "
                f"{type(model).__name__}"
            )
        if optimizer is None or not (isinstance(optimizer, torch.optim.Optimizer) or callable(optimizer)):
            raise ValueError(
                f"optimizer={optimizer!r} was found, a torch.optim.Optimizer over the model's parameters, or a "
                "function of the "
                "parameters such as functools.partial(torch.optim.Adam, lr=0.01), was expected"
            )
        given.check_model(model)
        if self._built is not None and not _is_function(optimizer):
            raise ValueError(
                f"optimizer must be a function of the parameters where model is a function that builds the module, got "
                f"a {type(optimizer).__name__}: pass for example functools.partial(torch.optim.Adam, lr=0.01)"
            )
        if not _is_function(optimizer):
            given.check_optimizer(optimizer)
        if self.value("loss") is None and self.value("loss_constructors") is None:
            raise ValueError(
                "neither loss nor loss_constructors was found, one of them was expected, such as "
                "loss=torch.nn.MSELoss()"
            )
        if isinstance(self.value("loss"), str):
            raise ValueError(
                f"loss={self.value('loss')!r} was found, a function or module was expected, such as torch.nn.MSELoss()"
            )
        refuse_classes("loss", self.value("loss"), nn.Module)
        refuse_classes("metrics", self.value("metrics"), nn.Module)
        labels = self.value("label_cols")
        weights = self.value("loss_weights")
        if weights is not None and len(weights) != len(labels):
            raise ValueError(f"loss_weights={weights} was found, one number per label ({len(labels)}) was expected")
        for group in self.value("metrics"):
            if isinstance(group, (list, tuple)) and len(group) != len(labels):
                raise ValueError(
                    f"metrics={group!r} was found, groups that are one function, or a list of one function per label "
                    f"({len(labels)}), were expected"
                )

    def _pack(self) -> bytes:
        from sparkvod.estimators.torch import given, packing

        model, optimizer = self._model, self.value("optimizer")
        parts = {name: dump_part(name, self.value(name)) for name in _PARTS}
        parts["model"] = packing.dump_model(model)
        sent = optimizer if _is_function(optimizer) else packing.detach(optimizer, model)
        parts["optimizer"] = dump_part("optimizer", sent)
        schedule = self.value("lr_scheduler")
        if schedule is not None or _is_function(optimizer):  # what they make, of copies, as the ranks will
            copied, sent = packing.load_model(parts["model"]), pickle.loads(parts["optimizer"])
            made = sent.attach(copied) if not _is_function(optimizer) else given.make_optimizer(sent, copied)
            if schedule is not None:
                given.try_scheduler(pickle.loads(parts["lr_scheduler"]), made)
        return pickle.dumps(parts)

    def _plan(self, payload: bytes, features: Sequence[Any], labels: Sequence[Any]) -> Plan:
        from sparkvod.estimators.torch import checking, packing
        from sparkvod.estimators.torch.losses import terms_for

        model = packing.load_model(pickle.loads(payload)["model"])
        inputs = columns.plan_inputs(
            features, self.value("input_shapes"), self.value("input_dtypes"), checking.default_dtype(model)
        )
        tails = columns.label_tails(labels, self.value("label_shapes"))
        terms = None if self.value("loss") is None else terms_for(self.value("loss"), len(labels))
        weighted = self.value("sample_weight_col") is not None
        metrics = pickle.loads(pickle.loads(payload)["metrics"])
        outputs, planned = checking.output_specs(model, inputs, labels, terms, tails, weighted, metrics)
        return Plan(inputs, planned, outputs)

    def _takes(self, plan: Plan) -> Sequence[values.Takes | None]:
        from sparkvod.estimators.torch.losses import terms_for

        if self.value("loss") is None:
            return super()._takes(plan)
        terms = terms_for(self.value("loss"), len(plan.labels))
        return [
            values.Takes(term.name, None if term.is_binary else output.tail[0], term.skipped)
            if term.is_binary or (term.takes_classes and label.dtype == "int64")
            else None
            for term, label, output in zip(terms, plan.labels, plan.outputs, strict=True)
        ]

    def _fingerprint(self) -> dict[str, Any]:
        model, optimizer = self._model, self.value("optimizer")
        found: dict[str, Any] = {
            f"model.{name}": f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
            for name, tensor in model.state_dict().items()
            if hasattr(tensor, "shape")
        }
        found["model"] = type(model).__qualname__
        if _is_function(optimizer):
            found["optimizer"] = _named(optimizer)
        else:
            found["optimizer"] = type(optimizer).__qualname__
            for number, group in enumerate(optimizer.param_groups):
                found |= {
                    f"optimizer.{number}.{k}": repr(v) for k, v in group.items() if k not in ("params", "initial_lr")
                }
        for name in ("loss", "loss_constructors", "lr_scheduler", "train_minibatch_fn", "gradient_compression"):
            value = self.value(name)
            found[name] = _names(value)
        found["metrics"] = _names(self.value("metrics"))
        found["transformation_fn"] = _names(self.value("transformation_fn"))
        found |= {name: self.value(name) for name in ("input_dtypes", "label_shapes")}
        return found

    def _dump(self, name: str, value: Any) -> bytes:
        from sparkvod.estimators.torch import packing

        if name == "model" and not is_builder(value):
            return packing.dump_model(value)
        if name == "optimizer" and not _is_function(value) and self.value("model") is not None:
            value = packing.detach(value, self.value("model"))
        return super()._dump(name, value)

    def _load(self, name: str, content: bytes) -> Any:
        from sparkvod.estimators.torch import packing

        value = packing.load_model(content) if packing.is_model(content) else super()._load(name, content)
        return value.attach(self.value("model")) if isinstance(value, packing.DetachedOptimizer) else value

    # ---- the end --------------------------------------------------------------------------------------------------

    def _trained(self, payload: bytes, result: TrainResult, params: dict[str, Any]) -> TorchModel:
        from sparkvod.estimators.torch import packing

        parts = pickle.loads(payload)
        model = packing.load_model(parts["model"])
        packing.load_weights(model, result.state)
        model.eval()
        given = pickle.loads(parts["optimizer"])
        optimizer = given.attach(model) if isinstance(given, packing.DetachedOptimizer) else given(model.parameters())
        optimizer.load_state_dict(packing.load_state(result.state["optimizer"]))
        packing.load_own(optimizer, model, result.state["optimizer_own"])
        shapes = [[-1, *item["tail"]] for item in params["_metadata"]["inputs"]]
        return self.get_model_class()(
            model=model,
            optimizer=packing.detach(optimizer, model),
            input_shapes=shapes,
            loss=self.value("loss"),
            loss_constructors=self.value("loss_constructors"),
            **params,
        )


def _is_function(optimizer: Any) -> bool:
    import torch

    return not isinstance(optimizer, torch.optim.Optimizer)


def _is_module(value: Any) -> bool:
    from torch import nn

    return isinstance(value, nn.Module)


def _names(value: Any) -> Any:
    return [_names(item) for item in value] if isinstance(value, (list, tuple)) else _named(value)


def _named(value: Any) -> str | None:
    """Returns a name that is the same in another process, with what was bound to it; of a loss, its settings too."""
    if value is None:
        return None
    if _is_module(value):
        plain = {k: v for k, v in vars(value).items() if isinstance(v, (bool, int, float, str)) and k[0] != "_"}
        plain.pop("training", None)
        plain |= {k: v.tolist() for k, v in value.state_dict().items() if hasattr(v, "tolist")}
        return f"{type(value).__qualname__}({', '.join(f'{k}={v!r}' for k, v in plain.items())})"
    if isinstance(value, functools.partial):
        arguments = [repr(a) for a in value.args] + [f"{k}={v!r}" for k, v in value.keywords.items()]
        return f"{_named(value.func)}({', '.join(arguments)})"
    name = getattr(value, "__qualname__", None)
    return str(name) if name else repr(value).split(" at 0x")[0]
