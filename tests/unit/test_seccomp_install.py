"""Profiles on a node's disk, and the answer that a starting pod waits for."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from syncstack.errors import DeadlineExceeded, ProfileError, SettingsError
from syncstack.seccomp.install import await_installed, digest, install
from tests.ports import free_port

SHIPPED = Path(__file__).parents[2] / "seccomp"


def test_the_shipped_profiles_arrive_as_they_are_readable_by_all(tmp_path: Path) -> None:
    found = install(SHIPPED, tmp_path / "seccomp" / "syncstack")
    assert sorted(found) == ["permissive.json", "restrictive.json"]
    for name, said in found.items():
        path = tmp_path / "seccomp" / "syncstack" / name
        assert path.read_bytes() == (SHIPPED / name).read_bytes()
        assert (path.stat().st_mode & 0o777, said) == (0o644, digest(path.read_bytes()))
    assert len(os.listdir(tmp_path / "seccomp" / "syncstack")) == 2, "something temporary was left"


def test_a_new_one_takes_the_place_of_the_old_and_the_same_one_is_left_alone(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    (source / "x.json").write_bytes((SHIPPED / "restrictive.json").read_bytes())
    install(source, target)
    before = (target / "x.json").stat().st_ino
    install(source, target)
    assert (target / "x.json").stat().st_ino == before
    (source / "x.json").write_bytes((SHIPPED / "permissive.json").read_bytes())
    install(source, target)
    assert (target / "x.json").read_bytes() == (SHIPPED / "permissive.json").read_bytes()


@pytest.mark.parametrize("bad", [b"", b"{", b'{"defaultActoin": "SCMP_ACT_ALLOW"}'])
def test_with_one_that_is_none_nothing_is_installed(tmp_path: Path, bad: bytes) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "a.json").write_bytes((SHIPPED / "restrictive.json").read_bytes())
    (source / "b.json").write_bytes(bad)
    with pytest.raises(ProfileError, match=r"b\.json"):
        install(source, tmp_path / "target")
    assert not (tmp_path / "target").exists()


def test_a_folder_without_any_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="holds no profile"):
        install(tmp_path, tmp_path / "target")


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "target").write_text("a file")
    with pytest.raises(SettingsError, match="profiles cannot be written"):
        install(SHIPPED, tmp_path / "target")


class Node:
    """`syncstack seccomp install --serve` as a process, as in the installer's container."""

    def __init__(self, folder: Path) -> None:
        self.url = f"http://127.0.0.1:{free_port()}"
        argv = [sys.executable, "-m", "syncstack.cli", "seccomp", "install", str(SHIPPED), str(folder), "--serve"]
        self.process = subprocess.Popen([*argv, self.url.removeprefix("http://")])

    def up(self) -> None:
        deadline = time.monotonic() + 20
        while True:
            try:
                httpx.get(self.url).raise_for_status()
            except httpx.HTTPError:
                assert time.monotonic() < deadline
                time.sleep(0.05)
            else:
                return


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    made = Node(tmp_path / "node")
    yield made
    made.process.kill()
    made.process.wait()


def test_a_pod_waits_until_its_node_answers_and_says_why_once(node: Node) -> None:
    said: list[str] = []
    await_installed(SHIPPED / "restrictive.json", node.url, 20, said.append)  # the installer has only begun
    assert len(said) <= 1
    assert all("nobody answers" in line for line in said)


def test_a_node_with_an_older_profile_of_that_name_is_waited_for(node: Node, tmp_path: Path) -> None:
    node.up()
    newer = tmp_path / "restrictive.json"
    newer.write_bytes((SHIPPED / "restrictive.json").read_bytes() + b"\n")
    with pytest.raises(DeadlineExceeded, match="another version of it"):
        await_installed(newer, node.url, 0, lambda _: None)
    other = tmp_path / "other.json"
    other.write_bytes(newer.read_bytes())
    with pytest.raises(DeadlineExceeded, match="none of that name"):
        await_installed(other, node.url, 0, lambda _: None)


def test_it_answers_for_what_it_installed_and_nothing_else_and_ends_at_sigterm(node: Node) -> None:
    node.up()
    assert httpx.get(f"{node.url}/permissive.json").text == digest((SHIPPED / "permissive.json").read_bytes())
    for path in ("/../../etc/passwd", "/etc/passwd", "/restrictive.json/x"):
        assert httpx.get(node.url + path).status_code == 404
    assert httpx.post(node.url).status_code == 501
    node.process.send_signal(signal.SIGTERM)
    assert node.process.wait(10) == 0
