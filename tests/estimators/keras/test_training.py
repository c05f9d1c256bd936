"""What KerasEstimator trains, compared with Keras's own fit over the same rows, in steps of all rows."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyspark.ml.functions import array_to_vector

from tests.estimators.backends import Here, write

keras = pytest.importorskip("keras", reason="the Keras estimator needs keras")
pytest.importorskip(keras.backend.backend(), reason="Keras needs its backend")

from sparkvod.errors import DataError  # noqa: E402
from sparkvod.estimators import Callback, KerasEstimator, KerasModel  # noqa: E402
from sparkvod.keras.callbacks import BestModelCheckpoint  # noqa: E402
from sparkvod.launch.local import LocalLauncher  # noqa: E402

layers, losses = keras.layers, keras.losses
ROWS = 203
RANDOM = np.random.default_rng(5)
X = RANDOM.standard_normal((ROWS, 3)).astype("float32")
Y = (X @ np.array([1, -2, 0.5]) + 0.3).astype("float32")
CLASSES = np.digitize(X[:, 0], [-0.5, 0.5]).astype("int32")
WEIGHTS = RANDOM.uniform(0, 3, ROWS)
WEIGHTS /= WEIGHTS.mean()  # Keras divides by rows, the estimator by weights: then they are the same


@pytest.fixture
def store(tmp_path: Path) -> Any:
    return write(tmp_path / "store", validation=True, x=X, y=Y, z=-Y, c=CLASSES, w=WEIGHTS, s=X[:, 0], t=X[:, 1])


def make(store: Any, model: Any, **params: Any) -> KerasEstimator:
    defaults = {"feature_cols": ["x"], "label_cols": ["y"], "batch_size": ROWS, "epochs": 2, "random_seed": 0}
    run = {"store": store, "backend": Here(), "verbose": 0}
    return KerasEstimator(**{"model": model, **defaults, **run, **params})


def network(*last: Any) -> Any:
    keras.utils.set_random_seed(1)
    return keras.Sequential([keras.Input((3,)), layers.Dense(6, activation="tanh"), *(last or [layers.Dense(1)])])


def fitted_by_keras(model: Any, x: Any, y: Any, **options: Any) -> Any:
    """Returns a copy that Keras fitted, and its history."""
    copy = keras.models.clone_model(model)
    copy.set_weights(model.get_weights())
    options = {"optimizer": keras.optimizers.SGD(0.1, momentum=0.9), **options}
    weights = options.pop("sample_weight", None)
    validation = (x, y) if weights is None else (x, y, weights)
    copy.compile(**options)
    fitted = copy.fit(
        x, y, batch_size=ROWS, epochs=2, shuffle=False, verbose=0, sample_weight=weights, validation_data=validation
    )
    return copy, fitted.history


def assert_same(found: Any, expected: Any, history: Any) -> None:
    for mine, theirs in zip(found.getModel().get_weights(), expected.get_weights(), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-5)
    for name, values in history.items():
        part, name = ("validation", name[4:]) if name.startswith("val_") else ("train", name)
        np.testing.assert_allclose([record[part][name] for record in found.getHistory()], values, rtol=1e-4, atol=1e-5)


def test_a_compiled_model_brings_its_optimizer_losses_and_metrics(store: Any) -> None:
    model = network(layers.Dense(3, activation="softmax"))
    options = {"loss": "sparse_categorical_crossentropy", "metrics": ["accuracy"]}
    expected, history = fitted_by_keras(model, X, CLASSES, **options)
    model.compile(optimizer=keras.optimizers.SGD(0.1, momentum=0.9), **options)
    before = model.get_weights()
    found = make(store, model, label_cols=["c"]).fit_on_parquet()
    assert_same(found, expected, history)
    assert all(np.array_equal(a, b) for a, b in zip(model.get_weights(), before, strict=True))
    assert model.optimizer is not None
    np.testing.assert_allclose(found.getModel().evaluate(X, CLASSES, verbose=0)[0], history["val_loss"][-1], rtol=1e-4)


def test_penalties_statistics_and_a_sum(store: Any) -> None:
    penalty = keras.regularizers.L2(0.05)
    model = network(layers.BatchNormalization(), layers.Dense(1, kernel_regularizer=penalty))
    options = {"loss": losses.MeanAbsoluteError(reduction="sum"), "metrics": ["mse", keras.metrics.R2Score()]}
    optimizer = {"optimizer": keras.optimizers.SGD(0.001)}
    expected, history = fitted_by_keras(model, X, Y[:, None], **options, **optimizer)
    assert_same(
        make(store, model, **options, optimizer=keras.optimizers.SGD(0.001)).fit_on_parquet(), expected, history
    )


def test_inputs_and_outputs_by_name_with_weights(store: Any) -> None:
    keras.utils.set_random_seed(1)
    t, s = keras.Input((1,), name="t"), keras.Input((1,), name="s")
    both = layers.Dense(5, activation="relu")(layers.Concatenate()([t, s]))
    outputs = [layers.Dense(1, name="z")(both), layers.Dense(3, activation="softmax", name="c")(both)]
    model = keras.Model({"t": t, "s": s}, outputs)
    options: dict[str, Any] = {
        "loss": {"z": "mse", "c": losses.SparseCategoricalCrossentropy()},
        "loss_weights": {"z": 0.5, "c": 2.0},
        "metrics": {"z": ["mae"], "c": ["accuracy"]},
    }
    x, y = {"t": X[:, 1:2], "s": X[:, 0:1]}, [-Y, CLASSES]
    expected, history = fitted_by_keras(model, x, y, **options, sample_weight=WEIGHTS.astype("float32"))
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    estimator = make(store, model, feature_cols=["s", "t"], label_cols=["c", "z"], optimizer=optimizer, **options)
    found = estimator.setSampleWeightCol("w").fit_on_parquet()
    assert_same(found, expected, history)


@keras.saving.register_keras_serializable("tests")
class Scaled(layers.Layer):
    def __init__(self, factor: float, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.factor = factor

    def call(self, x: Any) -> Any:
        return x * self.factor


class Own(keras.Model):
    """A model that is built only when it is called, with a dropout that does nothing, in graphs or eagerly."""

    def __init__(self, width: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.width = width
        self.first, self.scaled = layers.Dense(width, activation=soft), Scaled(2.0)
        self.last, self.drop = layers.Dense(1), layers.Dropout(0.0)

    def call(self, x: Any, training: bool = False) -> Any:
        return self.last(self.drop(self.scaled(self.first(x)), training=training))

    def get_config(self) -> dict[str, Any]:
        return {"width": self.width}


def soft(x: Any) -> Any:
    return keras.ops.softplus(x) - 0.5


def own_loss(y_true: Any, y_pred: Any) -> Any:
    return keras.ops.mean(keras.ops.square(y_true - y_pred), axis=-1)


class Largest(keras.metrics.Metric):
    """Adds up, as metrics must."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.total = self.add_weight(shape=(), initializer="zeros", name="total")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.total.assign_add(keras.ops.sum(keras.ops.abs(y_true - y_pred)))

    def result(self) -> Any:
        return self.total


