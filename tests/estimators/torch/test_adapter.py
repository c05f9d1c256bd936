"""What TorchEstimator's ranks do together: the same weights and buffers on all, whatever rows each has."""

from __future__ import annotations

import copy
import functools
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sparkvod.errors import DataError, WorkerError
from sparkvod.estimators import Callback, TorchEstimator
from tests.contracts.estimator import Interrupt
from tests.estimators.backends import Here, write

torch = pytest.importorskip("torch", reason="the PyTorch estimator needs torch")
nn, F = torch.nn, torch.nn.functional

ROWS = 65
RANDOM = np.random.default_rng(3)
X = RANDOM.standard_normal((ROWS, 3)).astype("float32")
Y = X @ np.array([1, -2, 0.5]) + 0.3
CLASSES = np.digitize(X[:, 0], [-0.5, 0.5]).astype("int32")
IGNORING = np.where(np.arange(ROWS) % 4, CLASSES, -100).astype("int32")

x, y, c, i = (torch.from_numpy(a) for a in (X, Y.astype("float32"), CLASSES.astype("int64"), IGNORING.astype("int64")))


@pytest.fixture
def store(tmp_path: Path) -> Any:
    # Row groups of 8 rows: both ranks have rows, and the last of three steps of 32 has but one row for both.
    columns = {"x": X, "y": Y, "c": CLASSES, "i": IGNORING, "b": (CLASSES > 0).astype("int64")}
    return write(tmp_path / "store", validation=True, row_group_size=8, **columns)


def network(outputs: int = 1, norm: bool = False) -> Any:
    torch.manual_seed(1)
    layers = [nn.Linear(3, 6), *([nn.BatchNorm1d(6)] if norm else []), nn.Tanh(), nn.Linear(6, outputs)]
    return nn.Sequential(*layers)


def fit(store: Any, model: Any, ranks: int = 1, optimizer: Any = None, **params: Any) -> Any:
    place = {"backend": Here()} if ranks == 1 else {"num_proc": ranks}
    defaults = {
        "model": model,
        "optimizer": optimizer or torch.optim.SGD(model.parameters(), lr=0.1),
        "loss": nn.MSELoss(),
        "feature_cols": ["x"],
        "label_cols": ["y"],
        "batch_size": 32 // ranks,
        "epochs": 3,
        "store": store,
        "verbose": 0,
        "random_seed": 0,
    }
    return TorchEstimator(**{**defaults, **place, **params}).fit_on_parquet()


def test_an_index_out_of_range_is_told_with_what_there_was(store: Any) -> None:
    model = nn.Sequential(nn.Embedding(2, 3), nn.Flatten(), nn.Linear(3, 1))
    words = r"index out of range.* whole numbers are c with values 0..2, .*embeddings 0 has 2 rows: indices from 0"
    with pytest.raises(IndexError, match=words):
        fit(store, model, feature_cols=["c"], input_dtypes=["int64"], epochs=1)


def flat(model: Any) -> Any:
    return torch.cat([value.detach().double().ravel() for value in model.state_dict().values()])


class Alike(Callback):
    """Raises where the ranks' parameters differ in a bit; with ``buffers``, also their buffers, between epochs."""

    def __init__(self, buffers: bool = False) -> None:
        self.buffers = buffers

    def on_batch_end(self, trainer: Any, epoch: int, step: int) -> None:
        self.compare(trainer, trainer.model.parameters())

    def on_epoch_end(self, trainer: Any, epoch: int, record: Any) -> None:
        if self.buffers:
            self.compare(trainer, trainer.model.buffers())

    def compare(self, trainer: Any, tensors: Any) -> None:
        import sparkvod.torch as hvd

        mine = [t.detach().numpy().tobytes() for t in tensors]
        assert len({tuple(others) for others in hvd.allgather_object(mine)}) == 1, f"rank {trainer.rank} differs"


def clipping(model, optimizer, transform_outputs, loss_fn, inputs, labels, sample_weights, passes, batch_idx):
    optimizer.zero_grad()
    inputs = [tensor.view(tensor.size(0), -1) for tensor in inputs]  # which a batch of no rows cannot do
    outputs, labels = transform_outputs(model(*inputs), labels)
    loss = loss_fn(outputs, labels, sample_weights)
    (loss + 0.1 * loss_fn.share * outputs[0].mean()).backward()
    optimizer.synchronize()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    with optimizer.skip_synchronize():
        optimizer.step()
    return outputs, loss


