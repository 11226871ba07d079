"""How this process becomes an engine's own server."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from syncstack.engines.host import check_port
from syncstack.engines.listen import claim
from syncstack.settings import Settings


def environment(base: Mapping[str, str], *, name: str, socket_dir: Path) -> dict[str, str]:
    """The environment of a server: ``base`` plus what our parts of it read."""
    return {**base, "SYNCSTACK_ENGINE_NAME": name, "SYNCSTACK_SOCKET_DIR": str(socket_dir)}


def become_server(argv: Sequence[str], env: Mapping[str, str], *, host: str, port: int, settings: Settings) -> NoReturn:
    """Check where it will listen, then become the server: one process less, and signals reach it. Raises UsageError."""
    env = {**env, "SYNCSTACK_LISTEN": settings.listen}
    listen_fd = claim(settings).listen_fd
    check_port(host, port)
    if listen_fd is not None:
        os.set_inheritable(listen_fd, True)
        env["SYNCSTACK_LISTEN_FD"] = str(listen_fd)
    os.execve(argv[0], list(argv), env)  # noqa: S606 - argv is ours, and there is no shell