def test_a_model_of_ones_own_with_ones_own_loss_and_metric(store: Any, tmp_path: Path) -> None:
    def fit(passes: int, rows: int) -> Any:
        estimator = make(
            store, Own(4), optimizer=keras.optimizers.Adam(0.05), loss=own_loss, metrics=[Largest(name="e")]
        )
        estimator.setParams(backward_passes_per_step=passes, batch_size=rows, epochs=20)
        return estimator.fit_on_parquet()

    once, often = fit(1, ROWS), fit(3, 100)  # steps of 100, 100 and 3 rows: what is left is applied too
    for found in (once, often):
        first, last = found.getHistory()[0], found.getHistory()[-1]
        assert last["validation"]["loss"] < 0.2 * first["train"]["loss"]
        predicted = np.asarray(keras.ops.convert_to_numpy(found.getModel()(X)))[:, 0]
        assert last["validation"]["loss"] == pytest.approx(np.mean((predicted - Y) ** 2), rel=1e-4)
        assert last["validation"]["e"] == pytest.approx(np.abs(predicted - Y).sum(), rel=1e-4)
        assert type(found.getModel()) is Own


class Stubborn(keras.callbacks.Callback):
    """Makes the second epoch the best."""

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.model.optimizer.learning_rate = [0.01, 0.05, 3.0, 3.0, 3.0, 3.0][epoch]


