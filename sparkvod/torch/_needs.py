"""Imported before all else in this package: says what to install when PyTorch is not there."""

from sparkvod.errors import require

require("torch", "sparkvod.torch", "torch")
