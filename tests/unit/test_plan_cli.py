"""``syncstack plan``: two files in, an explanation out; whatever the files hold."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import msgspec
import pytest

from syncstack.cli import main
from syncstack.plan.cli import MAX_HELLO_BYTES, Document
from tests.unit.hellos import Pair, apart, best_pair, both, cpu_pair, engine, put


class Run:
    """The command in this process: its exit status and what it printed."""

    def __init__(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self._capsys, self._monkeypatch = capsys, monkeypatch
        self.folder = folder

    def on(self, sender: Path, receiver: Path, *options: str) -> tuple[int, str, str]:
        argv = ["syncstack", "plan", "--from", str(sender), "--to", str(receiver), *options]
        self._monkeypatch.setattr(sys, "argv", argv)
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = self._capsys.readouterr()
        code = ended.value.code
        assert isinstance(code, int)
        return code, out, err

    def pair(self, pair: Pair, *options: str) -> tuple[int, str, str]:
        paths = self.folder / "a.json", self.folder / "b.json"
        for path, hello in zip(paths, pair, strict=True):
            path.write_bytes(msgspec.json.encode(hello))
        return self.on(*paths, *options)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    monkeypatch.delenv("SYNCSTACK_TRANSPORT", raising=False)
    monkeypatch.delenv("SYNCSTACK_STRICT", raising=False)
    return Run(capsys, monkeypatch, tmp_path)


def test_two_containers_without_a_gpu(run: Run) -> None:
    code, out, err = run.pair(cpu_pair())
    lines = out.splitlines()
    assert (code, err) == (0, "")
    assert lines[0] == "no      cuda_fd"
    assert lines[1].startswith(
        "        needs a GPU on both sides: no GPU in the trainer and the engine (no /dev/nvidia"
    )
    assert "chosen  host_fd" in lines
    assert "usable  stream" in lines
    assert lines[-1].startswith("host_fd, descriptors by unix socket; expected rate unknown: between CPUs")


def test_everything_that_is_lacking_is_shown_not_only_the_first(run: Run) -> None:
    pair = engine(engine(apart(cpu_pair()), "facts.namespaces.pid", "99"), "facts.namespaces.net", "98")
    pair = both(both(pair, "reachable", ()), "facts.network.interfaces", ())
    pair = both(pair, "facts.syscalls.memfd_create.verdict", "denied")
    code, out, _ = run.pair(pair)
    assert code == 1
    host = out[out.index("no      host_fd") : out.index("no      collective")]
    assert "needs a way for descriptors: no descriptor can be handed over. By a unix socket: they share no" in host
    assert "needs for pidfd_getfd, a way to talk: the trainer has no way to tell the engine which descriptor" in host
    assert "needs a memfd: the trainer cannot make a memfd" in host
    assert out.splitlines()[-1].startswith("no transport can serve this link: cuda_fd: no GPU")


def test_json_holds_the_same(run: Run) -> None:
    code, out, _ = run.pair(best_pair(), "-o", "json")
    document = msgspec.json.decode(out, type=Document)
    assert code == 0
    assert document.choice is not None
    assert (document.choice.transport, document.choice.fd) == ("cuda_fd", "scm")
    lacks = {row.transport: [lack.need for lack in row.unmet] for row in document.transports if row.unmet}
    assert lacks == {"collective": ["more than one worker"]}
    code, out, _ = run.pair(both(best_pair(), "transports", ()), "-o", "json")
    document = msgspec.json.decode(out, type=Document)
    assert (code, document.choice) == (1, None)
    assert document.problem.startswith("no transport can serve this link")
    assert document.transports[2].unmet[0].need == "this build"


def test_policy_and_strict(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    short = engine(best_pair(), "facts.memory.nofile_soft", 512)
    assert run.pair(short)[0] == 0
    code, out, _ = run.pair(short, "--strict")
    assert code == 1
    assert "the best transport that this hardware admits, cuda_fd, cannot be used" in out.splitlines()[-1]
    assert run.pair(short, "--strict", "--transport", "host_fd")[0] == 0
    monkeypatch.setenv("SYNCSTACK_STRICT", "true")
    assert run.pair(short)[0] == 1
    assert run.pair(short, "--no-strict")[0] == 0
    code, _, err = run.pair(short, "--transport", "hostfd")
    assert code == 2
    assert "names no known transport" in err


HELLO = msgspec.json.encode(best_pair()[0])

BAD: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "holds no hello"),
    "not JSON": (b"x" * 100, "holds no hello"),
    "an object of another kind": (b"{}", "missing required field"),
    "a wrong type": (HELLO.replace(b'"pid":7', b'"pid":"seven"', 1), "Expected `int`, got `str`"),
    "an unknown role": (HELLO.replace(b'"trainer"', b'"judge"', 1), "Invalid enum value"),
    "cut short": (HELLO[:-1], "holds no hello"),
    "not UTF-8": (HELLO.replace(b"docker", b"\xff\xfe", 1), "holds no hello"),
    "nested without end": (b"[" * 100_000, "holds no hello"),
    "a number without end": (HELLO.replace(b'"pid":7', b'"pid":' + b"7" * 5000, 1), "holds no hello"),
    "another version": (HELLO.replace(b'"version":1', b'"version":99', 1), "observed: 99; expected: 1"),
    "too large": (HELLO + b" " * MAX_HELLO_BYTES, "is too large for a hello"),
    "escapes in a key": (b'{"version":1,"\\u001b[31m":1,"role":"\\u001b[31mx"}', "holds no hello"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_one_line_and_exit_2(run: Run, tmp_path: Path, name: str) -> None:
    data, reason = BAD[name]
    bad, good = tmp_path / "bad.json", tmp_path / "good.json"
    bad.write_bytes(data)
    good.write_bytes(HELLO)
    for ends in ((bad, good), (good, bad)):
        code, out, err = run.on(*ends)
        assert (code, out) == (2, "")
        (line,) = err.splitlines()
        assert line.startswith(f"error: {bad} ")
        assert reason in line
        assert "\x1b" not in line


@pytest.mark.timeout(10)
def test_what_is_not_a_file_is_not_waited_for(run: Run, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, reason in (
        (tmp_path / "pipe", "is not a file"),
        (tmp_path, "is not a file"),
        (tmp_path / "x", "No such"),
    ):
        code, _, err = run.on(path, path)
        assert code == 2
        assert reason in err


def test_a_strangers_file_does_not_talk_to_the_terminal(run: Run) -> None:
    pair = engine(cpu_pair(), "facts.syscalls.pidfd_getfd.evidence", "x")
    gpu = put(pair[0].facts.gpu, "evidence", "\x1b]0;owned\x07\x1b[31mred [bold]markup[/bold]\nline")
    code, out, _ = run.pair(both(pair, "facts.gpu", gpu))
    assert code == 0
    assert "\x1b" not in out
    assert "\x07" not in out
    assert "?]0;owned??[31mred [bold]markup[/bold]?line" in out
    code, out, _ = run.pair(both(pair, "facts.gpu", gpu), "-o", "json")
    assert json.loads(out)["choice"]["transport"] == "host_fd"
    assert "\x1b" not in out
