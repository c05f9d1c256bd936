"""Losses as sums over rows: parts of a batch must add up to the whole."""

from __future__ import annotations

import functools
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the PyTorch estimator needs torch")

from sparkvod.estimators.torch.losses import Loss, LossTerm, terms_for  # noqa: E402

nn, F = torch.nn, torch.nn.functional
torch.manual_seed(0)
ROWS = 11
OUT, TARGET = torch.randn(ROWS, 3), torch.randn(ROWS, 3)
CLASSES = torch.randint(0, 3, (ROWS,))
WEIGHTS = torch.rand(ROWS, dtype=torch.float64)
FACTORS = torch.tensor([0.5, 1.0, 4.0])
SOME = torch.where(torch.arange(ROWS) % 3 == 0, -100, CLASSES)

CASES = [
    (nn.MSELoss(), TARGET),
    (nn.HuberLoss(delta=0.5), TARGET),
    (nn.BCEWithLogitsLoss(), torch.rand(ROWS, 3)),
    (nn.KLDivLoss(reduction="batchmean"), torch.rand(ROWS, 3)),
    (nn.CrossEntropyLoss(), CLASSES),
    (nn.CrossEntropyLoss(label_smoothing=0.1), CLASSES),
    (nn.CrossEntropyLoss(weight=FACTORS), CLASSES),
    (nn.CrossEntropyLoss(weight=FACTORS), torch.softmax(TARGET, 1)),
    (nn.CrossEntropyLoss(ignore_index=0), CLASSES),
    (nn.NLLLoss(weight=FACTORS), CLASSES),
    (nn.CrossEntropyLoss(), SOME),
    (nn.CrossEntropyLoss(weight=FACTORS, label_smoothing=0.1), SOME),
    (nn.NLLLoss(), SOME),
    (F.cross_entropy, SOME),
    (functools.partial(F.cross_entropy, weight=FACTORS, ignore_index=1), CLASSES),
    (functools.partial(F.nll_loss, weight=FACTORS), SOME),
    (functools.partial(F.kl_div, reduction="batchmean"), torch.rand(ROWS, 3)),
    (F.l1_loss, TARGET),
    (functools.partial(F.huber_loss, delta=2.0), TARGET),
    (lambda o, t: ((o - t) ** 2).mean(), TARGET),
    (lambda o, t: (o - t) ** 2, TARGET),
]


@pytest.mark.parametrize("number", range(len(CASES)))
@pytest.mark.parametrize("cuts", [[], [1], [4, 4], [3, 10]])
def test_parts_add_up_to_the_mean(number: int, cuts: list[int]) -> None:
    loss, target = CASES[number]
    term = LossTerm(loss)
    whole = loss(OUT, target)
    expected = whole.mean() if whole.ndim else whole
    edges = [0, *cuts, ROWS]
    parts = [slice(a, b) for a, b in zip(edges, edges[1:], strict=False) if b > a]
    total = sum(float(term.total(OUT[p], target[p], None)) for p in parts)
    normaliser = sum(term.normaliser(target[p], None) for p in parts)
    assert total / normaliser == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.parametrize("number", range(len(CASES) - 2))
def test_weights_of_whole_numbers_are_repeated_rows(number: int) -> None:
    loss, target = CASES[number]
    term = LossTerm(loss)
    assert term.takes_weights
    counts = torch.tensor([1, 2, 3, 0, 1, 1, 2, 0, 5, 1, 1])
    repeated = torch.repeat_interleave(torch.arange(ROWS), counts)
    expected = float(loss(OUT[repeated], target[repeated]).mean())
    weights = counts.double()
    found = float(term.total(OUT, target, weights)) / term.normaliser(target, weights)
    assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("loss", [nn.MSELoss(reduction="sum"), functools.partial(F.mse_loss, reduction="sum")])
def test_a_sum_is_not_taken_for_a_mean(loss: Any) -> None:
    term = LossTerm(loss)
    assert not term.divides
    assert float(term.total(OUT, TARGET, None)) == pytest.approx(float(loss(OUT, TARGET)))
    assert not LossTerm(lambda o, t, reduction="sum": F.mse_loss(o, t, reduction=reduction)).divides


def test_rows_without_any_label_have_neither_loss_nor_gradient() -> None:
    term, leaf = LossTerm(nn.CrossEntropyLoss()), OUT.clone().requires_grad_()
    nothing = torch.full((ROWS,), -100)
    assert term.normaliser(nothing, None) == 0
    total = term.total(leaf, nothing, None)
    total.backward()
    assert (float(total.detach()), float(leaf.grad.abs().sum())) == (0, 0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sums_over_rows_keep_their_digits_in_half_precision(dtype: Any) -> None:
    output, target = torch.full((5000, 1), 4, dtype=dtype), torch.zeros(5000, 1, dtype=dtype)
    for weights in (None, torch.ones(5000, dtype=torch.float64)):
        assert float(LossTerm(nn.MSELoss()).total(output, target, weights)) == 80000


def test_a_row_that_stands_in_for_none_gives_zeros_where_gradients_would_be() -> None:
    loss, leaf = Loss(terms_for(nn.MSELoss(), 1), [1.0]), OUT.clone().requires_grad_()
    loss.counts = False
    value = loss([leaf], [TARGET])
    value.backward()
    assert (float(value.detach()), loss.sums) == (0, [0.0])
    assert torch.equal(leaf.grad, torch.zeros_like(OUT))


def test_a_loss_of_a_batch_takes_no_weights() -> None:
    assert not LossTerm(lambda o, t: (o - t).mean()).takes_weights


def test_the_sum_of_shares_is_the_gradient_of_the_whole() -> None:
    leaf = OUT.clone().requires_grad_()
    (0.25 * F.mse_loss(leaf, TARGET) + 0.75 * F.cross_entropy(leaf, CLASSES, weight=FACTORS)).backward()
    terms = terms_for([nn.MSELoss(), nn.CrossEntropyLoss(weight=FACTORS)], 2)
    loss = Loss(terms, [0.25, 0.75])
    loss.normalisers = [t.normaliser(y, None) for t, y in zip(terms, (TARGET, CLASSES), strict=True)]
    parts = OUT.clone().requires_grad_()
    for part in (slice(0, 7), slice(7, 11)):
        loss([parts[part], parts[part]], [TARGET[part], CLASSES[part]]).backward()
    torch.testing.assert_close(parts.grad, leaf.grad)


def test_no_weight_at_all_is_no_gradient() -> None:
    loss = Loss(terms_for(nn.MSELoss(), 1), [1.0])
    loss.normalisers = [0.0]
    leaf = OUT.clone().requires_grad_()
    loss([leaf], [TARGET], torch.zeros(ROWS)).backward()
    assert torch.equal(leaf.grad, torch.zeros_like(OUT))


def test_one_loss_serves_all_labels() -> None:
    assert len(terms_for(nn.MSELoss(), 3)) == 3
    with pytest.raises(ValueError, match="loss with 2 functions was found, one per label \\(3\\)"):
        terms_for([nn.MSELoss(), nn.MSELoss()], 3)
