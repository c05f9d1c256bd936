"""What TorchEstimator trains, compared with a loop of plain PyTorch over the same rows."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sparkvod.errors import DataError
from sparkvod.estimators import Callback, TorchEstimator
from sparkvod.launch.local import LocalLauncher
from tests.estimators.backends import Here, Never, write

torch = pytest.importorskip("torch", reason="the PyTorch estimator needs torch")
F = torch.nn.functional

ROWS = 203
RANDOM = np.random.default_rng(5)
X = RANDOM.standard_normal((ROWS, 3)).astype("float32")
Y = (X @ np.array([1, -2, 0.5]) + 0.3).astype("float64")
CLASSES = (np.digitize(X[:, 0], [-0.5, 0.5])).astype("int32")
WEIGHTS = RANDOM.uniform(0, 3, ROWS)


@pytest.fixture
def store(tmp_path: Path) -> Any:
    return write(tmp_path / "store", validation=True, x=X, y=Y, z=-Y, c=CLASSES, w=WEIGHTS, s=X[:, 0], t=X[:, 1])


def network(outputs: int = 1) -> Any:
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(3, 6), torch.nn.Tanh(), torch.nn.Linear(6, outputs))


def make(store: Any, model: Any, **params: Any) -> TorchEstimator:
    defaults = {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "loss": torch.nn.MSELoss(),
        "feature_cols": ["x"],
        "label_cols": ["y"],
        "batch_size": ROWS,
        "epochs": 3,
        "store": store,
        "backend": Here(),
        "verbose": 0,
        "random_seed": 0,
    }
    return TorchEstimator(**{**defaults, **params})


def flat(model: Any) -> Any:
    return torch.cat([p.detach().ravel() for p in model.parameters()])


def plain(model: Any, loss: Any, epochs: int = 3, lr: float = 0.1) -> Any:
    """Trains on all rows at once; ``loss`` of the model."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for _ in range(epochs):
        optimizer.zero_grad()
        loss(model).backward()
        optimizer.step()
    return flat(model)


x, y, c, w = (
    torch.from_numpy(X),
    torch.from_numpy(Y).float(),
    torch.from_numpy(CLASSES).long(),
    torch.from_numpy(WEIGHTS),
)
CLASS_WEIGHTS = torch.tensor([1.0, 2.0, 5.0])


def close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def weighted(values: Any) -> Any:
    return (values * w).sum() / w.sum()


