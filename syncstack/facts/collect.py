"""Gather all facts about this process: system calls, small files, and a child of its own. No torch, no GPU context."""

from __future__ import annotations

import os
import platform
from pathlib import Path

from syncstack.facts import gpu, identity, memory, network, process, syscalls, target
from syncstack.facts.folder import probe_folder
from syncstack.facts.model import Facts


def collect(*, socket_dir: Path | None = None) -> Facts:
    """Return the facts of the calling process, within milliseconds; ``socket_dir`` adds that folder's facts.

    Changes nothing, and leaves nothing behind: a child that it starts is gone when it returns. A profile that kills
    instead of refusing would end the process here.
    """
    fields = process.status()
    mode = int(fields.get("Seccomp", "0"))
    return Facts(
        machine=platform.machine(),
        kernel=platform.release(),
        uid=os.getuid(),
        gid=os.getgid(),
        pid=os.getpid(),
        seccomp_mode=mode,
        # The count is there since kernel 5.9; a loaded filter is at least one.
        seccomp_filters=int(fields.get("Seccomp_filters", "1" if mode else "0")),
        no_new_privs=fields.get("NoNewPrivs") == "1",
        capabilities=process.capabilities(fields),
        namespaces=process.namespaces(),
        boot_id=process.boot_id(),
        runtime=process.runtime(),
        memory=memory.memory(),
        gpu=gpu.gpus(os.environ),
        syscalls=dict(syscalls.probe_all(seccomp_mode=mode)),
        socket_dir=None if socket_dir is None else probe_folder(socket_dir),
        identity=identity.identity(),
        child=target.probe_child(),
        network=network.network(),
    )
