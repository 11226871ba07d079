"""Ports for servers that a test starts in another process."""

from __future__ import annotations

import itertools
import os
import socket

LOW, HIGH = 10000, 20000
"""Below the kernel's ephemeral range, where the tests' own outgoing connections would now and then take the port before
its server does, and beside our own bands."""

_pairs = itertools.count(os.getpid() * 97)


def free_port() -> int:
    """A port on which nothing listens, nor on the next one. None is given twice in one process, nor soon in another."""
    for pair in _pairs:
        port = LOW + pair * 2 % (HIGH - LOW)
        if _free(port) and _free(port + 1):
            return port
    raise AssertionError("itertools.count ended")


def _free(port: int) -> bool:
    with socket.socket() as sock:
        try:
            sock.bind(("", port))
        except OSError:
            return False
    return True
