"""Builds the native tests plain, under ASan+UBSan and under TSan (incrementally), and runs each build.

``build-native/<variant>/sparkvod_tests NAME`` runs the cases whose names contain NAME.
"""

from __future__ import annotations

import pytest

from tests.native.building import BUILD_SECONDS, VARIANTS, build, run

RUN_SECONDS, FULL_RUN_SECONDS = 600, 5400


@pytest.mark.timeout(BUILD_SECONDS + FULL_RUN_SECONDS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_native(variant: str, full: bool) -> None:
    program = build(variant, "sparkvod_tests", VARIANTS[variant])
    output = run([str(program)] + (["--full"] if full else []), FULL_RUN_SECONDS if full else RUN_SECONDS)
    assert ", 0 failed" in output.splitlines()[-1]