class Board(keras.callbacks.TensorBoard):
    """Without files of TensorBoard's: those are in test_tensorboard.py."""

    def on_train_begin(self, logs: Any = None) -> None:
        Path(self.log_dir).mkdir(parents=True, exist_ok=True)

    def on_train_end(self, logs: Any = None) -> None:
        pass

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        pass

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        assert logs["val_loss"] > 0
        (Path(self.log_dir) / "epochs").write_text(str(epoch))

    on_train_batch_begin = on_train_batch_end = on_test_begin = on_test_end = on_epoch_begin


class Tells(Callback):
    def __init__(self, file: Path) -> None:
        self.file = file

    def on_epoch_end(self, trainer: Any, epoch: int, record: dict[str, Any]) -> None:
        self.file.write_text(str(epoch))


def test_callbacks_of_keras_and_the_best_weights(store: Any, tmp_path: Path) -> None:
    stop = keras.callbacks.EarlyStopping(monitor="val_loss", patience=3)
    log, board = keras.callbacks.CSVLogger(str(tmp_path / "log.csv")), Board("unused", write_graph=False)
    estimator = make(store, network(), optimizer="sgd", loss="mse", epochs=3, run_id="run")
    estimator.setParams(callbacks=[Stubborn(), stop, board, log, Tells(tmp_path / "told")])
    estimator.setCheckpointCallback(BestModelCheckpoint())
    estimator.fit_on_parquet()
    found = estimator.setEpochs(20).fit_on_parquet()  # goes on, with the patience that is left
    values = [record["validation"]["loss"] for record in found.getHistory()]
    assert len(values) == 5
    assert min(values) == values[1]
    assert found.getModel().evaluate(X, Y, verbose=0) == pytest.approx(values[1], rel=1e-4)
    assert (tmp_path / "told").read_text() == "4"
    assert (tmp_path / "log.csv").read_text().startswith("epoch,loss,val_loss")
    assert (Path(store.get_logs_path("run")) / "epochs").read_text() == "4"


def test_an_embedding_is_trained_as_the_matrix_that_it_is(store: Any) -> None:
    keras.utils.set_random_seed(3)
    code = keras.Input((1,), dtype="int32")
    embedding, last = layers.Embedding(3, 4), layers.Dense(1)
    looked_up = keras.Model(code, last(layers.Flatten()(embedding(code))))
    one_hot = layers.Flatten()(layers.CategoryEncoding(3, output_mode="one_hot")(code))
    matrix, last = layers.Dense(4, use_bias=False), layers.Dense(1)
    multiplied = keras.Model(code, last(matrix(one_hot)))
    multiplied.set_weights(looked_up.get_weights())
    options = {"feature_cols": ["c"], "loss": "mse", "batch_size": 50}
    found = [
        make(store, model, optimizer=keras.optimizers.Adam(0.01), **options).fit_on_parquet().getModel().get_weights()
        for model in (looked_up, multiplied)
    ]
    for mine, theirs in zip(*found, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-5)


