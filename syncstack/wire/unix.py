"""Unix sockets in the shared folder: who may connect is the kernel's decision, twice.

The engine's folder is mode 0700 and its sockets 0600, so only its own uid reaches them; and the peer's credentials
are asked from the kernel (SO_PEERCRED) on every accepted and every opened connection. Both containers run as one uid.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import struct
import time
from pathlib import Path

from syncstack.errors import EngineUnreachable, LinkRefused, UsageError

MAX_PATH_BYTES = 107
"""sun_path holds 108 bytes with its terminating zero."""

_UCRED = struct.Struct("3i")


def peer_uid(sock: socket.socket) -> int:
    """The uid of the process that connected or listened, as seen from this user namespace."""
    _, uid, _ = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return int(uid)


def check_peer(sock: socket.socket) -> None:
    """Raise LinkRefused unless the peer runs as this process's effective uid."""
    uid = peer_uid(sock)
    if uid != os.geteuid():
        raise LinkRefused(
            "the peer of a unix socket runs as another user",
            observed=f"uid {uid}",
            expected=f"uid {os.geteuid()}",
            next_step="run trainer and engine containers as the same user",
        )


def _check_path(path: Path) -> None:
    if len(os.fsencode(path)) > MAX_PATH_BYTES:
        raise UsageError(
            f"socket path {path} is too long",
            observed=f"{len(os.fsencode(path))} bytes",
            expected=f"<= {MAX_PATH_BYTES}",
            next_step="set SYNCSTACK_SOCKET_DIR to a shorter path",
        )


def prepare_folder(folder: Path) -> None:
    """Make an engine's folder (mode 0700, ours), or raise UsageError that says why it cannot serve."""
    _check_path(folder / "control.sock")
    try:
        folder.mkdir(mode=0o700, parents=False, exist_ok=True)
        status = folder.stat()
        if status.st_uid == os.geteuid():
            folder.chmod(0o700)
        writable = os.access(folder, os.W_OK | os.X_OK)
        if writable:
            remove_stale(folder / "control.sock")
    except OSError as error:
        raise _not_shared(folder, str(error)) from None
    if status.st_uid != os.geteuid() or not stat.S_ISDIR(status.st_mode) or not writable:
        raise _not_shared(folder, f"owner uid {status.st_uid}, mode {stat.filemode(status.st_mode)}")


def _not_shared(folder: Path, observed: str) -> UsageError:
    return UsageError(
        f"socket folder {folder} cannot be used",
        observed=observed,
        expected=f"a folder that uid {os.geteuid()} can write",
        next_step="mount one volume at SYNCSTACK_SOCKET_DIR in both containers, owned by that uid",
    )


def listen(path: Path, *, backlog: int = 16, kind: int = socket.SOCK_STREAM) -> socket.socket:
    """A listening socket at ``path``, mode 0600. A left-over of a dead process is replaced; a live one is an error."""
    _check_path(path)
    sock = socket.socket(socket.AF_UNIX, kind | socket.SOCK_CLOEXEC)
    try:
        remove_stale(path)
        # The folder is 0700, so nobody gets in between bind and chmod.
        sock.bind(os.fspath(path))
        path.chmod(0o600)
        sock.listen(backlog)
    except OSError as error:
        sock.close()
        raise _not_shared(path.parent, f"{path.name}: {error}") from None
    except BaseException:
        sock.close()
        raise
    return sock


def remove_stale(path: Path) -> None:
    """Remove the socket of a dead process, or raise UsageError when somebody still listens on it."""
    if not path.is_socket():
        return
    probe = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with probe:
        probe.settimeout(1.0)
        try:
            probe.connect(os.fspath(path))
        except (ConnectionRefusedError, FileNotFoundError):
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
            return
    raise UsageError(
        f"another process listens on {path}",
        consequence="Two engines of one name would answer for each other",
        next_step="give this engine another --name, or stop the other one",
    )


def connect(path: Path, *, deadline: float, kind: int = socket.SOCK_STREAM) -> socket.socket:
    """Connect to ``path``, trying again until ``deadline`` while nobody listens yet. Raises EngineUnreachable, or
    UsageError at once where trying again cannot help (no permission, not a socket folder)."""
    _check_path(path)
    while True:
        sock = socket.socket(socket.AF_UNIX, kind | socket.SOCK_CLOEXEC)
        try:
            sock.settimeout(max(0.05, deadline - time.monotonic()))  # a full backlog blocks
            sock.connect(os.fspath(path))
            sock.settimeout(None)
            check_peer(sock)
            return sock
        except (FileNotFoundError, ConnectionRefusedError, BlockingIOError, TimeoutError) as error:
            sock.close()
            if time.monotonic() >= deadline:
                raise EngineUnreachable(f"nobody listens on {path}", observed=str(error)) from None
            time.sleep(0.05)
        except OSError as error:
            sock.close()
            raise UsageError(
                f"cannot connect to {path}",
                observed=str(error),
                next_step="mount one volume at SYNCSTACK_SOCKET_DIR in both containers, with one uid on both sides",
            ) from None
        except BaseException:
            sock.close()
            raise
