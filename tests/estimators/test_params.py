"""The Params' table and all that is made from it."""

import inspect
import logging
import pickle

import numpy as np
import pytest
from pyspark.ml.param import Param
from pyspark.ml.tuning import ParamGridBuilder

from sparkvod.estimators import Callback, table
from sparkvod.estimators import params as params_module
from sparkvod.estimators.params import TableParams


class Example(TableParams, table=table.of(table.ESTIMATOR, "torch")):
    pass


class KerasExample(TableParams, table=table.of(table.ESTIMATOR, "keras")):
    pass


@pytest.mark.parametrize(("framework", "cls"), [("torch", Example), ("keras", KerasExample)])
def test_every_entry_is_a_param_with_accessors_and_a_place_in_the_signature(framework, cls):
    example = cls()
    entries = [entry for entry in table.ESTIMATOR if framework in entry.frameworks]
    names = [entry.name for entry in entries]
    assert len(set(names)) == len(names)
    assert list(inspect.signature(cls).parameters) == names
    assert all(p.kind is p.KEYWORD_ONLY for p in inspect.signature(cls).parameters.values())
    for entry in entries:
        assert isinstance(getattr(example, entry.name), Param)
        for name in (entry.accessor, *entry.aliases):
            assert getattr(example, f"get{name}")() == entry.default
            assert getattr(example, f"set{name}")(entry.default) is example


def test_the_peers_names_are_there():
    names = """
        NumProc Model Backend Store Optimizer Loss LossWeights Metrics GradientCompression SampleWeightCol FeatureCols
        LabelCols Validation Callbacks BatchSize ValBatchSize Epochs TrainStepsPerEpoch ValidationStepsPerEpoch
        RandomSeed Shuffle Verbose PartitionsPerProcess RunId TransformationFn TrainReaderNumWorker ValReaderNumWorker
        ReaderPoolType LabelShapes InMemoryCacheAll UseGpu MpStartMethod BackwardPassesPerStep ShufflingBufferSize
        InputShapes LossConstructors TrainMinibatchFn CompressSparseCols ContinuousCols CategoricalCols
    """
    for name in names.split():
        assert callable(getattr(Example, f"get{name}"))
        assert callable(getattr(Example, f"set{name}"))


def test_values_are_set_by_keyword_setter_and_set_params():
    example = Example(batch_size=64, feature_cols="a")
    assert (example.getBatchSize(), example.getFeatureCols()) == (64, ["a"])
    assert example.setEpochs(3).getEpochs() == 3
    assert example.setParams(batch_size=np.int64(8), epochs=2.0).getBatchSize() == 8
    assert type(example.getEpochs()) is int
    assert example.setEpochs(None).getEpochs() == 1
    assert not example.isSet("epochs")
    assert "the model as it is (default: 1)" in example.explainParams()


@pytest.mark.parametrize(
    ("keywords", "error", "words"),
    [
        ({"batchsize": 1}, TypeError, "did you mean 'batch_size'?"),
        ({"zzz": 1}, TypeError, "it has backend, "),
        ({"batch_size": 0}, ValueError, "batch_size=0 was found, a whole number of at least 1 was expected"),
        ({"batch_size": "8"}, TypeError, "batch_size='8' was found"),
        ({"batch_size": True}, TypeError, "whole number"),
        ({"epochs": 1.5}, TypeError, "whole number"),
        ({"validation": 1.0}, ValueError, r"share of rows in \[0, 1\)"),
        ({"shuffle": 1}, TypeError, "True or False"),
        ({"feature_cols": [1]}, TypeError, "list of strings"),
        ({"feature_cols": ["a", "a"]}, ValueError, "a came more often"),
        ({"feature_cols": []}, ValueError, r"feature_cols=\[\] was found, one name at least was expected, or None"),
        ({"loss_weights": [1.0, -0.5]}, ValueError, "numbers of 0 or more were expected"),
        ({"input_shapes": [20]}, TypeError, "list of shapes"),
        ({"input_shapes": [[-1, -1]]}, ValueError, "at most one -1"),
        ({"loss_weights": [float("nan")]}, TypeError, "finite numbers"),
        ({"reader": "petastrom"}, ValueError, "'auto', 'arrow'"),
        ({"backend": object()}, TypeError, "num_processes"),
        ({"store": 3}, TypeError, "Store"),
        ({"run_id": ""}, ValueError, "not empty"),
        ({"run_id": ".."}, ValueError, "without slashes"),
        ({"run_id": "../other"}, ValueError, "without slashes"),
        ({"input_dtypes": ["int65"]}, TypeError, "int65"),
        ({"random_seed": 2**70}, ValueError, r"random_seed=1180.* at least 0 and below 2\*\*63 was expected"),
        ({"random_seed": -1}, ValueError, "at least 0"),
        ({"metrics": ["accuracy"]}, TypeError, r"metrics=\['accuracy'\] was found, functions f\(output, label\)"),
        ({"metrics": [[abs, 3]]}, TypeError, "lists of them with one per label"),
        ({"callbacks": [print]}, TypeError, r"subclasses of sparkvod.estimators.Callback were expected, a builtin"),
        ({"callbacks": [Callback]}, TypeError, r"instances were expected, not classes; write Callback\(\)"),
        ({"callbacks": Callback()}, TypeError, "a list was expected"),
        ({"gradient_compression": 5}, TypeError, "gradient_compression=5 was found, a member"),
    ],
)
def test_a_wrong_value_is_an_error_when_it_is_set(keywords, error, words):
    with pytest.raises(error, match=words):
        Example(**keywords)


