"""The folder of the unix sockets: is it there, can a socket be made in it, is it a mount that others may share?"""

from __future__ import annotations

import contextlib
import secrets
import socket
import stat
from pathlib import Path

from syncstack.facts.model import FolderFact
from syncstack.facts.process import read_text


def mount_point(path: Path, mountinfo: str) -> tuple[str, str]:
    """Return (mount point, file system type) of the mount that holds ``path``, from the text of mountinfo."""
    best = ("/", "")
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        fields, kind = left.split(), right.split()
        if len(fields) < 5 or not kind:
            continue
        point = fields[4].replace("\\040", " ")
        if path.is_relative_to(point) and len(point) >= len(best[0]):
            best = (point, kind[0])
    return best


def _try_socket(path: Path) -> str:
    """Bind a unix socket in ``path`` and remove it; return "" or the reason why not."""
    # Not by process number: containers that share the folder number their processes alike.
    name = path / f".probe-{secrets.token_hex(4)}"
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(name))
    except OSError as error:
        return error.strerror or str(error)
    finally:
        with contextlib.suppress(OSError):
            name.unlink()
    return ""


def probe_folder(path: Path, *, mountinfo: str | None = None) -> FolderFact:
    """Return the facts of one folder. Leaves nothing behind in it."""
    try:
        mode = path.stat()
        what = "" if stat.S_ISDIR(mode.st_mode) else "is not a folder"
    except FileNotFoundError:
        what = "does not exist"
    except OSError as error:  # a folder above it may not be entered
        what = f"cannot be looked at: {error.strerror}"
    if what:
        return FolderFact(path=str(path), exists=False, writable=False, mounted=False, evidence=f"{path} {what}")
    text = read_text(Path("/proc/self/mountinfo")) if mountinfo is None else mountinfo
    point, kind = mount_point(path.resolve(), text)
    refusal = _try_socket(path)
    evidence = f"{path} lies on the mount {point} ({kind or 'unknown'}), mode {mode.st_mode & 0o7777:04o}, "
    evidence += f"owner {mode.st_uid}:{mode.st_gid}; bind of a unix socket: {refusal or 'ok'}"
    return FolderFact(
        path=str(path),
        exists=True,
        writable=not refusal,
        mounted=point != "/",
        evidence=evidence,
        device=mode.st_dev,
        inode=mode.st_ino,
    )
