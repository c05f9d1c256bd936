from __future__ import annotations

from pathlib import Path

import pytest

from sparkvod.errors import CollectiveTimeoutError
from sparkvod.launch._file_gather import FileGather, is_private
from tests.launch.worlds import together


@pytest.mark.parametrize("size", [1, 2, 5])
def test_everybody_gets_everybodys_bytes_again_and_again(size: int, tmp_path: Path) -> None:
    ranks = [FileGather(str(tmp_path), rank, size, 20) for rank in range(size)]

    def twice(rank: int) -> list[list[bytes]]:
        return [ranks[rank](b"%d" % rank * n) for n in range(2)]

    expected = [[b"%d" % rank * n for rank in range(size)] for n in range(2)]
    assert together([lambda r=r: twice(r) for r in range(size)]) == [expected] * size


def test_missing_ranks_are_named(tmp_path: Path) -> None:
    with pytest.raises(CollectiveTimeoutError, match=r"ranks 0,2 of 3 did not call init\(\) within 0.1 s"):
        FileGather(str(tmp_path), 1, 3, 0.1)(b"")
    (mine,) = tmp_path.iterdir()
    assert mine.stat().st_mode & 0o777 == 0o600  # what is gathered holds the world's secret


def test_only_a_closed_directory_of_ones_own_is_private(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    assert not is_private(str(folder))
    folder.mkdir(mode=0o700)
    assert is_private(str(folder))
    link = tmp_path / "link"
    link.symlink_to(folder)
    assert not is_private(str(link))
    folder.chmod(0o750)
    assert not is_private(str(folder))
