"""The ranks that the suites of this room share end with it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.contracts.worlds import close_worlds


@pytest.fixture(scope="package", autouse=True)
def _worlds() -> Iterator[None]:
    yield
    close_worlds()