class Judging(keras.Model):
    """Computes its loss itself."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.line = layers.Dense(1)

    def call(self, x: Any) -> Any:
        return self.line(x)

    def compute_loss(self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None) -> Any:
        return 2.0 * keras.ops.mean(keras.ops.square(keras.ops.sum(x, -1, keepdims=True) - y_pred))


def test_a_model_that_computes_its_loss(store: Any) -> None:
    model = Judging()
    model(X)
    found = make(store, model, optimizer=keras.optimizers.SGD(0.05), batch_size=60, epochs=20).fit_on_parquet()
    trained = found.getModel()
    np.testing.assert_allclose(trained.get_weights()[0], np.ones((3, 1)), atol=0.05)
    error = np.asarray(keras.ops.convert_to_numpy(trained(X)))[:, 0] - X.sum(1)
    assert found.getHistory()[-1]["validation"]["loss"] == pytest.approx(2 * np.mean(error**2), rel=1e-4)


class Told(Judging):
    """Computes another loss in training."""

    def compute_loss(self, x: Any, y: Any, y_pred: Any, sample_weight: Any, training: bool) -> Any:  # type: ignore[override]
        return (3.0 if training else 1.0) * keras.ops.mean(y_pred * 0.0 + 1.0)


def test_a_loss_is_told_whether_the_model_is_trained(store: Any) -> None:
    model = Told()
    model(X)
    (record,) = make(store, model, optimizer="sgd", epochs=1).fit_on_parquet().getHistory()
    assert record["train"]["loss"] == pytest.approx(3.0)
    assert record["validation"]["loss"] == pytest.approx(1.0)


@pytest.mark.parametrize("rows", [1, 255, 256, 600])
def test_predictions_do_not_depend_on_how_rows_are_cut(rows: int) -> None:
    from sparkvod.estimators.columns import Input
    from sparkvod.estimators.keras import inference, packing

    model, x = network(), np.random.default_rng(rows).standard_normal((rows, 3)).astype("float32")
    predict = inference.prediction(
        packing.dump_model(model), [Input(("x",), (3,), "float32")], ["y"], keras.backend.backend()
    )
    (found,) = predict([x])
    assert found.shape == (rows, 1)
    expected = keras.ops.convert_to_numpy(model(x))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


class Applies(layers.Layer):
    """Has what it applies where nobody looks for it."""

    def __init__(self, things: Any, **options: Any) -> None:
        super().__init__(**options)
        things = [keras.saving.deserialize_keras_object(t) if isinstance(t, dict) else t for t in things]
        self.applied = lambda x: functools.reduce(lambda value, thing: thing(value), things, x)
        self.shown = [keras.saving.serialize_keras_object(thing) for thing in things]

    def call(self, x: Any) -> Any:
        return self.applied(x)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "things": self.shown}


def test_custom_objects_go_where_the_model_goes(store: Any) -> None:
    class Halved(layers.Layer):
        """Which nobody finds by its name, since it is in a function."""

        def call(self, x: Any) -> Any:
            return x / 2

    model = network(Halved(), layers.Dense(1))
    expected, history = fitted_by_keras(model, X, Y, loss="mse")
    options = {"optimizer": keras.optimizers.SGD(0.1, momentum=0.9), "loss": "mse"}
    assert_same(make(store, model, **options).fit_on_parquet(), expected, history)  # since the model has it
    hidden = network(Applies([Halved()]), layers.Dense(1))
    hidden.set_weights(model.get_weights())
    with pytest.raises(DataError, match="pass what Keras cannot find by custom_objects"):
        make(store, hidden, **options).fit_on_parquet()
    found = make(store, hidden, custom_objects={"Halved": Halved}, **options).fit_on_parquet()
    assert_same(found, expected, history)
    again = found._load("model", found._dump("model", found.getModel()))
    np.testing.assert_array_equal(again.get_weights()[0], found.getModel().get_weights()[0])


def test_an_optimizer_that_has_taken_steps_goes_on(store: Any) -> None:
    expected, _ = fitted_by_keras(network(), X, Y, optimizer=keras.optimizers.Adam(0.05), loss="mse")
    expected.fit(X, Y, batch_size=ROWS, epochs=2, shuffle=False, verbose=0)
    model, _ = fitted_by_keras(network(), X, Y, optimizer=keras.optimizers.Adam(0.05), loss="mse")
    found = make(store, model).fit_on_parquet()
    for mine, theirs in zip(found.getModel().get_weights(), expected.get_weights(), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-5)
    assert int(found.getModel().optimizer.iterations) == 0  # what came back are the weights


@pytest.mark.timeout(120)
def test_probabilities_of_whole_labels_from_stored_vectors(spark: Any, tmp_path: Path) -> None:
    """Outputs keep their own type whatever the labels' is, after ``fit`` and for a model that was trained elsewhere."""
    path = str(tmp_path / "vectors")
    frame = spark.range(0, 40, 1, 2).selectExpr("array(double(id % 7), double(id % 3)) as a", "int(id % 2) as b", "id")
    frame.select(array_to_vector("a").alias("v"), "b", (frame["id"] % 3).alias("k")).write.parquet(path)
    df = spark.read.parquet(path)
    keras.utils.set_random_seed(4)
    features = keras.Input((2,))
    outputs = [layers.Dense(1, activation="sigmoid", name="b")(features), layers.Dense(3, name="k")(features)]
    estimator = KerasEstimator(
        model=keras.Model(features, outputs),
        optimizer=keras.optimizers.SGD(0.1),
        loss=["binary_crossentropy", losses.SparseCategoricalCrossentropy(from_logits=True)],
        feature_cols=["v"],
        label_cols=["b", "k"],
        input_shapes=[[-1, 2]],
        backend=Here(),
        store=str(tmp_path / "store"),
        verbose=0,
    )
    trained = estimator.fit(df)
    elsewhere = KerasModel(model=trained.getModel(), feature_cols=["v"], label_cols=["b", "k"], input_shapes=[[-1, 2]])
    for made in (trained, elsewhere):
        found = made.transform(df)
        assert [found.schema[f"{name}__output"].dataType.simpleString() for name in "bk"] == ["float", "vector"]
        table = found.toPandas()
        chances, scores = trained.getModel().predict(np.stack([v.toArray() for v in table["v"]]), verbose=0)
        assert ((chances > 0) & (chances < 1)).all()
        np.testing.assert_allclose(table["b__output"], chances[:, 0], rtol=1e-4)
        np.testing.assert_allclose(np.stack([v.toArray() for v in table["k__output"]]), scores, rtol=1e-4, atol=1e-5)


