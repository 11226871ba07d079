"""Bands of ports: read, compared with the kernel's, taken in blocks, and told who holds them."""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncstack.engines.listen import Listen, claim
from syncstack.errors import SettingsError
from syncstack.facts.listeners import listeners
from syncstack.facts.network import network
from syncstack.settings import Settings
from syncstack.wire import tcp
from syncstack.wire.ports import Band, check, parse, take

HOST = "127.0.0.1"
TOKEN = "0123456789abcdef" * 4


@pytest.fixture(autouse=True)
def own_cursors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@pytest.fixture
def band() -> Iterator[Band]:
    """Ten ports in a row that nobody uses; below the kernel's own range, where nothing here listens by chance."""
    for low in range(19000, 19900, 10):
        with ExitStack() as stack:
            try:
                for port in range(low, low + 10):
                    stack.enter_context(tcp.listen(tcp.Address(HOST, port)))
            except SettingsError:
                continue
        yield Band("data", low, low + 9)
        return
    raise AssertionError("no ten free ports below 19900")


def ports_of(sockets: list[socket.socket]) -> list[int]:
    return [tcp.address_of(sock).port for sock in sockets]


class TestBands:
    def test_the_default_ones_are_apart_from_each_other_and_from_the_kernels(self) -> None:
        bands = parse("")
        assert list(bands) == ["ray", "rendezvous", "http", "control", "data", "metrics", "router"]
        usual = msgspec.structs.replace(network(), ephemeral_low=32768, ephemeral_high=60999)
        check(bands, usual)

    def test_one_may_be_set_and_the_others_stay(self) -> None:
        assert parse("data=10000-10009")["data"] == Band("data", 10000, 10009)
        assert parse("data=10000-10009")["ray"] == parse("")["ray"]

    @pytest.mark.parametrize(
        ("text", "reason"),
        [
            ("data", "'data'"),
            ("data=1-x", "'data=1-x'"),
            ("dat=10000-10001", "dat is no band"),
            ("data=10001-10000", "the lower first"),
            ("data=80-90", "1024 to 65535"),
            ("data=60000-70000", "1024 to 65535"),
            ("data=20500-20501", "overlap"),
            ("data=10000-10010,ray=10010-10020", "overlap"),
            ("data=10000-10010,,", "''"),
        ],
    )
    def test_what_makes_no_sense_is_refused(self, text: str, reason: str) -> None:
        with pytest.raises(SettingsError, match=f"port bands .*{reason}.*SYNCSTACK_PORT_BANDS"):
            parse(text)

    @given(st.text(max_size=40))
    def test_any_text_is_bands_or_an_error(self, text: str) -> None:
        with suppress(SettingsError):
            assert parse(text)

    def test_a_band_among_outgoing_connections_is_an_error_with_both_ranges(self) -> None:
        wide = msgspec.structs.replace(network(), ephemeral_low=1024, ephemeral_high=65535)
        with pytest.raises(SettingsError, match=r"ray \(20000-20999\) overlaps .*ip_local_port_range 1024-65535"):
            check(parse(""), wide)
        rootly = msgspec.structs.replace(network(), ephemeral_low=0, ephemeral_high=0, unprivileged_port_start=30000)
        with pytest.raises(SettingsError, match="users may not listen on the band ray"):
            check(parse(""), rootly)


class TestTaking:
    def test_a_block_is_consecutive_and_listens(self, band: Band) -> None:
        sockets = take(band, HOST, 4)
        with ExitStack() as stack:
            for sock in sockets:
                stack.enter_context(sock)
            assert ports_of(sockets) == list(range(band.low, band.low + 4))
            for port in ports_of(sockets):
                socket.create_connection((HOST, port), timeout=5).close()

    def test_c06_the_next_one_gets_the_next_ports_and_not_those_just_given_up(self, band: Band) -> None:
        found = []
        for _ in range(3):
            sockets = take(band, HOST, 2)
            found += ports_of(sockets)
            for sock in sockets:
                sock.close()
        assert found == list(range(band.low, band.low + 6))

    def test_it_goes_round_and_steps_over_what_is_taken(self, band: Band) -> None:
        with ExitStack() as stack:
            stack.enter_context(tcp.listen(tcp.Address(HOST, band.low + 3)))
            first = [stack.enter_context(sock) for sock in take(band, HOST, 3)]
            second = [stack.enter_context(sock) for sock in take(band, HOST, 4)]
            assert ports_of(first) == [band.low + n for n in (0, 1, 2)]
            assert ports_of(second) == [band.low + n for n in (4, 5, 6, 7)]
            last = [stack.enter_context(sock) for sock in take(band, HOST, 2)]
            assert ports_of(last) == [band.low + n for n in (8, 9)]
            with pytest.raises(SettingsError) as caught:
                take(band, HOST)
        text = str(caught.value)
        assert f"the band data ({band.low}-{band.high}) has no 1 consecutive ports left" in text
        assert f"{band.low} process {os.getpid()} (" in text
        with take(band, HOST)[0]:
            pass  # and it is free again

    def test_a_block_that_does_not_fit_holds_nothing(self, band: Band) -> None:
        with tcp.listen(tcp.Address(HOST, band.low + 5)):
            with pytest.raises(SettingsError, match="no 6 consecutive ports"):
                take(band, HOST, 6)
            assert list(listeners(band.low, band.high)) == [band.low + 5]

    @pytest.mark.parametrize("content", [b"", b"x", b"99999999", b"\xff\x00"])
    def test_a_cursor_that_says_nonsense_is_none(self, band: Band, tmp_path: Path, content: bytes) -> None:
        (tmp_path / f"syncstack-ports-{os.getuid()}-data").write_bytes(content)
        with take(band, HOST)[0] as sock:
            assert ports_of([sock]) == [band.low]

    def test_a_cursor_that_cannot_be_kept_is_done_without(self, band: Band, tmp_path: Path) -> None:
        (tmp_path / f"syncstack-ports-{os.getuid()}-data").symlink_to(tmp_path / "elsewhere")
        with take(band, HOST)[0] as one, take(band, HOST)[0] as other:
            assert ports_of([one, other]) == [band.low, band.low + 1]
        assert not (tmp_path / "elsewhere").exists()

    def test_an_address_of_nobodys_is_no_taken_port(self, band: Band) -> None:
        with pytest.raises(SettingsError, match="cannot be listened on"):
            take(band, "192.0.2.1")

    def test_c06_ten_processes_at_once_get_ten_ports(self, band: Band, tmp_path: Path) -> None:
        context = multiprocessing.get_context("spawn")
        with context.Pool(5) as pool:
            found = pool.starmap(_take_one, [(band.low, band.high, str(tmp_path))] * 10, chunksize=1)
        assert sorted(found) == list(range(band.low, band.low + 10))


