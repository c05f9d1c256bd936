"""The optimiser by itself: on functions whose best point is known, and beside a library's Gaussian process."""

from __future__ import annotations

import math

import numpy as np
import pytest

from sparkvod.core.bayes import Search, _Process


def hill(point: np.ndarray) -> float:
    """Highest, 100, at (0.7, 0.2, anything)."""
    return 100 - 80 * (point[0] - 0.7) ** 2 - 60 * (point[1] - 0.2) ** 2


def climb(points: int, noise: float, scatter: float = 0.0) -> Search:
    search = Search(3, noise)
    random = np.random.default_rng(7)
    point = np.array([0.1, 0.9, 0.5])
    for _ in range(points):
        search.tell(point, hill(point) + scatter * random.standard_normal())
        point = search.ask()
    return search


@pytest.mark.timeout(60)
def test_it_finds_the_top_of_a_hill() -> None:
    search = climb(20, noise=0.05)
    assert hill(search.points[search.best()]) > 99.5
    assert hill(search.points[0]) < 45
    assert search.spread
    again = climb(20, noise=0.05)
    assert np.array_equal(np.stack(search.points), np.stack(again.points))


@pytest.mark.timeout(60)
def test_noise_does_not_lead_it_astray() -> None:
    search = climb(20, noise=0.5, scatter=5.0)
    assert hill(search.points[search.best()]) > 90


@pytest.mark.timeout(60)
def test_it_knows_when_nothing_is_to_be_gained() -> None:
    first, last = climb(6, noise=0.05), climb(20, noise=0.05)
    assert first.gain() > 0.01 > 0.005 > last.gain()
    flat = Search(2, 0.8)
    for score in (1e9, 1.001e9, 0.999e9, 1.0005e9, 1e9):
        flat.tell(flat.ask(), score)
    assert flat.gain() < 0.01
    constant = Search(1, 0.0)
    for _ in range(5):
        constant.tell(constant.ask(), 3e8)
    assert constant.gain() < 1e-6
    silent = Search(1, 0.0)
    silent.tell(np.array([0.5]), 0.0)
    assert silent.gain() == math.inf


def test_the_process_is_that_of_a_library() -> None:
    process_module = pytest.importorskip("sklearn.gaussian_process", reason="scikit-learn is not installed")
    random = np.random.default_rng(0)
    points, scores = random.random((12, 2)), random.random(12) * 1e8
    lengths, noise, anywhere = np.array([0.3, 1.2]), 0.4, random.random((50, 2))
    own = _Process(points, scores, lengths, noise)
    theirs = process_module.GaussianProcessRegressor(
        process_module.kernels.Matern(lengths, nu=2.5), alpha=noise**2 + 1e-6, optimizer=None, normalize_y=True
    ).fit(points, scores)
    mean, deviation = theirs.predict(anywhere, return_std=True)
    own_mean, own_deviation = own.predict(anywhere)
    np.testing.assert_allclose(own_mean * own.deviation + own.mean_score, mean, rtol=1e-6)
    np.testing.assert_allclose(own_deviation * own.deviation, deviation, rtol=1e-6)
    difference = theirs.log_marginal_likelihood_value_ - own.log_likelihood
    assert difference == pytest.approx(-6 * math.log(2 * math.pi))