@pytest.mark.timeout(120)
def test_a_step_of_the_users_runs_on_ranks_without_rows(store: Any, spark: Any) -> None:
    found = {
        ranks: fit(store, network(), ranks, train_minibatch_fn=clipping, callbacks=[Alike()] * (ranks > 1))
        for ranks in (1, 2, 3)
    }
    records = {ranks: model.getHistory()[-1] for ranks, model in found.items() if ranks < 3}
    assert sum(worker["rows"] for worker in found[2].workers) == 3 * ROWS
    torch.testing.assert_close(flat(found[2].getModel()), flat(found[1].getModel()), rtol=0, atol=1e-5)
    assert records[2]["train"]["loss"] == pytest.approx(records[1]["train"]["loss"], rel=1e-4)


@pytest.mark.timeout(120)
def test_a_rank_that_never_has_rows_runs_the_users_step(tmp_path: Path, spark: Any) -> None:
    store = write(tmp_path / "one", row_group_size=100, x=X, y=Y)
    found = fit(store, network(), 2, train_minibatch_fn=clipping, callbacks=[Alike()])
    assert sorted(worker["rows"] for worker in found.workers) == [0, 3 * ROWS]
    alone = fit(store, network(), train_minibatch_fn=clipping)
    torch.testing.assert_close(flat(found.getModel()), flat(alone.getModel()), rtol=0, atol=1e-5)


@pytest.mark.timeout(240)
def test_sync_batch_norm_is_that_of_one_process_on_the_joined_batch(store: Any, tmp_path: Path, spark: Any) -> None:
    def synced() -> Any:
        model = network(norm=True)
        model[1] = nn.SyncBatchNorm(6)
        return model

    # The last step has one row in all, or one rank has all rows.
    one_group = write(tmp_path / "one", row_group_size=100, x=X, y=Y)
    for rows, ranks, callbacks in ((store, 3, []), (one_group, 2, [Alike(buffers=True)])):
        alone = fit(rows, network(norm=True), batch_size=30, epochs=2)
        found = fit(rows, synced(), ranks, batch_size=30 // ranks, callbacks=callbacks, epochs=2)
        assert type(found.getModel()[1]) is nn.SyncBatchNorm
        torch.testing.assert_close(flat(found.getModel()), flat(alone.getModel()), rtol=0, atol=1e-4)
    rows = spark.createDataFrame([([1.0, 2.0, 3.0],)], "x array<float>")
    (row,) = found.transform(rows).collect()
    expected = found.getModel().eval()(torch.tensor([[1.0, 2.0, 3.0]]))
    assert row["y__output"] == pytest.approx(float(expected.detach()), rel=1e-4)


@pytest.mark.timeout(120)
def test_ignored_labels_count_over_all_ranks(store: Any, spark: Any) -> None:
    expected = network(3)
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        F.cross_entropy(expected(x), i).backward()
        optimizer.step()
    for ranks in (1, 2):
        found = fit(
            store, network(3), ranks, loss=nn.CrossEntropyLoss(), label_cols=["i"], batch_size=66 // ranks, epochs=3
        )
        torch.testing.assert_close(flat(found.getModel()), flat(expected), rtol=0, atol=1e-5)
        loss = float(F.cross_entropy(found.getModel()(x), i).detach())
        assert found.getHistory()[-1]["validation"]["loss"] == pytest.approx(loss, rel=1e-5)


def test_batches_in_which_all_labels_are_ignored_change_nothing(tmp_path: Path) -> None:
    store = write(tmp_path / "ignored", x=X, y=np.full(ROWS, -100))
    model = network(3)
    found = fit(store, model, loss=nn.CrossEntropyLoss())
    assert torch.equal(flat(found.getModel()), flat(model))
    assert found.getHistory()[-1]["train"]["loss"] == 0


def test_losses_made_on_the_ranks_get_class_indices(store: Any) -> None:
    model = network(3)
    given = fit(store, model, loss=nn.CrossEntropyLoss(), label_cols=["c"])
    made = fit(store, model, loss=None, loss_constructors=[lambda: nn.CrossEntropyLoss()], label_cols=["c"])
    assert torch.equal(flat(made.getModel()), flat(given.getModel()))


def test_losses_made_on_the_ranks_are_tried_before_training(store: Any) -> None:
    with pytest.raises(DataError, match="one output per class, two at least, was expected.*BCEWithLogitsLoss"):
        fit(store, network(1), loss=None, loss_constructors=[nn.CrossEntropyLoss], label_cols=["b"])
    with pytest.raises(DataError, match=r"output for label 'y' has the shape \[rows, 3\], the label \[rows\]"):
        fit(store, network(3), loss=None, loss_constructors=[nn.MSELoss])


@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(), F.cross_entropy, nn.NLLLoss(), nn.MultiMarginLoss()])
def test_classes_and_a_single_output_are_refused(store: Any, loss: Any) -> None:
    with pytest.raises(DataError, match="two at least, was expected.*BCEWithLogitsLoss"):
        fit(store, network(1), loss=loss, label_cols=["b"])
    trained = fit(store, network(1), loss=nn.BCEWithLogitsLoss(), label_cols=["b"]).getHistory()
    assert 0 < trained[-1]["train"]["loss"] < trained[0]["train"]["loss"]