_held = []


def _take_one(low: int, high: int, folder: str) -> int:
    tempfile.tempdir = folder
    _held.append(take(Band("data", low, high), HOST)[0])  # kept for as long as the process lives
    return tcp.address_of(_held[-1]).port


class TestHolders:
    def test_a_listener_is_named_with_its_process(self) -> None:
        with tcp.listen(tcp.Address(HOST, 0)) as sock:
            port = tcp.address_of(sock).port
            assert listeners(port, port)[port].pid == os.getpid()
            with pytest.raises(SettingsError, match=rf"Address already in use by process {os.getpid()} \(.+\)"):
                tcp.listen(tcp.Address(HOST, port))
        assert listeners(port, port) == {}

    def test_one_out_of_sight_is_told_by_its_user(self, tmp_path: Path) -> None:
        """A /proc whose processes' descriptors cannot be read."""
        line = "   0: 0100007F:4E20 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1234        0 55555 1"
        (tmp_path / "self/net").mkdir(parents=True)
        (tmp_path / "self/net/tcp").write_text("header\n" + line + "\nrubbish\n")
        (tmp_path / "77").mkdir()
        found = listeners(20000, 20999, tmp_path)
        assert str(found[20000]) == "a process of uid 1234 out of sight here"


class TestEngine:
    def test_auto_takes_the_bands_for_control_and_worker(self, band: Band) -> None:
        bands = f"data={band.low}-{band.low + 4},control={band.low + 5}-{band.high}"
        settings = Settings.load(listen=f"tcp://{HOST}:auto", port_bands=bands, token=TOKEN)
        claimed = claim(settings)
        assert claimed.listen_fd is not None
        with tcp.adopt(claimed.listen_fd, tcp.Address(HOST, 0)) as control:
            assert ports_of([control]) == [band.low + 5]
            listen = Listen.of(settings)
            with listen.open_worker(0) as one, listen.open_worker(1) as other:  # type: ignore[union-attr]
                assert ports_of([one, other]) == [band.low, band.low + 1]

    def test_a_band_among_outgoing_connections_is_refused_before_anything_is_held(self) -> None:
        low = network().ephemeral_low
        settings = Settings.load(listen=f"tcp://{HOST}:auto", port_bands=f"data={low}-{low + 5}", token=TOKEN)
        with pytest.raises(SettingsError, match="overlaps the ports of outgoing connections"):
            claim(settings)


def command(*argv: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "syncstack.cli", "ports", *argv],
        env=os.environ | env, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def test_the_command_shows_bands_and_holders(band: Band) -> None:
    with tcp.listen(tcp.Address(HOST, band.low)):
        set_ = f"data={band.low}-{band.high}"
        shown = command(SYNCSTACK_PORT_BANDS=set_, COLUMNS="160")
        assert shown.returncode == 0, shown.stderr
        assert f"{band.low}: process {os.getpid()} (" in shown.stdout
        document = json.loads(command("-o", "json", SYNCSTACK_PORT_BANDS=set_).stdout)
    assert document["problem"] == ""
    assert [each["port"] for each in document["taken"] if band.low <= each["port"] <= band.high] == [band.low]


def test_the_command_says_what_is_wrong() -> None:
    low = network().ephemeral_low
    clash = command(SYNCSTACK_PORT_BANDS=f"data={low}-{low + 5}")
    assert clash.returncode == 1
    assert "overlaps the ports of outgoing connections" in clash.stdout
    assert command(SYNCSTACK_PORT_BANDS="data=5").returncode == 2