CASES = {
    "mean": ({}, 1, lambda m: F.mse_loss(m(x)[:, 0], y)),
    "sum": (
        {"loss": torch.nn.MSELoss(reduction="sum"), "optimizer": 0.001},
        1,
        lambda m: F.mse_loss(m(x)[:, 0], y, reduction="sum"),
    ),
    "function": ({"loss": F.smooth_l1_loss}, 1, lambda m: F.smooth_l1_loss(m(x)[:, 0], y)),
    "per row": ({"loss": lambda o, t: (o - t).abs()}, 1, lambda m: (m(x)[:, 0] - y).abs().mean()),
    "weights": ({"sample_weight_col": "w"}, 1, lambda m: weighted((m(x)[:, 0] - y) ** 2)),
    "classes": (
        {"loss": torch.nn.CrossEntropyLoss(), "label_cols": ["c"]},
        3,
        lambda m: F.cross_entropy(m(x), c),
    ),
    "class weights": (
        {"loss": torch.nn.CrossEntropyLoss(weight=CLASS_WEIGHTS), "label_cols": ["c"]},
        3,
        lambda m: F.cross_entropy(m(x), c, weight=CLASS_WEIGHTS),
    ),
    "class weights and weights": (
        {"loss": torch.nn.CrossEntropyLoss(weight=CLASS_WEIGHTS), "label_cols": ["c"], "sample_weight_col": "w"},
        3,
        lambda m: (
            (F.cross_entropy(m(x), c, weight=CLASS_WEIGHTS, reduction="none") * w).sum() / (CLASS_WEIGHTS[c] * w).sum()
        ),
    ),
    "ignored class": (
        {"loss": torch.nn.CrossEntropyLoss(ignore_index=1), "label_cols": ["c"]},
        3,
        lambda m: F.cross_entropy(m(x), c, ignore_index=1),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_one_rank_trains_as_plain_pytorch(store: Any, name: str) -> None:
    params, outputs, loss = CASES[name]
    model = network(outputs)
    rate = params.get("optimizer", 0.1)
    params = {**params, "optimizer": torch.optim.SGD(model.parameters(), lr=rate)}
    found = make(store, model, **params).fit_on_parquet()
    close(flat(found.getModel()), plain(model, loss, lr=rate))


@pytest.mark.timeout(120)
def test_two_ranks_of_unequal_rows_train_as_plain_pytorch(store: Any, spark: Any) -> None:
    for name in ("weights", "class weights", "sum"):
        params, outputs, loss = CASES[name]
        model = network(outputs)
        rate = params.get("optimizer", 0.1)
        params = {**params, "optimizer": torch.optim.SGD(model.parameters(), lr=rate), "batch_size": 102}
        found = make(store, model, backend=None, num_proc=2, **params).fit_on_parquet()
        assert found.workers[0]["rows"] + found.workers[1]["rows"] == 3 * ROWS
        close(flat(found.getModel()), plain(model, loss, lr=rate))


def test_several_outputs_and_labels(store: Any) -> None:
    class Two(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = network(), network(3)

        def forward(self, x: Any) -> Any:
            return self.first(x), self.second(x)

    model = Two()
    found = make(
        store,
        model,
        label_cols=["y", "c"],
        loss=[torch.nn.MSELoss(), torch.nn.CrossEntropyLoss()],
        loss_weights=[0.7, 0.3],
        metrics=[[F.l1_loss, F.cross_entropy]],
    ).fit_on_parquet()
    close(
        flat(found.getModel()),
        plain(model, lambda m: 0.7 * F.mse_loss(m(x)[0][:, 0], y) + 0.3 * F.cross_entropy(m(x)[1], c)),
    )
    record = found.getHistory()[-1]
    with torch.no_grad():
        first, second = found.getModel()(x)
    expected = {"group_0_y": float(F.l1_loss(first[:, 0], y)), "group_0_c": float(F.cross_entropy(second, c))}
    assert record["validation"]["all_metrics"] == [pytest.approx(expected, rel=1e-5)]


def test_one_input_per_column_with_dtypes(store: Any) -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.line = torch.nn.Embedding(3, 2), torch.nn.Linear(3, 1)

        def forward(self, x: Any, codes: Any) -> Any:
            assert x.shape[1:] == (3, 1)
            assert codes.dtype == torch.int64
            return self.line(x[:, :, 0]) + self.embedding(codes[:, 0]).sum(1, keepdim=True)

    torch.manual_seed(0)
    model = Model()
    found = make(
        store, model, feature_cols=["x", "c"], input_shapes=[[-1, 3, 1], [-1, 1]], input_dtypes=[None, "int64"]
    ).fit_on_parquet()
    close(flat(found.getModel()), plain(model, lambda m: F.mse_loss(m(x[:, :, None], c[:, None])[:, 0], y)))


def test_columns_side_by_side(store: Any) -> None:
    model = network()
    found = make(store, model, feature_cols=["s", "t", "w"]).fit_on_parquet()
    together = torch.stack([x[:, 0], x[:, 1], w.float()], dim=1)
    close(flat(found.getModel()), plain(model, lambda m: F.mse_loss(m(together)[:, 0], y)))


def test_a_model_that_changes_its_input_changes_no_label(store: Any) -> None:
    class Halves(torch.nn.Linear):
        def forward(self, x: Any) -> Any:
            return super().forward(x.mul_(0.5))

    torch.manual_seed(2)
    model = Halves(3, 3)
    found = make(store, model, label_cols=["x"]).fit_on_parquet()
    close(flat(found.getModel()), plain(model, lambda m: F.mse_loss(m(x.clone()), x)))


def test_what_a_run_depends_on(store: Any) -> None:
    def double(frame: Any) -> Any:
        return frame * 2

    def fingerprint(**params: Any) -> dict[str, Any]:
        return make(store, network(), **params)._fingerprint()

    usual = fingerprint()
    weighted = torch.nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0]))
    for params, name, text in [
        ({"loss": torch.nn.MSELoss(reduction="sum")}, "loss", "MSELoss(reduction='sum')"),
        ({"loss": weighted}, "loss", "weight=[1.0, 2.0]"),
        ({"transformation_fn": double}, "transformation_fn", "double"),
        ({"input_dtypes": ["float64"]}, "input_dtypes", "float64"),
        ({"label_shapes": [[-1, 1]]}, "label_shapes", "[[-1, 1]]"),
    ]:
        found = fingerprint(**params)
        assert [key for key in found if found[key] != usual[key]] == [name]
        assert text in str(found[name])


