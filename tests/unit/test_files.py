"""A file is written whole, or stays as it was."""

from __future__ import annotations

from pathlib import Path

import pytest

from syncstack.files import write_whole


def test_it_takes_the_place_of_the_old_one_and_all_may_read_it(tmp_path: Path) -> None:
    path = tmp_path / "x"
    for content in (b"old", b"new"):
        write_whole(path, content)
        assert (path.read_bytes(), path.stat().st_mode & 0o777) == (content, 0o644)
    assert list(tmp_path.iterdir()) == [path]


def test_a_write_that_fails_leaves_the_old_one_and_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "x"
    write_whole(path, b"old")
    with pytest.raises(TypeError):
        write_whole(path, "no bytes")  # type: ignore[arg-type]  # it fails where a full disk would: in the write
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]
