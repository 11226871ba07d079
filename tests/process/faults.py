"""Faults, injected for real into one engine or the trainer while a refit stands in a phase of that engine."""

from __future__ import annotations

import contextlib
import itertools
import os
import resource
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from syncstack import EngineClient, Settings
from syncstack.errors import SyncstackError
from tests.process.fleet import TOKEN, Fleet, Member

Fault = Callable[[Fleet, Member], AbstractContextManager[None]]
"""Entered while the victim stands in the phase; the victim goes on inside, and left when the refit has ended."""


@contextmanager
def engine_killed(fleet: Fleet, victim: Member) -> Iterator[None]:
    victim.engine.kill()
    yield
    victim.restart()


@contextmanager
def engine_replaced(fleet: Fleet, victim: Member) -> Iterator[None]:
    """Killed, and another one listens at its address before the refit has ended, if that takes so long."""
    victim.restart()
    yield


@contextmanager
def engine_stopped(fleet: Fleet, victim: Member) -> Iterator[None]:
    victim.engine.kill(signal.SIGSTOP)
    yield
    victim.engine.kill(signal.SIGCONT)


@contextmanager
def engine_slow(fleet: Fleet, victim: Member) -> Iterator[None]:
    victim.engine.kill(signal.SIGSTOP)
    time.sleep(0.7)  # less than the silence after which it counts as lost
    victim.engine.kill(signal.SIGCONT)
    yield


@contextmanager
def trainer_killed(fleet: Fleet, victim: Member) -> Iterator[None]:
    fleet.stop_trainer()
    yield
    fleet.start_trainer()


@contextmanager
def trainer_stopped(fleet: Fleet, victim: Member) -> Iterator[None]:
    """For longer than an engine stands for it."""
    os.killpg(fleet.trainer.pid, signal.SIGSTOP)
    victim.release()
    time.sleep(10.0)
    os.killpg(fleet.trainer.pid, signal.SIGCONT)
    yield


def _iptables(action: str, ports: tuple[int, int], *target: str) -> None:
    for port in ports:
        for side in ("--sport", "--dport"):
            command = ["iptables", "-w", action, "INPUT", "-i", "lo", "-p", "tcp", side, str(port), *target]
            subprocess.run(command, check=True, capture_output=True)


@contextmanager
def _packets(ports: tuple[int, int], *target: str) -> Iterator[None]:
    _iptables("-I", ports, *target)
    try:
        yield
    finally:
        _iptables("-D", ports, *target)


@contextmanager
def black_hole(fleet: Fleet, victim: Member) -> Iterator[None]:
    with _packets(victim.ports, "-j", "DROP"):
        yield


@contextmanager
def connection_reset(fleet: Fleet, victim: Member) -> Iterator[None]:
    """Every packet to or from the victim is answered with a reset for a second; the resets themselves go through."""
    with _packets(victim.ports, "--tcp-flags", "RST", "NONE", "-j", "REJECT", "--reject-with", "tcp-reset"):
        victim.release()
        time.sleep(1.0)
    yield


@contextmanager
def packet_loss(fleet: Fleet, victim: Member) -> Iterator[None]:
    with _packets(victim.ports, "-m", "statistic", "--mode", "random", "--probability", "0.01", "-j", "DROP"):
        yield


@contextmanager
def no_descriptors(fleet: Fleet, victim: Member) -> Iterator[None]:
    """The victim may open no descriptor more than it has."""
    before = resource.prlimit(victim.pid, resource.RLIMIT_NOFILE)
    opened = {int(name) for name in os.listdir(f"/proc/{victim.pid}/fd")}
    lowest_free = next(number for number in itertools.count() if number not in opened)
    resource.prlimit(victim.pid, resource.RLIMIT_NOFILE, (lowest_free, before[1]))
    yield
    resource.prlimit(victim.pid, resource.RLIMIT_NOFILE, before)


@contextmanager
def stranger(fleet: Fleet, victim: Member) -> Iterator[None]:
    """Nonsense on both ports, from somebody without the token."""
    for port in victim.ports:
        for nonsense in (b"\xff" * 4096, b"POST /commit HTTP/1.1\r\nContent-Length: 99999999999\r\n\r\n", b""):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 2) as sock:
                sock.sendall(nonsense)
    yield


@contextmanager
def second_trainer(fleet: Fleet, victim: Member) -> Iterator[None]:
    """Another coordinator, with the token, begins a refit of its own. One of the two is refused."""
    settings = Settings.load(token=TOKEN, control_s=1, engine_ready_s=3)
    lease, client = None, None
    try:
        with contextlib.suppress(SyncstackError):
            client = EngineClient.connect(victim.address, settings=settings)
            lease = client.begin("f" * 32, 999_999, client.info.tensors)
        yield
    finally:
        if lease is not None:
            lease.close()
        if client is not None:
            client.close()


FAULTS: dict[str, Fault] = {
    "engine killed": engine_killed,
    "engine replaced": engine_replaced,
    "engine stopped": engine_stopped,
    "engine slow": engine_slow,
    "trainer killed": trainer_killed,
    "trainer stopped": trainer_stopped,
    "connection reset": connection_reset,
    "black hole": black_hole,
    "1 % packet loss": packet_loss,
    "no descriptors left": no_descriptors,
    "nonsense from a stranger": stranger,
    "second trainer": second_trainer,
}
