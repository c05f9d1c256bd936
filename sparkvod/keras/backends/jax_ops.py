"""Collectives on JAX's arrays, eager and in code that JAX compiles, with their derivatives."""

from __future__ import annotations

from sparkvod.keras.backends.jax_reduce import allreduce, barrier, broadcast, grouped_allreduce
from sparkvod.keras.backends.jax_rows import (
    allgather,
    alltoall,
    grouped_allgather,
    grouped_reducescatter,
    reducescatter,
)

__all__ = [
    "allgather",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "reducescatter",
]
