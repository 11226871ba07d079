"""Who listens on a port of this process's network namespace, as far as /proc tells."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Final

import msgspec

from syncstack.facts.process import read_text

_LISTEN: Final = "0A"


class Listener(msgspec.Struct, frozen=True, kw_only=True):
    """A listening TCP socket. ``pid`` is 0 where its process is another user's, or in a PID namespace out of sight."""

    port: int
    uid: int
    inode: int
    pid: int = 0
    command: str = ""

    def __str__(self) -> str:
        return f"process {self.pid} ({self.command})" if self.pid else f"a process of uid {self.uid} out of sight here"


def listeners(low: int, high: int, proc: Path = Path("/proc")) -> dict[int, Listener]:
    """The listeners on ports ``low`` to ``high``, by port. With many processes it takes some milliseconds."""
    found: dict[int, Listener] = {}
    for table in ("self/net/tcp", "self/net/tcp6"):
        for line in read_text(proc / table).splitlines()[1:]:
            words = line.split()
            if len(words) < 10 or words[3] != _LISTEN:
                continue
            port = int(words[1].rpartition(":")[2], 16)
            if low <= port <= high:
                found[port] = Listener(port=port, uid=int(words[7]), inode=int(words[9]))
    owners = _owners({each.inode for each in found.values()}, proc) if found else {}
    return {
        port: msgspec.structs.replace(each, pid=owners[each.inode][0], command=owners[each.inode][1])
        if each.inode in owners
        else each
        for port, each in sorted(found.items())
    }


def _owners(inodes: set[int], proc: Path) -> dict[int, tuple[int, str]]:
    """Process number and name for each socket that a process in sight has open."""
    wanted = {f"socket:[{inode}]": inode for inode in inodes}
    found: dict[int, tuple[int, str]] = {}
    for folder in proc.iterdir():
        if not folder.name.isdigit():
            continue
        try:
            fds = list((folder / "fd").iterdir())
        except OSError:
            continue  # another user's, or just ended
        for fd in fds:
            with contextlib.suppress(OSError):  # just closed
                inode = wanted.get(str(fd.readlink()))
                if inode is not None:
                    found[inode] = int(folder.name), read_text(folder / "comm")
    return found