def test_a_double_model_gets_doubles(store: Any) -> None:
    model = network().double()
    found = make(store, model).fit_on_parquet()
    expected = plain(model, lambda m: F.mse_loss(m(x.double())[:, 0], torch.from_numpy(Y)))
    torch.testing.assert_close(flat(found.getModel()), expected, rtol=0, atol=1e-12)


def test_the_peers_minibatch_function_and_constructors(store: Any) -> None:
    def minibatch(model, optimizer, transform_outputs, loss_fn, inputs, labels, sample_weights, passes, batch_idx):
        optimizer.zero_grad()
        outputs, labels = transform_outputs(model(*inputs), labels)
        loss = loss_fn(outputs, labels, sample_weights)
        penalty = sum((p**2).sum() for p in model.parameters())
        (loss + 0.01 * loss_fn.share * penalty).backward()
        optimizer.step()
        return outputs, loss

    def constructor(model, **kwargs):
        assert isinstance(model, torch.nn.Module)
        return torch.nn.MSELoss()

    model = network()
    found = make(store, model, train_minibatch_fn=minibatch, loss=None, loss_constructors=[constructor])
    expected = plain(model, lambda m: F.mse_loss(m(x)[:, 0], y) + 0.01 * sum((p**2).sum() for p in m.parameters()))
    close(flat(found.fit_on_parquet().getModel()), expected)


def test_gradients_of_several_batches_are_summed(store: Any) -> None:
    """Three batches of 68, 68 and 67 rows; the first two make a step, the last one the next."""
    model = network()
    found = make(store, model, batch_size=68, backward_passes_per_step=3, epochs=1, shuffle=False).fit_on_parquet()
    expected = copy.deepcopy(model)
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1)
    weight = torch.full((ROWS,), 1 / 68)
    order = _order(store, 68)
    weight[order[136:]] = 1 / 67
    (((expected(x)[:, 0] - y) ** 2) * weight).sum().backward()
    optimizer.step()
    close(flat(found.getModel()), flat(expected))


def _order(store: Any, batch_size: int) -> Any:
    """Returns the places of the rows in the order in which one rank sees them."""
    from sparkvod.data import open_prepared, open_reader

    reader = open_reader("auto", open_prepared(store).train, ["w"], batch_size, shuffle=False)
    seen = np.concatenate([batch.columns["w"] for batch in reader.epoch(0)])
    reader.close()
    return torch.from_numpy(np.array([int(np.flatnonzero(value == WEIGHTS)[0]) for value in seen]))


def test_the_learning_rate_is_taken_as_given_and_scheduled(store: Any) -> None:
    model = network()
    schedule = functools.partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.5)
    found = make(store, model, lr_scheduler=schedule, scale_lr=True).fit_on_parquet()
    assert [record["lr"] for record in found.getHistory()] == pytest.approx([0.1, 0.05, 0.025])
    assert found.getOptimizer().param_groups[0]["lr"] == pytest.approx(0.0125)
    watching = functools.partial(torch.optim.lr_scheduler.ReduceLROnPlateau, patience=0, threshold=1e9)
    found = make(store, model, lr_scheduler=watching).fit_on_parquet()
    assert [record["lr"] for record in found.getHistory()] == pytest.approx([0.1, 0.01, 0.001])


def test_the_optimizer_comes_back_and_may_be_a_function(store: Any) -> None:
    model = network()
    adam = functools.partial(torch.optim.Adam, lr=0.01)
    by_function = make(store, model, optimizer=adam).fit_on_parquet()
    by_instance = make(store, model, optimizer=adam(model.parameters())).fit_on_parquet()
    assert torch.equal(flat(by_function.getModel()), flat(by_instance.getModel()))
    optimizer = by_instance.getOptimizer()
    assert optimizer.param_groups[0]["params"][0] is next(by_instance.getModel().parameters())
    assert all(int(state["step"]) == 3 for state in optimizer.state.values())


def test_the_estimators_model_is_not_changed(store: Any) -> None:
    model = network()
    before = flat(model).clone()
    estimator = make(store, model)
    first = flat(estimator.fit_on_parquet().getModel())
    assert torch.equal(flat(model), before)
    assert torch.equal(flat(estimator.fit_on_parquet().getModel()), first)


