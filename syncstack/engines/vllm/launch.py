"""``syncstack engine vllm``: vLLM's own server with our plug-ins switched on and its unsafe doors shut."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from syncstack.engines.host import check_port
from syncstack.errors import UsageError
from syncstack.weights.checkpoint import read_metas
from syncstack.wire import unix

UNSAFE = ("VLLM_SERVER_DEV_MODE", "VLLM_ALLOW_INSECURE_SERIALIZATION")
"""Unauthenticated weight writes, and pickles from the network. Neither is needed."""


def environment(base: Mapping[str, str], *, name: str, socket_dir: Path) -> dict[str, str]:
    """The environment of the server: ``base`` plus what our plug-ins read."""
    unsafe = [variable for variable in UNSAFE if base.get(variable, "0") not in ("", "0")]
    if unsafe:
        raise UsageError(
            f"{' and '.join(unsafe)} would open unauthenticated ways to the weights",
            observed=", ".join(f"{variable}={base[variable]}" for variable in unsafe),
            consequence="The engine was not started",
            next_step="unset them; syncstack does not need them",
        )
    plugins = [plugin for plugin in base.get("VLLM_PLUGINS", "").split(",") if plugin]
    return {
        **base,
        "VLLM_PLUGINS": ",".join([*plugins, "syncstack"]),
        "SYNCSTACK_ENGINE_NAME": name,
        "SYNCSTACK_SOCKET_DIR": str(socket_dir),
    }


def command(*, model: Path, host: str, port: int, dtype: str, extra: Sequence[str]) -> list[str]:
    """The command line of vLLM's server."""
    return [
        sys.executable,
        "-m",
        "vllm.entrypoints.cli.main",
        "serve",
        str(model),
        "--host",
        host,
        "--port",
        str(port),
        "--dtype",
        dtype,
        "--worker-extension-cls",
        "syncstack.engines.vllm.worker.SyncstackWorker",
        *extra,
    ]


def launch(*, model: Path, name: str, socket_dir: Path, host: str, port: int, dtype: str, extra: Sequence[str]) -> None:
    """Check everything that can be checked, then become vLLM's server: one process less, and signals reach it."""
    read_metas(model)
    env = environment(os.environ, name=name, socket_dir=socket_dir)
    unix.prepare_folder(socket_dir / name)
    check_port(host, port)
    argv = command(model=model, host=host, port=port, dtype=dtype, extra=extra)
    os.execve(argv[0], argv, env)  # noqa: S606 - argv is ours, and there is no shell