@pytest.mark.timeout(180)
@pytest.mark.parametrize("step", [0, 1])
def test_batch_normalisation_goes_on_to_the_same_bits(store: Any, spark: Any, tmp_path: Path, step: int) -> None:
    """Interrupted in epoch 1; with step 1, from a checkpoint within it."""
    every = {"checkpoint_every": 1} if step else {}
    whole = fit(store, network(norm=True), 2, run_id="whole", callbacks=[Alike(buffers=True)])
    interrupt = Interrupt(tmp_path / "interrupted", epoch=1, step=step)
    with pytest.raises(WorkerError, match="interrupted by the test"):
        fit(store, network(norm=True), 2, run_id="broken", callbacks=[interrupt], **every)
    resumed = fit(store, network(norm=True), 2, run_id="broken", callbacks=[Alike(buffers=True)])
    assert flat(resumed.getModel()).numpy().tobytes() == flat(whole.getModel()).numpy().tobytes()
    losses = [[record["validation"]["loss"] for record in model.getHistory()] for model in (whole, resumed)]
    assert losses[0] == losses[1]
    with torch.no_grad():
        returned = F.mse_loss(whole.getModel()(x)[:, 0], y)
    assert losses[0][-1] == pytest.approx(float(returned), rel=1e-5)


@pytest.mark.timeout(120)
def test_each_rank_takes_up_what_is_its_own_within_an_epoch(store: Any, spark: Any, tmp_path: Path) -> None:
    """Rank 1's running statistics, which its batches of one row are normalised by, are not rank 0's.

    Neither is what compression left out of its gradients.
    """
    from sparkvod.torch import Compression

    class Note(Callback):
        def on_batch_end(self, trainer: Any, epoch: int, step: int) -> None:
            if trainer.rank == 1 and (epoch, step) == (1, 1):
                with open(tmp_path / "means", "a", encoding="utf-8") as file:
                    file.write(str(dict(trainer.model.named_buffers())["1.running_mean"].tolist()) + "\n")

    compression = Compression.chain(Compression.topk(0.2), Compression.bf16)
    options = {"callbacks": [Note()], "checkpoint_every": 1, "epochs": 2, "gradient_compression": compression}
    straight = fit(store, network(norm=True), 2, **options)
    interrupt = Interrupt(tmp_path / "interrupted", epoch=1, step=1)
    with pytest.raises(WorkerError, match="interrupted by the test"):
        fit(store, network(norm=True), 2, run_id="r", **{**options, "callbacks": [interrupt]})
    with pytest.raises(
        ValueError, match=r"gradient_compression is 'TopK\(ratio=0.3\)' and was 'TopK\(ratio=0.2\) \+ BF16"
    ):
        fit(store, network(norm=True), 2, run_id="r", **options | {"gradient_compression": Compression.topk(0.3)})
    again = fit(store, network(norm=True), 2, run_id="r", **options)
    unbroken, resumed = (tmp_path / "means").read_text().splitlines()
    assert unbroken == resumed
    torch.testing.assert_close(flat(again.getModel()), flat(straight.getModel()), rtol=0, atol=0)


class Locked(nn.Linear):
    """Cannot be pickled, and has a buffer that its state_dict does not."""

    def __init__(self) -> None:
        super().__init__(3, 1)
        self.lock = threading.Lock()
        self.register_buffer("factor", torch.rand(1), persistent=False)

    def forward(self, given: Any) -> Any:
        with self.lock:
            return super().forward(given) * self.factor


@pytest.mark.timeout(120)
def test_a_function_may_build_the_model(store: Any, spark: Any, tmp_path: Path) -> None:
    torch.manual_seed(1)
    expected = Locked()
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        F.mse_loss(expected(x)[:, 0], y).backward()
        optimizer.step()

    def build() -> Any:
        model = Locked()  # other numbers each time it is called
        model.bias.register_hook(lambda grad: grad * 1)
        return model

    torch.manual_seed(1)
    made = functools.partial(torch.optim.SGD, lr=0.1)
    fitted = fit(store, build, 2, made, global_batch_size=ROWS, batch_size=None)
    torch.testing.assert_close(flat(fitted.getModel()), flat(expected), rtol=0, atol=1e-5)
    fitted.write().save(str(tmp_path / "saved"))
    loaded = type(fitted).load(str(tmp_path / "saved")).getModel()
    assert torch.equal(flat(loaded), flat(fitted.getModel()))
    assert torch.equal(loaded.factor, expected.factor)
    assert not loaded.training
    rows = fitted.transform(spark.read.parquet(store.get_train_data_path())).select("x", "y__output").collect()
    with torch.no_grad():
        predicted = expected(torch.tensor([row["x"] for row in rows]))[:, 0]
    np.testing.assert_allclose([row["y__output"] for row in rows], predicted, rtol=0, atol=1e-4)

    again = TorchEstimator(model=build, optimizer=made, loss=nn.MSELoss(), label_cols=["y"])
    again.write().save(str(tmp_path / "estimator"))
    assert isinstance(TorchEstimator.load(str(tmp_path / "estimator")).value("model")(), nn.Linear)


