"""``syncstack doctor --peer``: both sides, what they share, and the plan's choice. The engine is a stub that answers
``GET /hello`` on a real unix socket with a real hello, or one of our making."""

from __future__ import annotations

import json
import os
import socketserver
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from syncstack.doctor.examine import examine
from syncstack.doctor.pair import PAIR_CHECKS, Pair, choice_line, plan, shared
from syncstack.doctor.peer import address_of
from syncstack.doctor.ways import host_transport
from syncstack.errors import PlanError
from syncstack.facts import Facts, Hello, say_hello
from syncstack.plan import Choice, Policy
from syncstack.refit.messages import EngineInfo, WorkerInfo
from syncstack.refit.state import StateReport, Step
from syncstack.transports import SPOKEN
from syncstack.weights.meta import ParamMeta
from syncstack.wire.messages import PROTOCOL_VERSION
from tests.unit.doctor_facts import GIB, MEMORY, SHARED, container

CLI = (sys.executable, "-m", "syncstack.cli", "doctor")
NAMESPACES = {"pid": "1", "ipc": "2", "net": "3", "mnt": "4", "user": "5", "uts": "6"}


def hello(facts: Facts, role: Any = "engine", **changes: Any) -> Hello:
    return replace(say_hello(role, transports=SPOKEN, reachable=("unix",), facts=facts), **changes)


def pair(
    ours: Facts, theirs: Facts, *, reachable: tuple[str, ...] = (), weights_bytes: int = 0, **changes: Any
) -> Pair:
    trainer = hello(ours, "trainer", reachable=reachable)
    engine = hello(theirs, reachable=(), **changes)
    return Pair(link="engine-0 worker 0", trainer=trainer, engine=engine, policy=Policy(), weights_bytes=weights_bytes)


def troubles(subject: Pair) -> dict[str, str]:
    return {one.id: one.status for one in examine(subject, PAIR_CHECKS) if one.status in ("warn", "fail", "crashed")}


def sibling(**changes: Any) -> Facts:
    return container(namespaces=NAMESPACES, boot_id="b", **changes)


def test_siblings_share_host_user_and_folder() -> None:
    other = sibling()
    found = shared(pair(sibling(), replace(other, namespaces={**NAMESPACES, "pid": "7", "net": "8", "ipc": "9"})))
    assert found.lines() == (
        "shared: host, user id, socket folder, user namespace",
        "not shared: PID namespace, IPC namespace, network namespace",
    )


def test_inodes_of_two_hosts_prove_nothing() -> None:
    found = shared(pair(sibling(), replace(sibling(), boot_id="other")))
    assert found.lines()[0] == "shared: user id"


def test_unknown_is_not_shared() -> None:
    blind = container(namespaces=dict.fromkeys(NAMESPACES, ""), boot_id="", socket_dir=replace(SHARED, inode=0))
    assert shared(pair(blind, blind)).lines()[0] == "shared: user id"


def test_a_link_that_works_has_no_trouble() -> None:
    good = pair(sibling(), sibling(), weights_bytes=GIB)
    assert troubles(good) == {}
    assert choice_line(good).startswith("engine-0 worker 0: host_fd (not cuda_fd: no GPU in")


def test_no_transport_is_a_failure_with_the_reason_of_each() -> None:
    bad = pair(sibling(socket_dir=None), sibling(socket_dir=None), transports=("host_fd", "disk"))
    assert troubles(bad) == {"peer.transport": "fail"}
    outcome = examine(bad, PAIR_CHECKS)[0]
    for name in ("cuda_fd", "host_fd", "collective", "disk"):
        assert f"{name}: " in outcome.observed
    assert "volumes: " in outcome.remedy.compose
    assert "emptyDir" in outcome.remedy.kubernetes
    assert choice_line(bad) == "engine-0 worker 0: none"


def test_two_releases_are_a_warning() -> None:
    assert troubles(pair(sibling(), sibling(), package="9.9.9")) == {"peer.release": "warn"}


def test_b07_weights_that_do_not_fit_the_side_that_writes() -> None:
    small = sibling(memory=replace(MEMORY, cgroup_headroom_bytes=GIB, cgroup_limit_bytes=2 * GIB))
    assert troubles(pair(small, sibling(), weights_bytes=3 * GIB)) == {"peer.memory": "warn"}
    # The engine maps what the trainer wrote: its own limit is another matter.
    assert troubles(pair(sibling(), small, weights_bytes=3 * GIB)) == {}


