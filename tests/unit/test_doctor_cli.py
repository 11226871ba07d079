"""``syncstack doctor`` as a command: its forms of output, its exit status, and what it says under real filters."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from importlib import metadata
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from syncstack.doctor import render
from syncstack.doctor.checks import CHECKS
from syncstack.doctor.examine import diagnose
from syncstack.doctor.pair import PAIR_CHECKS
from syncstack.facts import VisibilityMask
from tests.unit.doctor_facts import child, container, device, gpus

CLI = (sys.executable, "-m", "syncstack.cli")
RESTRICTED = (*CLI, "seccomp", "run", "restrictive", "--", *CLI, "doctor")


def run(
    *arguments: str, command: tuple[str, ...] = (*CLI, "doctor"), **environment: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*command, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, **environment},
    )


def test_json_holds_the_checks_and_the_facts(tmp_path: Path) -> None:
    done = run("-o", "json", "--socket-dir", str(tmp_path))
    found = json.loads(done.stdout)
    assert done.returncode == 0
    assert found["version"] == 2
    assert [check["id"] for check in found["checks"]] == [check.id for check in CHECKS]
    assert all(set(check["remedy"]) == {"other", "compose", "kubernetes"} for check in found["checks"])
    assert found["facts"]["socket_dir"]["path"] == str(tmp_path)
    assert found["summary"]


def test_the_folder_comes_from_the_environment(tmp_path: Path) -> None:
    absent = str(tmp_path / "absent")
    done = run("--only", "socket.dir", command=RESTRICTED, SYNCSTACK_SOCKET_DIR=absent)
    assert done.returncode == 1
    assert f"{absent} does not exist" in done.stdout
    assert f'compose: volumes: ["sockets:{absent}"] in both services\n' in done.stdout
    assert f"kubernetes: one emptyDir: {{medium: Memory}}, mounted at {absent} in both containers\n" in done.stdout
    assert "see: docs/doctor.md#socket.dir\n" in done.stdout
    given = run("--only", "socket.dir", "--socket-dir", str(tmp_path), command=RESTRICTED, SYNCSTACK_SOCKET_DIR=absent)
    assert given.returncode == 0


def test_wrong_use_exits_2() -> None:
    unknown = run("--only", "nope")
    assert (unknown.returncode, unknown.stderr.count("\n")) == (2, 1)
    assert "syncstack doctor --list" in unknown.stderr
    assert run("-o", "xml").returncode == 2


def test_the_list() -> None:
    done = run("--list")
    assert done.returncode == 0
    assert [line.split()[0] for line in done.stdout.splitlines()] == [check.id for check in (*CHECKS, *PAIR_CHECKS)]
    assert "(needs: container, usable socket folder)" in done.stdout


def test_pre_prints_problems_only(tmp_path: Path) -> None:
    good = run("--pre", "--only", "socket.dir", "--only", "seccomp.threads", "--socket-dir", str(tmp_path))
    assert (good.returncode, good.stdout, good.stderr) == (0, "", "")
    bad = run("--pre", "--only", "socket.dir", "--socket-dir", str(tmp_path / "absent"), command=RESTRICTED)
    assert bad.returncode == 1
    assert bad.stdout.startswith("FAIL    socket.dir")
    assert bad.stdout.splitlines()[-1].endswith("; 1 failure")


@pytest.mark.parametrize(("environment", "coloured"), [({}, True), ({"NO_COLOR": "1"}, False)])
def test_colour_on_a_terminal_only_and_not_against_no_color(
    tmp_path: Path, environment: dict[str, str], coloured: bool
) -> None:
    leader, follower = pty.openpty()
    base = {key: value for key, value in os.environ.items() if key != "NO_COLOR"}
    try:
        subprocess.run(
            [*CLI, "doctor", "--only", "socket.dir", "-v", "--socket-dir", str(tmp_path)],
            stdout=follower,
            timeout=60,
            check=True,
            env={**base, "TERM": "xterm-256color", **environment},
        )
        shown = os.read(leader, 65536).decode()
    finally:
        os.close(leader)
        os.close(follower)
    assert "socket.dir" in shown
    assert bool(re.search(r"\x1b\[[0-9;]*3[0-7]m", shown)) is coloured
    assert "\x1b" not in run("--only", "socket.dir", "-v", "--socket-dir", str(tmp_path)).stdout


def test_markdown_is_for_strangers_eyes() -> None:
    """No address, no boot id, no identifier of a container or GPU, and nothing that leaves its cell or block."""
    uuid = "GPU-5c2b7f1e-9a3d-4c61-8b7e-0f1e2d3c4b5a"
    mask = VisibilityMask(name="CUDA_VISIBLE_DEVICES", text=uuid, kind="list", entries=(uuid,))
    hostile = "x|y `z` @somebody ``` \x1b[31m\n| injected |"
    facts = container(
        socket_dir=None,
        boot_id="11111111-2222-4333-8444-aaaabbbbcccc",
        gpu=gpus(device(uuid=uuid), masks=(mask,)),
        child=child("denied", "seccomp", f"{hostile} docker/{'0a' * 32}"),
    )
    text = render.markdown(diagnose(facts))
    for secret in ("172.18.0.2", "127.0.0.1", facts.boot_id, "0f1e2d3c4b5a", "0a" * 32):
        assert secret not in text
    assert "\x1b" not in text
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert len(rows) == len(CHECKS) + 1
    assert all(len(re.findall(r"(?<!\\)\|", row)) == 4 for row in rows)
    assert text.count("```") == 4
    assert "| seccomp.pidfd-getfd | **warning** | `denied: x\\|y 'z' @somebody" in text


def test_markdown_reads_the_environment_of_nobody(tmp_path: Path) -> None:
    done = run("-o", "markdown", "--socket-dir", str(tmp_path), SYNCSTACK_TOKEN="hunter2", HF_TOKEN="hunter2")
    assert done.returncode == 0
    assert done.stdout.startswith("**syncstack doctor**: ")
    assert "hunter2" not in done.stdout


def test_a_peers_text_cannot_command_the_terminal() -> None:
    console = Console(file=StringIO(), width=40)
    facts = container(socket_dir=None, child=child("denied", "seccomp", "\x1b]0;owned\x07\r\x9b31m"))
    render.text(console, diagnose(facts), verbose=True)
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", console.file.getvalue())  # type: ignore[attr-defined]


def test_under_the_restrictive_filter_the_note_says_what_it_is(tmp_path: Path) -> None:
    done = run("-o", "json", "--only", "seccomp.pidfd-getfd", "--socket-dir", str(tmp_path), command=RESTRICTED)
    (check,) = json.loads(done.stdout)["checks"]
    assert check["observed"].startswith("denied: ")
    assert "forbidden by the seccomp filter" in check["observed"]
    assert check["remedy"]["compose"] == 'security_opt: ["seccomp=./seccomp/permissive.json"]'


def test_the_folder_is_left_as_it_was(tmp_path: Path) -> None:
    run("-v", "--socket-dir", str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_a_source_tree_without_package_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with PYTHONPATH alone; the command once ended in a traceback there."""

    def missing(package: str) -> str:
        raise metadata.PackageNotFoundError(package)

    monkeypatch.setattr(metadata, "version", missing)
    assert diagnose(container()).package == "not installed"
