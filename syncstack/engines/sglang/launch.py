"""``syncstack engine sglang``: SGLang's own server with our gate before it and its unsafe doors shut."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from syncstack.engines.host import check_port
from syncstack.engines.listen import claim
from syncstack.settings import Settings
from syncstack.weights.checkpoint import read_metas


def environment(base: Mapping[str, str], *, name: str, socket_dir: Path) -> dict[str, str]:
    """The environment of the server: ``base`` plus what our parts of it read."""
    return {**base, "SYNCSTACK_ENGINE_NAME": name, "SYNCSTACK_SOCKET_DIR": str(socket_dir)}


def command(*, model: Path, host: str, port: int, dtype: str, extra: Sequence[str]) -> list[str]:
    """The command line of the server: SGLang's own options, read by SGLang."""
    options = ["--model-path", str(model), "--host", host, "--port", str(port), "--dtype", dtype]
    return [sys.executable, "-m", "syncstack.engines.sglang.serve", *options, *extra]


def launch(*, model: Path, host: str, port: int, dtype: str, extra: Sequence[str], settings: Settings) -> None:
    """Check everything that can be checked, then become SGLang's server: one process less, and signals reach it."""
    read_metas(model)
    env = environment(os.environ, name=settings.engine_name, socket_dir=settings.socket_dir)
    env["SYNCSTACK_LISTEN"] = settings.listen
    listen_fd = claim(settings).listen_fd
    check_port(host, port)
    if listen_fd is not None:
        os.set_inheritable(listen_fd, True)
        env["SYNCSTACK_LISTEN_FD"] = str(listen_fd)
    argv = command(model=model, host=host, port=port, dtype=dtype, extra=extra)
    os.execve(argv[0], argv, env)  # noqa: S606 - argv is ours, and there is no shell
