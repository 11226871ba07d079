"""A full collection is put off as long as anybody asks for it, and comes after that."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator

import pytest

from syncstack.collector import full_collection_put_off

pytestmark = pytest.mark.skipif(sys.version_info >= (3, 14), reason="Python 3.14 collects step by step")


@pytest.fixture(autouse=True)
def _thresholds() -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(50, 2, 2)
    yield
    gc.set_threshold(*before)


def generations_of(garbage: int) -> set[int]:
    """Which generations are collected while so many objects come that stay."""
    seen = set[int]()

    def note(phase: str, info: dict[str, int]) -> None:
        seen.add(info["generation"])

    gc.callbacks.append(note)
    try:
        kept = [[number] for number in range(garbage)]
        assert len(kept) == garbage
    finally:
        gc.callbacks.remove(note)
    return seen


def test_the_young_are_collected_and_the_old_are_not() -> None:
    gc.freeze()  # a quarter as many as there are must be new before a full one comes
    try:
        assert generations_of(100_000) == {0, 1, 2}
        with full_collection_put_off():
            assert generations_of(100_000) == {0, 1}
        assert generations_of(100_000) == {0, 1, 2}
    finally:
        gc.unfreeze()


def test_it_ends_with_the_last_and_leaves_what_somebody_else_has_set() -> None:
    with full_collection_put_off():
        with full_collection_put_off():
            pass
        assert gc.get_threshold()[2] > 1 << 30
    assert gc.get_threshold() == (50, 2, 2)
    with pytest.raises(KeyError), full_collection_put_off():
        raise KeyError
    assert gc.get_threshold() == (50, 2, 2)
    with full_collection_put_off():
        gc.set_threshold(9, 9, 9)
    assert gc.get_threshold() == (9, 9, 9)