def test_functions_that_build_no_model_are_refused(store: Any) -> None:
    made = functools.partial(torch.optim.SGD, lr=0.1)
    with pytest.raises(
        ValueError, match=r"model=.*<lambda> raised ZeroDivisionError: .* must build a torch\.nn\.Module"
    ):
        fit(store, lambda: 1 / 0, optimizer=made)
    with pytest.raises(ValueError, match=r"model=.*<lambda> must return a torch\.nn\.Module, got a int"):
        fit(store, lambda: 1, optimizer=made)
    optimizer = torch.optim.SGD(network().parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"must be a function of the parameters where model is a function.*got a SGD"):
        fit(store, network, optimizer=optimizer)
    widths = iter(range(1, 9))
    with pytest.raises(ValueError, match=r"(?s)must build the same module each time it is called: .*size mis"):
        fit(store, lambda: nn.Linear(3, next(widths)), optimizer=made)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_inputs_and_labels_have_the_models_dtype(store: Any, dtype: str) -> None:
    class Checked(nn.Linear):
        def forward(self, given: Any) -> Any:
            assert given.dtype == self.weight.dtype
            return super().forward(given)

    torch.manual_seed(0)
    model = Checked(3, 1).to(getattr(torch, dtype))
    found = fit(store, model, batch_size=ROWS, epochs=1)
    expected = copy.deepcopy(model)
    F.mse_loss(expected(x.to(model.weight.dtype))[:, 0], torch.from_numpy(Y).to(model.weight.dtype)).backward()
    with torch.no_grad():
        for parameter in expected.parameters():
            parameter -= 0.1 * parameter.grad
    trained = found.getModel()
    assert trained.weight.dtype == model.weight.dtype
    tolerance = {"bfloat16": 2e-2, "float16": 2e-3, "float64": 1e-7}[dtype]
    torch.testing.assert_close(flat(trained), flat(expected), rtol=0, atol=tolerance)


@pytest.mark.timeout(60)
def test_a_bfloat16_model_predicts(store: Any, spark: Any) -> None:
    model = nn.Linear(3, 1).bfloat16()
    found = fit(store, model, ranks=2, input_dtypes=["bfloat16"])
    table = found.transform(spark.read.parquet(store.get_train_data_path())).select("x", "y__output").toPandas()
    with torch.no_grad():
        given = torch.from_numpy(np.stack(table["x"].tolist())).bfloat16()
        expected = found.getModel()(given)[:, 0].double().numpy()
    np.testing.assert_allclose(table["y__output"].to_numpy("float64"), expected, rtol=1e-2, atol=1e-2)


@pytest.mark.timeout(60)
def test_a_classifiers_scores_come_out_whole(store: Any, spark: Any) -> None:
    found = fit(store, network(3), loss=nn.CrossEntropyLoss(), label_cols=["c"])
    rows = found.transform(spark.read.parquet(store.get_train_data_path())).select("x", "c__output").collect()
    with torch.no_grad():
        expected = found.getModel()(torch.tensor([row["x"] for row in rows]))
    scores = np.array([row["c__output"].toArray() for row in rows])
    np.testing.assert_allclose(scores, expected.numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.timeout(60)
def test_metrics_may_change_between_epochs(store: Any, tmp_path: Path) -> None:
    options = {"run_id": "run", "metrics": [F.l1_loss]}
    fit(store, network(), epochs=1, **options)
    more = fit(store, network(), epochs=2, **{**options, "metrics": [F.l1_loss, F.mse_loss]}).getHistory()
    assert [len(record["train"]["all_metrics"]) for record in more] == [1, 2]
    interrupt = Interrupt(tmp_path / "interrupted", epoch=2, step=1, rank=0)
    with pytest.raises(ArithmeticError):
        fit(store, network(), epochs=3, checkpoint_every=1, callbacks=[interrupt], **options)
    with pytest.raises(ValueError, match=r"metrics is \[\] and was \['l1_loss'\].*not in step 1 of one"):
        fit(store, network(), epochs=3, run_id="run")
    assert len(fit(store, network(), epochs=3, **options).getHistory()) == 3
