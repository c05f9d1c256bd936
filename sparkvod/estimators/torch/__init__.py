"""The estimator for PyTorch."""

from sparkvod.estimators.torch.estimator import TorchEstimator
from sparkvod.estimators.torch.model import TorchModel

__all__ = ["TorchEstimator", "TorchModel"]
