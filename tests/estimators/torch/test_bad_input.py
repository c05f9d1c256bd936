"""Bad input to TorchEstimator: a clear error before anything starts."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from sparkvod.errors import DataError, LaunchError, StoreError
from sparkvod.estimators import TorchEstimator, TorchModel
from sparkvod.estimators.trying import CannotTakeRows
from tests.contracts.estimator import FEATURES, frame
from tests.estimators.backends import Never

torch = pytest.importorskip("torch", reason="the PyTorch estimator needs torch")
nn = torch.nn


@pytest.fixture(scope="module")
def df(spark: Any) -> Any:
    return frame(spark)


def make(model: Any = None, **params: Any) -> TorchEstimator:
    model = nn.Linear(4, 1) if model is None else model
    defaults = {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "loss": nn.MSELoss(),
        "feature_cols": FEATURES,
        "label_cols": ["y"],
        "backend": Never(),
        "verbose": 0,
    }
    return TorchEstimator(**{**defaults, **params})


class Unpicklable(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 1)
        self.lock = threading.Lock()


class Summed(nn.Linear):
    def forward(self, x: Any) -> Any:
        return super().forward(x).sum()


class Named(nn.Linear):
    def forward(self, x: Any) -> Any:
        return {"y": super().forward(x)}


def frozen() -> Any:
    return nn.Linear(4, 1).requires_grad_(False)


def embedding(**options: Any) -> Any:
    return nn.Sequential(nn.Embedding(5, 3, **options), nn.Flatten(), nn.Linear(12, 1))


def stranger() -> Any:
    return torch.optim.SGD(nn.Linear(9, 9).parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("params", "error", "words"),
    [
        ({"label_cols": None}, ValueError, "no label_cols were found"),
        ({"optimizer": None}, ValueError, "optimizer=None was found"),
        ({"optimizer": "sgd"}, ValueError, "optimizer='sgd' was found"),
        ({"optimizer": stranger()}, ValueError, "that are not the model's was found"),
        ({"loss": None}, ValueError, "neither loss nor loss_constructors"),
        ({"loss": "mse"}, ValueError, "loss='mse' was found"),
        ({"loss": [nn.MSELoss(), nn.MSELoss()]}, ValueError, "loss with 2 functions"),
        ({"loss": nn.MSELoss}, ValueError, r"the class MSELoss was found in loss, .* write MSELoss\(\)"),
        ({"loss": [nn.L1Loss]}, ValueError, r"the class L1Loss was found in loss"),
        ({"metrics": [[nn.L1Loss]]}, ValueError, r"the class L1Loss was found in metrics, .* write L1Loss\(\)"),
        ({"loss_weights": [0.5, 0.5]}, ValueError, "one number per label"),
        ({"metrics": [[nn.MSELoss(), nn.MSELoss()]]}, ValueError, "one function per label"),
        ({"model": Unpicklable()}, TypeError, "model of class Unpicklable cannot be pickled"),
        ({"loss": Unpicklable()}, TypeError, "loss cannot be pickled"),
        ({"metrics": [threading.Lock().acquire]}, TypeError, "metrics cannot be pickled"),
        ({"model": frozen()}, ValueError, "2 parameters, all of them with requires_grad=False, was found"),
        ({"model": nn.LazyLinear(1)}, ValueError, r"no shape yet was found \(weight, bias\).* call it once"),
        ({"model": embedding(sparse=True)}, ValueError, r"sparse=True were found \(0\).* with sparse=False"),
        ({"optimizer": torch.optim.LBFGS}, ValueError, "LBFGS was found, whose step.. needs a closure"),
        ({"optimizer": lambda p: None}, ValueError, "an optimizer function that returned None was found"),
        ({"optimizer": lambda: 0}, ValueError, "the optimizer function failed on the driver .TypeError"),
        ({"lr_scheduler": lambda optimizer: None}, ValueError, "an lr_scheduler function that returned None was found"),
        ({"lr_scheduler": lambda o: o.nothing}, ValueError, "the lr_scheduler function failed .AttributeError"),
        ({"metrics": [lambda o, y: o]}, DataError, r"a metric .* a Tensor of shape \[3, 1\] was found for label 'y'"),
        # labels [rows] against outputs [rows, 3]: with three rows they would broadcast
        ({"model": nn.Linear(4, 3), "loss": lambda o, y: ((o - y) ** 2).mean()}, DataError, "the loss failed on them"),
        (
            {"model": nn.Linear(4, 3), "loss": lambda o, y: o.sum(), "metrics": [lambda o, y: (o - y).mean()]},
            DataError,
            r"a metric .* unless the rows are as many as the output has numbers \(3\)",
        ),
        # columns
        ({"feature_cols": ["x0", "x7"]}, DataError, "no column 'x7' in the DataFrame.*x0, x1, x2, row"),
        ({"label_cols": ["Y"]}, DataError, "no column 'Y' in the DataFrame"),
        ({"sample_weight_col": "w"}, DataError, "no column 'w'"),
        ({"validation": "test"}, DataError, "no column 'test'"),
        ({"validation": "x0"}, DataError, "boolean or a whole number was expected"),
        # the model and the columns
        ({"model": nn.Linear(5, 1)}, DataError, r"the model cannot take its 1 input of \[rows, 4\] float32"),
        ({"input_shapes": [[-1, 5]]}, DataError, r"shape \[-1, 5\] was found"),
        ({"model": nn.Linear(4, 3)}, DataError, r"output for label 'y' has the shape \[rows, 3\], the label \[rows\]"),
        ({"label_cols": ["y", "weight"]}, DataError, "a model with 1 outputs was found, one per label"),
        ({"model": Summed(4, 1)}, DataError, "do not reduce over the rows"),
        ({"model": Named(4, 1)}, TypeError, "a model that returns a dict"),
        (
            {"loss": nn.CrossEntropyLoss(), "model": nn.Sequential(nn.Linear(4, 1), nn.Flatten(0))},
            DataError,
            "one output per class",
        ),
        ({"loss": lambda output, label: output.detach().sum()}, DataError, "does not depend on the output"),
        ({"loss": lambda output, label: 0.0}, DataError, "returned a float"),
        ({"loss": lambda o, y: (o - y).mean(), "sample_weight_col": "weight"}, DataError, "one number per batch"),
        ({"label_shapes": [[-1, 2]]}, DataError, "label 'y'"),
        ({"input_dtypes": ["int64"]}, DataError, "cannot take its 1 input"),
    ],
)
def test_before_any_job(df: Any, params: dict[str, Any], error: type[Exception], words: str, tmp_path: Path) -> None:
    if "model" in params and "optimizer" not in params:
        params = {**params, "optimizer": torch.optim.SGD(params["model"].parameters(), lr=0.1)}
    with pytest.raises(error, match=words) as caught:
        make(**params, store=str(tmp_path / "store")).fit(df)
    if isinstance(caught.value, CannotTakeRows):  # it was tried on the first rows too, for which the data were prepared
        assert not (tmp_path / "store" / "runs").exists()
    else:
        assert not (tmp_path / "store").exists()


@pytest.mark.parametrize(
    ("expression", "words"),
    [
        ("if(id = 700, null, x0) as x0", "x0.*null"),
        ("if(id = 700, float('nan'), x0) as x0", "x0.*NaN"),
        ("string(x0) as x0", "column 'x0' has the type string, which cannot become a tensor"),
        ("array(x0, array(1.0f)) as x0", "cannot become a tensor"),
        ("if(id < 600, array(x0), array(x0, x0)) as x0", "x0"),
    ],
)
def test_values(df: Any, tmp_path: Path, expression: str, words: str) -> None:
    if "array(x0, array" in expression:
        expression = "array(array(x0)) as x0"
    others = [name for name in df.columns if name != "x0"]
    with pytest.raises(DataError, match=words):
        make(store=str(tmp_path)).fit(df.selectExpr(*others, expression))
    assert not list(tmp_path.glob("**/*.parquet"))


def test_what_a_given_optimizer_trains() -> None:
    from sparkvod.estimators.torch import given

    model = nn.Linear(4, 1)
    with pytest.raises(ValueError, match="a model with no parameters was found"):
        given.check_model(nn.Flatten(0))
    with pytest.raises(ValueError, match="LBFGS was found, whose step"):
        given.check_optimizer(torch.optim.LBFGS(model.parameters()))
    model.bias.requires_grad_(False)
    given.check_model(model)
    with pytest.raises(ValueError, match=r"an optimizer \(SGD\) over parameters that all have requires_grad=False"):
        given.check_optimizer(torch.optim.SGD([model.bias], lr=0.1))
    for optimizer in (torch.optim.SGD, torch.optim.Adam, torch.optim.SparseAdam, torch.optim.Rprop):
        given.check_optimizer(optimizer(model.parameters()))

    def asks_the_world(optimizer: Any) -> Any:
        import sparkvod.torch as hvd

        return torch.optim.lr_scheduler.StepLR(optimizer, hvd.size())

    given.try_scheduler(asks_the_world, torch.optim.SGD(model.parameters()))  # only the ranks can say


def test_no_model(df: Any) -> None:
    with pytest.raises(ValueError, match="no model was found"):
        make().setModel(None).fit(df)
    with pytest.raises(ValueError, match=r"model must be a torch.nn.Module, .*, got a int"):
        make().setModel(3).fit(df)


def test_no_instances(df: Any) -> None:
    with pytest.raises(ValueError, match=r"the class model=Linear was found, .* write Linear\(\.\.\.\)"):
        make().setModel(nn.Linear).fit(df)
    with pytest.raises(TypeError, match=r"metrics=L1Loss\(\) was found, .* write metrics=\[f\]"):
        make(metrics=nn.L1Loss())
    schedule = torch.optim.lr_scheduler.StepLR(stranger(), 1)
    with pytest.raises(TypeError, match=r"lr_scheduler=.* was found, .* write functools.partial\(torch.optim"):
        make(lr_scheduler=schedule)


def test_no_spark_dataframe(df: Any) -> None:
    rows = df.limit(3).toPandas()
    with pytest.raises(TypeError, match=r"fit was called with a pandas DataFrame, .* spark.createDataFrame"):
        make().fit(rows)
    frame_like = type("DataFrame", (), {"__module__": "pyspark.pandas.frame"})()
    with pytest.raises(TypeError, match=r"fit needs a Spark DataFrame, got one of pandas on Spark: call .to_spark\(\)"):
        make().fit(frame_like)
    with pytest.raises(TypeError, match=r"fit was called with a builtins list, "):
        make().fit([1, 2])
    model = TorchModel(model=nn.Linear(4, 1), feature_columns=FEATURES, label_columns=["y"])
    with pytest.raises(TypeError, match=r"transform was called with a pandas DataFrame, .* spark.createDataFrame"):
        model.transform(rows)


def test_columns_that_transform_would_add(df: Any) -> None:
    with pytest.raises(DataError, match="already has the output columns Y__output: .*drop or rename yours before fit"):
        make().fit(df.withColumn("Y__output", df["y"]))


def test_features_by_default_are_explained(df: Any, tmp_path: Path) -> None:
    words = r"'name' has the type string, .*It is a feature because no feature_cols were found.* pass feature_cols"
    with pytest.raises(DataError, match=words):
        make(feature_cols=None, store=str(tmp_path)).fit(df.selectExpr(*FEATURES, "y", "string(id) as name"))
    df.limit(9).selectExpr(*FEATURES, "y", "string(id) as name").write.parquet(f"{tmp_path}/intermediate_train_data")
    with pytest.raises(DataError, match=words):
        make(feature_cols=None, store=str(tmp_path)).fit_on_parquet()
    with pytest.raises(DataError, match="StringIndexer") as caught:
        make(label_cols=["name"], store=str(tmp_path)).fit(df.selectExpr(*FEATURES, "string(id) as name"))
    assert "no feature_cols" not in str(caught.value)


def test_fewer_epochs_than_are_done(df: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    options = {"backend": None, "num_proc": 1, "batch_size": 512, "store": str(tmp_path), "run_id": "r"}
    make(**options, epochs=2, random_seed=1).fit(df)
    caplog.clear()
    model = make(**options, epochs=1, random_seed=1).fit(df)
    assert len(model.getHistory()) == 2
    found = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert len(found) == 1
    assert "run 'r' has done 2 epochs and epochs=1 was found: nothing is trained" in found[0]


def test_no_rows(df: Any, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no rows"):
        make(store=str(tmp_path)).fit(df.filter("id < 0"))
    with pytest.raises(DataError, match="validation"):
        make(store=str(tmp_path), validation="none").fit(df.selectExpr("*", "false as none"))


def test_a_vector_of_another_width_is_seen_after_preparing_at_the_latest(df: Any, tmp_path: Path) -> None:
    vectors = df.selectExpr("array(x0, x1, x2) as v", "y")
    with pytest.raises(DataError, match=r"the model cannot take its 1 input of \[rows, 3\]"):
        make(feature_cols=["v"], store=str(tmp_path)).fit(vectors)


def test_more_ranks_than_slots(df: Any, tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="9 ranks were asked for, and this Spark application has slots for 4"):
        make(backend=None, num_proc=9, store=str(tmp_path / "store")).fit(df)
    assert not (tmp_path / "store").exists()


def test_dynamic_allocation(df: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sparkvod.launch import _spark_slots

    conf = {"spark.master": "spark://host:7077", "spark.dynamicAllocation.enabled": "true"}
    monkeypatch.setattr(_spark_slots, "conf_of", lambda spark: conf.get)
    with pytest.raises(LaunchError, match=r"spark.dynamicAllocation.enabled=true was found.*SPARK-24942"):
        make(backend=None, num_proc=2, store=str(tmp_path / "store")).fit(df)
    assert not (tmp_path / "store").exists()


def test_a_store_that_cannot_be_written(df: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StoreError, match="cannot be written"):
        make(store=str(tmp_path / "file" / "store")).fit(df)


def test_no_store_on_a_cluster(df: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from sparkvod.estimators import base

    monkeypatch.setattr(base, "on_this_host", lambda spark: False)
    with pytest.raises(ValueError, match=r"no store was found.* pass store=Store.create"):
        make().fit(df)


def test_a_temporary_store_goes_with_its_estimator(df: Any) -> None:
    estimator = make(backend=None, num_proc=1, batch_size=512)
    estimator.fit(df)
    folder = Path(estimator._folder.path)
    assert folder.exists()
    copied = estimator.copy()
    del estimator
    assert folder.exists()
    del copied
    assert not folder.exists()


def three(model: Any = None, **params: Any) -> TorchEstimator:
    """Returns an estimator with three outputs, for a loss over classes."""
    return make(nn.Linear(4, 3) if model is None else model, **{"loss": nn.CrossEntropyLoss(), **params})


class Started(Exception):
    """Says that the labels were found to be good."""


class Starts(Never):
    def run(self, fn: Any, args: Any = (), kwargs: Any = None, env: Any = None) -> list[Any]:
        raise Started


FRACTIONS = "label 'k' has fractional values .*, {} needs whole class numbers"
OUTSIDE = r"label 'k' has values 0..3, the model has 3 outputs; {}"


@pytest.mark.parametrize(
    ("label", "params", "words"),
    [
        ("0.9 + 1.9 * rand(1)", {}, FRACTIONS.format("CrossEntropyLoss")),
        ("0.9 + 1.9 * rand(1)", {"loss": nn.functional.cross_entropy}, FRACTIONS.format("cross_entropy")),
        ("id / 4", {"loss": nn.NLLLoss()}, FRACTIONS.format("NLLLoss")),
        ("id % 4", {}, OUTSIDE.format("CrossEntropyLoss")),
        ("double(id % 4)", {"loss": nn.NLLLoss(reduction="sum")}, OUTSIDE.format("NLLLoss")),
        ("id % 4", {"loss": nn.MultiMarginLoss()}, OUTSIDE.format("MultiMarginLoss")),
        ("id % 3 - 1", {"validation": 0.3}, "label 'k' has values -1..1, the model has 3 outputs"),
        ("id % 3", {"model": nn.Linear(4, 1), "loss": nn.BCEWithLogitsLoss()}, "values 0..2, BCEWithLogitsLoss needs"),
    ],
)
def test_labels_that_the_loss_cannot_take(df: Any, tmp_path: Path, label: str, params: Any, words: str) -> None:
    data = df.selectExpr("*", f"{label} as k")
    with pytest.raises(DataError, match=words):
        three(**params, store=str(tmp_path), label_cols=["k"]).fit(data)


@pytest.mark.parametrize(
    ("label", "params"),
    [
        ("double(id % 3)", {}),
        ("if(id % 7 = 0, -100, id % 3)", {"loss": nn.CrossEntropyLoss(reduction="sum")}),
        ("if(id % 7 = 0, 9, id % 3)", {"loss": nn.NLLLoss(ignore_index=9)}),
        ("id / 4", {"transformation_fn": lambda batch: batch}),
        ("id % 2 = 0", {"model": nn.Linear(4, 1), "loss": nn.BCEWithLogitsLoss()}),
    ],
)
def test_labels_that_it_takes(df: Any, tmp_path: Path, label: str, params: Any) -> None:
    data = df.selectExpr("*", f"{label} as k")
    with pytest.raises(Started):
        three(**params, store=str(tmp_path), label_cols=["k"], backend=Starts()).fit(data)
