"""A trainer of several ranks, sharded by FSDP2: each sends its share, and the engines have one version."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.process.conftest import REPO, Engine, environment, profile_path
from tests.process.fleet import DEADLINES, TOKEN
from tests.process.test_tcp import address_of
from tests.process.warm import Warm, WarmProcess

WATCHDOG_S = 60.0
TENSORS = 21


class Rank:
    """One process."""

    def __init__(self, warm: Warm, folder: Path, model: Path, world: int, rank: int, addresses: list[str]) -> None:
        argv = [str(folder / "store"), str(world), str(rank), str(model), *addresses]
        env = {**environment(folder), **DEADLINES, "SYNCSTACK_TOKEN": TOKEN}
        self.log = (folder / f"rank-{rank}.log").open("ab")
        script = REPO / "tests/process/ranks_trainer.py"
        profile = profile_path("restrictive")
        self.process = WarmProcess(warm, script, argv, env=env, profile=profile, stderr=self.log)

    def say(self, line: str) -> None:
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        line = self.process.stdout.readline()
        assert line, Path(self.log.name).read_text()[-3000:]
        found: dict[str, Any] = json.loads(line)
        return found

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
        self.process.wait(10)
        self.process.close()
        self.log.close()


StartRanks = Callable[[int, list[Engine]], list[Rank]]


@pytest.fixture
def start_ranks(warm: Warm, socket_dir: Path, model: Path) -> Iterator[StartRanks]:
    ranks: list[Rank] = []

    def start(world: int, engines: list[Engine]) -> list[Rank]:
        tcp = "tcp" in Path(engines[0].log_path).name
        addresses = [address_of(engine) if tcp else engine.address for engine in engines]
        ranks.extend(Rank(warm, socket_dir, model, world, rank, addresses) for rank in range(world))
        assert [rank.answer() for rank in ranks] == [{"ready": True}] * world
        return ranks

    yield start
    for rank in ranks:
        rank.close()


@pytest.fixture
def engines(start_engine: Callable[..., Engine]) -> list[Engine]:
    env = {**DEADLINES, "SYNCSTACK_LISTEN": "tcp://127.0.0.1:0", "SYNCSTACK_TOKEN": TOKEN}
    return [start_engine(profile="restrictive", env=env, name=f"tcp-{number}") for number in range(2)]


def together(ranks: list[Rank], line: str, **other: str) -> list[dict[str, Any]]:
    """Every rank is told ``line``, or what ``other`` has for it, and answers."""
    for number, rank in enumerate(ranks):
        rank.say(other.get(f"rank{number}", line))
    return [rank.answer() for rank in ranks]


def check(answers: list[dict[str, Any]], engines: list[Engine], version: int, transport: str) -> None:
    assert all("reports" in answer for answer in answers), answers
    assert [answer["reports"] for answer in answers] == [answers[0]["reports"]] * len(answers)
    for report in answers[0]["reports"]:
        assert (report["version"], report["transport"]) == (version, transport)
        assert report["tensors"] == report["digests_equal"] >= TENSORS - 1
    wanted = pytest.approx(answers[0]["logprobs"], abs=1e-4)
    for engine in engines:
        response = engine.complete()
        assert response.headers["x-syncstack-version"] == str(version)
        assert engine.logprobs() == wanted


@pytest.mark.parametrize("world", [2, 4])
def test_c27_every_rank_sends_its_share_in_a_group(engines: list[Engine], start_ranks: StartRanks, world: int) -> None:
    ranks = start_ranks(world, engines)
    for version in (1, 2, 3):
        check(together(ranks, f"refit {version} {version}"), engines, version, "collective")
    ranks[0].say("refit 4 4")
    time.sleep(float(DEADLINES["SYNCSTACK_LINK_S"]) + 2)
    for rank in ranks[1:]:  # that come late are waited for
        rank.say("refit 4 4")
    check([rank.answer() for rank in ranks], engines, 4, "collective")


def test_every_rank_sends_its_share_through_memory(
    start_engine: Callable[..., Engine], start_ranks: StartRanks
) -> None:
    """Colocated: each rank has a segment of its own, and the engine maps them all."""
    engines = [start_engine(profile="restrictive", name=f"engine-{number}") for number in range(2)]
    ranks = start_ranks(2, engines)
    for version in (1, 2, 3):
        check(together(ranks, f"refit {version} {version}"), engines, version, "host_fd")


@pytest.mark.parametrize("failing", [0, 1])
def test_a_source_that_fails_on_one_rank_fails_the_version_on_all(
    engines: list[Engine], start_ranks: StartRanks, failing: int
) -> None:
    ranks = start_ranks(2, engines)
    check(together(ranks, "refit 1 1"), engines, 1, "collective")
    begin = time.monotonic()
    answers = together(ranks, "refit 2 2", **{f"rank{failing}": "stop 2 2"})
    assert time.monotonic() - begin < WATCHDOG_S / 2
    # Rank 0 raises what its own source did.
    assert [answer.get("error") for answer in answers] == ["RefitFailed" if failing else "ValueError", "RefitFailed"]
    for answer in answers:
        assert "the source is told to fail" in answer["text"]
    for engine in engines:
        assert engine.complete().headers["x-syncstack-version"] == "1"
    check(together(ranks, "refit 3 3"), engines, 3, "collective")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_c28_an_engine_that_dies_or_stops_fails_the_version_on_all_ranks(
    engines: list[Engine], start_ranks: StartRanks, number: int
) -> None:
    ranks = start_ranks(2, engines)
    check(together(ranks, "refit 1 1"), engines, 1, "collective")
    engines[1].kill(number)
    answers = together(ranks, "refit 2 2")
    assert all("error" in answer for answer in answers), answers
    assert engines[0].complete().headers["x-syncstack-version"] == "1"


def test_a_rank_that_dies_is_told_of_and_nothing_is_published(engines: list[Engine], start_ranks: StartRanks) -> None:
    ranks = start_ranks(2, engines)
    check(together(ranks, "refit 1 1"), engines, 1, "collective")
    ranks[1].process.kill()
    ranks[0].say("refit 2 2")
    answer = ranks[0].answer()
    assert answer["error"] in ("RefitFailed", "RankLost")
    assert "trainer rank 1 has gone" in answer["text"]
    for engine in engines:
        assert engine.complete().headers["x-syncstack-version"] == "1"


def test_ranks_that_refit_different_versions_are_told(engines: list[Engine], start_ranks: StartRanks) -> None:
    ranks = start_ranks(2, engines)
    answers = together(ranks, "refit 1 1", rank1="refit 7 1")
    for answer in answers:
        assert "refit different versions (observed: rank 0: 1; here: 7)" in answer["text"]
    check(together(ranks, "refit 2 2"), engines, 2, "collective")
