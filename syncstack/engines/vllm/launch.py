"""``syncstack engine vllm``: vLLM's own server with our plug-ins switched on and its unsafe doors shut."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path

import syncstack
from syncstack.engines.launch import become_server
from syncstack.engines.launch import environment as launch_environment
from syncstack.errors import UsageError
from syncstack.settings import Settings
from syncstack.weights.checkpoint import read_metas

PLUGINS = "vllm.endpoint_plugins"
"""Where vLLM looks for what answers a trainer."""

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
    switched_on = {"VLLM_PLUGINS": ",".join([*(plugin for plugin in plugins if plugin), "syncstack"])}
    return launch_environment({**base, **switched_on}, name=name, socket_dir=socket_dir)


def installed_plugins() -> list[str]:
    """Names of the plugins that vLLM loads when VLLM_PLUGINS is unset."""
    groups = ("general", "platform", "io_processor", "stat_logger")
    return sorted({point.name for group in groups for point in entry_points(group=f"vllm.{group}_plugins")})


def check_plugin() -> None:
    """Raise UsageError where vLLM would not find our plugin: it would serve, and no trainer could ever reach it."""
    if "syncstack" not in {point.name for point in entry_points(group=PLUGINS)}:
        raise UsageError(
            "vLLM would not find syncstack's plugin: this Python has the package, but not its metadata",
            observed=f"no entry point syncstack in {PLUGINS}; the package is {Path(syncstack.__file__).parent}",
            expected="syncstack installed in the environment of vLLM; its folder on PYTHONPATH is not enough",
            consequence="The engine was not started",
            next_step=f"{sys.executable} -m pip install, of the wheel or of the checkout",
        )


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
    """Check everything that can be checked, then become vLLM's server."""
    read_metas(model)
    check_plugin()
    env = environment(os.environ, name=settings.engine_name, socket_dir=settings.socket_dir)
    argv = command(model=model, host=host, port=port, dtype=dtype, extra=extra)
    become_server(argv, env, host=host, port=port, settings=settings)
