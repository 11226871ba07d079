"""`syncstack bench`: every way between two real processes, and a table that tells when one did not arrive."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from syncstack.bench import cli
from syncstack.bench.ways import Ours, Pair
from syncstack.cli import app
from syncstack.errors import HandleRefused, UsageError

pytestmark = pytest.mark.timeout(180)


def run(*arguments: str) -> str:
    found = CliRunner().invoke(app, ["bench", *arguments], catch_exceptions=False)
    assert found.exit_code == 0, found.output
    return found.output


@pytest.mark.parametrize(
    ("group", "ways"),
    [
        ("colocated", ["one copy", "host_fd", "torch, one bucket", "torch, by tensor", "pickle and a pipe"]),
        ("staged", ["one copy", "host_fd", "stream", "pickle and a pipe"]),
        ("collective", ["broadcast by Gloo", "collective", "stream", "pickle and a pipe"]),
    ],
)
def test_every_way_arrives_and_is_measured(group: str, ways: list[str]) -> None:
    sizes = ("--mib", "3", "--tensors", "5", "--rounds", "2", "--device", "cpu")
    document = json.loads(run("--peer-group", group, *sizes, "-o", "json"))
    assert [row["way"] for row in document["rows"]] == ways
    assert document["bytes"] == (3 << 20) // 5 // 2 * 2 * 5
    for number, row in enumerate(document["rows"]):
        assert not row["failed"], row
        assert row["equal"] == (number > 0), row
        assert row["gb_per_s"] == pytest.approx(document["bytes"] / row["ms"] / 1e6)
        assert row["floor_ratio"] == pytest.approx(document["rows"][0]["ms"] / row["ms"])
    assert not torch.distributed.is_initialized()


def test_a_device_that_is_not_there_is_told_and_nothing_is_started() -> None:
    with pytest.raises(UsageError, match=r"no such device .* Nothing was measured\. Next: "):
        run("--peer-group", "staged", "--device", "cuda:7")


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    with Pair(cli._weights(1 << 20, 3, "cpu"), "cpu") as made:
        yield made


def test_what_did_not_arrive_is_not_called_equal(pair: Pair) -> None:
    row = cli._row("nothing", "others", lambda _: lambda: None, pair, 1)
    assert not row.equal
    assert not row.failed


def test_a_way_that_is_refused_is_a_row_and_the_next_one_works(pair: Pair, capsys: pytest.CaptureFixture[str]) -> None:
    refused = cli._row("refused", "others", lambda _: lambda: pair.ask("flat", then="no tensor"), pair, 1)
    unspeakable = cli._row("unspeakable", "others", lambda _: lambda: pair.ask("flat", then=lambda: None), pair, 1)
    ours = cli._row("host_fd", "syncstack", lambda pair: Ours(pair, "host_fd"), pair, 1)
    assert refused.failed.startswith("TypeError")
    assert "pickle" in unspeakable.failed
    assert not ours.failed
    assert ours.equal
    document = cli.Document(
        peer_group="colocated", device="cpu", bytes=1, tensors=1, rounds=1, rows=(refused, unspeakable, ours)
    )
    cli._print(document)
    assert "refused failed: TypeError" in capsys.readouterr().out


@pytest.mark.parametrize(("refused", "code"), [(True, 0), (False, 1)])
def test_memory_that_is_not_a_ways_own_fails_nobodys_script(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, refused: bool, code: int
) -> None:
    """On a GPU with expandable segments every run has one: ``cuda_ipc``."""

    def other(_: Pair) -> Callable[[], None]:
        raise HandleRefused("no legacy handle") if refused else RuntimeError("no legacy handle")

    row = cli._row("cuda_ipc", "syncstack", other, pair, 1)
    document = cli.Document(peer_group="colocated", device="cpu", bytes=1, tensors=1, rounds=1, rows=(row,))
    monkeypatch.setattr(cli, "_measured", lambda *_: document)
    found = CliRunner().invoke(app, ["bench", "--peer-group", "colocated"])
    assert found.exit_code == code
    assert f"cuda_ipc {'refused' if refused else 'failed'}: no legacy handle" in found.output


def test_a_receiver_that_ends_is_no_wait(tmp_path: Path) -> None:
    with Pair(cli._weights(1 << 20, 3, "cpu"), "cpu") as made:
        made._process.kill()
        row = cli._row("pickle", "others", lambda pair: lambda: pair.ask("digest"), made, 1)
    assert "the receiver ended in digest" in row.failed
