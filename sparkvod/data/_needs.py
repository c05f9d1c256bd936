"""Imported before all else in this package: says what to install when what it is made of is not there."""

from sparkvod.errors import require

require("spark", "sparkvod.data", "numpy", "pyarrow", "fsspec")