def test_positional_arguments_are_refused():
    with pytest.raises(TypeError):
        Example(3)


def test_num_proc_excludes_backend():
    from sparkvod.estimators import SparkBackend, TorchEstimator

    backend = SparkBackend(2)
    with pytest.raises(ValueError, match="one of them was expected"):
        TorchEstimator(num_proc=2, backend=backend)
    assert TorchEstimator(backend=backend).getBackend() is backend


def test_batch_size_excludes_global_batch_size():
    from sparkvod.estimators import TorchEstimator

    estimator = TorchEstimator(global_batch_size=64)
    with pytest.raises(ValueError, match="batch_size=8 and global_batch_size=64 exclude each other"):
        estimator.copy({estimator.batch_size: 8})
    with pytest.raises(ValueError, match="exclude each other"):
        TorchEstimator(global_batch_size=64, batch_size=32)
    assert estimator.setGlobalBatchSize(None).setBatchSize(8).getBatchSize() == 8


def test_copy_and_grid():
    example = Example(batch_size=64)
    grid = ParamGridBuilder().addGrid(example.epochs, [1, 2]).addGrid(example.batch_size, [16, 32]).build()
    assert len(grid) == 4
    other = example.copy(grid[-1])
    assert (other.getEpochs(), other.getBatchSize()) == (2, 32)
    assert (example.getEpochs(), example.getBatchSize()) == (1, 64)
    with pytest.raises(ValueError, match="epochs=-1"):
        example.copy({example.epochs: -1})


def test_mutable_defaults_are_not_shared():
    Example().getMetrics().append(1)
    assert Example().getMetrics() == []


def test_scikit_learn_clones_it():
    base = pytest.importorskip("sklearn.base", reason="scikit-learn is not installed")
    example = Example(batch_size=64, feature_cols=["a", "b"], input_shapes=((-1, 2),), loss_weights=(0.5,))
    other = base.clone(example)
    assert other is not example
    assert other.get_params() == example.get_params()
    assert example.set_params(epochs=7) is example
    assert example.get_params()["epochs"] == 7


def test_params_without_a_meaning_say_so_once(caplog, monkeypatch):
    monkeypatch.setattr(params_module, "_warned", set())
    monkeypatch.setattr(logging.getLogger("sparkvod"), "propagate", True)
    with caplog.at_level(logging.WARNING):
        example = Example(reader_pool_type="process", shuffle_buffer_size=100, train_reader_num_workers=2)
        example.copy()
    assert [record.getMessage().split(":")[0] for record in caplog.records] == [
        "reader_pool_type='process' has no effect",
        "shuffle_buffer_size=100 has no effect",
    ]


def test_instances_can_be_pickled():
    import cloudpickle

    other = pickle.loads(cloudpickle.dumps(Example(batch_size=5)))
    assert other.getBatchSize() == 5