def test_callbacks_see_the_training_and_may_end_it(store: Any, tmp_path: Path) -> None:
    class Watch(Callback):
        def __init__(self) -> None:
            self.calls: list[Any] = []

        def on_train_begin(self, trainer: Any) -> None:
            self.calls.append(("begin", trainer.rank, trainer.size))

        def on_epoch_begin(self, trainer: Any, epoch: int) -> None:
            self.calls.append(("epoch", epoch))

        def on_batch_end(self, trainer: Any, epoch: int, step: int) -> None:
            self.calls.append(("batch", epoch, step))

        def on_epoch_end(self, trainer: Any, epoch: int, record: Any) -> None:
            self.calls.append(("done", record["epoch"], len(trainer.history)))
            if epoch == 1:
                trainer.stop()

        def on_train_end(self, trainer: Any) -> None:
            self.calls.append(("end",))

    watch = Watch()
    found = make(store, network(), batch_size=128, epochs=5, callbacks=[watch]).fit_on_parquet()
    assert len(found.getHistory()) == 2
    one = [("epoch", 0), ("batch", 0, 0), ("batch", 0, 1), ("done", 0, 1)]
    two = [("epoch", 1), ("batch", 1, 0), ("batch", 1, 1), ("done", 1, 2)]
    assert watch.calls == [("begin", 0, 1), *one, *two, ("end",)]


def test_steps_per_epoch(store: Any) -> None:
    found = make(store, network(), batch_size=50, train_steps_per_epoch=3, validation_steps_per_epoch=1)
    assert [record["rows"] for record in found.fit_on_parquet().getHistory()] == [150, 150, 150]
    found = make(store, network(), batch_size=50, train_steps_per_epoch=7, epochs=1).fit_on_parquet()
    assert found.getHistory()[0]["rows"] == ROWS + 100


def test_a_batch_of_one_row_with_batch_normalisation(store: Any) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
    found = make(store, model, batch_size=101).fit_on_parquet()
    assert torch.isfinite(flat(found.getModel())).all()
    assert not found.getModel().training


def test_transformation_fn(store: Any) -> None:
    def double(batch: Any) -> Any:
        batch["x"] = [2 * row for row in batch["x"]]
        return batch

    model = network()
    found = make(store, model, transformation_fn=double).fit_on_parquet()
    close(flat(found.getModel()), plain(model, lambda m: F.mse_loss(m(2 * x)[:, 0], y)))
    with pytest.raises(ValueError, match=r"it got 203, returned 10"):
        make(store, model, transformation_fn=lambda batch: batch.head(10)).fit_on_parquet()


def test_fit_on_parquet_takes_params_and_needs_a_store(store: Any) -> None:
    estimator = make(store, network())
    assert len(estimator.fit_on_parquet({estimator.epochs: 1}).getHistory()) == 1
    with pytest.raises(ValueError, match="no store was found"):
        make(None, network()).fit_on_parquet()


def test_scikit_learn_clone_trains_the_same(store: Any) -> None:
    base = pytest.importorskip("sklearn.base", reason="scikit-learn is not installed")
    estimator = make(None, network(), backend=None)
    other = base.clone(estimator).setStore(store).setBackend(Here())
    estimator.setStore(store).setBackend(Here())
    assert torch.equal(flat(other.fit_on_parquet().getModel()), flat(estimator.fit_on_parquet().getModel()))


def test_names_with_dots_and_backticks(spark: Any, tmp_path: Path) -> None:
    from pyspark.ml.feature import VectorAssembler

    df = spark.range(0, 60, 1, 2).selectExpr(
        "id / 60 as `dep.time`", "sin(id) as `a``b`", "id as dep", "2 * id / 60 as `dep.delay`",
        "double(1 + id % 2) as `w.w`", "id % 5 = 0 as `held.out`",
    )  # fmt: skip
    df = VectorAssembler(inputCols=["dep"], outputCol="v.v").transform(df)
    model = torch.nn.Linear(3, 1)
    columns = {"feature_cols": ["dep.time", "a`b", "v.v"], "label_cols": ["dep.delay"], "sample_weight_col": "w.w"}
    fitted = make(str(tmp_path / "store"), model, **columns, validation="held.out", batch_size=16).fit(df)
    assert fitted.workers[0]["rows"] == 3 * 48
    assert fitted.getHistory()[-1]["validation"]["loss"] >= 0
    rows = fitted.transform(df).select("dep", "`dep.time`", "`a``b`", "`dep.delay__output`").collect()
    inputs = torch.tensor([[row[1], row[2], row[0]] for row in rows])
    with torch.no_grad():
        close(torch.tensor([row[3] for row in rows]), fitted.getModel()(inputs)[:, 0])
    on_files = make(str(tmp_path / "store"), model, **columns).fit_on_parquet(dataset_idx=0)
    assert len(on_files.transform(df).head(1)) == 1


