"""Labels with values that a loss cannot take."""

from __future__ import annotations

import pytest

from sparkvod.data.ranges import Range
from sparkvod.errors import DataError
from sparkvod.estimators.values import Takes, check

ENTROPY = Takes("CrossEntropyLoss", 2, -100)


@pytest.mark.parametrize(
    ("found", "takes", "words"),
    [
        (Range((0, 1, 2), True), ENTROPY, r"label 'k' has values 0..2, the model has 2 outputs; .*from 0 to 1"),
        (Range((-1, 0, 1), None), ENTROPY, r"label 'k' has values -1..1, the model has 2 outputs"),
        (Range((-100, -1, 1), None), ENTROPY, r"label 'k' has values -1..1"),
        (Range((0, 1, 255), True), ENTROPY, r"label 'k' has values 0..255"),
        (Range((0.9, 2.8), False), ENTROPY, "label 'k' has fractional values 0.9..2.8, CrossEntropyLoss needs whole"),
        (Range((0, 2), True), Takes("BCELoss"), r"label 'k' has values 0..2, BCELoss needs numbers from 0 to 1"),
    ],
)
def test_refused(found: Range, takes: Takes, words: str) -> None:
    with pytest.raises(DataError, match=words):
        check("k", found, takes)


@pytest.mark.parametrize(
    ("found", "takes"),
    [
        (Range((0, 1), True), ENTROPY),
        (Range((0.0, 1.0), None), ENTROPY),
        (Range((-100, 0, 1), True), ENTROPY),
        (Range((-100,), True), ENTROPY),
        (Range((), True), ENTROPY),
        (Range((0, 1, 255), True), Takes("NLLLoss", 2, 255)),
        (Range((0.1, 0.9), False), Takes("BCELoss")),
    ],
)
def test_taken(found: Range, takes: Takes) -> None:
    check("k", found, takes)
