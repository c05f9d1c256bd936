"""Without an optional package: an ImportError that says which extra to install."""

from __future__ import annotations

import subprocess
import sys

import pytest

BLOCKED = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {missing!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Missing())
try:
    {statement}
except ImportError as error:
    print(error)
"""


TORCH_ESTIMATOR = "from sparkvod.estimators import TorchEstimator"


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("missing", "statement", "words"),
    [
        (["torch"], "import sparkvod.torch", "torch was not found, which sparkvod.torch needs; {}[torch]'"),
        (
            ["torch"],
            TORCH_ESTIMATOR,
            "torch was not found, which {e} needs; {}[torch]'",
        ),
        (
            ["pyspark"],
            TORCH_ESTIMATOR,
            "pyspark was not found, which {e} needs; {}[spark]'",
        ),
        (
            ["pyspark", "numpy", "pyarrow"],
            TORCH_ESTIMATOR,
            "pyspark, numpy, pyarrow were not found, which {e} needs; {}[spark]'",
        ),
        (
            ["keras"],
            TORCH_ESTIMATOR.replace("Torch", "Keras"),
            "keras was not found, which sparkvod.estimators.KerasEstimator needs; {}[keras]'",
        ),
        (["keras", "tensorflow"], "import sparkvod.estimators; sparkvod.estimators.TorchEstimator", ""),
        (["pyarrow"], "import sparkvod.data", "pyarrow was not found, which sparkvod.data needs; {}[spark]'"),
        (["fsspec"], "from sparkvod.data import Store", "fsspec was not found, which sparkvod.data needs; {}[spark]'"),
        (["torch", "pyspark", "numpy", "pyarrow", "fsspec"], "import sparkvod, sparkvod.launch.local", ""),
        (["torch", "pyspark"], "from sparkvod.estimators import Callback, SparkBackend", ""),
    ],
)
def test_what_is_missing_is_named_with_its_extra(missing: list[str], statement: str, words: str) -> None:
    code = BLOCKED.format(missing=missing, statement=statement)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50, check=True)
    expected = words.replace("{}", "pip install 'sparkvod").replace("{e}", "sparkvod.estimators.TorchEstimator")
    assert done.stdout.strip() == expected