@pytest.mark.timeout(90)
def test_sync_batch_normalization_is_that_of_one_process_also_where_a_rank_has_no_rows(tmp_path: Path) -> None:
    if keras.backend.backend() != "tensorflow":
        pytest.skip("SyncBatchNormalization is TensorFlow's")
    from sparkvod.tensorflow import SyncBatchNormalization

    # Rank 1 has fewer rows in the first steps, and none in the last ones.
    store, rows = write(tmp_path / "store", row_group_size=150, x=X, y=Y), {}

    def fitted(norm: Any, backend: Any, batch: int) -> Any:
        keras.utils.set_random_seed(1)
        model = network(norm, layers.Dropout(0.0), layers.Dense(1))
        options = {"optimizer": keras.optimizers.SGD(0.1), "loss": "mse", "metrics": ["mae"], "batch_size": batch}
        found = make(store, model, backend=backend, **options).fit_on_parquet()
        rows[batch] = [worker["rows"] for worker in found.workers]
        return found

    one = fitted(layers.BatchNormalization(momentum=0.5), Here(), 40)
    two = fitted(SyncBatchNormalization(momentum=0.5), LocalLauncher(2, verbose=0, timeout=60), 20)
    assert rows[20][1] < rows[20][0]
    assert sum(rows[20]) == sum(rows[40])
    for mine, theirs in zip(two.getModel().get_weights(), one.getModel().get_weights(), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-6)
    assert two.getHistory()[-1]["train"] == pytest.approx(one.getHistory()[-1]["train"], rel=1e-4)
