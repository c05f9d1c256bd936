"""What the ranks must have in common: the digest, and the words for the first difference."""

from __future__ import annotations

from dataclasses import replace

from sparkvod.core.agreement import Description, difference

WEIGHT, BIAS = ("weight", (2, 4), "float32"), ("bias", (2,), "float32")
ONE = Description((WEIGHT, BIAS), (("op", "Sum"),), ((1, 0),), (("SPARKVOD_BUCKET_BYTES", "8"),))


def test_equal_descriptions_have_equal_digests() -> None:
    assert ONE.digest() == replace(ONE).digest()
    # A knob matters by the buckets that it makes.
    assert ONE.digest() == replace(ONE, knobs=(("SPARKVOD_BUCKET_BYTES", "9"),)).digest()
    for other in (
        replace(ONE, parameters=(BIAS, WEIGHT)),
        replace(ONE, parameters=(("weight", (4, 2), "float32"), BIAS)),
        replace(ONE, options=(("op", "Average"),)),
        replace(ONE, buckets=((1,), (0,))),
    ):
        assert other.digest() != ONE.digest()
    assert len(replace(ONE, parameters=(("\ud800", (1,), "float32"),)).digest()) == 32


def test_a_parameter_that_differs_is_named() -> None:
    other = replace(ONE, parameters=(("weight", (4, 2), "float32"), BIAS))
    assert difference([ONE, other, ONE]) == (
        "parameter 0: ranks 0,2 have 'weight' [2, 4] float32, rank 1 has 'weight' [4, 2] float32"
    )
    assert difference([ONE, replace(ONE, parameters=(WEIGHT,))]) == (
        "parameter 1: rank 0 has 'bias' [2] float32, rank 1 has none"
    )


def test_options_knobs_and_buckets_are_named_in_this_order() -> None:
    split = replace(ONE, buckets=((1,), (0,)))
    assert difference([ONE, replace(split, options=(("op", "Average"),))]) == "op: rank 0 has Sum, rank 1 has Average"
    assert difference([split, replace(ONE, knobs=(("SPARKVOD_BUCKET_BYTES", "9"),))]) == (
        "SPARKVOD_BUCKET_BYTES: rank 0 has 8, rank 1 has 9"
    )
    assert difference([ONE, split]) == (
        "bucket 0 (see groups=): rank 0 has 2 parameters (1, 0), rank 1 has 1 parameters (1)"
    )