PROFILES = ("restrictive", "permissive", "docker-default", "unconfined")
LAYOUTS = ("shared folder", "shared PID namespace", "neither")


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_doctor_and_plan_agree(profile: str, layout: str) -> None:
    """What one side's doctor says of the host transport, what the pair's says, and what the plan chooses."""
    folder = SHARED if layout == "shared folder" else None
    ours = container(profile, boot_id="b", namespaces=NAMESPACES, socket_dir=folder)
    apart = {**NAMESPACES, "pid": "7", "net": "8"}
    theirs = replace(ours, namespaces=NAMESPACES | {"net": "8"} if layout == "shared PID namespace" else apart)
    link = pair(ours, theirs, reachable=("tcp",))
    available, how = host_transport(theirs)
    found = plan(link)
    by_pidfd = profile in ("permissive", "unconfined")
    if layout == "shared folder":
        assert isinstance(found, Choice)
        assert (found.transport, found.fd) == ("host_fd", "scm")
        assert (available, how, troubles(link)) == (True, "", {})
    elif layout == "shared PID namespace" and by_pidfd:
        assert isinstance(found, Choice)
        assert (found.transport, found.fd) == ("host_fd", "pidfd")
        assert available
        assert how.startswith("by pidfd_getfd only, to an engine in the same PID namespace")
        assert troubles(link) == {}
    else:
        assert isinstance(found, Choice)
        assert (found.transport, found.fd, troubles(link)) == ("stream", "", {})
        assert isinstance(plan(replace(link, policy=Policy.of("host_fd"))), PlanError)
        # One side alone cannot know whose PID namespace it is in, and says so.
        assert available is by_pidfd
        assert "same PID namespace" in how if by_pidfd else "no pidfd_getfd: seccomp" in how


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("/run/syncstack/engine-0", "unix:/run/syncstack/engine-0"),
        ("/run/syncstack/engine-0/control.sock", "unix:/run/syncstack/engine-0"),
        ("unix:/run/syncstack/engine-0/", "unix:/run/syncstack/engine-0"),
        ("tcp://10.0.0.1:7000", "tcp://10.0.0.1:7000"),
    ],
)
def test_addresses(text: str, address: str) -> None:
    assert address_of(text) == address


@contextmanager
def engine(folder: Path, workers: tuple[Hello, ...], body: bytes | None = None) -> Iterator[str]:
    """Answer ``GET /hello`` in ``folder`` and return its address."""
    state = StateReport(step=Step.SERVING, version=3, target=None, accepts_requests=True, reason="", since=0.0)
    info = EngineInfo(
        protocol=PROTOCOL_VERSION, name="engine-0", kind="stub", kind_version="1", model="m", dtype="float32",
        tensors=(ParamMeta(name="w", dtype="float32", shape=(1024, 256)),),
        workers=tuple(WorkerInfo(socket=f"w{i}.sock", hello=one) for i, one in enumerate(workers)),
        heartbeat_s=0.5, state=state,
    )  # fmt: skip

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            content = msgspec.json.encode(info) if body is None else body
            self.send_response(200 if self.path == "/hello" else 404)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
            pass

        def address_string(self) -> str:
            return "unix"

    folder.mkdir(mode=0o700, parents=True)
    path = folder / "control.sock"
    with socketserver.ThreadingUnixStreamServer(str(path), Handler) as server:
        path.chmod(0o600)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield str(folder)
        finally:
            server.shutdown()
            thread.join()


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*CLI, *arguments], capture_output=True, text=True, timeout=60, check=False, env=dict(os.environ)
    )


def test_the_command_shows_both_sides(tmp_path: Path) -> None:
    from syncstack.facts import collect

    theirs = replace(collect(socket_dir=tmp_path), uid=os.getuid())
    workers = (hello(theirs), hello(theirs, rank=1))
    with engine(tmp_path / "engine-0", workers) as folder:
        text = run("--peer", folder, "--socket-dir", str(tmp_path))
        found = json.loads(run("--peer", folder, "--socket-dir", str(tmp_path), "-o", "json").stdout)
        paper = run("--peer", folder, "--socket-dir", str(tmp_path), "-o", "markdown").stdout
    assert text.returncode == 0, text.stdout + text.stderr
    assert "engine-0 worker 0: stub 1, syncstack " in text.stdout
    assert "shared: host, user id, socket folder, PID namespace, IPC namespace, network namespace" in text.stdout
    assert "engine-0 worker 1: host_fd (not cuda_fd: " in text.stdout
    assert "engine-0 worker 1: host_fd (not cuda_fd: " in paper
    assert [peer["link"] for peer in found["peers"]] == ["engine-0 worker 0", "engine-0 worker 1"]
    assert found["peers"][0]["shared"]["folder"] is True
    # Whatever contains this test: an engine that was seen in the folder proves that it is shared.
    assert found["summary"].startswith("zero-copy host transport available; GPU: ")
    assert {one["status"] for one in found["checks"] if one["id"] == "socket.shared"} <= {"pass", "skip"}
    ids = [check["id"] for check in found["peers"][0]["checks"]]
    assert ids[: len(PAIR_CHECKS)] == [check.id for check in PAIR_CHECKS]
    assert "socket.dir" in ids


def test_the_peers_failure_is_the_commands(tmp_path: Path) -> None:
    from syncstack.facts import collect

    theirs = collect(socket_dir=tmp_path)
    denied = {**theirs.syscalls, "clone3": replace(theirs.syscalls["clone3"], verdict="denied")}
    with engine(tmp_path / "engine-0", (hello(replace(theirs, syscalls=denied)),)) as folder:
        done = run("--peer", folder, "--socket-dir", str(tmp_path), "--only", "seccomp.threads")
    assert done.returncode == 1
    assert "FAIL    seccomp.threads" in done.stdout.partition("engine-0 worker 0: stub")[2]


def test_a_strangers_answer_is_no_crash(tmp_path: Path) -> None:
    with engine(tmp_path / "engine-0", (), body=b'{"protocol": "\x1b[31m"}') as folder:
        done = run("--peer", folder, "--socket-dir", str(tmp_path))
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert "Traceback" not in done.stderr


def test_nobody_answers(tmp_path: Path) -> None:
    done = run("--peer", str(tmp_path / "nobody"), "--socket-dir", str(tmp_path))
    assert done.returncode == 2
    assert "did not become ready within 5 s" in done.stderr


@pytest.mark.parametrize(
    "arguments", [("--pre", "--peer", "/x"), ("--only", "peer.transport"), ("--peer", "http://x"), ("--peer", "x")]
)
def test_wrong_use(arguments: tuple[str, ...]) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