def test_names_with_dots_and_no_feature_cols(spark: Any, tmp_path: Path) -> None:
    df = spark.range(20).selectExpr("id / 20 as `a.b`", "id / 10 as a", "id / 5 as `y.y`")
    model = torch.nn.Linear(2, 1)
    fitted = make(str(tmp_path), model, feature_cols=None, label_cols=["y.y"], epochs=1).fit(df)
    assert fitted.getFeatureColumns() == ["a.b", "a"]


class SquaredMean(torch.nn.CrossEntropyLoss):
    """Reduces itself, whatever its ``reduction`` says."""

    def forward(self, output: Any, label: Any) -> Any:
        return super().forward(output, label).pow(2).mean()


class Focal(torch.nn.CrossEntropyLoss):
    """Leaves the reduction to the class above as long as it is ``none``."""

    def forward(self, output: Any, label: Any) -> Any:
        found = F.cross_entropy(output, label, weight=self.weight, reduction="none") * 2
        return found if self.reduction == "none" else found.mean()


def scalar(output: Any, label: Any, reduction: str = "mean") -> Any:
    return F.mse_loss(output, label)  # has the keyword, and does not heed it


def test_a_loss_that_returns_one_number_is_the_mean_over_the_batch(store: Any) -> None:
    classes = {"label_cols": ["c"]}

    def focal(m: Any) -> Any:
        return 2 * weighted(F.cross_entropy(m(x), c, reduction="none"))

    cases: list[Any] = [
        (SquaredMean(), classes, 3, lambda m: F.cross_entropy(m(x), c).pow(2)),
        (SquaredMean(weight=CLASS_WEIGHTS), classes, 3, lambda m: F.cross_entropy(m(x), c, CLASS_WEIGHTS).pow(2)),
        (Focal(), {**classes, "sample_weight_col": "w"}, 3, focal),
        (scalar, {}, 1, lambda m: F.mse_loss(m(x)[:, 0], y)),
        (lambda o, t: (o - t).abs().mean(), {}, 1, lambda m: (m(x)[:, 0] - y).abs().mean()),
    ]  # fmt: skip
    for loss, params, outputs, expected in cases:
        model = network(outputs)
        found = make(store, model, loss=loss, **params).fit_on_parquet()
        close(flat(found.getModel()), plain(model, expected))
    constructed = make(store, network(3), loss=None, loss_constructors=SquaredMean, **classes).fit_on_parquet()
    close(flat(constructed.getModel()), plain(network(3), cases[0][3]))
    for loss, params in ((SquaredMean(), classes), (scalar, {})):
        with pytest.raises(DataError, match="returns one number per batch, and sample_weight_col needs one per row"):
            make(store, network(3 if params else 1), loss=loss, sample_weight_col="w", **params).fit_on_parquet()


normed = torch.nn.utils.parametrizations.weight_norm


BUFFERS = {
    "complex": torch.full((2,), 1 + 2j, dtype=torch.complex64),
    "float8": torch.full((3,), 2.0).to(torch.float8_e5m2),
    "uint32": torch.tensor(2**32 - 1, dtype=torch.uint32),
    "expanded": torch.arange(4.0).expand(3, 4),
    "coo": torch.eye(2).to_sparse(),
    "csr": torch.eye(2).to_sparse_csr(),
}


class Counting(torch.optim.SGD):
    """Has an attribute of its own, in place of its class's, and counts."""

    factor = 0.0

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr)
        self.factor, self.calls = 0.5, 0

    def step(self, closure: Any = None) -> Any:
        self.calls += 1
        for group in self.param_groups:
            for p in group["params"]:
                p.grad.mul_(self.factor)
        return super().step(closure)


