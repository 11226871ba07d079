"""The torch drop-in on a real GPU: plain torch.multiprocessing between two processes, both under a filter."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bench.child import NOBODY, Child
from bench.qwen import shapes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(200),
    pytest.mark.skipif(not Path("/dev/nvidia0").exists(), reason="needs an NVIDIA GPU"),
    pytest.mark.skipif(os.getuid() != 0, reason="needs root, to make namespaces and to give up its rights"),
]

SHAPES = [[4096, 4096], [4096], [7, 11, 13], [3, 0], [20 << 20], [1]]


@contextmanager
def pair(
    *, install: str = "yes", profile: str = "restrictive", apart: bool = True, expandable: bool = True
) -> Iterator[tuple[Child, Child]]:
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        os.chown(folder, NOBODY, NOBODY)
        arguments = ["-m", "bench.gpu_ipc", str(folder), profile, install]
        sides = [
            Child(arguments, folder / f"home-{role}", apart=apart, expandable=expandable)
            for role in ("producer", "consumer")
        ]
        try:
            yield sides[0], sides[1]
        finally:
            for side in sides:
                side.kill()


def moved(producer: Child, consumer: Child) -> tuple[float, float]:
    """Share everything, and raise unless the consumer reads what the producer has. Milliseconds of both halves."""
    shared = producer.ask("share")
    taken = consumer.ask("take", pickles=shared["pickles"])
    assert consumer.ask("digest") == producer.ask("digest")
    return shared["ms"], taken["ms"]


def test_without_it_torchs_own_sharing_is_denied() -> None:
    with pair(install="no", apart=False) as (producer, consumer):
        assert producer.ask("make", shapes=SHAPES)["expandable"]
        error = consumer.try_to("take", pickles=producer.ask("share")["pickles"])["error"]
        assert "pidfd" in error


def test_with_it_expandable_segments_are_one_memory_in_two_pid_namespaces_and_are_given_back() -> None:
    with pair() as (producer, consumer):
        assert producer.hello["seccomp"] == consumer.hello["seccomp"] == "2"
        assert producer.hello["pid"] == consumer.hello["pid"] == 1
        assert producer.ask("make", shapes=SHAPES)["expandable"]
        moved(producer, consumer)
        for writer, reader in ((producer, consumer), (consumer, producer)):
            writer.ask("write", value=3.5)
            assert reader.ask("digest") == writer.ask("digest")
        consumer.ask("drop")
        before = producer.ask("state"), consumer.ask("state")
        assert (before[0]["entries"], before[1]["native"], before[1]["copied"]) == (0, [False], False)
        for _ in range(50):
            moved(producer, consumer)
            consumer.ask("drop")
        after = producer.ask("state"), consumer.ask("state")
        for one, other in zip(before, after, strict=True):
            assert other["entries"] == 0
            assert other["fds"] <= one["fds"] + 1
            assert other["gpu_free"] >= one["gpu_free"] - (8 << 20)
        producer.ask("drop")
        freed = producer.ask("state")["gpu_free"]
        assert freed > after[0]["gpu_free"] + (60 << 20)  # nobody holds it any more


def test_where_torchs_own_way_works_nothing_is_done() -> None:
    for expandable in (True, False):
        with pair(profile="", apart=False, expandable=expandable) as (producer, consumer):
            producer.ask("make", shapes=SHAPES)
            moved(producer, consumer)
            assert consumer.ask("state")["native"] == [True]
            assert producer.ask("state")["entries"] == 0


def test_plain_memory_in_two_pid_namespaces_is_copied() -> None:
    with pair(expandable=False) as (producer, consumer):
        assert not producer.ask("make", shapes=SHAPES)["expandable"]
        moved(producer, consumer)
        assert consumer.ask("state")["copied"]


def test_a_model_of_434_tensors() -> None:
    with pair() as (producer, consumer):
        producer.ask("make", shapes=[list(shape) for shape in shapes()])
        for _ in range(3):
            shared, taken = moved(producer, consumer)
            print(f"434 tensors, 6.2 GB: share {shared:.1f} ms, open {taken:.1f} ms")
            consumer.ask("drop")
