"""The table of needs, on real processes: what is called required is required, and what is called fine is fine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from syncstack.seccomp import libseccomp
from syncstack.seccomp.check import check
from syncstack.seccomp.needs import NEEDS, Need

# What syncstack and the engines do, in small: a script file, imports, threads, fork and exec, signals, temporary files,
# a sealed memfd over a unix socket with SO_PEERCRED, asyncio over TCP.
PROGRAM = """
import asyncio, fcntl, mmap, os, signal, socket, subprocess, sys, tempfile, threading, time
time.sleep(0.01)
thread = threading.Thread(target=time.sleep, args=(0.01,))
thread.start()
thread.join()
pid = os.fork()
if pid == 0:
    os._exit(0)
os.waitpid(pid, 0)
assert subprocess.run(["true"], capture_output=True).returncode == 0
seen = []
signal.signal(signal.SIGUSR1, lambda *_: seen.append(1))
signal.raise_signal(signal.SIGUSR1)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
assert seen and os.uname().sysname == "Linux"
memfd = os.memfd_create("w", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
os.ftruncate(memfd, 4096)
assert os.write(memfd, b"WEIGHTS") == 7
with mmap.mmap(memfd, 4096) as view:
    view[:7] = b"weights"
fcntl.fcntl(memfd, 1033, 0xF)
with tempfile.TemporaryDirectory(dir=sys.path[0]) as folder:
    with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as client:
        server.bind(folder + "/socket")
        server.listen(1)
        server.settimeout(5)
        client.connect(folder + "/socket")
        peer, _ = server.accept()
        peer.settimeout(5)
        peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        socket.send_fds(peer, [b"x"], [memfd])
        assert os.pread(socket.recv_fds(client, 1, 1)[1][0], 7, 0) == b"weights"
    os.unlink(folder + "/socket")
async def talk():
    async def serve(reader, writer):
        writer.write(await reader.read(4))
        await writer.drain()
        writer.close()
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    writer.write(b"ping")
    assert await reader.read(4) == b"ping"
    server.close()
asyncio.run(asyncio.wait_for(talk(), 5))
"""

# Who is not in the program above: what they need was found on them before.
ELSEWHERE = ("runc", "gloo", "Ray", "vLLM", "torch")


def here(need: Need) -> bool:
    number = libseccomp.number_of(need.name)
    return number is not None and number >= 0 and not need.who.startswith(ELSEWHERE)


REQUIRED = [need.name for need in NEEDS if need.required and here(need)]
SPARED = [need.name for need in NEEDS if need.fine and here(need)]


def refusing(folder: Path, call: str, errno: int) -> str:
    path = folder / "profile.json"
    rule = {"names": [call], "action": "SCMP_ACT_ERRNO", "errnoRet": errno}
    path.write_text(json.dumps({"defaultAction": "SCMP_ACT_ALLOW", "syscalls": [rule]}))
    return str(path)


def works(folder: Path, profile: str) -> bool:
    script = folder / "program.py"
    script.write_text(PROGRAM)
    command = [sys.executable, "-m", "syncstack.cli", "seccomp", "run", profile, "--", sys.executable, str(script)]
    return subprocess.run(command, capture_output=True, timeout=60, check=False).returncode == 0


def required(profile: str) -> set[str]:
    (reading,) = check(profile, caps=(), runtimes=["docker"]).readings
    failed = [finding for finding in reading.findings if (finding.level, finding.kind) == ("fail", "needed")]
    return {call.partition("(")[0] for finding in failed for call in finding.calls}


def test_the_program_works_when_nothing_is_refused(tmp_path: Path) -> None:
    assert works(tmp_path, "restrictive")
    assert works(tmp_path, refusing(tmp_path, "reboot", 1))


@pytest.mark.parametrize("call", sorted(set(REQUIRED)))
def test_without_a_required_call_something_ends(tmp_path: Path, call: str) -> None:
    profile = refusing(tmp_path, call, 1)
    assert call in required(profile)
    assert not works(tmp_path, profile)


@pytest.mark.parametrize("call", SPARED)
def test_an_answer_that_is_fine_is_fine(tmp_path: Path, call: str) -> None:
    profile = refusing(tmp_path, call, 38)
    assert call not in required(profile)
    assert works(tmp_path, profile)
