"""Runs a command that does not outlive whoever started it, however that ended. Run as a file, without our package.

    python -I -S tether.py FD COMMAND...

FD is the end of a pipe whose other end the starter holds. When that closes, the whole process group is killed: a
trainer that was killed leaves no engine behind that holds a GPU. The kernel's own PR_SET_PDEATHSIG would not do: it
follows the thread that started a process, and the engines' watchers are threads that end. From here it does, and ends
the command where somebody kills this process alone.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading

NOT_FOUND = 127
PR_SET_PDEATHSIG = 1


def watch(fd: int) -> None:
    """Until the other end is closed; then end everything."""
    os.read(fd, 1)
    os.killpg(0, signal.SIGKILL)


def main() -> int:
    """Start the command, and end as it does."""
    fd, argv = int(sys.argv[1]), sys.argv[2:]
    libc = ctypes.CDLL(None)
    for number in (signal.SIGTERM, signal.SIGINT):  # a handler, not SIG_IGN: the command would inherit that
        signal.signal(number, lambda *_: None)
    try:
        child = subprocess.Popen(argv, preexec_fn=lambda: libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL))
    except OSError as error:
        sys.stderr.write(f"error: {argv[0]} cannot be run: {error.strerror}\n")
        return NOT_FOUND
    threading.Thread(target=watch, args=(fd,), daemon=True).start()
    code = child.wait()
    if code < 0:
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code


if __name__ == "__main__":
    sys.exit(main())
