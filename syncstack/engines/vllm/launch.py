"""``syncstack engine vllm``: vLLM's own server with our plug-ins switched on and its unsafe doors shut."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path

from syncstack.engines.host import check_port
from syncstack.engines.listen import claim
from syncstack.errors import UsageError
from syncstack.settings import Settings
from syncstack.weights.checkpoint import read_metas

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
    # Unset means all but endpoint plugins, and naming ours would turn those off.
    plugins = base["VLLM_PLUGINS"].split(",") if "VLLM_PLUGINS" in base else installed_plugins()
    return {
        **base,
        "VLLM_PLUGINS": ",".join([*(plugin for plugin in plugins if plugin), "syncstack"]),
        "SYNCSTACK_ENGINE_NAME": name,
        "SYNCSTACK_SOCKET_DIR": str(socket_dir),
    }


def installed_plugins() -> list[str]:
    """Names of the plugins that vLLM loads when VLLM_PLUGINS is unset."""
    groups = ("general", "platform", "io_processor", "stat_logger")
    return sorted({point.name for group in groups for point in entry_points(group=f"vllm.{group}_plugins")})


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


def launch(*, model: Path, host: str, port: int, dtype: str, extra: Sequence[str], settings: Settings) -> None:
    """Check everything that can be checked, then become vLLM's server: one process less, and signals reach it."""
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