def test_hooks_and_own_attributes_train_on_two_ranks_as_in_plain_pytorch(store: Any) -> None:
    model = torch.nn.Sequential(
        torch.nn.Linear(3, 4), torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(4, 1))
    )
    expected = copy.deepcopy(model)
    for one in (model, expected):
        one[0].weight.register_hook(lambda grad: grad * 0)
        one[0].register_forward_hook(lambda module, args, output: output.tanh())
    for name, buffer in BUFFERS.items():
        model.register_buffer(name, buffer)
    optimizer = Counting(model.parameters(), 0.1)
    optimizer.register_step_pre_hook(lambda optimizer, args, kwargs: optimizer.param_groups[0].update(lr=0.2))
    estimator = make(store, model, optimizer=optimizer, backend=LocalLauncher(2, verbose=0), batch_size=None)
    found = estimator.setGlobalBatchSize(ROWS).fit_on_parquet()
    own = torch.optim.SGD(expected.parameters(), lr=0.1)  # 0.2 times the factor of 0.5
    for _ in range(3):
        own.zero_grad()
        F.mse_loss(expected(x)[:, 0], y).backward()
        own.step()
    close(flat(found.getModel()), flat(expected))
    assert torch.equal(found.getModel()[0].weight, model[0].weight)
    for name, buffer in BUFFERS.items():  # shared by the ranks after each epoch, and loaded into the fitted model
        assert getattr(found.getModel(), name).to_dense().tolist() == buffer.to_dense().tolist(), name
    other = network()
    other.register_buffer("kept", torch.ones(2, dtype=torch.complex64).conj())
    with pytest.raises(ValueError, match="'kept' cannot be broadcast, because it is a conjugate view"):
        make(store, other, backend=Never()).fit_on_parquet()
    assert (found.getOptimizer().calls, found.getOptimizer().factor, optimizer.calls) == (3, 0.5, 0)
    script = torch.jit.script(torch.nn.Linear(3, 1))
    script.weight.register_hook(lambda grad: grad)
    with pytest.raises(ValueError, match=r"TorchScript model has hooks on parameters \(weight\)"):
        make(store, script).fit_on_parquet()
    model[0].bias.register_post_accumulate_grad_hook(lambda parameter: None)
    with pytest.raises(ValueError, match=r"post-accumulate-grad hooks on parameters \(0.bias\)"):
        make(store, model).fit_on_parquet()


class OneBased(torch.nn.Module):
    """Its ids begin at 1, and it takes the logarithm of a length: zeros are no rows for it."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(3, 1)
        self.line = torch.nn.Linear(1, 1)

    def forward(self, kind: Any, length: Any) -> Any:
        if (length <= 0).any():
            raise ValueError("a length of 0")
        return self.table(kind.squeeze(1) - 1) + self.line(length.log())


def positive(output: Any, label: Any) -> Any:
    if (label <= 0).any():
        raise ValueError("labels above 0 only")
    return (output - label).pow(2)


def test_models_and_losses_that_zeros_are_nothing_for_are_tried_on_the_first_rows(tmp_path: Path) -> None:
    kinds, lengths = RANDOM.integers(1, 4, ROWS), RANDOM.uniform(1, 9, ROWS)
    own = write(tmp_path / "own", k=kinds, l=lengths, y=lengths * kinds, none=np.zeros(ROWS))
    model = OneBased()
    params = {"feature_cols": ["k", "l"], "input_shapes": [[-1, 1], [-1, 1]], "input_dtypes": ["int64", None]}
    kind, length = torch.from_numpy(kinds)[:, None], torch.from_numpy(lengths).float()[:, None]
    for loss in ({"loss": positive}, {"loss": None, "loss_constructors": lambda: positive}):
        found = make(own, model, **params, **loss).fit_on_parquet()
        close(flat(found.getModel()), plain(model, lambda m: (m(kind, length) - kind * length).pow(2).mean()))
    with pytest.raises(DataError, match=r"cannot take its 2 inputs .* \(ValueError: a length of 0\)"):
        make(own, model, **{**params, "feature_cols": ["k", "none"]}, backend=Never()).fit_on_parquet()
    with pytest.raises(DataError, match=r"the loss failed on them \(ValueError: labels above 0 only\)"):
        make(own, model, **params, loss=positive, label_cols=["none"], backend=Never()).fit_on_parquet()
    shifted = make(
        own, model, **{**params, "feature_cols": ["k", "none"]}, transformation_fn=lambda f: f.assign(none=f.none + 1)
    )
    assert len(shifted.setEpochs(0).fit_on_parquet().getHistory()) == 0
