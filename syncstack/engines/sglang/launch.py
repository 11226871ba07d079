"""``syncstack engine sglang``: SGLang's own server with our gate before it and its unsafe doors shut."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from syncstack.engines.launch import become_server, environment
from syncstack.settings import Settings
from syncstack.weights.checkpoint import read_metas


def command(*, model: Path, host: str, port: int, dtype: str, extra: Sequence[str]) -> list[str]:
    """The command line of the server: SGLang's own options, read by SGLang."""
    options = ["--model-path", str(model), "--host", host, "--port", str(port), "--dtype", dtype]
    return [sys.executable, "-m", "syncstack.engines.sglang.serve", *options, *extra]


def launch(*, model: Path, host: str, port: int, dtype: str, extra: Sequence[str], settings: Settings) -> None:
    """Check everything that can be checked, then become SGLang's server."""
    read_metas(model)
    env = environment(os.environ, name=settings.engine_name, socket_dir=settings.socket_dir)
    argv = command(model=model, host=host, port=port, dtype=dtype, extra=extra)
    become_server(argv, env, host=host, port=port, settings=settings)
