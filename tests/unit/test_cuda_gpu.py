"""cuda_fd and cuda_ipc between real processes on a real GPU, as nobody, without a capability, both under a filter."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bench.gpu_fd import Pair

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(200),
    pytest.mark.skipif(not Path("/dev/nvidia0").exists(), reason="needs an NVIDIA GPU"),
    pytest.mark.skipif(os.getuid() != 0, reason="needs root, to make namespaces and to give up its rights"),
]

SHAPES = [[4096, 4096], [4096], [], [3, 0], [7, 11, 13], [20 << 20]]
"""The last is 40 MiB: two chunks of torch's and more."""


def test_every_bit_arrives_and_what_moves_is_followed() -> None:
    with Pair() as pair:
        assert pair.worker.hello["seccomp"] == pair.trainer.hello["seccomp"] == "2"
        assert pair.worker.hello["uid"] == 65534
        assert int(pair.worker.hello["caps"], 16) == 0
        assert pair.worker.hello["pid"] == pair.trainer.hello["pid"] == 1  # each in a PID namespace of its own
        assert pair.trainer.ask("make", shapes=SHAPES)["expandable"]
        pair.right()
        for step in range(3):
            pair.trainer.ask("change", number=-1, step=step)
            pair.right()
            assert pair.trainer.ask("move", number=step)["moved"]
            pair.right()
        pair.trainer.ask("make", shapes=SHAPES[:4])
        pair.worker.ask("forget")
        pair.right()


def test_plain_memory_goes_by_its_legacy_handle_in_one_pid_namespace_and_is_refused_in_two() -> None:
    with Pair(transport="cuda_ipc", apart=False, expandable=False) as pair:
        assert not pair.trainer.ask("make", shapes=SHAPES)["expandable"]
        for step in range(3):
            pair.trainer.ask("change", number=-1, step=step)
            pair.right()
    with Pair(transport="cuda_ipc", expandable=False) as pair:
        pair.trainer.ask("make", shapes=SHAPES)
        refused = pair.trainer.try_to("stage")["error"]
        assert refused.startswith("HandleRefused: ")
        assert "another PID namespace" in refused


def test_plain_memory_goes_by_descriptors_of_a_copy_into_another_pid_namespace() -> None:
    with Pair(expandable=False) as pair:
        assert not pair.trainer.ask("make", shapes=SHAPES)["expandable"]
        for step in range(3):
            pair.trainer.ask("change", number=-1, step=step)
            pair.right()
            pair.trainer.ask("move", number=step)
            pair.right()
        before = pair.trainer.ask("usage")
        for _ in range(50):
            pair.trainer.ask("change", number=-1, step=1)
            pair.refit()
        pair.right()
        after = pair.trainer.ask("usage")
        assert after["fds"] <= before["fds"] + 1
        assert after["gpu_free"] >= before["gpu_free"] - (8 << 20)


def test_a_worker_that_writes_ends_itself_and_harms_nobody() -> None:
    with Pair() as pair:
        pair.trainer.ask("make", shapes=SHAPES)
        before = pair.trainer.ask("digest")
        session = pair.trainer.ask("stage")["session"]
        assert "error" in pair.worker.try_to("write", session=session)
        assert pair.trainer.ask("digest") == before


def test_a_worker_that_dies_leaves_the_trainer_as_it_was_and_another_takes_its_place() -> None:
    with Pair() as pair:
        pair.trainer.ask("make", shapes=SHAPES)
        pair.refit()
        before = pair.trainer.ask("usage")
        pair.worker.kill()
        assert "Lost" in pair.trainer.try_to("stage")["error"]
        pair.renew_worker()
        pair.trainer.ask("end_link")
        pair.right()
        after = pair.trainer.ask("usage")
        assert after["fds"] <= before["fds"] + 1
        assert after["gpu_free"] >= before["gpu_free"] - (64 << 20)


def test_two_hundred_versions_leave_nothing() -> None:
    with Pair() as pair:
        pair.trainer.ask("make", shapes=SHAPES)
        for number in range(20):
            pair.trainer.ask("move", number=number % 2)
            pair.trainer.ask("change", number=-1, step=1)
            pair.refit()
        pair.right()
        before = {"trainer": pair.trainer.ask("usage"), "worker": pair.worker.ask("usage")}
        for number in range(200):
            pair.trainer.ask("change", number=-1, step=1)
            if not number % 10:
                pair.trainer.ask("move", number=number % 2)
            pair.refit()
        pair.right()
        after = {"trainer": pair.trainer.ask("usage"), "worker": pair.worker.ask("usage")}
        print(before, after)
        for side in before:
            assert after[side]["fds"] <= before[side]["fds"] + 1
            assert after[side]["mappings"] <= before[side]["mappings"] + 20
            assert after[side]["gpu_free"] >= before[side]["gpu_free"] - (8 << 20)
