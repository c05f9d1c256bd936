"""Bayesian optimisation of a few numbers from 0 to 1 whose score is dear to measure, and noisy.

What was measured becomes a Gaussian process (Rasmussen and Williams, 2006, algorithm 2.1; Matérn kernel, ν = 5/2, one
length for each dimension, the likeliest of many drawn ones). The next point is the one with the greatest expected
improvement over the best mean so far (Jones, Schonlau and Welch, 1998).

Some twenty points in at most five dimensions need a matrix of 20 × 20, so this is numpy and no package of optimisers:
scikit-learn's process would bring SciPy, ten times the size of this whole project, for the same forty lines.
"""

from __future__ import annotations

import math

import numpy as np

_FIRST = 4  # points spread over the cube before the process is asked
_SHORTEST, _LONGEST = 0.1, 3.0
_DRAWN_LENGTHS = 64
_DRAWN_POINTS = 2048
_NEAR_POINTS = 512
_NEAR = 0.05
_LEAST_VARIANCE = 1e-6
_erf = np.vectorize(math.erf, otypes=[float])


class Search:
    """Looks for the point of the unit cube with the highest score.

    Args:
        dimensions: numbers of a point, at least one.
        noise: standard deviation of a score's noise, as a share of the standard deviation of all scores; 0 or more.
        seed: of what is drawn at random; equal scores give equal points.
    """

    def __init__(self, dimensions: int, noise: float, seed: int = 0) -> None:
        self.points: list[np.ndarray] = []
        self.scores: list[float] = []
        self._dimensions, self._noise = dimensions, noise
        self._random = np.random.default_rng(seed)
        # A Latin hypercube: each quarter of each dimension comes once.
        places = [self._random.permutation(_FIRST) for _ in range(dimensions)]
        self._first = list((np.stack(places, axis=1) + 0.5) / _FIRST)
        self._process: _Process | None = None

    @property
    def spread(self) -> bool:
        """Whether the first points, which are spread over the cube, are measured."""
        return not self._first

    def tell(self, point: np.ndarray, score: float) -> None:
        """Takes a point that was measured, shape ``[dimensions]``, and its score."""
        self.points.append(np.asarray(point, dtype=float))
        self.scores.append(float(score))
        self._process = None

    def ask(self) -> np.ndarray:
        """Returns the point to measure next, shape ``[dimensions]``."""
        if self._first:
            return self._first.pop(0)
        return self._most_promising()[0]

    def gain(self) -> float:
        """Returns what the most promising point is expected to add to the best score, as a share of it."""
        process = self._fitted()
        best = abs(process.mean_score + process.best * process.deviation)
        return self._most_promising()[1] * process.deviation / best if best > 0 else math.inf

    def best(self) -> int:
        """Returns the number of the measured point that the process holds for the best, noise left aside."""
        return int(np.argmax(self._fitted().predict(np.stack(self.points))[0]))

    def _fitted(self) -> _Process:
        if self._process is None:
            lengths = _SHORTEST * (_LONGEST / _SHORTEST) ** self._random.random((_DRAWN_LENGTHS, self._dimensions))
            points, scores = np.stack(self.points), np.array(self.scores)
            self._process = max((_Process(points, scores, each, self._noise) for each in lengths), key=_likelihood)
        return self._process

    def _most_promising(self) -> tuple[np.ndarray, float]:
        """Returns a point and its expected improvement, in standard deviations of the scores."""
        process = self._fitted()
        around = self.points[self.best()]
        near = around + _NEAR * self._random.standard_normal((_NEAR_POINTS, self._dimensions))
        anywhere = self._random.random((_DRAWN_POINTS, self._dimensions))
        candidates = np.clip(np.concatenate([anywhere, near]), 0.0, 1.0)
        mean, deviation = process.predict(candidates)
        better = (mean - process.best) / deviation
        improvement = deviation * (
            better * (1 + _erf(better / math.sqrt(2))) / 2 + np.exp(-(better**2) / 2) / math.sqrt(2 * math.pi)
        )
        most = int(np.argmax(improvement))
        return candidates[most], float(improvement[most])


def _likelihood(process: _Process) -> float:
    return process.log_likelihood


class _Process:
    """A Gaussian process over points ``[n, d]`` with scores ``[n]``, brought to mean 0 and standard deviation 1.

    Products of more than n × n numbers are made by ``einsum``, since a BLAS would start threads for them, beside the
    training's.
    """

    def __init__(self, points: np.ndarray, scores: np.ndarray, lengths: np.ndarray, noise: float) -> None:
        self.mean_score = float(scores.mean())
        self.deviation = float(scores.std()) or 1.0
        self._points, self._lengths = points, lengths
        normal = (scores - self.mean_score) / self.deviation
        covariance = _matern(points, points, lengths) + (noise**2 + _LEAST_VARIANCE) * np.eye(len(points))
        factor = np.linalg.cholesky(covariance)
        self._whiten = np.linalg.inv(factor)
        self._weights = self._whiten.T @ (self._whiten @ normal)
        self.log_likelihood = float(-normal @ self._weights / 2 - np.log(np.diag(factor)).sum())
        self.best = float(self.predict(points)[0].max())

    def predict(self, points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns mean and standard deviation of the normal scores, without noise, at points ``[m, d]``."""
        between = _matern(points, self._points, self._lengths)
        explained = np.einsum("ij,mj->mi", self._whiten, between)
        variance = np.maximum(1.0 - (explained**2).sum(axis=1), _LEAST_VARIANCE)
        return np.einsum("mj,j->m", between, self._weights), np.sqrt(variance)


def _matern(a: np.ndarray, b: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    distance = np.sqrt(5 * (((a[:, None] - b[None]) / lengths) ** 2).sum(axis=-1))
    return (1 + distance + distance**2 / 3) * np.exp(-distance)
