"""``python -m syncstack.engines.sglang.serve``: SGLang's server, started by ``syncstack engine sglang``."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import sys
from collections.abc import Sequence
from typing import Any

from syncstack.engines.host import start_control
from syncstack.engines.sglang.host import SglangHost
from syncstack.engines.sglang.worker import run_scheduler
from syncstack.errors import SyncstackError, UsageError
from syncstack.refit.gate import App, Gate, Message, Receive, Scope, Send
from syncstack.refit.state import EngineState
from syncstack.settings import Settings

log = logging.getLogger(__name__)

TESTED_WITH = ("0.5.20",)
"""SGLang releases that the tests of this release ran against, on the CPU."""

ONLY = {
    "dp_size": 1,
    "tp_size": 1,
    "pp_size": 1,
    "tokenizer_worker_num": 1,
    "speculative_algorithm": None,
    "weight_cache_mode": "off",
    "use_ray": False,
    "encoder_only": False,
    "enable_http2": False,
}
"""What this release refits: one scheduler process with one model, behind SGLang's default server."""


class Front:
    """The gate before all of SGLang's routes. It starts the control endpoint as soon as the server has started."""

    def __init__(self, app: App, settings: Settings) -> None:
        self._app = app
        self._settings = settings
        self._state = EngineState()
        self._gate = Gate(app, state=self._state)
        self._task: asyncio.Task[None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve; at the server's own start, start the control endpoint before the server says that it is up."""
        if scope["type"] != "lifespan":
            await self._gate(scope, receive, send)
            return

        async def then(message: Message) -> None:
            if message["type"] == "lifespan.startup.complete":
                await self._start()
            await send(message)

        await self._app(scope, receive, then)

    async def _start(self) -> None:
        from sglang.srt.entrypoints import http_server

        state: Any = http_server._global_state
        host = SglangHost(state.tokenizer_manager, self._settings)
        if host.kind_version not in TESTED_WITH:
            log.warning("SGLang %s was not tested; tested: %s", host.kind_version, ", ".join(TESTED_WITH))
        self._task = await start_control(host, self._state, self._settings)


def check(arguments: Any) -> None:
    """Raise UsageError for what this release does not refit."""
    for option, expected in ONLY.items():
        found = getattr(arguments, option, expected)
        if found != expected:
            raise UsageError(
                f"SGLang was started with {option} {found}",
                expected=f"{expected}: this release refits nothing else",
                consequence="The engine was not started",
            )


def main(argv: Sequence[str]) -> None:
    """Start SGLang's server. Its administrative routes get a key that nobody has, unless one is given."""
    from sglang.srt.entrypoints import http_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    load_plugins()
    shut = () if "--admin-api-key" in argv else ("--admin-api-key", secrets.token_urlsafe(32))
    arguments = prepare_server_args([*argv, *shut])
    check(arguments)
    http_server.app.add_middleware(Front, settings=Settings.load())
    try:
        http_server.launch_server(arguments, run_scheduler_process_func=run_scheduler)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except SyncstackError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
